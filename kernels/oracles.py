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


def fold_partial(
    carried: tuple[Tensor, Tensor, Tensor], more_out: Tensor, more_lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(acc, m, l) of an online softmax, as in `State`, with a normalised partial result over other keys.

    Args:
        carried: [heads, rows, head_dim], [heads, rows] and [heads, rows].
        more_out: [heads, rows, head_dim]; anything where no key was seen.
        more_lse: [heads, rows], its log-sum-exp (natural logarithm); −inf where no key was seen.
        scale: softmax scale, which m is before.
    """
    acc, m, l = carried  # noqa: E741
    seen = more_lse > -torch.inf
    m_new = torch.maximum(m, more_lse / scale)
    base = torch.where(m_new > -torch.inf, m_new, 0)
    decay, weight = torch.exp(scale * (m - base)), torch.exp(more_lse - scale * base)
    more = torch.where(seen.unsqueeze(-1), more_out, 0) * weight.unsqueeze(-1)
    return acc * decay.unsqueeze(-1) + more, m_new, l * decay + weight


def tile_rows(tiles: Tensor, head_dim: int) -> Tensor:
    """[heads, blocks · 128, head_dim] from tiles that hold four columns of their 128 rows, then the next four."""
    return tiles.view(len(tiles), -1, head_dim // 4, 128, 4).transpose(2, 3).reshape(len(tiles), -1, head_dim)
