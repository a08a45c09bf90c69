"""Which block pairs of a query shard and of key shards are full, partial or empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marble.mask.algebra import MaskFn
from marble.mask.domains import BlockSummaries, dense, summarise
from marble.mask.predicates import CHUNK, Side
from marble.mask.shards import expand, true_at
from marble.mask.tracks import Tracks
from marble.mask.vectors import by_kernel, running_max, take

_PAIRS = 1 << 24  # block pairs that are summarised in one go


@dataclass(frozen=True, eq=False)
class Sights:
    """What the keys of blocks are seen by, in storage positions. Blocks that are not exact have nothing here.

    Attributes:
        block: int64 [intervals], rising: key block ``block`` is seen by queries in ``lo`` to ``hi``.
        lo: int64 [intervals].
        hi: int64 [intervals]; not above ``lo`` for padding.
    """

    block: Tensor
    lo: Tensor
    hi: Tensor

    @classmethod
    def of(cls, keys: Side) -> Sights:
        """What the blocks of a key side are seen by."""
        lo, hi = keys.ramps
        found = [keys.blocks.of, lo.first, hi.last]
        if not keys.complete:
            some = true_at(keys.exact[keys.blocks.of])
            found = [part.index_select(0, some) for part in found]
        return cls(*found)


@dataclass(frozen=True, eq=False)
class Pairing:
    """Queries against keys.

    Attributes:
        mask: the mask.
        tracks: gives the tracks of all stored tokens; they are seldom needed.
        queries: the query side, one shard.
        keys: the key side.
    """

    mask: MaskFn
    tracks: Callable[[], Tracks]
    queries: Side
    keys: Side

    @property
    def block(self) -> int:
        """Rows of a whole block."""
        return self.queries.blocks.block

    @cached_property
    def _sights(self) -> tuple[Tensor, Tensor]:
        """What a kernel finds for `touched` and `inside`."""
        from marble.kernels.triton.sights import sights

        keys = self.keys
        assert keys.ranges is not None
        return sights(keys.blocks, keys.ranges.table, keys.ranges.exact, self.queries.blocks.shards[0])

    def touched(self) -> tuple[Tensor, Tensor, Tensor]:
        """Intervals (key block, first query block, one past the last) with a legal pair, sorted and disjoint; and
        perhaps some that are empty."""
        if by_kernel(self.keys.blocks.of):
            return merge(self.keys.blocks.of, *self._sights[0])
        sights = Sights.of(self.keys)
        low, high = bounds = self.queries.blocks.shards[0].before(torch.stack([sights.lo, sights.hi]))
        some = true_at(low < high)
        block, (low, high) = sights.block.index_select(0, some), take(bounds, some)
        return merge(block, low // self.block, (high + (self.block - 1)) // self.block)

    def inside(self) -> tuple[Tensor, Tensor]:
        """For each key block, the first query block that sees all of it and one past the last, which is not below."""
        if by_kernel(self.keys.blocks.of):
            first, last = self._sights[1]
            return first, last
        from_, to = self.queries.blocks.shards[0].before(self.keys.common)
        first = (from_ + (self.block - 1)) // self.block
        # Ragged blocks are never full.
        return first, torch.maximum(first, to // self.block * (self.keys.blocks.length == self.block))

    def classify(self) -> tuple[Tensor, Tensor]:
        """Runs of full tiles (key block, first query block, blocks) and partial tiles (key block, query block), int64
        [3, runs] and [2, tiles]."""
        found = []
        if self.keys.ranges is not None:
            found.append(self.by_ranges())
        left = self.keys.left
        if len(left) or not found:
            found.append(self.by_summaries(left))
        if len(found) == 1:
            return found[0]
        runs, parts = (torch.cat(results, 1) for results in zip(*found, strict=True))
        return in_order(runs), in_order(parts)

    def by_ranges(self) -> tuple[Tensor, Tensor]:
        """Key blocks whose keys all have a range of visible queries."""
        # Full: the query blocks inside every key's range.
        first, last = self.inside()
        full = true_at(last > first)
        start, stop = first.index_select(0, full), last.index_select(0, full)
        runs = torch.stack([full, start, stop - start])
        # Partial: what else the ranges touch.
        block, low, high = self.touched()
        first, last = first.index_select(0, block), last.index_select(0, block)
        low = torch.stack([low, torch.maximum(low, last)], 1).flatten()
        high = torch.stack([torch.minimum(high, first), high], 1).flatten()
        owner, query = expand(low, torch.maximum(low, high))
        return runs, torch.stack([block.index_select(0, owner // 2), query])

    def by_summaries(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Any mask: block summaries first, then pair by pair what they leave open."""
        count = len(self.queries.blocks)
        runs, parts = [blocks.new_zeros(3, 0)], [blocks.new_zeros(2, 0)]
        if count and len(blocks):
            q = BlockSummaries.of_blocks(self.tracks().take(self.queries.blocks.positions(self._everything)[0]))
            for some in blocks.split(max(_PAIRS // count, 1)):
                k = BlockSummaries.of_blocks(self.tracks().take(self.keys.blocks.positions(some)[0]))
                found = self._summarised(some, *summarise(self.mask, q, k))
                runs.append(found[0])
                parts.append(found[1])
        return torch.cat(runs, 1), torch.cat(parts, 1)

    @cached_property
    def _everything(self) -> Tensor:
        return torch.arange(len(self.queries.blocks), device=self.queries.blocks.of.device)

    def _summarised(self, blocks: Tensor, full: Tensor, maybe: Tensor) -> tuple[Tensor, Tensor]:
        full = full.T & (self.queries.blocks.length == self.block)
        full &= (self.keys.blocks.length[blocks] == self.block).unsqueeze(1)
        open_row, query = (maybe.T & ~full).nonzero().unbind(1)
        some, every = self._look(blocks[open_row], query)
        full[open_row[every], query[every]] = True
        edges = torch.nn.functional.pad(full.byte(), (1, 1)).diff(dim=1).to(torch.int8)
        row, start = (edges == 1).nonzero().T
        stop = (edges == -1).nonzero()[:, 1]
        partial = some & ~every
        return torch.stack([blocks[row], start, stop - start]), torch.stack([blocks[open_row[partial]], query[partial]])

    def _look(self, key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Which tiles hold some legal pair, and which are whole and hold legal pairs only."""
        some, every = (torch.zeros(len(key), dtype=torch.bool, device=key.device) for _ in range(2))
        for at in range(0, len(key), CHUNK):
            legal = self.legal(query[at : at + CHUNK], key[at : at + CHUNK])
            some[at : at + CHUNK] = legal.flatten(1).any(1)
            every[at : at + CHUNK] = legal.flatten(1).all(1)
        return some, every

    def legal_by_key(self, key: Tensor, query: Tensor) -> Tensor:
        """The mask over some tiles: bool [tiles, block (keys), block (queries)]."""
        return self.legal(query, key).transpose(1, 2)

    def legal(self, query: Tensor, key: Tensor) -> Tensor:
        """The mask over some tiles: bool [tiles, block (queries), block (keys)]."""
        k, k_real = self.keys.blocks.positions(key)
        q, q_real = self.queries.blocks.positions(query)
        legal = dense(self.mask, self.tracks().take(q), self.tracks().take(k))
        return legal & q_real.unsqueeze(2) & k_real.unsqueeze(1)


def in_order(entries: Tensor) -> Tensor:
    """Entries, int64 [values, entries], sorted by their first two values."""
    if not entries.shape[1]:
        return entries
    return take(entries, torch.argsort(entries[0] * (int(entries[1].max()) + 1) + entries[1]))


def merge(group: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The union of the intervals of each group, as sorted and disjoint intervals that do not touch.

    Args:
        group: int64 [intervals], rising.
        start: int64 [intervals], below 2⁴⁰ like ``stop``.
        stop: int64 [intervals], not below ``start``; empty intervals may stay if none with members touches them.
    """
    shift = group << 40
    low, high = start + shift, stop + shift
    # Asking a GPU takes longer than sorting in vain.
    if low.is_cuda or not bool((low[1:] >= low[:-1]).all()):
        low, order = torch.sort(low)
        high = high.index_select(0, order)
    reach = running_max(high)
    fresh = torch.ones_like(group, dtype=torch.bool)
    torch.gt(low[1:], reach[:-1], out=fresh[1:])
    if low.is_cuda or not bool(fresh.all()):
        first = true_at(fresh)
        low, reach = low.index_select(0, first), reach[first.roll(-1) - 1]  # place −1 is the last
    return low >> 40, low & ((1 << 40) - 1), reach & ((1 << 40) - 1)
