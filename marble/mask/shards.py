"""Shards of the stored tokens as stretches, and their blocks as cells: never token by token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marble.layout import CPU
from marble.mask.storage import Storage
from marble.mask.vectors import take


def expand(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Every (interval, member) of the intervals from ``start`` to ``stop``, which is not below, int64 [members] each.

    Example:
        >>> expand(torch.tensor([5, 9]), torch.tensor([7, 10]))
        (tensor([0, 0, 1]), tensor([5, 6, 9]))
    """
    count = stop - start
    owner = torch.repeat_interleave(count)
    shift = stop - count.cumsum(0)
    return owner, torch.arange(len(owner), device=owner.device) + shift.index_select(0, owner)


def numbers(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Numbers that the host knows, int64, on a device that is not waited for."""
    return torch.tensor(values, dtype=torch.int64, device=CPU).to(device, non_blocking=True)


def true_at(mask: Tensor) -> Tensor:
    """Where a mask is true, int64 [true entries], for bool [entries]."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # ten times as fast as torch's
    return mask.nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Shard:
    """Rising positions of the storage order, as stretches without gaps between their tokens.

    Attributes:
        start: int64 [stretches], first position of each stretch, rising.
        stop: int64 [stretches], one past the last.
        row: int64 [stretches], the shard's row at which each begins.
        rows: number of tokens.
    """

    start: Tensor
    stop: Tensor
    row: Tensor
    rows: int

    @classmethod
    def of(cls, positions: Tensor) -> Shard:
        """The shard of some rising positions, int64 [rows]."""
        edges = (positions.diff() != 1).nonzero().flatten()
        if not len(positions):
            return cls(positions, positions, positions, 0)
        row = torch.cat([edges.new_zeros(1), edges + 1])
        stop = positions[torch.cat([edges, edges.new_full((1,), len(positions) - 1)])] + 1
        return cls(positions[row], stop, row, len(positions))

    @classmethod
    def of_interval(cls, start: int, stop: int, device: torch.device) -> Shard:
        """All stored tokens from ``start`` to ``stop``."""
        first, last, row = numbers([start, stop, 0], device).unsqueeze(1)
        return cls(first, last, row, stop - start)

    @cached_property
    def _before(self) -> tuple[Tensor, Tensor]:
        """What `before` adds to a position behind the start of that many stretches, and where the last one stops."""
        pad = self.start.new_zeros(1)
        return torch.cat([pad, self.row - self.start]), torch.cat([pad, self.stop])

    def before(self, positions: Tensor) -> Tensor:
        """How many of the shard's tokens lie before each storage position, int64 [...]."""
        if len(self.start) == 1:
            return positions.clamp(self.start, self.stop) - self.start
        stretch = torch.searchsorted(self.start, positions)
        offset, stop = (column.take(stretch) for column in self._before)
        return torch.minimum(positions, stop) + offset

    def positions(self, rows: Tensor) -> Tensor:
        """The storage positions of some rows, int64 [...]."""
        stretch = torch.searchsorted(self.row, rows, right=True) - 1
        return rows + (self.start - self.row)[stretch]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one or several shards, shard after shard, and the cells that spans and stretches cut them into.

    A cell is what one block has of one stored span in one stretch: neighbours in the span and in the block. The cells
    of a block follow one another.

    Attributes:
        block: rows of a whole block.
        shards: the shards.
        base: first block of each shard and, last, the number of blocks.
        length: int64 [blocks], rows of each block.
        span: int64 [cells], which span a cell is cut from, by sequence order.
        within: int64 [cells], its first token's place in the span.
        start: int64 [cells], that token's storage position.
        row: int64 [cells], that token's row in the block.
        rows: int64 [cells], its number of tokens.
        of: int64 [cells], its block, rising.
    """

    block: int
    shards: tuple[Shard, ...]
    base: tuple[int, ...]
    length: Tensor
    span: Tensor
    within: Tensor
    start: Tensor
    row: Tensor
    rows: Tensor
    of: Tensor

    @classmethod
    def cut(cls, shards: Sequence[Shard], storage: Storage, block: int) -> Blocks:
        """Cut shards of a storage order into blocks of ``block`` rows and cells."""
        return cls._kept(storage, (block, *shards), lambda: cls._cut(shards, storage, block))

    @classmethod
    def whole(cls, storage: Storage, block: int) -> Blocks:
        """The blocks of all stored tokens."""

        def make() -> Blocks:
            span = torch.arange(len(storage.stored_start), device=storage.device)
            shard = Shard.of_interval(0, storage.layout.tokens, storage.device)
            start = storage.stored_start
            return cls._at_blocks((shard,), storage, block, span, start, storage.stored_stop, start)

        return cls._kept(storage, (block, "whole"), make)

    @classmethod
    def _kept(cls, storage: Storage, key: tuple[Any, ...], make: Callable[[], Blocks]) -> Blocks:
        """What was made last stays: the layers of a model ask for the same."""
        if key not in storage.last_cut:
            storage.last_cut.clear()
            storage.last_cut[key] = make()
        return storage.last_cut[key]

    def part(self, number: int) -> Blocks:
        """The blocks of one of the shards."""
        first, last = self.base[number : number + 2]
        low, high = self.ptr[first : last + 1 : max(last - first, 1)].tolist() if last > first else (0, 0)
        cells = slice(low, high)
        return Blocks(
            self.block,
            (self.shards[number],),
            (0, last - first),
            self.length[first:last],
            self.span[cells],
            self.within[cells],
            self.start[cells],
            self.row[cells],
            self.rows[cells],
            self.of[cells] - first,
        )

    @classmethod
    def _cut(cls, shards: Sequence[Shard], storage: Storage, block: int) -> Blocks:
        """The stretches of the shards, cut at spans, then at blocks."""
        borders = storage.stored_start
        first = _bases(shards, block)[:-1]
        start, stop = (torch.cat([getattr(shard, side) for shard in shards]) for side in ("start", "stop"))
        row = torch.cat([shard.row + at * block for shard, at in zip(shards, first, strict=True)])
        spans = torch.searchsorted(borders, start, right=True) - 1
        stretch, span = expand(spans, torch.searchsorted(borders, stop))
        start, stop, row = take(torch.stack([start, stop, row]), stretch)
        low = torch.maximum(start, borders.index_select(0, span))
        high = torch.minimum(stop, storage.stored_stop.index_select(0, span))
        return cls._at_blocks(shards, storage, block, span, low, high, row + low - start)

    @classmethod
    def _at_blocks(
        cls, shards: Sequence[Shard], storage: Storage, block: int, span: Tensor, low: Tensor, high: Tensor, row: Tensor
    ) -> Blocks:
        """Stretches from ``low`` to ``high`` of single stored spans, cut at blocks.

        Args:
            shards: what the stretches make up.
            storage: the storage order.
            block: rows of a whole block.
            span: int64 [stretches], which stored span each is of.
            low: int64 [stretches], first storage position.
            high: int64 [stretches], one past the last.
            row: int64 [stretches], the row of the first, counted over the whole blocks of all shards.
        """
        borders, base = storage.stored_start, _bases(shards, block)
        length = torch.full((base[-1],), block, dtype=torch.int64, device=borders.device)
        for shard, last in zip(shards, base[1:], strict=True):
            if shard.rows % block:
                length[last - 1] = shard.rows % block
        end = row + high - low
        piece, of = expand(row // block, (end + (block - 1)) // block)
        row, end, start, span = take(torch.stack([row, end, low, span]), piece)
        first = of * block
        at = torch.maximum(row, first)
        rows = torch.minimum(end, first + block) - at
        start += at - row
        return cls(
            block,
            tuple(shards),
            base,
            length,
            storage.span_order.index_select(0, span),
            start - borders.index_select(0, span),
            start,
            at - first,
            rows,
            of,
        )

    def __len__(self) -> int:
        return self.base[-1]

    @cached_property
    def shard_of(self) -> Tensor:
        """The shard of each block, int64 [blocks]."""
        counts = numbers(self.base, self.of.device).diff()
        return torch.repeat_interleave(counts, output_size=len(self))

    @cached_property
    def place(self) -> Tensor:
        """Each block's place in its shard, int64 [blocks]."""
        base = numbers(self.base, self.of.device)
        return torch.arange(len(self), device=base.device) - base.index_select(0, self.shard_of)

    @cached_property
    def ptr(self) -> Tensor:
        """Where each block's cells begin, int64 [blocks + 1]."""
        return pointers(self.of, len(self))

    @cached_property
    def cells(self) -> Tensor:
        """The cells as one tensor, int64 [cells, 5]: span, within, start, row and rows of each."""
        return torch.stack([self.span, self.within, self.start, self.row, self.rows], 1)

    def positions(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Storage positions of the rows of some blocks, [blocks, block], and which of them exist.

        Rows that do not exist repeat the last one that does.
        """
        local = torch.arange(self.block, device=blocks.device).expand(len(blocks), self.block)
        real = local < self.length[blocks].unsqueeze(1)
        wanted = blocks.unsqueeze(1) * self.block + torch.minimum(local, self.length[blocks].unsqueeze(1) - 1)
        row = self.of * self.block + self.row
        cell = torch.searchsorted(row, wanted, right=True) - 1
        return (self.start - row)[cell] + wanted, real

    def columns(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """How many rows of each block lie before a storage position, int64 [...], for blocks and positions [...]."""
        far = 1 << 40
        cell = torch.searchsorted(self.of * far + self.start, blocks * far + positions) - 1
        some = cell >= self.ptr[blocks]
        cell = cell.clamp(min=0)
        return torch.where(some, self.row[cell] + torch.minimum(positions - self.start[cell], self.rows[cell]), 0)

    @cached_property
    def straight(self) -> Tensor:
        """Whether all rows of a block are neighbours in storage, bool [blocks]."""
        last = self.ptr[1:] - 1
        stop = self.start.index_select(0, last) + self.rows.index_select(0, last)
        return stop - self.first == self.length

    @cached_property
    def first(self) -> Tensor:
        """The storage position of each block's first row, int64 [blocks]."""
        return self.start.index_select(0, self.ptr[:-1])


def _bases(shards: Sequence[Shard], block: int) -> tuple[int, ...]:
    """The first block of each shard and, last, the number of blocks."""
    return (0, *itertools.accumulate(-(-shard.rows // block) for shard in shards))


def pointers(owner: Tensor, owners: int) -> Tensor:
    """Where the entries of each owner begin, int64 [owners + 1], for entries sorted by owner."""
    if owner.is_cuda:  # fewer kernels, and bincount would wait
        return torch.searchsorted(owner.contiguous(), torch.arange(owners + 1, device=owner.device))
    ptr = torch.zeros(owners + 1, dtype=torch.int64, device=owner.device)
    return ptr.scatter_add_(0, owner + 1, torch.ones_like(owner)).cumsum(0)
