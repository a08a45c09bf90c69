"""Block summaries of tracks: the smallest and largest value of a block, and which residues modulo 64 it holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.tuned import tuned


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def _summarise(columns, low, high, bits, tokens, blocks, block, BLOCK: tl.constexpr):
    number, column = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Repeating the last token completes the last block without changing what it holds.
    place = tl.minimum(number * block + tl.minimum(tl.arange(0, BLOCK), block - 1), tokens - 1)
    value = tl.load(columns + column * tokens + place)
    at = column * blocks + number
    tl.store(low + at, tl.min(value, 0))
    tl.store(high + at, tl.max(value, 0))
    present = tl.full((BLOCK,), 1, tl.int64) << (value & 63).to(tl.int64)
    tl.store(bits + at, tl.reduce(present, 0, _either))


def summaries(columns: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Summaries of consecutive blocks; the last may be shorter.

    Args:
        columns: int32 [tracks, tokens], contiguous.
        block: tokens of a block.

    Returns:
        Smallest and largest values, int32 [tracks, blocks], and the residues as sets of 64 bits, int64, alike.

    Raises:
        ValueError: if the columns are not contiguous int32.
    """
    if columns.dtype != torch.int32 or not columns.is_contiguous():
        raise ValueError(f"summaries: expected contiguous int32 tracks, got {columns.dtype}")
    tracks, tokens = columns.shape
    blocks = -(-tokens // block)
    low, high = (torch.empty(tracks, blocks, dtype=torch.int32, device=columns.device) for _ in range(2))
    bits = torch.empty(tracks, blocks, dtype=torch.int64, device=columns.device)
    if columns.numel():
        grid = (blocks, tracks)
        whole = triton.next_power_of_2(block)
        _summarise[grid](columns, low, high, bits, tokens, blocks, block, BLOCK=whole, **tuned("summaries"))
    return low, high, bits
