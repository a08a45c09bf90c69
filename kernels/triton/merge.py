"""Merging partial results in float32: outputs with their log-sum-exps, and sums of gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.tuned import tuned


@triton.jit
def _merge(out, lse, more_out, more_lse, rows, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    real = row < rows
    at = head * rows + row
    one = tl.load(lse + at, real, other=float("-inf"))
    other = tl.load(more_lse + at, real, other=float("-inf"))
    # Rows without keys on either side: the maximum would be −inf, and (−inf) − (−inf) no number.
    peak = tl.maximum(one, other)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    share, more_share = tl.exp(one - peak), tl.exp(other - peak)
    total = share + more_share
    scale = tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)
    place = at[:, None] * width + column[None, :]
    inside = real[:, None] & (column < width)[None, :]
    first = tl.load(out + place, inside, other=0.0)
    second = tl.load(more_out + place, inside, other=0.0)
    tl.store(out + place, first * (share * scale)[:, None] + second * (more_share * scale)[:, None], inside)
    tl.store(lse + at, tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), float("-inf")), real)


@triton.jit
def _add(target, more, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    tl.store(target + at, tl.load(target + at, real) + tl.load(more + at, real).to(tl.float32), real)


def merge_partials(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Fold a normalised partial result over other keys into ``out`` and ``lse``, in place.

    Args:
        out: float32 [heads, rows, head_dim], contiguous.
        lse: float32 [heads, rows], contiguous.
        more_out: like ``out``.
        more_lse: like ``lse``.

    Raises:
        ValueError: if a tensor is not float32 and contiguous, or shapes differ.
    """
    _expect_sums(out, lse, more_out, more_lse)
    heads, rows, width = out.shape
    if more_out.shape != out.shape or lse.shape != (heads, rows) or more_lse.shape != lse.shape:
        raise ValueError(f"merge: shapes differ: {[tuple(x.shape) for x in (out, lse, more_out, more_lse)]}")
    if out.numel():
        choice, whole = tuned("merge"), triton.next_power_of_2(width)
        grid = (triton.cdiv(rows, choice["BLOCK"]), heads)
        _merge[grid](out, lse, more_out, more_lse, rows, width, WIDTH=whole, **choice)


def add_sums(target: Tensor, more: Tensor) -> None:
    """Add gradients to a float32 sum, in place.

    Raises:
        ValueError: if a tensor is not contiguous, shapes differ, or the sum is not float32.
    """
    _expect_sums(target)
    if more.shape != target.shape or not more.is_contiguous():
        raise ValueError(f"merge: cannot add {tuple(more.shape)} to {tuple(target.shape)}")
    if target.numel():
        choice = tuned("add_sums")
        _add[(triton.cdiv(target.numel(), choice["BLOCK"]),)](target, more, target.numel(), **choice)


def _expect_sums(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"merge: what is summed is contiguous float32, got {tensor.dtype}")
