"""How much of a mask lies between any two ranks, counted from block ranges and without building a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from marble.cost.grid import Counts, Grid, Intervals
from marble.mask.pairing import Sights, merge
from marble.mask.predicates import Side
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder


@dataclass(frozen=True, eq=False)
class PairCounts:
    """What the queries of each rank (first index) compute on the keys of each rank (second index).

    Attributes:
        tokens: int64 [ranks], tokens of each rank.
        tiles: int64 [ranks, ranks], visited tiles.
        partial: int64 [ranks, ranks], those of them that are partial.
        query_blocks: int64 [ranks, ranks], query blocks with any tile.
        key_blocks: int64 [ranks, ranks], key blocks with any tile; of dense calls once for every sequence.
        key_rows: int64 [ranks, ranks], the rows of the key blocks with any tile.
        touched: int64 [ranks], query blocks of each rank with any tile.
        remote: int64 [ranks], those with a tile on another rank's keys.
    """

    tokens: Counts
    tiles: Counts
    partial: Counts
    query_blocks: Counts
    key_blocks: Counts
    key_rows: Counts
    touched: Counts
    remote: Counts

    @classmethod
    def of(cls, order: TokenOrder, mask: StoredMask, block: int, *, dense: bool = False) -> PairCounts:
        """Count a mask under a token order, in O(blocks · ranks).

        A rank's blocks are cut where its pieces meet, so that the queries that see a key block are a few intervals of
        such fragments in storage order; running sums over fragments, one for every rank, count them. A block of two
        pieces that one key block sees both counts twice.

        Args:
            order: the token order.
            mask: the mask over the stored tokens; all its tokens have visible ranges.
            block: rows of a block.
            dense: whether blocks begin anew with every piece, sample and stretch of spans set apart, as the sequences
                of dense calls do.

        Raises:
            ValueError: if a token has no visible ranges.
        """
        if not countable(mask):
            raise ValueError("counts: the mask has tokens without visible ranges; build the schedules and count those")
        assert mask.ranges is not None
        storage = mask.storage
        grid = Grid.cut(order, storage, block, dense=dense)
        keys = Side(grid.blocks, mask.ranges.key_spans)
        sights = Sights.of(keys)
        some = (sights.lo < sights.hi).numpy()
        first, last = grid.edges_to(sights.lo.numpy()[some]) - 1, grid.edges_to(sights.hi.numpy()[some] - 1)
        found = merge(*map(torch.from_numpy, (sights.block.numpy()[some], first, last)))
        # Full: whole query blocks inside what every key of a whole key block is seen by.
        low, high = keys.common.numpy()
        low, high = grid.edges_to(low - 1), grid.edges_to(high) - 1
        full = np.flatnonzero((low < high) & (grid.blocks.length.numpy() == block))
        visited = Intervals(*(part.numpy() for part in found))
        counts = _between(order, grid, visited, Intervals(full, low[full], high[full]))
        if dense:
            # A bidirectional span takes a sequence of its own beside the one that covers the rows before it.
            wide = (storage.table.seg >= 0).numpy()[grid.blocks.span.numpy()]
            again = np.bincount(grid.rank_of[grid.blocks.of.numpy()][wide], minlength=order.world)
            own = np.arange(order.world)
            for count in (counts.tiles, counts.partial, counts.query_blocks, counts.key_blocks):
                count[own, own] += again
            counts.touched[:] += again
        return counts


def countable(mask: StoredMask) -> bool:
    """Whether all tokens of a mask have visible ranges, so that `PairCounts.of` can count it."""
    return mask.ranges is not None and mask.ranges.key_spans.complete


def _between(order: TokenOrder, grid: Grid, visited: Intervals, full: Intervals) -> PairCounts:
    """The counts of visited tiles and of full ones, rank by rank: each one's arrays stay in a core's cache."""
    ranks, of, length = order.world, grid.rank_of, grid.blocks.length.numpy()
    base = np.searchsorted(of, np.arange(ranks + 1))
    queries = _Sums(base)
    whole = (length == grid.blocks.block) & ~grid.several
    visited_at, full_at = (np.searchsorted(part.key, base) for part in (visited, full))
    tiles, partial, query_blocks = np.zeros((3, ranks, ranks), dtype=np.int64)
    walked = np.zeros((ranks, ranks))
    touched, remote = np.zeros((2, len(of)), dtype=np.bool_)
    for rank in range(ranks):
        # How many blocks of the rank's keys each query block sees.
        sees = grid.cover(visited, slice(*visited_at[rank : rank + 2]), np.maximum)
        covered = grid.cover(full, slice(*full_at[rank : rank + 2]), np.minimum) * whole
        some = sees > 0
        tiles[:, rank], query_blocks[:, rank] = queries.of(sees), queries.of(some)
        partial[:, rank] = tiles[:, rank] - queries.of(covered)
        touched |= some
        some[base[rank] : base[rank + 1]] = False
        remote |= some
        if grid.sequences is not None:
            shared, alone = grid.sequences
            walked[:, rank] = queries.of(sees * shared)
            walked[rank, rank] = (sees * alone)[base[rank] : base[rank + 1]].sum()
    key_blocks, key_rows = _seen(grid, ranks, visited, base)
    if grid.sequences is not None:
        key_blocks = walked.round().astype(np.int64)
    counts = (queries.of(part).astype(np.int64) for part in (touched, remote))
    return PairCounts(np.array(order.lengths), tiles, partial, query_blocks, key_blocks, key_rows, *counts)


def _seen(grid: Grid, ranks: int, visited: Intervals, base: Counts) -> tuple[Counts, Counts]:
    """How many key blocks of each rank (second index) the queries of each rank (first) see, and the rows of these.

    Ranks are bits: those with a fragment in an interval are the union of two overlapping runs of fragments whose number
    is a power of two.
    """
    bits = np.zeros((len(grid.rank), -(-ranks // 64)), dtype=np.uint64)
    bits[np.arange(len(bits)), grid.rank // 64] = np.uint64(1) << (grid.rank % 64).astype(np.uint64)
    size = np.frexp(visited.last - visited.first)[1] - 1  # the largest power of two that fits
    seen = np.zeros((len(size), bits.shape[1]), dtype=np.uint64)
    for power in range(int(size.max(initial=-1)) + 1):
        some = size == power
        seen[some] = bits[visited.first[some]] | bits[visited.last[some] - (1 << power)]
        bits = bits[: -(1 << power)] | bits[1 << power :]
    fresh = np.flatnonzero(np.diff(visited.key, prepend=-1))
    key = visited.key[fresh]
    seen = np.bitwise_or.reduceat(seen, fresh) if len(fresh) < len(seen) else seen
    flags = np.unpackbits(seen.astype("<u8").view(np.uint8), axis=1, count=ranks, bitorder="little")
    blocks = _Sums(np.searchsorted(key, base)).of(flags)
    rows = blocks * grid.blocks.block
    short = np.flatnonzero(grid.blocks.length.numpy()[key] < grid.blocks.block)
    missing = grid.blocks.block - grid.blocks.length.numpy()[key[short]]
    np.subtract.at(rows, grid.rank_of[key[short]], flags[short] * missing[:, None])
    return blocks.T.astype(np.int64), rows.T.astype(np.int64)


class _Sums:
    """Sums of rows from each base to the next, which may be the same; int64 [bases]."""

    def __init__(self, base: Counts) -> None:
        self._some = base[:-1] < base[1:]
        self._start, self._stop = base[:-1][self._some], base[-1]

    def of(self, values: NDArray[Any]) -> NDArray[Any]:
        """The sums of some values [rows, ...], [bases − 1, ...]."""
        total = np.zeros((len(self._some), *values.shape[1:]))
        if len(self._start):
            counted = values.astype(np.int32) if values.itemsize == 1 else values  # cast as it goes, it is slower
            total[self._some] = np.add.reduceat(counted[: self._stop], self._start)
        return total
