"""Block pairs of the packed mask by their summaries: full, empty, or to be looked into.

The packed mask over intervals, as `marble.mask.domains` evaluates any mask; for what has no visible ranges.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.tuned import tuned

EMPTY, OPEN, FULL = 0, 1, 2


@triton.jit
def _side(low, high, bits, track, at, count, real):
    place = track * count + at
    return (
        tl.load(low + place, real, other=0),
        tl.load(high + place, real, other=0),
        tl.load(bits + place, real, other=0),
    )


@triton.jit
def _equal(q_low, q_high, q_bits, k_low, k_high, k_bits):
    """Whether two tracks may be equal for some pair, and whether they may differ for some."""
    may = (q_low[:, None] <= k_high[None, :]) & (k_low[None, :] <= q_high[:, None])
    may = may & ((q_bits[:, None] & k_bits[None, :]) != 0)
    differ = (q_low != q_high)[:, None] | (k_low != k_high)[None, :] | (q_low[:, None] != k_low[None, :])
    return may, differ


@triton.jit
def _classify(
    q_low, q_high, q_bits, k_low, k_high, k_bits, state, queries, keys, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q_real, k_real = q < queries, k < keys
    q_sample, q_sample_high, q_sample_bits = _side(q_low, q_high, q_bits, 0, q, queries, q_real)
    k_sample, k_sample_high, k_sample_bits = _side(k_low, k_high, k_bits, 0, k, keys, k_real)
    q_seg, q_seg_high, q_seg_bits = _side(q_low, q_high, q_bits, 1, q, queries, q_real)
    k_seg, k_seg_high, k_seg_bits = _side(k_low, k_high, k_bits, 1, k, keys, k_real)
    q_noise, q_noise_high, q_noise_bits = _side(q_low, q_high, q_bits, 2, q, queries, q_real)
    k_noise, k_noise_high, k_noise_bits = _side(k_low, k_high, k_bits, 2, k, keys, k_real)
    q_pos, q_pos_high, _ = _side(q_low, q_high, q_bits, 3, q, queries, q_real)
    k_pos, k_pos_high, _ = _side(k_low, k_high, k_bits, 3, k, keys, k_real)
    # Each condition: may it hold for some pair, may it fail for some pair.
    nearest, farthest = q_pos[:, None] - k_pos_high[None, :], q_pos_high[:, None] - k_pos[None, :]
    near, near_fails = farthest >= 0, nearest < 0
    if WINDOW > 0:
        near, near_fails = near & (nearest < WINDOW), near_fails | (farthest >= WINDOW)
    span, span_fails = _equal(q_seg, q_seg_high, q_seg_bits, k_seg, k_seg_high, k_seg_bits)
    span, span_fails = span & (k_seg_high >= 0)[None, :], span_fails | (k_seg < 0)[None, :]
    noise, noise_fails = _equal(q_noise, q_noise_high, q_noise_bits, k_noise, k_noise_high, k_noise_bits)
    noise, noise_fails = noise | (k_noise < 0)[None, :], noise_fails & (k_noise_high >= 0)[None, :]
    sample, sample_fails = _equal(q_sample, q_sample_high, q_sample_bits, k_sample, k_sample_high, k_sample_bits)
    sample = sample & (q_sample_high >= 0)[:, None] & (k_sample_high >= 0)[None, :]
    sample_fails = sample_fails | (q_sample < 0)[:, None] | (k_sample < 0)[None, :]
    some = (near | span) & noise & sample
    fails = (near_fails & span_fails) | noise_fails | sample_fails
    found = tl.where(fails, tl.where(some, 1, 0), 2)
    place = state + q.to(tl.int64)[:, None] * keys + k[None, :]
    tl.store(place, found.to(tl.int8), q_real[:, None] & k_real[None, :])


def classify(q: tuple[Tensor, Tensor, Tensor], k: tuple[Tensor, Tensor, Tensor], window: int | None = None) -> Tensor:
    """Which block pairs of the packed mask (without padding) are full, and which may hold a legal pair.

    Args:
        q: smallest values, largest values (int32) and residues (int64), each [4, query blocks], of the tracks sample,
            seg, noise and pos: see `marble.kernels.triton.summaries`.
        k: the same of the key blocks.
        window: the layer's window, None for a global layer.

    Returns:
        int8 [query blocks, key blocks] of `EMPTY`, `OPEN` and `FULL`. Ragged blocks are treated like whole ones.

    Raises:
        ValueError: if there are not four tracks, or a summary is not contiguous.
    """
    for part in (*q, *k):
        if len(part) != 4 or not part.is_contiguous():
            raise ValueError(f"classify: expected contiguous summaries of 4 tracks, got {tuple(part.shape)}")
    queries, keys = q[0].shape[1], k[0].shape[1]
    state = torch.empty(queries, keys, dtype=torch.int8, device=q[0].device)
    if state.numel():
        choice = tuned("classify")
        grid = (triton.cdiv(queries, choice["BLOCK"]), triton.cdiv(keys, choice["BLOCK"]))
        _classify[grid](*q, *k, state, queries, keys, WINDOW=window or 0, **choice)
    return state
