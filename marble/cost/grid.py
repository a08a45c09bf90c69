"""Blocks of all ranks as fragments of the storage order, and how many intervals of fragments cover each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from marble.mask.shards import Blocks
from marble.mask.storage import Storage
from marble.order.token_order import TokenOrder

Counts = NDArray[np.int64]
_BUCKET = 64
"""Storage positions that share an entry of the table that finds their fragments; half a block."""


@dataclass(frozen=True, eq=False)
class Intervals:
    """Key block ``key`` is seen by the query fragments from ``first`` to ``last``; int64 [intervals], keys rise."""

    key: Counts
    first: Counts
    last: Counts


@dataclass(frozen=True, eq=False)
class Grid:
    """The blocks of all ranks, and their fragments: what a block has of one piece of the order.

    Attributes:
        blocks: the blocks, rank after rank, with their cells.
        start: int64 [fragments], first storage position of each fragment, rising.
        stop: int64 [fragments], one past the last.
        rank: int64 [fragments], whose it is.
        by_block: int64 [fragments], the fragments block after block.
        block_start: int64 [blocks], where each block begins among these.
        sample: int64 [fragments], the sample that each begins in.
        sequences: float64 [2, blocks], of dense calls how many sequences begin in each block, shared ones by their
            rows; on other ranks' keys, and on the rank's own.
    """

    blocks: Blocks
    start: Counts
    stop: Counts
    rank: Counts
    by_block: Counts
    block_start: Counts
    sample: Counts
    sequences: NDArray[np.float64] | None

    @cached_property
    def first_of(self) -> Counts:
        """The first fragment of each block."""
        return self.by_block[self.block_start]

    @cached_property
    def rank_of(self) -> Counts:
        """The rank of each block, rising."""
        return self.rank[self.first_of]

    @cached_property
    def _edges(self) -> Counts:
        """Where fragments begin, and where the last one stops."""
        return np.append(self.start, self.stop[-1])

    @cached_property
    def _buckets(self) -> Counts:
        """How many of the edges are not above each multiple of `_BUCKET`."""
        return np.bincount(-(-self._edges // _BUCKET), minlength=int(self.stop[-1]) // _BUCKET + 1).cumsum()

    def edges_to(self, position: Counts) -> Counts:
        """How many fragments begin at each storage position or before, int64 [positions]; past all tokens one more.

        A table leads close to the place, as a binary search in each of many blocks takes ten times as long.
        """
        count = np.where(position < 0, 0, self._buckets[np.maximum(position, 0) // _BUCKET])
        edges = np.append(self._edges, np.iinfo(np.int64).max)
        while (more := edges[count] <= position).any():
            count += more
        return count

    @cached_property
    def mixed(self) -> tuple[Counts, Counts, Counts, Counts]:
        """The blocks of more than one fragment, their fragments, and where each of their samples and each of the
        blocks begins: among these fragments, and among these samples."""
        count = np.diff(self.block_start, append=len(self.start))
        blocks = np.flatnonzero(count > 1)
        owner, at = _split(self.block_start[blocks], self.block_start[blocks] + count[blocks])
        fragments = self.by_block[at]
        samples = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(self.sample[fragments], prepend=-1) != 0))
        return blocks, fragments, samples, np.flatnonzero(np.diff(owner[samples], prepend=-1))

    @cached_property
    def several(self) -> NDArray[np.bool_]:
        """Whether a block has more than one sample."""
        blocks, _, samples, starts = self.mixed
        several = np.zeros(len(self.block_start), dtype=np.bool_)
        several[blocks] = np.diff(starts, append=len(samples)) > 1
        return several

    def cover(self, intervals: Intervals, some: slice, nested: np.ufunc) -> Counts:
        """How many of some intervals cover each block, int64 [blocks].

        Fragments of one block and sample mostly nest in what they see: ``nested`` makes them one. Those of several
        samples are seen by different keys.
        """
        count = len(self.start) + 1
        edges = (np.bincount(ends[some], minlength=count) for ends in (intervals.first, intervals.last))
        found = np.subtract(*edges).cumsum()
        cover = found[self.first_of]
        blocks, fragments, samples, starts = self.mixed
        if len(blocks):
            cover[blocks] = np.add.reduceat(nested.reduceat(found[fragments], samples), starts)
        return cover

    @classmethod
    @lru_cache(maxsize=4)
    def cut(cls, order: TokenOrder, storage: Storage, block: int, *, dense: bool) -> Grid:
        """Cut an order's pieces at the blocks of its ranks, and those at spans. The last are kept, for other layers."""
        spans, borders = storage.span_order.numpy(), storage.stored_start.numpy()
        start, stop, rank = order.pieces.numpy().T
        part = np.zeros_like(rank)
        if dense:
            apart = storage.apart.numpy()[spans]
            turns = np.append(0, (np.diff(storage.table.ordinal.numpy()[spans]) != 0) | (np.diff(apart) != 0)).cumsum()
            cut = np.union1d(start, borders[1:][np.diff(turns) != 0])
            piece = np.searchsorted(start, cut, side="right") - 1
            start, stop, rank = cut, np.append(cut[1:], stop[-1]), rank[piece]
            part = turns[np.searchsorted(borders, start, side="right") - 1]
        by_rank = np.argsort(rank, kind="stable")
        # Where a part of a rank ends, its last block does too.
        length, part, owner = (stop - start)[by_rank], part[by_rank], rank[by_rank]
        last = np.flatnonzero(np.append((np.diff(owner) != 0) | (np.diff(part) != 0), True))
        waste = np.zeros_like(length)
        waste[last] = -np.diff(length.cumsum()[last], prepend=0) % block
        end = (length + waste).cumsum()
        row = np.empty_like(length)
        row[by_rank] = end - length - waste
        # Fragments, in storage order.
        piece, of = _split(row // block, -(-(row + stop - start) // block))
        low = start[piece] + np.maximum(of * block - row[piece], 0)
        high = np.minimum(start[piece] + (of + 1) * block - row[piece], stop[piece])
        by_block = np.argsort(of, kind="stable")
        block_start = np.flatnonzero(np.append(True, np.diff(of[by_block]) != 0))
        inside = low - start[piece] + row[piece] - of * block
        # Cells, block after block.
        a, b = low[by_block], high[by_block]
        owner, span = _split(np.searchsorted(borders, a, side="right") - 1, np.searchsorted(borders, b))
        cell = np.maximum(a[owner], borders[span])
        rows = np.minimum(b[owner], storage.stored_stop.numpy()[span]) - cell
        number = np.repeat(np.arange(len(block_start)), np.diff(block_start, append=len(of)))
        lengths = np.add.reduceat(high[by_block] - low[by_block], block_start)
        columns = (spans[span], cell - borders[span], cell, inside[by_block][owner] + cell - a[owner], rows)
        blocks = Blocks(
            block,
            (),
            (0, len(block_start)),
            torch.from_numpy(lengths),
            *(torch.from_numpy(column) for column in (*columns, number[owner])),
        )
        sample = storage.table.ordinal.numpy()[spans[np.searchsorted(borders, low, side="right") - 1]]
        sequences = None
        if dense:
            part = np.empty_like(row)
            part[by_rank] = np.searchsorted(last, np.arange(len(row)))
            piece_of = piece[by_block][owner]
            alone = _alone(storage, start, rank, piece_of, columns[0], part)
            sequences = np.stack([_shares(number[owner], rows, group) for group in (piece_of, alone)])
        return cls(blocks, low, high, rank[piece], by_block, block_start, sample, sequences)


def _alone(storage: Storage, start: Counts, rank: Counts, piece: Counts, span: Counts, part: Counts) -> Counts:
    """Which sequence each cell belongs to on the rank's own keys, int64 [cells].

    A part of a rank is one sequence. But spans set apart see different keys each, and so do the spans of a sample with
    bidirectional ones that has no second rank.

    Args:
        storage: the storage order.
        start: int64 [pieces], first storage position of each piece, rising; pieces are of one sample.
        rank: int64 [pieces].
        piece: int64 [cells], the piece of each cell.
        span: int64 [cells], its span by sequence order.
        part: int64 [pieces], the part of each piece: what its rank has of a sample, set apart or not.
    """
    ordinal = storage.table.ordinal.numpy()
    wide = np.bincount(ordinal, storage.table.seg.numpy() >= 0) > 0
    home = ordinal[storage.span_order.numpy()[np.searchsorted(storage.stored_start.numpy(), start, side="right") - 1]]
    first = np.flatnonzero(np.diff(home, prepend=-1))
    shared = np.minimum.reduceat(rank, first) < np.maximum.reduceat(rank, first)
    by_span = storage.apart.numpy()[span] | (wide & ~shared)[ordinal[span]]
    single = np.cumsum(np.diff(span * len(start) + piece, prepend=-1) != 0)
    return np.where(by_span, len(start) + single, part[piece])


def _shares(block: Counts, rows: Counts, group: Counts) -> NDArray[np.float64]:
    """Of every block the share that its rows have of their groups, summed over groups."""
    return np.bincount(block, rows / np.bincount(group, rows)[group]).astype(np.float64)


def _split(first: Counts, last: Counts) -> tuple[Counts, Counts]:
    """Every (interval, member) of the intervals from ``first`` to ``last``, which is above it."""
    count = last - first
    owner = np.repeat(np.arange(len(first)), count)
    return owner, np.arange(len(owner)) + (last - count.cumsum())[owner]
