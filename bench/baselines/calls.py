"""The attention calls that are measured, and what they cost: tiles, legal pairs, floating-point operations, state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

import marble
from marble.compose.schedule import Schedule
from marble.compose.schedules.fetch import Exchange
from marble.compose.schedules.touches import flag_touches
from marble.kernels.contract import Band, Tiles, Touch, Varlen
from marble.layout import Layout, Span
from marble.mask.algebra import MaskFn
from marble.mask.domains import dense
from marble.mask.join import Part, join_keys
from marble.mask.modes import packed_mask
from marble.mask.tiles import StoredMask
from marble.workloads import WORKLOADS, build

BLOCK = 128
ONCE = int(Touch.FIRST | Touch.LAST)


@dataclass(frozen=True, eq=False)
class MaskedCall:
    """One call: some stored queries against some stored keys.

    Attributes:
        name: what the results call it.
        shape: heads, head dim, window and scale.
        stored: the mask over the stored tokens.
        rows: int64 [query rows], the storage position of each query.
        cols: int64 [key rows], the storage position of each key row, −1 where a row holds no token.
        tiles: the pairs that the call computes, on the CPU.
    """

    name: str
    shape: marble.AttentionShape
    stored: StoredMask
    rows: Tensor
    cols: Tensor
    tiles: Tiles

    @property
    def mask(self) -> MaskFn:
        """The mask as a baseline gets it: without the test for padding where the layout has none."""
        padded = bool((self.stored.storage.layout.table.sample < 0).any())
        return self.stored.mask if padded else packed_mask(self.shape.window)

    def legal(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Which pairs of some query rows and key rows of the call are computed: bool [rows, cols]."""
        tokens, tracks = self.cols[cols], self.stored.tracks
        pairs = dense(self.stored.mask, tracks.take(self.rows[rows]), tracks.take(tokens.clamp(min=0)))
        return pairs & (tokens >= 0)

    @property
    def visited_pairs(self) -> int:
        """Pairs of the tiles that the call computes; ragged tiles count as whole ones."""
        return self.tiles.visited * self.tiles.block**2

    @cached_property
    def legal_pairs(self) -> int:
        """Pairs that the mask allows."""
        return legal_pairs(self.tiles)

    def flops(self, pairs: int, *, backward: bool) -> float:
        """Operations of the matrix products over some pairs: two forward, five backward."""
        return 2 * (5 if backward else 2) * float(pairs) * self.shape.heads * self.shape.head_dim

    @classmethod
    def joined(
        cls, name: str, shape: marble.AttentionShape, stored: StoredMask, rows: Tensor, shards: Sequence[Tensor]
    ) -> MaskedCall:
        """Some queries against the keys of several shards, one after the other: storage positions all.

        Raises:
            ValueError: if a shard before the last is not whole blocks.
        """
        if any(len(shard) % BLOCK for shard in shards[:-1]):
            raise ValueError(f"{name}: shards are not whole blocks, so one call cannot join them")
        base, parts = 0, []
        for shard in shards:
            work = stored.tiles(rows, shard, BLOCK)
            parts.append(Part(work, torch.ones(len(work.key_row), dtype=torch.bool), base))
            base += len(shard)
        return cls(name, shape, stored, rows, torch.cat(list(shards)), join_keys(parts))

    def once(self) -> MaskedCall:
        """The same call on its own: every touch is the first and the last."""
        return replace(self, tiles=replace(self.tiles, touch=torch.full_like(self.tiles.touch, ONCE)))


def legal_pairs(tiles: Tiles) -> int:
    """Pairs that a call's tiles allow, counted from its predicates."""
    lists = tiles.by_query
    words, bits = lists.ranges.long() & 0xFFFFFFFF, lists.bits.long()
    lo0, hi0, lo1, hi1 = (words >> shift & 255 for shift in (0, 8, 16, 24))
    in_ranges = (hi0 - lo0 + hi1 - lo1).sum(1)
    in_bits = (bits.unsqueeze(-1) >> torch.arange(32, device=bits.device) & 1).flatten(1).sum(1)
    slot = lists.parts[:, 1].long()
    partial = int(in_ranges[slot[slot >= 0]].sum()) + int(in_bits[~slot[slot < 0]].sum())
    return lists.full * tiles.block**2 + partial


def dense_pairs(work: Varlen) -> int:
    """Pairs of a dense call's sequences."""
    rows, keys = (ends[:, 1].long() - ends[:, 0].long() for ends in (work.queries, work.keys))
    # The last query sees all keys, each one before it one less. What that leaves is the reverse.
    some = torch.minimum(rows, keys)
    causal = some * keys - some * (some - 1) // 2
    every = rows * keys
    return int({Band.FULL: every, Band.CAUSAL: causal, Band.REVERSE_CAUSAL: every - causal}[work.band].sum())


def rank_pairs(schedule: Schedule) -> float:
    """Legal pairs that a rank computes in a pass, once for every query head."""
    total, buffers = 0, schedule.forward.buffers_by_name
    for call in (call for step in schedule.forward.steps for call in step.calls):
        pairs = legal_pairs(call.work) if isinstance(call.work, Tiles) else dense_pairs(call.work)
        total += pairs * buffers[call.q].heads
    return float(total)


