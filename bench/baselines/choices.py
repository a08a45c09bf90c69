"""What `bench.choices` measures: every strategy of many layers on the ranks of a group, and the chunked ring with
numbers of chunks that are given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import marble
from bench.baselines.calls import DENSE_CAUSAL, Case
from bench.baselines.layers import Inputs, Layer, Offer, Ours, on_rank
from marble.comm.transport import Connection
from marble.compose.builders import ORDERS, SCHEDULES, build
from marble.compose.plan import Plan
from marble.compose.schedules.ulysses import HeadSplit
from marble.cost.profile import Profile
from marble.kernels.contract import Backend
from marble.mask.modes import packed_mask
from marble.mask.ranges import VisibleRanges
from marble.mask.tiles import StoredMask
from marble.order.chunks import chunked_order, pair_work
from marble.order.set_apart import set_apart
from marble.replay import replay_layer, replay_rank
from marble.replays import Strategy, price_of
from marble.workloads import WORKLOADS

KI = 1024
PRICES = Profile.load("h200")
"""What transfers take in replays."""
BLOCK = 128
Clock = Callable[[Mapping[str, Layer]], dict[str, float]]
"""Milliseconds of each of some layers."""

OTHERS = ((32, 8, 64), (16, 16, 128))
"""Heads, key/value heads and head size of every workload's second and third layer; the first is its model's."""
LENGTHS = {
    "qwen_docs": (64, 128, 256),
    "molmo_docs": (64, 128, 256),
    "gemma_docs": (64, 128, 256),
    "bagel_mix": (64, 128, 256),
    "qwen_video": (32, 64, 128),
    "molmo_video": (32, 64, 128),
    "bagel_long": (16, 32, 64),
    DENSE_CAUSAL: (16, 32, 64),
}
"""Ki tokens of the packs of each workload; the longer its samples, the shorter."""
CHUNKED = tuple((tokens * KI, chunks) for tokens in (128, 256, 512) for chunks in (2, 16, 64))
"""Tokens of long-video packs, and chunks of each rank: the nine runs that τ is fitted to."""


def cases() -> list[Case]:
    """Workloads × layers × lengths, in an order that any beginning is a sample of."""
    found = []
    for name, lengths in LENGTHS.items():
        own = (
            [(k.heads, k.kv_heads, 128, k.window) for k in WORKLOADS[name].layers]
            if name in WORKLOADS
            else [(32, 8, 128, None)]
        )
        windows = dict.fromkeys(window for *_, window in own)
        shapes = dict.fromkeys([*own, *((*heads, window) for window in windows for heads in OTHERS)])
        found += [Case(name, marble.AttentionShape(*shape), tokens * KI) for shape in shapes for tokens in lengths]
    return sorted(found, key=digest)


def key(case: Case) -> str:
    """The case in one line, with its heads."""
    return f"{case.title}, {case.shape.heads}:{case.shape.kv_heads} heads"


def digest(case: Case) -> bytes:
    """What cases are sorted and split by: as good as random, and always the same."""
    return hashlib.sha256(key(case).encode()).digest()


def strategies(ranks: int, heads: int) -> Iterator[Strategy]:
    """Everything that `marble.cost.select.candidates` looks at, if every mask were dense."""
    for degree in (degree for degree in range(1, ranks + 1) if ranks % degree == 0 == heads % degree):
        if degree == ranks:
            yield Strategy(ranks, "ring", tuple(ORDERS)[-1], degree)
            continue
        for order in ORDERS:
            yield from (
                Strategy(ranks, name, order, degree) for name in SCHEDULES if name != "chunked" or order == "chunks"
            )


@dataclass(frozen=True)
class Settings:
    """How layers are measured.

    Attributes:
        kernels: marble's.
        device: this rank's.
        connection: carries the transfers.
        clock: times layers, after a first run of each.
    """

    kernels: Backend
    device: torch.device
    connection: Connection
    clock: Clock

    def accepted(self, case: Case) -> tuple[dict[str, Layer], dict[str, str]]:
        """The strategies that a case can have, and why not the others."""
        inputs, ranks = Inputs.random(case, self.device, sets=1), dist.get_world_size()
        layers: dict[str, Layer] = {}
        refused: dict[str, str] = {}
        for strategy in strategies(ranks, case.shape.heads):
            answer = Offer(str(strategy), partial(self._layer, case, inputs, strategy)).accepted()
            if isinstance(answer, str):
                refused[str(strategy)] = answer
            else:
                layers[str(strategy)] = answer
        return layers, refused

    def _layer(self, case: Case, inputs: Inputs, strategy: Strategy) -> Ours:
        how = {"schedule": strategy.schedule, "order": strategy.order, "ulysses": strategy.ulysses}
        plan = marble.plan(case.layout, case.shape, group=dist.group.WORLD, device=self.device, **how)
        return on_rank(plan, dist.get_rank(), inputs, self.kernels, self.connection)

    def measured(self, case: Case) -> dict[str, Any]:
        """A case and the milliseconds of all its strategies, as JSON has it."""
        layers, refused = self.accepted(case)
        parts = {name: pieces(layer) for name, layer in layers.items()}
        record = as_record(case) | {"ms": self.clock(layers), "pieces": parts, "refused": refused}
        if layers:
            fastest = [min(layers, key=record["ms"].__getitem__)]
            dist.broadcast_object_list(fastest)
            layer = layers[fastest[0]]
            assert isinstance(layer, Ours)
            record["replay"] = {"strategy": fastest[0], "ms": self.replayed(layer)}
        return record

    def replayed(self, layer: Ours) -> float:
        """Milliseconds of a layer's replay: each rank its own part on its own GPU, transfers priced."""
        mine = replay_rank(layer.plan, layer.rank, self.kernels, device=self.device, repeats=2)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return 1e3 * replay_layer(every, price_of(PRICES), PRICES.step or 0.0).seconds

    def chunked(self, case: Case, per_rank: int) -> dict[str, Any]:
        """Milliseconds of a chunked ring with so many chunks on each rank, and what C is made of."""
        chunks = Chunked.of(case, dist.get_world_size(), per_rank)
        inputs = Inputs.random(case, self.device, sets=1)
        layer = on_rank(chunks.plan(case, dist.get_rank()), dist.get_rank(), inputs, self.kernels, self.connection)
        layer()
        layer.synchronize()
        (ms,) = self.clock({"chunked": layer}).values()
        counted = {"chunks": per_rank, "ranges": chunks.ranges, "pairs": chunks.pairs}
        return as_record(case) | counted | {"ms": ms, "replay": {"strategy": "chunked", "ms": self.replayed(layer)}}


