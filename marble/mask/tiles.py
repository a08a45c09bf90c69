"""From a mask to tiles: which block pairs of two shards are full, partial or empty, and what a partial one computes.

Two paths lead to the same tiles. Where the mask has visible ranges, block pairs are classified by them: exactly, and
without touching a token pair. Everything else is classified by block summaries, and what these leave open is looked
at pair by pair. Tests hold the paths to one answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marble.kernels.contract import MAX_BLOCK, TileList, Tiles, Touch
from marble.mask.algebra import MaskFn
from marble.mask.domains import BlockSummaries, dense, summarise
from marble.mask.ranges import VisibleRanges
from marble.mask.storage import Storage
from marble.mask.tracks import Tracks

_CHUNK = 256  # tiles that are looked at pair by pair in one go: 4 Mi pairs


@dataclass(frozen=True, eq=False)
class StoredMask:
    """A mask over the stored tokens, with visible ranges where it has them.

    Attributes:
        storage: the storage order.
        mask: the mask; padding is its own business (`marble.mask.modes.not_padding`).
        ranges: its visible ranges, or None for a mask without.
        user: tracks of the user's own in sequence order, by name.
    """

    storage: Storage
    mask: MaskFn
    ranges: VisibleRanges | None = None
    user: Mapping[str, Tensor] | None = None

    @cached_property
    def tracks(self) -> Tracks:
        """The tracks in storage order."""
        return Tracks.of(self.storage.layout, self.user).take(self.storage.sequence)

    def tiles(self, rows: Tensor, cols: Tensor, block: int) -> Tiles:
        """The tiles between the query shard ``rows`` and the key shard ``cols``.

        Args:
            rows: int64 [query rows], rising storage positions of the queries.
            cols: int64 [key rows], rising storage positions of the keys.
            block: rows of a block, 1 to 128.

        Returns:
            All tiles with at least one legal pair, with every touch the first and the last.
        """
        if not 1 <= block <= MAX_BLOCK:
            raise ValueError(f"block: expected 1 to {MAX_BLOCK} tokens, got {block}")
        pairing = _Pairing(self, rows, cols, block)
        runs, parts = pairing.classify()
        by_key = _by_outer(runs, parts, pairing.key_blocks, *pairing.predicates(parts, transposed=True))
        runs, parts = _transpose(runs), _sorted(parts.flip(1))
        by_query = _by_outer(runs, parts, pairing.query_blocks, *pairing.predicates(parts.flip(1), transposed=False))
        starts = torch.arange(pairing.key_blocks) * block
        touch = torch.full((pairing.query_blocks,), int(Touch.FIRST | Touch.LAST), dtype=torch.uint8)
        return Tiles(
            block,
            len(rows),
            starts.int(),
            (len(cols) - starts).clamp(max=block).int(),
            by_query,
            by_key,
            touch,
        )

    def seen(self, shards: Sequence[Tensor], cols: Tensor, block: int) -> Tensor:
        """Which key blocks of the shard ``cols`` each query shard sees: bool [shards, key blocks]."""
        pairing = _Pairing(self, cols, cols, block)
        answer = torch.zeros(len(shards), pairing.key_blocks, dtype=torch.bool)
        ranged = torch.zeros(pairing.key_blocks, dtype=torch.bool)
        if self.ranges is not None:
            pieces = pairing.pieces(self.ranges)
            ranged = pieces.exact
            visible = torch.stack([pieces.block, pieces.lo_first, pieces.hi_last], 1)
            group, lo, hi = _merge(visible[ranged[pieces.block] & (pieces.lo_first < pieces.hi_last)]).T.contiguous()
            for rank, shard in enumerate(shards):
                answer[rank, group[torch.searchsorted(shard, lo) < torch.searchsorted(shard, hi)]] = True
        open_blocks = (~ranged).nonzero().flatten()
        if len(open_blocks):
            for rank, shard in enumerate(shards):
                for found in _Pairing(self, shard, cols, block).by_summaries(open_blocks):
                    answer[rank, found[:, 0]] = True
        return answer

    def work(self, block: int) -> Tensor:
        """Visited tiles of each query block of the whole stored sequence, int64 [blocks]."""
        everything = torch.arange(self.storage.layout.tokens)
        pairing = _Pairing(self, everything, everything, block)
        runs, parts = pairing.classify()
        change = torch.zeros(pairing.query_blocks + 1, dtype=torch.int64)
        change.index_add_(0, runs[:, 1], torch.ones_like(runs[:, 1]))
        change.index_add_(0, runs[:, 1] + runs[:, 2], -torch.ones_like(runs[:, 1]))
        return change.cumsum(0)[:-1] + torch.bincount(parts[:, 1], minlength=pairing.query_blocks)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Neighbouring keys of one block and one span, by the visible queries of the first and the last of them.

    Attributes:
        block: int64 [pieces], key block.
        lo_first: int64 [pieces], first query that sees the first key; so ``lo_last``, ``hi_first`` and ``hi_last``.
        exact: bool [key blocks], whether all keys of a block have a range.
    """

    block: Tensor
    lo_first: Tensor
    lo_last: Tensor
    hi_first: Tensor
    hi_last: Tensor
    exact: Tensor


