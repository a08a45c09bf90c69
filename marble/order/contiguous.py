"""Contiguous shards: what a plain ring does, kept for comparison and for layouts that are even already."""

from __future__ import annotations

import torch
from torch import Tensor


def contiguous(blocks: int, ranks: int) -> Tensor:
    """Rank of each block, int64 [blocks]: neighbours stay together and ranks differ by one block at most.

    Example:
        >>> contiguous(5, 2).tolist()
        [0, 0, 0, 1, 1]
    """
    sizes = [blocks // ranks + (rank < blocks % ranks) for rank in range(ranks)]
    return torch.repeat_interleave(torch.arange(ranks), torch.tensor(sizes))
