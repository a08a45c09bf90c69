"""What `bench.replay` replays: a workload's layer on many ranks, under the picked strategy and under others.

Every other strategy is the best of its kind by the estimate, over all orders and Ulysses degrees that it can have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean

import torch

import marble
from bench.baselines.calls import rank_pairs
from marble.compose import planner
from marble.compose.schedule import Schedule
from marble.cost.profile import Profile
from marble.cost.select import Candidate
from marble.kernels.contract import Backend
from marble.layout import Layout
from marble.mask.modes import packed_mask
from marble.mask.ranges import VisibleRanges
from marble.mask.tiles import StoredMask
from marble.order.chunks import pair_work
from marble.order.set_apart import set_apart
from marble.replays import Expected, Replay, Strategy, plans, replay
from marble.workloads import MODELS, WORKLOADS, build

MI = 1024 * 1024
PICKED, GATHER, ULYSSES_GATHER = "picked", "all-gather", "Ulysses + all-gather"
RING, CHUNKED, FETCH = "ring", "chunked ring", "sparse all-to-all"
PTRR, CONTIGUOUS = WHOLE = "ring on ptrr", "ring on contiguous"
"""Contiguous shards differ so much that few ranks say little of the layer; what they are compared with is looked at in
the same way."""
_NAMED = {RING: "ring", CHUNKED: "chunked", FETCH: "sparse_a2a"}


@dataclass(frozen=True)
class Case:
    """One layer of a workload's model on many ranks.

    Attributes:
        name: a workload.
        kind: which of its model's kinds of layers.
        tokens: of the pack.
        ranks: that share it.
        roles: the strategies to replay.
        seed: of the pack.
        scale: of the workload's spans; below 1 only in tests.
        model: whose layer, if not the workload's own model's.
    """

    name: str
    kind: int
    tokens: int
    ranks: int
    roles: tuple[str, ...]
    seed: int = 0
    scale: float = 1.0
    model: str = ""

    @property
    def title(self) -> str:
        """The case in one line of a table."""
        window = self.shape.window
        size = f"{self.tokens // MI}M" if self.tokens % MI == 0 else f"{self.tokens:,}"
        layer = f"{f', {self.model}' if self.model else ''}{f', window {window}' if window else ''}"
        return f"{self.name}{layer}, {size} tokens, {self.ranks} ranks, seed {self.seed}"

    @property
    def key(self) -> str:
        """What ``--cases`` calls it."""
        layer = f"{f'-{self.model}' if self.model else ''}{f'-{self.kind}' if self.kind else ''}"
        return f"{self.name}{layer}-{self.tokens // MI}M-{self.ranks}"

    @cached_property
    def layout(self) -> Layout:
        """The pack."""
        return build(self.name, self.tokens, self.seed, self.scale)

    @property
    def shape(self) -> marble.AttentionShape:
        """The layer, as if its model had no other kind: it has a token order of its own."""
        kind = MODELS[self.model or WORKLOADS[self.name].model][self.kind]
        return marble.AttentionShape(kind.heads, kind.kv_heads, kind.head_dim, kind.window, kind.scale)

    def strategies(self, profile: Profile) -> dict[str, Strategy]:
        """The strategy of each role that the layer can have."""
        ranked = planner.ranking(self.layout, self.shape, self.ranks, profile)
        found = {}
        for role in self.roles:
            if role in WHOLE:
                found[role] = Strategy(self.ranks, "ring", role.rpartition(" ")[2])
            elif best := next((candidate for candidate in ranked if _plays(candidate, role)), None):
                found[role] = Strategy(self.ranks, best.schedules[0], best.order, best.ulysses)
        return found

    def over_mean_pack(self, packs: int = 8) -> float:
        """Legal pairs of the pack over the mean of as many packs, seeds from 0 on; for masks of dense calls."""
        layouts = [build(self.name, self.tokens, seed, self.scale) for seed in range(packs)]
        return _pairs(self.layout) / mean(map(_pairs, layouts))


def _plays(candidate: Candidate, role: str) -> bool:
    """Whether a candidate is of a role's kind."""
    (name,) = candidate.schedules
    if role in (GATHER, ULYSSES_GATHER):
        return name == "all_gather" and (candidate.ulysses > 1) is (role == ULYSSES_GATHER)
    return role == PICKED or name == _NAMED[role]


