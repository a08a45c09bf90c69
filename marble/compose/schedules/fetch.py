"""Fetching keys: each rank gets the remote key blocks that its queries see, at once, and sends their gradients back.

Source: MARBLE, section 04, "sparse all-to-all" (Luma AI, October 2026). On a sliding-window layer the blocks that a
rank sees are the last window, so the same builder is the last-window all-to-all. Fetching every block is the
all-gather that FlashMask's context parallelism uses, kept as a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

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
    return _schedule(Exchange.seen_by(order, mask, block), order, mask, rank, heads, kv_heads)


def all_gather(order: TokenOrder, mask: StoredMask, rank: int, block: int, heads: int, kv_heads: int) -> Schedule:
    """One rank's all-gather: every rank fetches every key and makes one call. Arguments as for `sparse_a2a`."""
    seen = tuple(
        torch.ones(order.world, -(-rows // block), dtype=torch.bool, device=order.storage.device)
        for rows in order.lengths
    )
    return _schedule(Exchange(order.lengths, seen, block), order, mask, rank, heads, kv_heads, at_once=True)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Who fetches what, and where it lies. All ranks derive the same from the same order.

    Attributes:
        tokens: number of tokens of each rank.
        seen: per rank, which of its key blocks every other rank fetches, bool [ranks, key blocks].
        block: rows of a block.

    The rows of a rank's ``kv``: its own shard, then what it fetches, rank by rank, each area in whole blocks. ``dkv``
    is the same, followed by an inbox for the gradients that come home from each rank.
    """

    tokens: tuple[int, ...]
    seen: tuple[Tensor, ...]
    block: int

    @classmethod
    @lru_cache(maxsize=2)
    def seen_by(cls, order: TokenOrder, mask: StoredMask, block: int) -> Exchange:
        """The blocks that each rank's queries see. The last are kept, for the schedules of the other ranks."""
        seen = mask.seen_of(order.shards, order.shards, block)
        return cls(order.lengths, seen.split([-(-rows // block) for rows in order.lengths], 1), block)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    @cached_property
    def _runs(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        return {}

    def runs(self, owner: int, reader: int) -> list[tuple[int, int]]:
        """The row ranges of the owner's shard that the reader fetches."""
        if (owner, reader) not in self._runs:
            seen = self.seen[owner][reader].cpu().numpy()
            self._runs[owner, reader] = stretches(seen, self.block, self.tokens[owner])
        return self._runs[owner, reader]

    @cached_property
    def _rows(self) -> list[list[int]]:
        counts = []
        for rows, seen in zip(self.tokens, self.seen, strict=True):
            count = seen.sum(1) * self.block
            if rows % self.block:
                count -= seen[:, -1] * (self.block - rows % self.block)
            counts.append(count.tolist())
        return counts

    def rows(self, owner: int, reader: int) -> int:
        """How many of the owner's rows the reader fetches."""
        return self._rows[owner][reader]

    def home(self, rank: int) -> Rows:
        """A rank's own keys."""
        return Rows("kv", 0, self.tokens[rank])

    def areas(self, rank: int, *, inbox: bool = False) -> dict[int, int]:
        """First row of what a rank fetches from each other rank, or of the gradients that it gets back from each.

        The key −1 holds the number of rows of all.
        """
        if (rank, inbox) in self._areas:
            return self._areas[rank, inbox]
        at = self.areas(rank)[-1] if inbox else whole_blocks(self.tokens[rank], self.block)
        found = {}
        for other in range(self.world):
            if other != rank:
                found[other] = at
                at += whole_blocks(self.rows(rank, other) if inbox else self.rows(other, rank), self.block)
        found[-1] = at
        self._areas[rank, inbox] = found
        return found

    @cached_property
    def _areas(self) -> dict[tuple[int, bool], dict[int, int]]:
        return {}

    @cached_property
    def rooms(self) -> tuple[int, int]:
        """Rows of the largest ``kv`` and of the largest ``dkv`` of any rank; none for one rank."""
        if self.world == 1:
            return 0, 0
        kv, dkv = (max(self.areas(rank, inbox=inbox)[-1] for rank in range(self.world)) for inbox in (False, True))
        return kv, dkv

    def fetches(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers of keys and values that a rank takes part in."""
        moves = []
        for owner, reader in self._pairs(rank):
            at = self.areas(reader)[owner]
            for start, stop in self.runs(owner, reader):
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
            for start, stop in self.runs(rank, reader) if reader >= 0 else ():
                found.append(Add(Rows("dkv", at, at + stop - start), Rows("dkv", start, stop)))
                at += stop - start
        return tuple(found)

    def _pairs(self, rank: int) -> list[tuple[int, int]]:
        others = [other for other in range(self.world) if other != rank]
        return sorted([(rank, other) for other in others] + [(other, rank) for other in others])


def _schedule(
    exchange: Exchange,
    order: TokenOrder,
    mask: StoredMask,
    rank: int,
    heads: int,
    kv_heads: int,
    *,
    at_once: bool = False,
) -> Schedule:
    """``at_once``: one call over local and fetched keys instead of one each."""
    block, areas, home = exchange.block, exchange.areas(rank), exchange.home(rank)
    owners = [other for other in range(exchange.world) if other != rank and exchange.rows(other, rank)]
    own, *fetched = mask.tiles_of(order.shards[rank], [order.shards[owner] for owner in (rank, *owners)], block)
    base = 0 if at_once else whole_blocks(len(home), block)
    parts = [Part(own, torch.ones_like(own.key_row, dtype=torch.bool), 0)] if at_once else []
    for owner, tiles in zip(owners, fetched, strict=True):
        parts.append(Part(tiles, exchange.seen[owner][rank], areas[owner] - base))
    calls: list[tuple[Tiles, Rows]] = [] if at_once else [(own, home)]
    if parts:
        calls.append((join_keys(parts), Rows("kv", base, areas[-1])))
    found = flag_touches([work for work, _ in calls])
    forward = [
        Call(work, kv, carries=carry)
        for work, (_, kv), carry, busy in zip(found.calls, calls, found.carries, found.busy, strict=True)
        if busy
    ]
    backward = [
        Call(work, kv, dkv=Rows("dkv", kv.start, kv.stop))
        for (work, kv), busy in zip(calls, found.busy, strict=True)
        if busy
    ]

    def run(made: list[Call], *, at_home: bool) -> tuple[Call, ...]:
        return tuple(call for call in made if (call.kv == home) == at_home)

    mine = len(home)
    steps = (
        Step(exchange.fetches(rank), found.untouched, run(forward, at_home=True)),
        Step(calls=run(forward, at_home=False)),
    )
    back = (
        Step(exchange.fetches(rank), (Rows("dq", 0, mine), Rows("dkv", 0, areas[-1]))),
        Step(calls=run(backward, at_home=False)),
        Step(exchange.returns(rank), calls=run(backward, at_home=True), adds=exchange.adds(rank)),
    )
    q, lse = Buffer("q", Kind.TOKENS, mine, heads), Buffer("lse", Kind.STATISTICS, mine, heads)
    kv = Buffer("kv", Kind.PAIRS, areas[-1], kv_heads, whole=exchange.rooms[0])
    return Schedule(
        rank,
        exchange.tokens,
        Pass((q, kv, Buffer("out", Kind.TOKENS, mine, heads), lse), steps),
        Pass(
            (
                q,
                kv,
                Buffer("dout", Kind.TOKENS, mine, heads),
                lse,
                Buffer("delta", Kind.STATISTICS, mine, heads),
                Buffer("dq", Kind.TOKEN_SUMS, mine, heads),
                Buffer(
                    "dkv",
                    Kind.PAIR_SUMS,
                    exchange.areas(rank, inbox=True)[-1],
                    kv_heads,
                    whole=exchange.rooms[1],
                ),
            ),
            back,
        ),
    )
