"""Processing-time round-robin: blocks dealt by their cost, for rings."""

from __future__ import annotations

import torch
from torch import Tensor


def ptrr(costs: Tensor, ranks: int) -> Tensor:
    """Rank of each block: blocks sorted by cost are dealt in rounds, every other round in reverse.

    Args:
        costs: [blocks], work of each query block in any unit.
        ranks: number of ranks; it need not divide the number of blocks.

    Returns:
        int64 [blocks].

    Source: PyTorch's ``_PTRRLoadBalancer`` (torch.distributed.tensor.experimental, 2025); the seed's section 03.

    Example:
        Costs 1 to 6 on two ranks: sorted 6 5 4 3 2 1, dealt 0 1 | 1 0 | 0 1, so rank 0 gets 6 + 3 + 2 and rank 1 gets
        5 + 4 + 1.

        >>> ptrr(torch.tensor([1, 2, 3, 4, 5, 6]), 2).tolist()
        [1, 0, 0, 1, 1, 0]
    """
    place = torch.arange(len(costs))
    turn, seat = place // ranks, place % ranks
    rank = torch.empty_like(place)
    rank[torch.argsort(costs, descending=True, stable=True)] = torch.where(turn % 2 == 0, seat, ranks - 1 - seat)
    return rank