class _Pairing:
    """One query shard against one key shard. Runs are int64 [n, 3] of (outer block, first inner block, blocks) and
    parts int64 [n, 2] of (outer block, inner block), both by key block until they are transposed."""

    def __init__(self, stored: StoredMask, rows: Tensor, cols: Tensor, block: int) -> None:
        self.stored, self.rows, self.cols, self.block = stored, rows, cols, block
        self.query_blocks, self.key_blocks = -(-len(rows) // block), -(-len(cols) // block)

    def classify(self) -> tuple[Tensor, Tensor]:
        """Runs of full tiles and the partial tiles, each sorted by key block, then query block."""
        if not len(self.rows) or not len(self.cols):
            return torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
        if self.stored.ranges is None:
            return self.by_summaries(torch.arange(self.key_blocks))
        pieces = self.pieces(self.stored.ranges)
        found = [self._by_ranges(pieces)]
        if not pieces.exact.all():
            found.append(self.by_summaries((~pieces.exact).nonzero().flatten()))
        runs, parts = (torch.cat(results) for results in zip(*found, strict=True))
        return _sorted(runs), _sorted(parts)

    def pieces(self, ranges: VisibleRanges) -> _Pieces:
        """The key shard cut at blocks, at spans and where it skips stored tokens."""
        cols, rows = self.cols, torch.arange(0, len(self.cols), self.block)
        jumps = (cols.diff() != 1).nonzero().flatten() + 1
        spans = torch.searchsorted(cols, ranges.borders)
        start = torch.unique(torch.cat([rows, jumps, spans[spans < len(cols)]]))
        stop = torch.cat([start[1:], start.new_full((min(len(cols), 1),), len(cols))])
        first, last = ranges.keys(cols[start]), ranges.keys(cols[stop - 1])
        block = start // self.block
        exact = torch.ones(self.key_blocks, dtype=torch.bool)
        exact[block[~(first.exact & last.exact)]] = False
        return _Pieces(block, first.lo, last.lo, first.hi, last.hi, exact)

    def _by_ranges(self, pieces: _Pieces) -> tuple[Tensor, Tensor]:
        """Key blocks whose keys all have a range of visible queries."""
        bounds = torch.stack([pieces.lo_first, pieces.lo_last, pieces.hi_first, pieces.hi_last])
        lo_first, lo_last, hi_first, hi_last = torch.searchsorted(self.rows, bounds)
        # Full: the query blocks inside every key's range. The last, ragged blocks are never full.
        nothing = torch.zeros(self.key_blocks, dtype=torch.int64)
        highest = nothing.scatter_reduce(0, pieces.block, lo_last, "amax")
        lowest = (nothing + len(self.rows)).scatter_reduce(0, pieces.block, hi_first, "amin")
        whole = (torch.arange(self.key_blocks) + 1) * self.block <= len(self.cols)
        first = -(-highest // self.block)
        last = torch.where(whole & pieces.exact, torch.maximum(first, lowest // self.block), first)
        runs = torch.stack([torch.arange(self.key_blocks), first, last - first], 1)
        # Not empty: the union of the query blocks that the ranges touch.
        touched = torch.stack([pieces.block, lo_first // self.block, -(-hi_last // self.block)], 1)
        pairs = _expand(_merge(touched[(lo_first < hi_last) & pieces.exact[pieces.block]]))
        partial = (pairs[:, 1] < first[pairs[:, 0]]) | (pairs[:, 1] >= last[pairs[:, 0]])
        return runs[runs[:, 2] > 0], pairs[partial]

    def by_summaries(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Any mask: block summaries first, then pair by pair what they leave open."""
        if not len(self.rows):
            return torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
        tracks = self.stored.tracks
        q = BlockSummaries.of(tracks.take(self.rows), self.block)
        k = BlockSummaries.of(tracks.take(self.cols), self.block).take(blocks)
        full, maybe = summarise(self.stored.mask, q, k)
        full = full.T.clone()
        full[:, self.query_blocks - 1] &= self.query_blocks * self.block == len(self.rows)
        full[blocks == self.key_blocks - 1] &= self.key_blocks * self.block == len(self.cols)
        open_pairs = (maybe.T & ~full).nonzero()
        open_pairs[:, 0] = blocks[open_pairs[:, 0]]
        some, all_ = self._look(open_pairs)
        upgraded = open_pairs[all_]
        full[torch.searchsorted(blocks, upgraded[:, 0].contiguous()), upgraded[:, 1]] = True
        edges = torch.nn.functional.pad(full.byte(), (1, 1)).diff(dim=1).to(torch.int8)
        starts, stops = (edges == 1).nonzero(), (edges == -1).nonzero()
        runs = torch.stack([blocks[starts[:, 0]], starts[:, 1], stops[:, 1] - starts[:, 1]], 1)
        return runs, open_pairs[some & ~all_]

    def _look(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Which (key block, query block) pairs hold some legal pair, and which are whole and hold legal pairs only."""
        some, every = (torch.zeros(len(pairs), dtype=torch.bool) for _ in range(2))
        for at in range(0, len(pairs), _CHUNK):
            legal = self._legal(pairs[at : at + _CHUNK])
            some[at : at + _CHUNK] = legal.flatten(1).any(1)
            every[at : at + _CHUNK] = legal.flatten(1).all(1)
        return some, every

    def _legal(self, pairs: Tensor) -> Tensor:
        """The mask over some tiles: bool [tiles, block (queries), block (keys)]."""
        tracks = self.stored.tracks
        k, k_real = self._gather(self.cols, pairs[:, 0])
        q, q_real = self._gather(self.rows, pairs[:, 1])
        legal = dense(self.stored.mask, tracks.take(q), tracks.take(k))
        return legal & q_real.unsqueeze(2) & k_real.unsqueeze(1)

    def predicates(self, parts: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """What partial tiles compute: (slots [parts], ranges [slots, block], bits [slots, block, words]).

        ``parts`` is by key block; with ``transposed`` the outer rows are keys, else queries.
        """
        outer, inner = (parts[:, 0], parts[:, 1]) if transposed else (parts[:, 1], parts[:, 0])
        shards = (self.cols, self.rows) if transposed else (self.rows, self.cols)
        words = torch.zeros(len(parts), self.block, dtype=torch.int64)
        open_tiles = torch.ones(len(parts), dtype=torch.bool)
        if self.stored.ranges is not None and len(parts):
            blocks, which = torch.unique(outer, return_inverse=True)
            tokens, real = self._gather(shards[0], blocks)
            bounds, exact = _bounds(self.stored.ranges, tokens, transposed)
            open_tiles = ~(exact | ~real).all(1)[which]
            closed = (~open_tiles).nonzero().flatten()
            bounds, real = bounds[which[closed]], real[which[closed]]
            columns, columns_real = self._gather(shards[1], inner[closed])
            columns = torch.where(columns_real, columns, torch.iinfo(torch.int64).max)
            edges = torch.searchsorted(columns.contiguous(), bounds.flatten(1))
            edges = edges.view(bounds.shape) * real.unsqueeze(2)
            words[closed] = _pack_ranges(edges)
        left = open_tiles.nonzero().flatten()
        tiled = torch.zeros(len(parts), dtype=torch.bool)
        bits = []
        for at in range(0, len(left), _CHUNK):
            chosen = left[at : at + _CHUNK]
            legal = self._legal(parts[chosen])
            legal = legal.transpose(1, 2) if transposed else legal
            edges, fits = _edges(legal)
            words[chosen] = _pack_ranges(edges)
            tiled[chosen] = ~fits
            bits.append(_pack_bits(legal[~fits]))
        ranges, range_slot = dedupe(words[~tiled])
        tables, bit_slot = dedupe(torch.cat(bits) if bits else torch.zeros(0, self.block, -(-self.block // 32)))
        slots = torch.empty(len(parts), dtype=torch.int64)
        slots[~tiled], slots[tiled] = range_slot, ~bit_slot
        return slots, ranges.int(), tables.int()

    def _gather(self, shard: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Storage positions of the rows of some blocks of a shard, [blocks, block], and which of them exist."""
        local = blocks.unsqueeze(1) * self.block + torch.arange(self.block)
        real = local < len(shard)
        return shard[local.clamp(max=len(shard) - 1)], real


def _bounds(ranges: VisibleRanges, tokens: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """The visible ranges of stored keys (``transposed``) or queries, [..., 2 or 4], and whether they are exact."""
    if transposed:
        keys = ranges.keys(tokens)
        return torch.stack([keys.lo, keys.hi], -1), keys.exact
    queries = ranges.queries(tokens)
    return queries.bounds, queries.exact


def _sorted(rows: Tensor) -> Tensor:
    """Rows sorted by their first two columns."""
    if not len(rows):
        return rows
    return rows[torch.argsort(rows[:, 0] * (int(rows[:, 1].max()) + 1) + rows[:, 1])]


def _merge(intervals: Tensor) -> Tensor:
    """The union of intervals (group, start, stop) per group, as disjoint intervals."""
    if not len(intervals):
        return intervals
    group, start, stop = _sorted(intervals).T
    shift = group * (int(stop.max()) + 1)
    reach = (stop + shift).cummax(0).values
    fresh = torch.ones_like(group, dtype=torch.bool)
    fresh[1:] = (group.diff() != 0) | ((start + shift)[1:] > reach[:-1])
    last = torch.cat([fresh[1:], fresh.new_ones(1)])
    return torch.stack([group[fresh], start[fresh], (reach - shift)[last]], 1)


def _expand(intervals: Tensor) -> Tensor:
    """Every (group, member) of intervals (group, start, stop)."""
    group, start, stop = intervals.T
    length = stop - start
    first = torch.repeat_interleave(start - (length.cumsum(0) - length), length)
    return torch.stack([torch.repeat_interleave(group, length), first + torch.arange(int(length.sum()))], 1)


def _transpose(runs: Tensor) -> Tensor:
    """Runs by inner block: (inner, first outer, blocks), from sorted runs (outer, first inner, blocks).

    A transposed run begins at the outer block whose runs hold an inner block that its predecessor's do not, and ends
    where the successor's do not. Only those borders are enumerated, so the cost is the number of runs on both sides.
    """
    if not len(runs):
        return runs
    outer, start, stop = runs[:, 0], runs[:, 1], runs[:, 1] + runs[:, 2]
    intervals = torch.stack([outer, start, stop], 1)
    begins = _expand(_without(intervals, outer - 1))
    ends = _expand(_without(intervals, outer + 1))
    begins, ends = _sorted(begins.flip(1)), _sorted(ends.flip(1))
    return torch.stack([begins[:, 0], begins[:, 1], ends[:, 1] - begins[:, 1] + 1], 1)


def _without(intervals: Tensor, other: Tensor) -> Tensor:
    """Each interval (group, start, stop), less those of the group ``other`` beside it. Sorted by group, then start."""
    group, start, stop = intervals.T
    low, high = torch.searchsorted(group.contiguous(), torch.stack([other, other + 1], 1)).T
    pieces = []
    cursor = start
    # Groups hold one interval where ranges exist; the loop runs as often as the fullest group has intervals.
    for step in range(int((high - low).max()) if len(group) else 0):
        there = low + step < high
        index = (low + step).clamp(max=len(group) - 1)
        cut = torch.where(there, start[index].clamp(min=cursor, max=stop), cursor)
        pieces.append(torch.stack([group, cursor, cut], 1))
        cursor = torch.where(there, stop[index].clamp(min=cursor, max=stop), cursor)
    pieces.append(torch.stack([group, cursor, stop], 1))
    joined = torch.cat(pieces)
    return joined[joined[:, 1] < joined[:, 2]]


def _by_outer(runs: Tensor, parts: Tensor, blocks: int, slots: Tensor, ranges: Tensor, bits: Tensor) -> TileList:
    def pointers(outer: Tensor) -> Tensor:
        return torch.searchsorted(outer.contiguous(), torch.arange(blocks + 1)).int()

    return TileList(
        pointers(runs[:, 0]),
        runs[:, 1:].int(),
        pointers(parts[:, 0]),
        torch.stack([parts[:, 1], slots], 1).int(),
        ranges,
        bits,
    )


def _edges(legal: Tensor) -> tuple[Tensor, Tensor]:
    """The ranges of set columns of bool [tiles, rows, columns]: bounds [tiles, rows, 4] and, per tile, whether two
    ranges suffice for every row."""
    change = torch.nn.functional.pad(legal.to(torch.int8), (1, 1)).diff(dim=2)
    starts, stops = change == 1, change == -1
    fits = (starts.sum(2) <= 2).flatten(1).all(1)
    bounds = []
    for edge in (starts, stops):
        first = edge.to(torch.int8).argmax(2)
        second = edge.shape[2] - 1 - edge.flip(2).to(torch.int8).argmax(2)
        two = edge.sum(2) > 1
        bounds += [torch.where(edge.any(2), first, 0), torch.where(two, second, 0)]
    return torch.stack([bounds[0], bounds[2], bounds[1], bounds[3]], 2), fits


def _pack_ranges(edges: Tensor) -> Tensor:
    """Words of bounds [tiles, rows, 2 or 4]: sorted, empty ranges as (0, 0) and last, touching ranges joined."""
    if edges.shape[2] == 2:
        edges = torch.nn.functional.pad(edges, (0, 2))
    lo0, hi0, lo1, hi1 = edges.unbind(2)
    one, two = lo0 < hi0, lo1 < hi1
    swap = two & (~one | (lo1 < lo0))
    lo0, lo1 = torch.where(swap, lo1, lo0), torch.where(swap, lo0, lo1)
    hi0, hi1 = torch.where(swap, hi1, hi0), torch.where(swap, hi0, hi1)
    join = one & two & (lo1 <= hi0)
    hi0 = torch.where(join, torch.maximum(hi0, hi1), hi0)
    second = one & two & ~join
    lo1, hi1 = torch.where(second, lo1, 0), torch.where(second, hi1, 0)
    some = one | two
    lo0, hi0 = torch.where(some, lo0, 0), torch.where(some, hi0, 0)
    word = lo0 | hi0 << 8 | lo1 << 16 | hi1 << 24
    return torch.where(word >= 1 << 31, word - (1 << 32), word)


def _pack_bits(legal: Tensor) -> Tensor:
    """bool [tiles, rows, columns] as words [tiles, rows, ⌈columns / 32⌉] of 32 bits."""
    words = -(-legal.shape[2] // 32)
    legal = torch.nn.functional.pad(legal, (0, words * 32 - legal.shape[2]))
    bits = legal.view(*legal.shape[:2], words, 32).long() << torch.arange(32)
    word = bits.sum(3)
    return torch.where(word >= 1 << 31, word - (1 << 32), word)


def dedupe(table: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of a table, and for each of its rows the distinct one."""
    if not len(table):
        return table, torch.zeros(0, dtype=torch.int64)
    return torch.unique(table, dim=0, return_inverse=True)
