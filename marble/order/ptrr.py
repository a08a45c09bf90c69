"""Processing-time round-robin: blocks dealt by their cost, for rings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def ptrr(costs: Tensor, ranks: int) -> Tensor:
    """Rank of each block: blocks sorted by cost are dealt in rounds, one to each rank.

    Within a round the costliest block goes to the rank with the least work so far. PyTorch's rule, to reverse every
    other round, guesses at that; this is exact, and it balances several kinds of layers at once: each round is dealt
    by the kind whose ranks are furthest apart.

    Args:
        costs: [blocks] or [kinds of layers, blocks], work of each query block in any unit.
        ranks: number of ranks; it need not divide the number of blocks.

    Returns:
        int64 [blocks].

    Source: PyTorch's ``_PTRRLoadBalancer`` (torch.distributed.tensor.experimental, 2025); MARBLE, section 03.

    Example:
        Costs 1 to 6 on two ranks: 6 | 5, then 4 to the second and 3 to the first, then 2 | 1, so rank 0 gets
        6 + 3 + 2 and rank 1 gets 5 + 4 + 1.

        >>> ptrr(torch.tensor([1, 2, 3, 4, 5, 6]), 2).tolist()
        [1, 0, 0, 1, 1, 0]
    """
    work = np.atleast_2d(costs.double().numpy())
    unit = 1 / np.maximum(work.sum(1), 1)
    load = np.zeros((len(work), ranks))
    rank_of = np.empty(work.shape[1], dtype=np.int64)
    by_cost = np.argsort(-(unit @ work), kind="stable")
    for first in range(0, len(by_cost), ranks):
        hand = by_cost[first : first + ranks]
        kind = int(np.argmax((load.max(1) - load.min(1)) * unit))
        hand = hand[np.argsort(-work[kind, hand], kind="stable")]
        seats = np.argsort(load[kind], kind="stable")[: len(hand)]
        rank_of[hand] = seats
        load[:, seats] += work[:, hand]
    return torch.from_numpy(rank_of)