@dataclass(frozen=True)
class Settings:
    """How replays are made.

    Attributes:
        kernels: marble's.
        device: where.
        profile: chooses the strategies, and prices transfers.
        rates: its rates are what compute is held to.
        budget: seconds of one rank's layers, estimated, that a strategy may take.
        most: ranks of a strategy at most.
    """

    kernels: Backend
    device: torch.device
    profile: Profile
    rates: Profile
    budget: float
    most: int = 3

    def runs(self, role: str, strategy: Strategy, seconds: float) -> tuple[int, int, int]:
        """Ranks, timed runs and runs before them, for a rank that takes so long; one of each where time is short.

        Of some roles (`WHOLE`) as many ranks are wanted as time allows.
        """
        every = role in WHOLE
        budget, most = (4 * self.budget, strategy.ranks) if every else (self.budget, self.most)
        ranks = min(max(int(budget / seconds), 1), most)
        runs = min(max(int(budget / seconds / ranks), 1), 2 if every else 6)
        return ranks, max(runs - 1, 1), int(runs > 1)

    @property
    def room(self) -> float:
        """Bytes that a replay may need, with some for inputs and what allocators waste."""
        return 0.85 * torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else float("inf")


@dataclass(frozen=True, eq=False)
class Answer:
    """A strategy of a case, replayed or not.

    Attributes:
        expected: what the estimate says of it.
        found: the replay; None where it needs more memory than there is.
        share: of the busiest replayed rank's time what its legal pairs take at the kernels' rates.
    """

    expected: Expected
    found: Replay | None = None
    share: float = 0.0

    @property
    def nbytes(self) -> float:
        """Memory of the fullest rank; where nothing was replayed, that of the estimate."""
        return self.expected.memory if self.found is None else self.found.layer.nbytes


def answers(case: Case, settings: Settings) -> Iterator[tuple[str, Answer]]:
    """Replay every role of a case; roles that have one strategy share its replay."""
    found: dict[tuple[Strategy, bool], Answer] = {}
    for role, strategy in case.strategies(settings.profile).items():
        what = strategy, role in WHOLE
        if what not in found:
            expected = Expected.of(case.layout, case.shape, strategy, settings.profile)
            if settings.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            found[what] = _answer(case, role, expected, settings)
        yield role, found[what]


def _answer(case: Case, role: str, expected: Expected, settings: Settings) -> Answer:
    if expected.memory > settings.room:
        return Answer(expected)
    shape, device, how = case.shape, settings.device, expected.strategy
    _warm(case, how, settings)
    # PyTorch cuts what it allocates from here on from this piece, so that no timed run waits for memory.
    torch.empty(int(min(1.3 * expected.memory, settings.room)), dtype=torch.uint8, device=device)
    count, repeats, warmup = settings.runs(role, how, float(expected.compute.sum(0).max()))
    ranks = expected.worth_replaying(count)
    to = (case.layout, shape, expected, ranks, settings.profile, settings.kernels)
    found = replay(*to, device=device, repeats=repeats, warmup=warmup)
    busiest = max(found.layer.ranks, key=lambda rank: rank.seconds)
    (_, planned), *_ = plans(case.layout, shape, how, (busiest.rank,), device)
    least = least_seconds(planned.schedules[0][busiest.rank], shape.head_dim, settings.rates)
    return Answer(expected, found, least / busiest.seconds)


def _warm(case: Case, strategy: Strategy, settings: Settings) -> None:
    """A small pack with the same heads, so that no timed run compiles kernels."""
    few = replace(strategy, ranks=2 * strategy.ulysses)
    small = replace(case, tokens=few.ranks * 512, scale=WORKLOADS[case.name].demo_scale)
    expected = Expected.of(small.layout, small.shape, few, settings.profile)
    to = (small.layout, small.shape, expected, (0,), settings.profile, settings.kernels)
    replay(*to, device=settings.device, repeats=1, warmup=0)


def least_seconds(schedule: Schedule, head_dim: int, rates: Profile) -> float:
    """What a rank's legal pairs take at the rates of full tiles: two products forward, five backward."""
    operations = 2.0 * rank_pairs(schedule) * head_dim
    forward, backward = rates.rates(head_dim)
    return operations * (2 / forward + 5 / backward)


def _pairs(layout: Layout) -> float:
    storage = set_apart(layout)
    return float(pair_work(StoredMask(storage, packed_mask(), VisibleRanges(storage)), 1).sum())
