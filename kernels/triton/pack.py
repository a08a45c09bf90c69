"""Packing blocks of rows for a transfer, and adding packed gradients to the rows they belong to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.tuned import tuned


@triton.jit
def _gather(source, first, length, packed, width, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < block)[:, None] & (column < width)[None, :]
    real = inside & (row < tl.load(length + number))[:, None]
    values = tl.load(source + (tl.load(first + number) + row).to(tl.int64)[:, None] * width + column, real, other=0.0)
    tl.store(packed + (number * block + row)[:, None] * width + column, values, inside)


@triton.jit
def _add(target, first, length, packed, width, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = (row < tl.load(length + number))[:, None] & (column < width)[None, :]
    place = target + (tl.load(first + number) + row).to(tl.int64)[:, None] * width + column
    more = tl.load(packed + (number * block + row)[:, None] * width + column, real, other=0.0)
    tl.store(place, tl.load(place, real, other=0.0) + more.to(tl.float32), real)


def gather_blocks(source: Tensor, first: Tensor, length: Tensor, block: int) -> Tensor:
    """Blocks of rows, packed one after the other: [blocks · block, ...]; rows that a block lacks are 0.

    Args:
        source: [rows, ...], contiguous.
        first: int32 [blocks], first row of each block.
        length: int32 [blocks], rows of each block, at most ``block``.
        block: rows kept for each.

    Raises:
        ValueError: if ``source`` is not contiguous.
    """
    packed = torch.empty(len(first) * block, *source.shape[1:], dtype=source.dtype, device=source.device)
    _launch(_gather, source, first, length, packed, block)
    return packed


def add_blocks(target: Tensor, first: Tensor, length: Tensor, packed: Tensor) -> None:
    """Add packed blocks [blocks · block, ...] to the rows of ``target`` that they were gathered from, in place.

    Args:
        target: float32 [rows, ...], contiguous.
        first: int32 [blocks], as for `gather_blocks`; blocks do not overlap, so each row has one writer.
        length: int32 [blocks].
        packed: [blocks · block, ...], contiguous.

    Raises:
        ValueError: if a tensor is not contiguous, or the sum is not float32.
    """
    if target.dtype != torch.float32:
        raise ValueError(f"pack: gradients are summed in float32, got {target.dtype}")
    if len(first):
        _launch(_add, target, first, length, packed, len(packed) // len(first))


def _launch(
    kernel: triton.JITFunction, rows: Tensor, first: Tensor, length: Tensor, packed: Tensor, block: int
) -> None:
    if not rows.is_contiguous() or not packed.is_contiguous():
        raise ValueError("pack: rows and packed blocks must be contiguous")
    width = rows[0].numel() if len(rows) else 0
    if width and packed.numel():
        choice, whole = tuned("pack"), triton.next_power_of_2(block)
        grid = (len(first), triton.cdiv(width, choice["COLUMNS"]))
        kernel[grid](rows, first, length, packed, width, block, ROWS=whole, **choice)
