"""From a mask to tiles: which block pairs of shards are full, partial or empty, and what a partial one computes.

Two paths lead to the same tiles. Where the mask has visible ranges, block pairs are classified by them: exactly, and
without touching a token. Everything else is classified by block summaries, and what these leave open is looked at pair
by pair. Tests hold the paths to one answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from marble.kernels.contract import MAX_BLOCK, TileList, Tiles, Touch
from marble.mask.algebra import MaskFn
from marble.mask.pairing import Pairing, Sights
from marble.mask.predicates import Side, predicates
from marble.mask.ranges import VisibleRanges
from marble.mask.shards import Blocks, Shard, expand, numbers, pointers, true_at
from marble.mask.storage import Storage
from marble.mask.tracks import Tracks
from marble.mask.vectors import take

_MANY = 4096  # partial tiles that are worth a second thread


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
        return Tracks.of(self.storage.layout, self.user, self.storage.device).take(self.storage.sequence)

    def tiles(self, rows: Tensor, cols: Tensor, block: int) -> Tiles:
        """The tiles between the query shard ``rows`` and the key shard ``cols``, int64 rising storage positions."""
        return self.tiles_of(Shard.of(rows), [Shard.of(cols)], block)[0]

    def tiles_of(self, rows: Shard, cols: Sequence[Shard], block: int) -> list[Tiles]:
        """The tiles between a query shard and each of several key shards.

        Args:
            rows: the stored positions of the queries.
            cols: those of the keys of each shard.
            block: rows of a block, 1 to 128.

        Returns:
            Per key shard all tiles with at least one legal pair, with every touch the first and the last. The shards'
            lists share their tables of predicates.
        """
        if not 1 <= block <= MAX_BLOCK:
            raise ValueError(f"block: expected 1 to {MAX_BLOCK} tokens, got {block}")
        ranges = self.ranges
        if ranges is not None and ranges.many:
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(lambda: ranges.query_spans)
                keys = self._side(cols, block, keys=True)
            found.result()
        else:
            keys = self._side(cols, block, keys=True)
        queries = self._queries(rows, keys)
        pairing = Pairing(self.mask, lambda: self.tracks, queries, keys)
        runs, parts = pairing.classify()
        by_key = partial(predicates, keys, queries, parts, pairing.legal_by_key)
        # The orientations are independent: many tiles on a CPU are resolved on two threads.
        if parts.device.type == "cpu" and parts.shape[1] >= _MANY:
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(by_key)
                turned = pool.submit(_transpose, runs, keys.blocks, len(queries.blocks))
                by_query = _by_query(pairing, turned.result, parts, pool)
            slots = job.result()
        else:
            turn = partial(_transpose, runs, keys.blocks, len(queries.blocks))
            by_query, slots = _by_query(pairing, turn, parts), by_key()
        key_lists = _lists(keys.blocks.base, runs, parts, slots)
        blocks = len(queries.blocks)
        touch = torch.full((blocks,), int(Touch.FIRST | Touch.LAST), dtype=torch.uint8, device=runs.device)
        counts = [high - low for low, high in itertools.pairwise(keys.blocks.base)]
        length = keys.blocks.length.int().split(counts)
        start = torch.arange(0, max(counts) * block, block, dtype=torch.int32, device=runs.device)
        return [
            Tiles(block, rows.rows, start[: len(rows_of)], rows_of, query_list, key_list, touch)
            for rows_of, query_list, key_list in zip(length, by_query, key_lists, strict=True)
        ]

    def seen(self, shards: Sequence[Tensor], cols: Tensor, block: int) -> Tensor:
        """Which key blocks of the shard ``cols`` each query shard sees: bool [shards, key blocks]."""
        return self.seen_of([Shard.of(shard) for shard in shards], [Shard.of(cols)], block)

    def seen_of(self, readers: Sequence[Shard], owners: Sequence[Shard], block: int) -> Tensor:
        """Which key blocks of all owners, owner after owner, each reader's queries see: bool [readers, key blocks]."""
        keys = self._side(owners, block, keys=True)
        answer = torch.zeros(len(readers), len(keys.blocks), dtype=torch.bool, device=keys.blocks.of.device)
        sights = None if keys.ranges is None else Sights.of(keys)
        left = keys.left
        for found, shard in zip(answer, readers, strict=True):
            if sights is not None:
                low, high = shard.before(torch.stack([sights.lo, sights.hi]))
                found[sights.block[low < high]] = True
            if len(left):
                pairing = Pairing(self.mask, lambda: self.tracks, self._side([shard], block, keys=False), keys)
                for tiles in pairing.by_summaries(left):
                    found[tiles[0]] = True
        return answer

    def stretches(self, block: int) -> Tensor:
        """Every visited tile of the whole stored sequence once, in stretches of query blocks: key block, first query
        block and one past the last, int64 [3, stretches]. Some may be empty."""
        keys = Side(Blocks.whole(self.storage, block), None if self.ranges is None else self.ranges.key_spans)
        pairing = Pairing(self.mask, lambda: self.tracks, replace(keys, ranges=None), keys)
        left, ranged = pairing.keys.left, pairing.keys.ranges is not None
        found = [torch.stack(pairing.touched())] if ranged else []
        if len(left) or not ranged:
            (key, first, count), (one_key, query) = pairing.by_summaries(left)
            found += [torch.stack([key, first, first + count]), torch.stack([one_key, query, query + 1])]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def work(self, block: int) -> Tensor:
        """Visited tiles of each query block of the whole stored sequence, int64 [blocks]."""
        return work_of(self.stretches(block), -(-self.storage.layout.tokens // block))

    def _side(self, shards: Sequence[Shard], block: int, *, keys: bool) -> Side:
        ranges = None
        if self.ranges is not None:
            ranges = self.ranges.key_spans if keys else self.ranges.query_spans
        return Side(Blocks.cut(shards, self.storage, block), ranges)

    def _queries(self, rows: Shard, keys: Side) -> Side:
        """The query side; where the shard is one of the key shards, it is cut already."""
        if not any(rows is shard for shard in keys.blocks.shards):
            return self._side([rows], keys.blocks.block, keys=False)
        number = next(number for number, shard in enumerate(keys.blocks.shards) if shard is rows)
        return Side(keys.blocks.part(number), None if self.ranges is None else self.ranges.query_spans)


def work_of(stretches: Tensor, blocks: int) -> Tensor:
    """Tiles of each query block, int64 [blocks], from `StoredMask.stretches`."""
    change = torch.zeros(blocks + 1, dtype=torch.int64, device=stretches.device)
    _, first, last = stretches
    one = torch.ones_like(first)
    return change.index_add_(0, first, one).index_add_(0, last, one, alpha=-1).cumsum(0)[:-1]


def _by_query(
    pairing: Pairing, runs: Callable[[], Tensor], parts: Tensor, helper: Executor | None = None
) -> list[TileList]:
    """Parts by key block, and runs that are `_transpose`d already, as lists by query block, one per key shard; with
    another thread's help where it is free."""
    keys, queries = pairing.keys, pairing.queries
    # By query, the outer blocks are the query blocks once per key shard.
    count = len(queries.blocks)
    key, query = parts
    label = keys.blocks.shard_of.index_select(0, key) * count + query
    order = torch.argsort(label * len(keys.blocks) + key)
    tiles = take(torch.stack([label, query, key]), order)
    slots = predicates(queries, keys, tiles[1:], pairing.legal, helper)
    parts = torch.stack([tiles[0], keys.blocks.place.index_select(0, tiles[2])])
    return _lists([number * count for number in range(len(keys.blocks.shards) + 1)], runs(), parts, slots)


def _lists(
    base: Sequence[int], runs: Tensor, parts: Tensor, predicates: tuple[Tensor, Tensor, Tensor]
) -> list[TileList]:
    """Tile lists of the outer blocks from ``base[i]`` to ``base[i + 1]``, for runs and parts sorted by outer block."""
    slots, ranges, bits = predicates
    counts = [high - low for low, high in itertools.pairwise(base)]
    # Each list counts from its own first entry; behind its end, its pointers repeat the last.
    first, last = numbers([base[:-1], base[1:]], runs.device).unsqueeze(2)
    at = torch.minimum(first + torch.arange(max(counts) + 1, device=runs.device), last)
    ptr = torch.stack([pointers(entries[0], base[-1])[at] for entries in (runs, parts)])
    run_ptr, part_ptr = relative = (ptr - ptr[:, :, :1]).int()
    run_counts, part_counts = relative[:, :, -1].tolist()
    columns = (
        [row[: count + 1] for row, count in zip(run_ptr, counts, strict=True)],
        torch.stack([runs[1], runs[2]], 1).int().split(run_counts),
        [row[: count + 1] for row, count in zip(part_ptr, counts, strict=True)],
        torch.stack([parts[1], slots], 1).int().split(part_counts),
    )
    return [TileList(*column, ranges, bits) for column in zip(*columns, strict=True)]


def _transpose(runs: Tensor, keys: Blocks, queries: int) -> Tensor:
    """Runs (key block, first query block, blocks) as runs (label, first key block of the shard, blocks), sorted.

    A label stands for a key shard and a query block, and a transposed run stays in its shard. It begins at the key
    block whose runs hold a query block that its predecessor's do not, and ends where the successor's do not. Only
    those borders are enumerated, so the cost is the number of runs on both sides.
    """
    key, start, count = runs
    shards = len(keys.shards)
    group = key + keys.shard_of.index_select(0, key) + 1  # a gap between shards
    side, run, low, high = _without(group, len(keys) + shards, start, start + count)
    owner, query = expand(low, high)
    key, side = take(torch.stack([key.index_select(0, run), side]), owner)
    label = keys.shard_of.index_select(0, key) * queries + query
    # As many runs begin as end: both in order of label and key, first all that begin.
    order = torch.argsort((side * (shards * queries) + label) * len(keys) + key)
    label, key = take(torch.stack([label, key]), order)
    half = len(order) // 2
    label, first, last = label[:half], key[:half], key[half:]
    return torch.stack([label, keys.place.index_select(0, first), last - first + 1])


def _without(group: Tensor, most: int, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What of each interval the group before does not hold, and what the group behind does not.

    The intervals are sorted by group, from 1 to ``most``, then start, and those of a group are disjoint.

    Returns:
        (side, interval, start, stop) of what is left, side 0 for the group before and 1 for the one behind.
    """
    ptr = pointers(group, most + 2)
    neighbour = group + torch.arange(-1, 2, 2, device=group.device).unsqueeze(1)
    low, high = ptr[neighbour], ptr[neighbour + 1]
    start, stop = start.expand_as(low), stop.expand_as(low)
    pieces, cursor = [], start
    # Groups hold one interval where ranges exist; the loop runs as often as the fullest group has intervals.
    for step in range(int((high - low).max()) if len(group) else 0):
        there = low + step < high
        index = (low + step).clamp_(max=len(group) - 1)
        cut = torch.where(there, start[0][index].clamp_(cursor, stop), cursor)
        pieces.append((cursor, cut))
        cursor = torch.where(there, stop[0][index].clamp_(cursor, stop), cursor)
    pieces.append((cursor, stop))
    low, high = (torch.stack(parts).flatten() for parts in zip(*pieces, strict=True))
    some = true_at(low < high)
    side, interval = some // max(len(group), 1) % 2, some % max(len(group), 1)
    return side, interval, low.index_select(0, some), high.index_select(0, some)
