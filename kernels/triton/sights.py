"""Which blocks of a query shard see which keys: one program per key block, its cells side by side."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.lookup import below, bound
from marble.kernels.triton.tuned import tuned
from marble.kernels.triton.words import Cells


class Stretches(Protocol):
    """A shard as stretches of stored tokens, by the names and meanings of `marble.mask.shards.Shard`."""

    @property
    def start(self) -> Tensor:
        """First position of each stretch, int64 [stretches], rising."""

    @property
    def stop(self) -> Tensor:
        """One past the last, int64 [stretches]."""

    @property
    def row(self) -> Tensor:
        """The shard's row at which each begins, int64 [stretches]."""


@triton.jit
def _before(position, start, stop, row, stretches, here):
    """How many tokens of the shard lie before some positions."""
    last = below(start, stretches, position, here) - 1
    some = here & (last >= 0)
    inside = tl.minimum(position, tl.load(stop + last, some, 0)) - tl.load(start + last, some, 0)
    return tl.where(some, tl.load(row + last, some, 0) + inside, 0)


_PLAIN = list(range(11))
"""Arguments that no two versions are compiled for, whatever their alignment: every plan brings new sizes."""


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def _sights(
    ptr,
    cells,
    table,
    exact,
    start,
    stop,
    row,
    found,
    spans,
    stretches,
    block,
    BLOCK: tl.constexpr,
):
    number, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cell = tl.load(ptr + number) + tl.arange(0, BLOCK)
    here, count = cell < tl.load(ptr + number + 1), tl.load(ptr + blocks)
    # Cells are span, within, start, row, rows.
    span, place = tl.load(cells + 5 * cell, here, 0), tl.load(cells + 5 * cell + 1, here, 0)
    rows = tl.load(cells + 5 * cell + 4, here, 0)
    last = place + rows - 1
    known = tl.min(tl.load(exact + span, here, 1).to(tl.int32), 0) > 0
    # What any key of a cell is seen by, then what all are.
    low = _before(bound(table, 0, span, spans, place), start, stop, row, stretches, here)
    high = _before(bound(table, 1, span, spans, last), start, stop, row, stretches, here)
    some = known & (low < high)
    tl.store(found + cell, tl.where(some, low // block, 0), here)
    tl.store(found + count + cell, tl.where(some, (high + (block - 1)) // block, 0), here)
    low = _before(bound(table, 0, span, spans, last), start, stop, row, stretches, here)
    high = _before(bound(table, 1, span, spans, place), start, stop, row, stretches, here)
    low, high = tl.max(low, 0), tl.min(tl.where(here, high, 1 << 40), 0)
    low = (low + (block - 1)) // block
    # Ragged blocks are never full.
    whole = known & (tl.sum(rows, 0) == block)
    inside = found + 2 * count + number
    tl.store(inside, low)
    tl.store(inside + blocks, tl.maximum(low, tl.where(whole, high // block, 0)))


def sights(keys: Cells, table: Tensor, exact: Tensor, queries: Stretches) -> tuple[Tensor, Tensor]:
    """The query blocks that see keys.

    Args:
        keys: the key blocks; queries have blocks of the same size.
        table: int64 [2, 3, spans], contiguous, the ramps of `marble.mask.ranges.SpanRanges`.
        exact: bool [spans], whether they are the visible ranges of all of a span's keys.
        queries: the query shard.

    Returns:
        The first query block that sees a key of each cell and one past the last, int64 [2, cells], 0 twice if there is
        none; and of those that see all keys of a block, int64 [2, blocks], twice the same if there is none, or if the
        block is ragged. Blocks with a key that has no range are seen by none.

    Raises:
        ValueError: if the table is not of this type and shape.
    """
    if table.dtype != torch.int64 or table.shape[:2] != (2, 3) or not table.is_contiguous():
        raise ValueError(f"sights: expected an int64 table [2, 3, spans], got {table.dtype} {tuple(table.shape)}")
    cells, blocks = len(keys.cells), len(keys.ptr) - 1
    found = table.new_empty(2 * (cells + blocks))
    if blocks:
        _sights[(blocks,)](
            keys.ptr,
            keys.cells,
            table,
            exact,
            queries.start,
            queries.stop,
            queries.row,
            found,
            table.shape[2],
            len(queries.start),
            keys.block,
            BLOCK=triton.next_power_of_2(keys.block),
            **tuned("sights"),
        )
    return found[: 2 * cells].view(2, cells), found[2 * cells :].view(2, blocks)
