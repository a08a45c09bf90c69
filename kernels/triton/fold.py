"""What surrounds kernels that do not know the contract: partial results folded into state, tiled sums added to rows.

Both walk the blocks of 128 rows that such a kernel computed, packed one after the other, wherever their rows are.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.contract import State

BLOCK = 128
"""Rows of a block."""

_ROWS = 32


class Rows(Protocol):
    """Blocks of rows of a tensor."""

    @property
    def first(self) -> Tensor:
        """The first row of each block, int32 [blocks]."""

    @property
    def length(self) -> Tensor:
        """The rows of each block, int32 [blocks], at most 128."""


@triton.jit
def _fold(
    blocks, partial, state, results, scale, strides, CARRIED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    first, length, touch = blocks
    more_out, more_lse = partial
    acc, m, sums = state
    out, lse = results
    more_row, more_head, more_lse_head, state_rows, out_row, out_head, lse_head = strides
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    real = row < tl.load(length + number)
    packed = number * 128 + row
    place = (tl.load(first + number) + row).to(tl.int64)
    found = tl.load(more_lse + head * more_lse_head + packed, real, other=float("-inf"))
    # What a kernel left in rows that saw no key is not read: it need not be a number.
    seen = (found > float("-inf"))[:, None]
    more = tl.load(more_out + (packed * more_row + head * more_head)[:, None] + column, seen, other=0.0)
    peak = found / scale
    old_peak, old_sum, old = tl.full(peak.shape, float("-inf"), tl.float32), tl.zeros_like(peak), tl.zeros_like(more)
    flags = tl.load(touch + number)
    at = head * state_rows + place
    if CARRIED:
        known = real & ((flags & 1) == 0)
        old_peak = tl.load(m + at, known, other=float("-inf"))
        old_sum = tl.load(sums + at, known, other=0.0)
        old = tl.load(acc + at[:, None] * WIDTH + column, known[:, None], other=0.0)
    new_peak = tl.maximum(old_peak, peak)
    # Weights are relative to this number, however it was rounded; where nothing was seen any finite one gives 0.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay, weight = tl.exp(scale * (old_peak - base)), tl.exp(found - scale * base)
    total = old * decay[:, None] + more * weight[:, None]
    total_sum = old_sum * decay + weight
    last = real
    if CARRIED:
        last = real & ((flags & 2) != 0)
        kept = real & ((flags & 2) == 0)
        tl.store(m + at, new_peak, kept)
        tl.store(sums + at, total_sum, kept)
        tl.store(acc + at[:, None] * WIDTH + column, total, kept[:, None])
    some = total_sum > 0
    divisor = tl.where(some, total_sum, 1.0)
    final = (total / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + (place * out_row + head * out_head)[:, None] + column, final, last[:, None])
    tl.store(lse + head * lse_head + place, tl.where(some, scale * base + tl.log(divisor), float("-inf")), last)


@triton.jit
def _add(target, tiles, first, length, scale, head_stride, row_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    real = (row < tl.load(length + number)) & (column < WIDTH)
    tile = tiles + (head * tl.num_programs(0) + number) * (128 * WIDTH)
    values = tl.load(tile + column // 4 * (128 * 4) + row * 4 + column % 4, real, other=0.0)
    place = (tl.load(first + number) + row).to(tl.int64) * row_stride + column
    # Blocks of several sequences may hold the same rows.
    tl.atomic_add(target + head * head_stride + place, values * scale, real, sem="relaxed")


def fold_partial(
    blocks: Rows,
    touch: Tensor,
    partial: tuple[Tensor, Tensor],
    state: State | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> None:
    """Fold a normalised partial result into ``state``; on a last touch write ``out`` and ``lse``.

    The row maximum that is kept need not be a score: any reference is as good that ``acc`` and ``l`` are relative to.

    Args:
        blocks: where the query rows of each block are.
        touch: int32 [blocks], the `Touch` of each block.
        partial: what the call computed, float32: its output [blocks · 128, heads, head_dim] over its keys alone, and
            log-sum-exp [heads, blocks · 128], −inf where it saw none. The last block may be cut at its end.
        state: as for `Backend.forward`.
        out: as for `Backend.forward`.
        lse: as for `Backend.forward`.
        scale: softmax scale.

    Raises:
        ValueError: if a partial result is not float32.
    """
    more_out, more_lse = partial
    if more_out.dtype != torch.float32 or more_lse.dtype != torch.float32:
        raise ValueError(f"fold: partial results are float32, got {more_out.dtype} and {more_lse.dtype}")
    _, heads, width = more_out.shape
    kept = (more_lse,) * 3 if state is None else (state.acc, state.m, state.l)  # not read if there is no state
    rows = 0 if state is None else state.m.shape[1]
    strides = (*more_out.stride()[:2], more_lse.stride(0), rows, *out.stride()[:2], lse.stride(0))
    _fold[(len(touch), heads, BLOCK // _ROWS)](
        (blocks.first, blocks.length, touch),
        partial,
        kept,
        (out, lse),
        scale,
        strides,
        CARRIED=state is not None,
        ROWS=_ROWS,
        WIDTH=width,
    )


def add_tiles(target: Tensor, tiles: Tensor, blocks: Rows, scale: float) -> None:
    """Add ``scale`` times a kernel's sums, kept tile by tile, to the rows that they belong to, in place.

    A tile holds 128 rows in the order of a tensor memory fragment: four columns of every row, then the next four.

    Args:
        target: float32 [heads, rows, head_dim], with any strides but the last.
        tiles: float32 [heads, blocks · 128 · head_dim], contiguous.
        blocks: where the rows of each block are; blocks may overlap.
        scale: factor.

    Raises:
        ValueError: if a sum is not float32, or sizes differ.
    """
    heads, _, width = target.shape
    if target.dtype != torch.float32 or tiles.dtype != torch.float32:
        raise ValueError(f"fold: gradients are summed in float32, got {target.dtype} and {tiles.dtype}")
    if tiles.shape != (heads, len(blocks.first) * BLOCK * width) or not tiles.is_contiguous():
        raise ValueError(f"fold: expected tiles of {len(blocks.first)} blocks, got {tuple(tiles.shape)}")
    grid = (len(blocks.first), heads, BLOCK // _ROWS)
    if tiles.numel():
        _add[grid](target, tiles, blocks.first, blocks.length, scale, *target.stride()[:2], ROWS=_ROWS, WIDTH=width)
