"""A call's tiles as FlashAttention-4's block-sparse kernels read them: numbered blocks, lists, and a table of slots.

Those kernels number blocks by the rows that they hold: block i is the rows from 128 i. Where a call's blocks lie like
that, nothing is copied; otherwise their rows are packed, one block after the other, before the kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marble.kernels.contract import Work
from marble.kernels.cute import worklist
from marble.kernels.cute.predicates import BLOCK
from marble.kernels.cute.worklist import NOWHERE, WorkList


@dataclass(frozen=True, eq=False)
class Grid:
    """The blocks of one side of a call, by the number that the kernels know them by.

    Attributes:
        first: int32 [blocks], first row of each.
        length: int32 [blocks], rows of each, at most 128; 0 for numbers that the call does not use.
        packed: whether rows must be packed; otherwise block i begins at row 128 i.
    """

    first: Tensor
    length: Tensor
    packed: bool

    def __len__(self) -> int:
        return len(self.first)

    def spread(self, rows: Tensor, fill: float) -> Tensor:
        """Values [heads, rows] in the order of the blocks, [heads, 128 · blocks]; ``fill`` where a block has no row."""
        offset = torch.arange(BLOCK, device=rows.device)
        real = (offset < self.length.unsqueeze(1)).flatten()
        index = (self.first.unsqueeze(1) + offset).flatten()
        return torch.where(real, rows[:, torch.where(real, index, 0)], fill)


@dataclass(frozen=True, eq=False)
class Lists:
    """The tiles of each outer block: how many, and the numbers of the inner blocks, ascending and then 0.

    Attributes:
        partial_count: int32 [outer].
        partial: int32 [outer, longest].
        full_count: int32 [outer].
        full: int32 [outer, longest].
    """

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


@dataclass(frozen=True, eq=False)
class SparseCall:
    """A call on Blackwell.

    Attributes:
        queries: its query blocks.
        keys: its key blocks.
        touch: int32 [query blocks].
        by_query: key blocks of each query block, for the forward pass.
        by_key: query blocks of each key block, for the backward pass.
        table: int32 [query blocks, key blocks], the slot of a partial tile, as in `TileList.parts`; 0 elsewhere. Four
            bytes for every pair of blocks: 4 MiB for 128k query and key rows.
        ranges: int32 [slots, 128] as in `TileList.ranges`, one slot or more.
        bits: int32 [slots, 128, 4] as in `TileList.bits`, one slot or more.
    """

    queries: Grid
    keys: Grid
    touch: Tensor
    by_query: Lists
    by_key: Lists
    table: Tensor
    ranges: Tensor
    bits: Tensor

    @property
    def empty(self) -> bool:
        """Whether no pair at all is computed; touched rows are still begun and finished."""
        return not len(self.keys)


_lowered: WeakKeyDictionary[Work, SparseCall] = WeakKeyDictionary()


def lower(work: Work) -> SparseCall:
    """The lists of a call, on the device that its tensors are on. Lowered once per call object.

    Raises:
        ValueError: if its blocks are not of 128 rows, or two tiles hold the same rows.
    """
    lower_all([work])
    return _lowered[work]


def lower_all(works: Sequence[Work]) -> None:
    """Lower calls on one device.

    Raises:
        ValueError: as `lower`.
    """
    left = [work for work in dict.fromkeys(works) if work not in _lowered]
    worklist.lower_all(left)
    _lowered.update({work: _sparse(worklist.lower(work).by_query) for work in left})


def _sparse(work: WorkList) -> SparseCall:
    """The lists of work by query block, which both passes walk: the backward pass by their transpose."""
    row, rows, part, parts, run, runs, _, touch = work.items.long().unbind(1)
    part_owner, at = _entries(part, parts)
    tile, slot, tile_rows, _ = work.parts[at].long().unbind(1)
    # A tile of nothing says that a query block is touched, which `touch` says here.
    some = tile != NOWHERE
    part_owner, tile, slot, tile_rows = part_owner[some], tile[some], slot[some], tile_rows[some]
    run_owner, at = _entries(run, runs)
    run_row, blocks = work.runs[at].long().unbind(1)
    of_run, step = _entries(torch.zeros_like(blocks), blocks)
    full_owner, full = run_owner[of_run], run_row[of_run] + BLOCK * step
    queries, outer = _grid(row, rows)
    keys, inner = _grid(torch.cat([tile, full]), torch.cat([tile_rows, torch.full_like(full, BLOCK)]))
    partial = outer[part_owner], inner[: len(tile)]
    whole = outer[full_owner], inner[len(tile) :]
    pairs = torch.cat([partial[0], whole[0]]) * len(keys) + torch.cat([partial[1], whole[1]])
    if len(pairs.unique()) < len(pairs):
        raise ValueError(
            "tiles: two key blocks of a call hold the same rows; kernels for Blackwell would take one for the other"
        )
    table = torch.zeros(len(queries), len(keys), dtype=torch.int32, device=row.device)
    table[partial] = torch.where(slot < len(work.ranges), slot, ~(slot - len(work.ranges))).int()
    touches = torch.zeros(len(queries), dtype=torch.int32, device=row.device)
    touches[outer] = touch.int()
    sizes = len(queries), len(keys)
    by_query, by_key = (
        Lists(*_ragged(partial[a], partial[b], sizes[a]), *_ragged(whole[a], whole[b], sizes[a]))
        for a, b in ((0, 1), (1, 0))
    )
    return SparseCall(
        queries, keys, touches, by_query, by_key, table, _some(_dense(work.ranges)), _some(_dense(work.bits))
    )


def _entries(first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The owner and the place of every entry, for owners with ``count`` entries from the place ``first`` each."""
    owner = torch.repeat_interleave(torch.arange(len(first), device=first.device), count)
    return owner, first[owner] + torch.arange(len(owner), device=first.device) - (count.cumsum(0) - count)[owner]


def _grid(row: Tensor, rows: Tensor) -> tuple[Grid, Tensor]:
    """The grid of blocks, which may be named several times, and the number of each."""
    packed = bool((row % BLOCK != 0).any())
    if packed:
        first, number = torch.unique(row, return_inverse=True)
    else:
        number = row // BLOCK
        first = torch.arange(int(number.max()) + 1 if len(number) else 0, device=row.device) * BLOCK
    length = torch.zeros_like(first).scatter_reduce_(0, number, rows, "amax")
    return Grid(first.int(), length.int(), packed), number


def _ragged(owner: Tensor, number: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """How many numbers each owner has, and its numbers, ascending and then 0."""
    order = torch.argsort(number)
    order = order[torch.argsort(owner[order], stable=True)]
    owner, number = owner[order], number[order]
    count = torch.bincount(owner, minlength=blocks)
    longest = int(count.max()) if blocks else 0
    table = torch.zeros(blocks, max(longest, 1), dtype=torch.int32, device=owner.device)
    table[owner, torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner]] = number.int()
    return count.int(), table


def _some(slots: Tensor) -> Tensor:
    """Slots with one more if there is none: rows behind the end of a call look one up, and what they get is dropped."""
    return slots if len(slots) else slots.new_zeros(1, *slots.shape[1:])


def _dense(table: Tensor) -> Tensor:
    """``table`` with the strides of a fresh tensor, which `Tensor.contiguous` does not promise for sizes 0 and 1."""
    fresh = torch.empty_like(table, memory_format=torch.contiguous_format)
    return table if table.stride() == fresh.stride() else fresh.copy_(table)
