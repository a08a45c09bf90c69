"""What small kernels compute, in torch alone: the truth that their tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partials(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two normalised partial results over disjoint keys as one.

    Args:
        out: [heads, rows, head_dim], outputs over some keys; 0 where none was seen.
        lse: [heads, rows], their log-sum-exp (natural logarithm); −inf where none was seen.
        more_out: outputs over other keys, like ``out``.
        more_lse: their log-sum-exp, like ``lse``.
    """
    total = torch.logaddexp(lse, more_lse)
    finite = torch.where(total == -torch.inf, 0, total)
    share, more_share = (torch.exp(part - finite).unsqueeze(-1) for part in (lse, more_lse))
    return share * out + more_share * more_out, total


def gather_blocks(source: Tensor, first: Tensor, length: Tensor, block: int) -> Tensor:
    """Blocks of rows, packed one after the other: [blocks · block, ...]; rows that a block lacks are 0.

    Args:
        source: [rows, ...].
        first: int32 [blocks], first row of each block.
        length: int32 [blocks], rows of each block, at most ``block``.
        block: rows kept for each.
    """
    row = torch.arange(block, device=source.device)
    real = row < length.unsqueeze(1)
    picked = source[torch.where(real, first.unsqueeze(1) + row, 0).flatten()]
    return picked * real.flatten().view(-1, *[1] * (source.ndim - 1))


def add_blocks(target: Tensor, first: Tensor, length: Tensor, packed: Tensor) -> Tensor:
    """``target`` [rows, ...] with packed blocks [blocks · block, ...] added to the rows they were gathered from."""
    block = len(packed) // max(len(first), 1)
    row = torch.arange(block, device=target.device)
    real = (row < length.unsqueeze(1)).flatten()
    return target.index_add(0, (first.unsqueeze(1) + row).flatten()[real], packed[real].to(target.dtype))
