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

from marble.kernels.triton.lookup import bound
from marble.kernels.triton.tuned import tuned


class Cells(Protocol):
    """Blocks as cells, by the names and meanings of `marble.mask.shards.Blocks`."""

    @property
    def block(self) -> int:
        """Rows of a whole block."""

    @property
    def ptr(self) -> Tensor:
        """Where each block's cells begin, int64 [blocks + 1]."""

    @property
    def cells(self) -> Tensor:
        """Span, within, start, row and rows of each cell, int64 [cells, 5], contiguous."""


@triton.jit
def _passed(position, start, rows):
    """How many rows of a cell lie before some positions."""
    return tl.minimum(tl.maximum(position - start, 0), rows).to(tl.int32)


@triton.jit
def _range(lo, hi):
    return tl.where(lo < hi, lo | (hi << 8), 0)


_PLAIN = list(range(10))
"""Arguments that no two versions are compiled for, whatever their alignment: every plan brings new sizes."""


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def _words(
    tiles,
    ptr,
    cells,
    inner_ptr,
    inner_cells,
    bounds,
    spans,
    words,
    labels,
    block,
    TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    outer, inner = tl.load(tiles + tile), tl.load(tiles + tl.num_programs(0) + tile)
    line = tl.arange(0, BLOCK)
    lo0, hi0 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    lo1, hi1 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for cell in range(tl.load(ptr + outer), tl.load(ptr + outer + 1)):
        # Cells are span, within, start, row, rows.
        at = cells + 5 * cell
        of, first = tl.load(at), tl.load(at + 3)
        here = (line >= first) & (line < first + tl.load(at + 4))
        place = line + (tl.load(at + 1) - first)
        lo0 = tl.where(here, bound(bounds, 0, of, spans, place), lo0)
        hi0 = tl.where(here, bound(bounds, 1, of, spans, place), hi0)
        if TWO:
            lo1 = tl.where(here, bound(bounds, 2, of, spans, place), lo1)
            hi1 = tl.where(here, bound(bounds, 3, of, spans, place), hi1)
    from0, to0 = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    from1, to1 = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for cell in range(tl.load(inner_ptr + inner), tl.load(inner_ptr + inner + 1)):
        start, count = tl.load(inner_cells + 5 * cell + 2), tl.load(inner_cells + 5 * cell + 4)
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


def range_words(outer: Cells, inner: Cells, bounds: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The range words of some tiles, and a hash of each tile's words.

    Args:
        outer: the blocks that rows of tiles belong to.
        inner: the blocks that their columns belong to.
        bounds: int64 [bounds, 3, spans], contiguous: the first value, the last value and the offset of the two or four
            ramps that bound what each span's tokens see, as storage positions.
        tiles: int64 [2, tiles], contiguous, the outer and the inner block of each tile.

    Returns:
        int32 [tiles, block] as in `marble.kernels.contract.TileList.ranges`, and int64 [tiles].

    Raises:
        ValueError: if the bounds or the tiles are not of these types and shapes.
    """
    if bounds.dtype != torch.int64 or bounds.shape[:2] not in ((2, 3), (4, 3)) or not bounds.is_contiguous():
        raise ValueError(f"words: expected int64 bounds [2 or 4, 3, spans], got {bounds.dtype} {tuple(bounds.shape)}")
    if tiles.dtype != torch.int64 or tiles.ndim != 2 or len(tiles) != 2 or not tiles.is_contiguous():
        raise ValueError(f"words: expected int64 tiles [2, tiles], got {tiles.dtype} {tuple(tiles.shape)}")
    count, block = tiles.shape[1], outer.block
    words = torch.empty(count, block, dtype=torch.int32, device=bounds.device)
    labels = torch.empty(count, dtype=torch.int64, device=bounds.device)
    if count:
        _words[(count,)](
            tiles,
            outer.ptr,
            outer.cells,
            inner.ptr,
            inner.cells,
            bounds,
            bounds.shape[2],
            words,
            labels,
            block,
            TWO=len(bounds) == 4,
            BLOCK=triton.next_power_of_2(block),
            **tuned("words"),
        )
    return words, labels