@dataclass(frozen=True, eq=False)
class Chunked:
    """Chunks dealt in sequence order, every other round reversed.

    Attributes:
        mask: the layer's.
        rank: int64 [chunks], the rank of each chunk.
        ranks: number of ranks.
        pairs: legal pairs of every step's slowest rank, summed.
    """

    mask: StoredMask
    rank: np.ndarray
    ranks: int
    pairs: float

    @classmethod
    def of(cls, case: Case, ranks: int, per_rank: int) -> Chunked:
        """Deal a case's chunks, and count."""
        storage = set_apart(case.layout)
        mask = StoredMask(storage, packed_mask(), VisibleRanges(storage))
        place = np.arange(ranks * per_rank)
        rank = np.where(place // ranks % 2 == 0, place % ranks, ranks - 1 - place % ranks)
        on = np.eye(ranks)[rank]
        between, each = on.T @ pair_work(mask, len(rank)) @ on, np.arange(ranks)
        # Rank r computes on the keys of rank r − s in step s.
        pairs = sum(float(between[each, (each - step) % ranks].max()) for step in range(ranks))
        return cls(mask, rank, ranks, pairs)

    @property
    def ranges(self) -> int:
        """What τ is paid for: steps times the ranges of a rank."""
        return len(self.rank)

    def plan(self, case: Case, rank: int) -> Plan:
        """A rank's plan."""
        order = chunked_order(self.mask.storage, self.ranks, torch.from_numpy(self.rank))
        split = HeadSplit(case.shape.heads, case.shape.kv_heads, 1)
        schedules = build("chunked", order, order, self.mask, BLOCK, split, (rank,))
        return Plan(order, (case.shape,), ("chunked",), (schedules,), rank, BLOCK, 1, (self.mask,))


def pieces(layer: Layer) -> int:
    """Transfers and sums of a rank's layer, each of which takes a launch of its own; the estimate knows bytes only."""
    assert isinstance(layer, Ours)
    schedule = layer.plan.schedules[0][layer.rank]
    return sum(len(step.transfers) + len(step.adds) for step in (*schedule.forward.steps, *schedule.backward.steps))


def as_record(case: Case) -> dict[str, Any]:
    """A case as JSON has it."""
    shape = case.shape
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "window": shape.window}
    return {"name": case.name, "tokens": case.tokens, "scale": case.scale, "shape": heads}


def of_record(record: Mapping[str, Any]) -> Case:
    """A case from JSON."""
    return Case(record["name"], marble.AttentionShape(**record["shape"]), record["tokens"], record["scale"])