@dataclass(frozen=True)
class Case:
    """A layer of a workload at some length: ``name`` is a workload, or ``dense_causal`` for one long causal sample."""

    name: str
    shape: marble.AttentionShape
    tokens: int
    scale: float = 1.0

    @property
    def title(self) -> str:
        """The case in one line of a table."""
        window = f", window {self.shape.window}" if self.shape.window else ""
        return f"{self.name}{window}, {self.tokens:,} tokens, d{self.shape.head_dim}"

    @cached_property
    def layout(self) -> Layout:
        if self.name == DENSE_CAUSAL:
            return Layout([[Span("causal", self.tokens)]])
        return build(self.name, self.tokens, scale=self.scale)

    def whole(self) -> MaskedCall:
        """The packed sequence as one call on one GPU, in the storage order of its plan."""
        plan = marble.plan(self.layout, self.shape, ranks=1)
        assert plan.masks is not None
        rows = plan.order.shard(0)
        return MaskedCall(self.title, self.shape, plan.masks[0], rows, rows, plan.masks[0].tiles(rows, rows, BLOCK))

    def ring(self, ranks: int = 8, rank: int = 0) -> tuple[list[MaskedCall], MaskedCall]:
        """A rank's calls around the ring, with the touches of carried state, and the same pairs as one call."""
        plan = marble.plan(self.layout, self.shape, ranks=ranks, rank=rank, order="ptrr")
        assert plan.masks is not None
        stored, rows = plan.masks[0], plan.order.shard(rank)
        shards = [plan.order.shard((rank - step) % ranks) for step in range(ranks)]
        tiles = [stored.tiles(rows, shard, BLOCK) for shard in shards]
        title = f"{self.title}, rank {rank} of {ranks}"
        calls = [
            MaskedCall(f"{title}, step {step}", self.shape, stored, rows, shard, work)
            for step, (shard, work) in enumerate(zip(shards, flag_touches(tiles).calls, strict=True))
        ]
        joined = MaskedCall.joined(title, self.shape, stored, rows, shards)
        return calls, joined

    def all_to_all(self, ranks: int = 8, rank: int = 0) -> list[MaskedCall]:
        """A rank's two calls in the sparse all-to-all: its own keys, then what it fetched."""
        plan = marble.plan(self.layout, self.shape, ranks=ranks, rank=rank, schedule="sparse_a2a")
        assert plan.masks is not None
        stored, shards = plan.masks[0], tuple(plan.order.shard(other) for other in range(ranks))
        exchange = Exchange.seen_by(plan.order, stored, BLOCK)
        rows, areas = shards[rank], exchange.areas(rank)
        base = min(areas.values())
        parts, cols = [], torch.full((areas[-1] - base,), -1)
        for owner in range(ranks):
            if owner != rank and exchange.rows(owner, rank):
                part = Part(stored.tiles(rows, shards[owner], BLOCK), exchange.seen[owner][rank], areas[owner] - base)
                parts.append(part)
                runs = exchange.runs(owner, rank)
                fetched = torch.cat([shards[owner][start:stop] for start, stop in runs])
                cols[part.first_row : part.first_row + len(fetched)] = fetched
        works = [stored.tiles(rows, rows, BLOCK)] + ([join_keys(parts)] if parts else [])
        title = f"{self.title}, rank {rank} of {ranks}"
        return [
            MaskedCall(f"{title}, {where}", self.shape, stored, rows, keys, work)
            for where, keys, work in zip(("own", "fetched"), (rows, cols), flag_touches(works).calls, strict=False)
        ]


DENSE_CAUSAL = "dense_causal"
_DENSE_SHAPE = marble.AttentionShape(32, 8, 128)


def cases(names: Sequence[str], dims: Sequence[int], tokens: int, scale: float = 1.0) -> list[Case]:
    """Every layer kind of some workloads, at each head dim; the softmax scale is the model's at its own head dim."""
    found = []
    for name in names:
        kinds = WORKLOADS[name].layers if name != DENSE_CAUSAL else (_DENSE_SHAPE,)
        for kind in kinds:
            for dim in dims:
                scaling = kind.scale if dim == kind.head_dim else None
                shape = marble.AttentionShape(kind.heads, kind.kv_heads, dim, kind.window, scaling)
                found.append(Case(name, shape, tokens, scale))
    return found


def state_bytes(calls: Sequence[MaskedCall]) -> int:
    """Bytes of carried state that the calls must read and write: accumulator, maximum and sum of every touched row."""
    total = 0
    for call in calls:
        tiles = call.tiles
        first = torch.arange(len(tiles.touch)) * tiles.block
        rows = (tiles.query_rows - first).clamp(max=tiles.block) * (tiles.by_query.counts() > 0)
        moves = (tiles.touch & int(Touch.FIRST) == 0).long() + (tiles.touch & int(Touch.LAST) == 0).long()
        total += int((rows * moves).sum()) * call.shape.heads * (call.shape.head_dim + 2) * 4
    return total
