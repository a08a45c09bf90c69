"""Fetching keys: each rank gets the remote key blocks that its queries see, at once, and sends their gradients back.

Source: MARBLE, section 04, "sparse all-to-all" (Luma AI, October 2026). On a sliding-window layer the blocks that a
rank sees are the last window, so the same builder is the last-window all-to-all. Fetching every block is the
all-gather that FlashMask's context parallelism uses, kept as a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marble.compose.schedule import Add, Buffer, Call, Kind, Pass, Rows, Schedule, Step, Transfer
from marble.compose.schedules.touches import flag_touches, stretches, whole_blocks
from marble.kernels.contract import Tiles
from marble.mask.join import Part, join_keys
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder


def sparse_a2a(order: TokenOrder, mask: StoredMask, rank: int, block: int, heads: int, kv_heads: int) -> Schedule:
    """One rank's sparse all-to-all.

    Forward, the blocks that a rank sees travel while it computes on its own keys; a second call takes the fetched
    ones, carrying the state of query blocks that see both. Backward, the fetched keys come first, and their fp32
    gradients travel home while the rank computes on its own keys.

    Args:
        order: the token order; contiguous shards or whole samples need the fewest remote keys.
        mask: the mask over the stored tokens.
        rank: whose schedule to build.
        block: rows of a tile's block; keys are fetched in whole blocks.
        heads: query heads.
        kv_heads: key/value heads.
    """
    shards = tuple(order.shard(other) for other in range(order.world))
    seen = tuple(mask.seen(shards, shard, block) for shard in shards)
    return _schedule(Exchange(shards, seen, block), mask, rank, heads, kv_heads, at_once=False)


def all_gather(order: TokenOrder, mask: StoredMask, rank: int, block: int, heads: int, kv_heads: int) -> Schedule:
    """One rank's all-gather: every rank fetches every key and makes one call. Arguments as for `sparse_a2a`."""
    shards = tuple(order.shard(other) for other in range(order.world))
    seen = tuple(torch.ones(len(shards), -(-len(shard) // block), dtype=torch.bool) for shard in shards)
    return _schedule(Exchange(shards, seen, block), mask, rank, heads, kv_heads, at_once=True)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Who fetches what, and where it lies. All ranks derive the same from the same order.

    Attributes:
        shards: storage positions of each rank's tokens.
        seen: per rank, which of its key blocks every other rank fetches, bool [ranks, key blocks].
        block: rows of a block.

    The rows of a rank's ``kv``: its own shard, then what it fetches, rank by rank, each area in whole blocks. ``dkv``
    is the same, followed by an inbox for the gradients that come home from each rank.
    """

    shards: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]
    block: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.shards)

    @cached_property
    def runs(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """For each pair (owner, reader) the row ranges of the owner's shard that the reader fetches."""
        return {
            (owner, reader): stretches(seen[reader], self.block, len(self.shards[owner]))
            for owner, seen in enumerate(self.seen)
            for reader in range(self.world)
            if reader != owner
        }

    def rows(self, owner: int, reader: int) -> int:
        """How many of the owner's rows the reader fetches."""
        return sum(stop - start for start, stop in self.runs[owner, reader])

    def home(self, rank: int) -> Rows:
        """A rank's own keys."""
        return Rows("kv", 0, len(self.shards[rank]))

    def areas(self, rank: int, *, inbox: bool = False) -> dict[int, int]:
        """First row of what a rank fetches from each other rank, or of the gradients that it gets back from each.

        The key −1 holds the number of rows of all.
        """
        at = self.areas(rank)[-1] if inbox else whole_blocks(len(self.shards[rank]), self.block)
        found = {}
        for other in range(self.world):
            if other != rank:
                found[other] = at
                at += whole_blocks(self.rows(rank, other) if inbox else self.rows(other, rank), self.block)
        found[-1] = at
        return found

    def fetches(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers of keys and values that a rank takes part in."""
        moves = []
        for owner, reader in self._pairs(rank):
            at = self.areas(reader)[owner]
            for start, stop in self.runs[owner, reader]:
                moves.append(Transfer(owner, Rows("kv", start, stop), reader, Rows("kv", at, at + stop - start)))
                at += stop - start
        return tuple(moves)

    def returns(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers of gradients that a rank takes part in: what was fetched from an owner, as one piece."""
        moves = []
        for owner, reader in self._pairs(rank):
            rows = self.rows(owner, reader)
            src, dst = self.areas(reader)[owner], self.areas(owner, inbox=True)[reader]
            if rows:
                moves.append(Transfer(reader, Rows("dkv", src, src + rows), owner, Rows("dkv", dst, dst + rows)))
        return tuple(moves)

    def adds(self, rank: int) -> tuple[Add, ...]:
        """Gradients that came home, added to the rank's own."""
        found = []
        for reader, at in self.areas(rank, inbox=True).items():
            for start, stop in self.runs.get((rank, reader), ()):
                found.append(Add(Rows("dkv", at, at + stop - start), Rows("dkv", start, stop)))
                at += stop - start
        return tuple(found)

    def _pairs(self, rank: int) -> list[tuple[int, int]]:
        return [pair for pair in self.runs if rank in pair]


def _schedule(exchange: Exchange, mask: StoredMask, rank: int, heads: int, kv_heads: int, *, at_once: bool) -> Schedule:
    """``at_once``: one call over local and fetched keys instead of one each."""
    shards, block = exchange.shards, exchange.block
    areas, home = exchange.areas(rank), exchange.home(rank)
    own = mask.tiles(shards[rank], shards[rank], block)
    base = 0 if at_once else whole_blocks(len(home), block)
    parts = [Part(own, torch.ones(len(own.key_row), dtype=torch.bool), 0)] if at_once else []
    for owner in range(exchange.world):
        if owner != rank and exchange.rows(owner, rank):
            tiles = mask.tiles(shards[rank], shards[owner], block)
            parts.append(Part(tiles, exchange.seen[owner][rank], areas[owner] - base))
    calls: list[tuple[Tiles, Rows]] = [] if at_once else [(own, home)]
    if parts:
        calls.append((join_keys(parts), Rows("kv", base, areas[-1])))
    flagged, carries, untouched = flag_touches([work for work, _ in calls])
    forward = [
        Call(work, kv, carries=carry)
        for work, (_, kv), carry in zip(flagged, calls, carries, strict=True)
        if work.visited
    ]
    backward = [Call(work, kv, dkv=Rows("dkv", kv.start, kv.stop)) for work, kv in calls if work.visited]

    def run(made: list[Call], *, at_home: bool) -> tuple[Call, ...]:
        return tuple(call for call in made if (call.kv == home) == at_home)

    mine = len(shards[rank])
    steps = (
        Step(exchange.fetches(rank), untouched, run(forward, at_home=True)),
        Step(calls=run(forward, at_home=False)),
    )
    back = (
        Step(exchange.fetches(rank), (Rows("dq", 0, mine), Rows("dkv", 0, areas[-1]))),
        Step(calls=run(backward, at_home=False)),
        Step(exchange.returns(rank), calls=run(backward, at_home=True), adds=exchange.adds(rank)),
    )
    tokens = tuple(len(shard) for shard in shards)
    q, lse = Buffer("q", Kind.TOKENS, mine, heads), Buffer("lse", Kind.STATISTICS, mine, heads)
    kv = Buffer("kv", Kind.PAIRS, areas[-1], kv_heads)
    return Schedule(
        rank,
        tokens,
        Pass((q, kv, Buffer("out", Kind.TOKENS, mine, heads), lse), steps),
        Pass(
            (
                q,
                kv,
                Buffer("dout", Kind.TOKENS, mine, heads),
                lse,
                Buffer("delta", Kind.STATISTICS, mine, heads),
                Buffer("dq", Kind.TOKEN_SUMS, mine, heads),
                Buffer("dkv", Kind.PAIR_SUMS, exchange.areas(rank, inbox=True)[-1], kv_heads),
            ),
            back,
        ),
    )
