"""Range words of partial tiles, straight from the visible ranges of spans: for blocks whose tokens all have ranges.

One program writes one tile. It walks over the cells of the outer block (what the block has of one span), takes each
row's bounds from the span's ramps, and counts how many rows of the inner block lie before each bound.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor


class Cells(Protocol):
    """Blocks as cells: `marble.mask.shards.Blocks`. All tensors are int64 [cells], but ``ptr``, [blocks + 1]."""

    block: int
    span: Tensor
    within: Tensor
    start: Tensor
    row: Tensor
    rows: Tensor

    @property
    def ptr(self) -> Tensor:
        """Where each block's cells begin."""


@triton.jit
def _bound(bounds, number, span, spans, place):
    """Where a bound of the tokens at some places of a span lies: the ramp clamp(place + offset, first, last)."""
    at = bounds + 3 * number * spans + span
    return tl.minimum(tl.maximum(place + tl.load(at + 2 * spans), tl.load(at)), tl.load(at + spans))


@triton.jit
def _passed(position, start, rows):
    """How many rows of a cell lie before some positions."""
    return tl.minimum(tl.maximum(position - start, 0), rows).to(tl.int32)


@triton.jit
def _range(lo, hi):
    return tl.where(lo < hi, lo | (hi << 8), 0)


_PLAIN = list(range(15))
"""Arguments that no two versions are compiled for, whatever their alignment: every plan brings new sizes."""


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def _words(
    outer_block,
    inner_block,
    ptr,
    span,
    within,
    row,
    rows,
    inner_ptr,
    inner_start,
    inner_rows,
    bounds,
    spans,
    words,
    labels,
    block,
    TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    outer, inner = tl.load(outer_block + tile), tl.load(inner_block + tile)
    line = tl.arange(0, BLOCK)
    lo0, hi0 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    lo1, hi1 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for cell in range(tl.load(ptr + outer), tl.load(ptr + outer + 1)):
        first, of = tl.load(row + cell), tl.load(span + cell)
        here = (line >= first) & (line < first + tl.load(rows + cell))
        place = line + (tl.load(within + cell) - first)
        lo0 = tl.where(here, _bound(bounds, 0, of, spans, place), lo0)
        hi0 = tl.where(here, _bound(bounds, 1, of, spans, place), hi0)
        if TWO:
            lo1 = tl.where(here, _bound(bounds, 2, of, spans, place), lo1)
            hi1 = tl.where(here, _bound(bounds, 3, of, spans, place), hi1)
    from0, to0 = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    from1, to1 = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for cell in range(tl.load(inner_ptr + inner), tl.load(inner_ptr + inner + 1)):
        start, count = tl.load(inner_start + cell), tl.load(inner_rows + cell)
        from0 += _passed(lo0, start, count)
        to0 += _passed(hi0, start, count)
        if TWO:
            from1 += _passed(lo1, start, count)
            to1 += _passed(hi1, start, count)
    word = _range(from0, to0)
    if TWO:
        # Sorted ranges, empty ones 0 and last, touching ones joined.
        other = _range(from1, to1)
        both = (word != 0) & (other != 0)
        swap = both & (from1 < from0)
        low, high = tl.where(swap, other, word), tl.where(swap, word, other)
        joined = (low & 255) | (tl.maximum(low >> 8, high >> 8) << 8)
        touch = both & ((high & 255) <= (low >> 8))
        word = tl.where(touch, joined, tl.where(both, low | (high << 16), word | other))
    tl.store(words + tile * block + line, word, line < block)
    factor = (2 * line + 1).to(tl.int64) * -7046029254386353131  # SplitMix64
    tl.store(labels + tile, tl.sum(word.to(tl.int64) * (factor ^ (factor >> 31)), 0))


def range_words(
    outer: Cells, inner: Cells, bounds: Tensor, outer_block: Tensor, inner_block: Tensor
) -> tuple[Tensor, Tensor]:
    """The range words of some tiles, and a hash of each tile's words.

    Args:
        outer: the blocks that rows of tiles belong to.
        inner: the blocks that their columns belong to.
        bounds: int64 [bounds, 3, spans], contiguous: the first value, the last value and the offset of the two or four
            ramps that bound what each span's tokens see, as storage positions.
        outer_block: int64 [tiles], contiguous, the outer block of each tile.
        inner_block: int64 [tiles], contiguous, its inner block.

    Returns:
        int32 [tiles, block] as in `marble.kernels.contract.TileList.ranges`, and int64 [tiles].

    Raises:
        ValueError: if the bounds are not of this type and shape, or positions are not contiguous.
    """
    if bounds.dtype != torch.int64 or bounds.shape[:2] not in ((2, 3), (4, 3)) or not bounds.is_contiguous():
        raise ValueError(f"words: expected int64 bounds [2 or 4, 3, spans], got {bounds.dtype} {tuple(bounds.shape)}")
    if not (outer_block.is_contiguous() and inner_block.is_contiguous()):
        raise ValueError("words: expected contiguous blocks of tiles")
    tiles, block = len(outer_block), outer.block
    words = torch.empty(tiles, block, dtype=torch.int32, device=bounds.device)
    labels = torch.empty(tiles, dtype=torch.int64, device=bounds.device)
    if tiles:
        _words[(tiles,)](
            outer_block,
            inner_block,
            outer.ptr,
            outer.span,
            outer.within,
            outer.row,
            outer.rows,
            inner.ptr,
            inner.start,
            inner.rows,
            bounds,
            bounds.shape[2],
            words,
            labels,
            block,
            TWO=len(bounds) == 4,
            BLOCK=triton.next_power_of_2(block),
            num_warps=1,
        )
    return words, labels
