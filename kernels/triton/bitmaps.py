"""Bit tiles of the packed mask, in both orientations: for tiles that no ranges describe.

The kernel reads the tracks of the tiles' tokens and compares pair by pair, which is what `marble.mask.domains.dense`
does with tensors of every pair. Equal tiles are found by the caller.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.tuned import tuned


@triton.jit
def _bits(
    tracks,
    q_at,
    k_at,
    q_bits,
    k_bits,
    tokens,
    block,
    words,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    inside = row < block
    q = tl.load(q_at + tile * block + row, inside, other=-1)
    k = tl.load(k_at + tile * block + row, inside, other=-1)
    q_real, k_real = q >= 0, k >= 0
    # Tracks lie one after the other: sample, seg, noise, pos.
    q_sample, k_sample = tl.load(tracks + q, q_real, other=-1)[:, None], tl.load(tracks + k, k_real, other=-1)[None, :]
    q_seg, k_seg = (
        tl.load(tracks + tokens + q, q_real, other=-1)[:, None],
        tl.load(tracks + tokens + k, k_real, other=-1)[None, :],
    )
    q_noise, k_noise = (
        tl.load(tracks + 2 * tokens + q, q_real, other=-1)[:, None],
        tl.load(tracks + 2 * tokens + k, k_real, other=-1)[None, :],
    )
    q_pos, k_pos = (
        tl.load(tracks + 3 * tokens + q, q_real, other=0)[:, None],
        tl.load(tracks + 3 * tokens + k, k_real, other=0)[None, :],
    )
    near = q_pos >= k_pos
    if WINDOW > 0:
        near = near & (q_pos - k_pos < WINDOW)
    legal = (near | ((q_seg == k_seg) & (k_seg >= 0))) & ((k_noise < 0) | (q_noise == k_noise))
    legal = legal & (q_sample == k_sample) & (q_sample >= 0) & (k_sample >= 0)
    # Bit c % 32 of word c // 32 is column c. Words past the end of a narrow block are never set and never stored.
    shift = tl.arange(0, 32)[None, None, :]
    word = tl.arange(0, WORDS)
    for side in tl.static_range(2):
        pairs = legal if side == 0 else tl.trans(legal)
        packed = tl.sum(tl.reshape(pairs.to(tl.int32), (BLOCK, WORDS, 32)) << shift, 2)  # each bit once
        to = (q_bits if side == 0 else k_bits) + (tile * block + row)[:, None] * words + word[None, :]
        tl.store(to, packed, inside[:, None] & (word < words)[None, :])


def packed_bits(tracks: Tensor, q_at: Tensor, k_at: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """The packed mask (`marble.mask.modes.packed_mask` without padding) over some tiles, as bits.

    Args:
        tracks: int32 [4, tokens], contiguous: sample, seg, noise and pos of every stored token.
        q_at: int64 [tiles, block], storage positions of each tile's queries; −1 for a row that does not exist.
        k_at: int64 [tiles, block], the same for its keys.
        window: the layer's window, None for a global layer.

    Returns:
        int32 [tiles, block, ⌈block / 32⌉] twice: with query rows and key columns, and with key rows and query columns.

    Raises:
        ValueError: if the inputs are not of these types and shapes.
    """
    if tracks.dtype != torch.int32 or tracks.ndim != 2 or len(tracks) != 4 or not tracks.is_contiguous():
        raise ValueError(f"bitmaps: expected int32 tracks [4, tokens], got {tracks.dtype} {tuple(tracks.shape)}")
    if q_at.shape != k_at.shape or q_at.dtype != torch.int64 or k_at.dtype != torch.int64:
        raise ValueError(
            f"bitmaps: expected int64 positions of one shape, got {tuple(q_at.shape)}, {tuple(k_at.shape)}"
        )
    tiles, block = q_at.shape
    words = -(-block // 32)
    q_bits, k_bits = (torch.empty(tiles, block, words, dtype=torch.int32, device=tracks.device) for _ in range(2))
    if tiles:
        size = max(triton.next_power_of_2(block), 32)
        _bits[(tiles,)](
            tracks,
            q_at.contiguous(),
            k_at.contiguous(),
            q_bits,
            k_bits,
            tracks.shape[1],
            block,
            words,
            WINDOW=window or 0,
            BLOCK=size,
            WORDS=size // 32,
            **tuned("bitmaps"),
        )
    return q_bits, k_bits
