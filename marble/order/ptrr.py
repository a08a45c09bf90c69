"""Processing-time round-robin: blocks dealt by their cost, for rings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def ptrr(costs: Tensor, ranks: int) -> Tensor:
    """Rank of each block: blocks sorted by cost are dealt in rounds, one to each rank.

    Within a round the costliest block goes to the rank with the least work so far. PyTorch's rule, to reverse every
    other round, guesses at that; this is exact, and it balances several kinds of layers at once: each round is dealt
    by the kind whose ranks are furthest apart. Most rounds are of equal costs and change no balance. Round i of all
    then begins at rank i: dealt alike in round after round, blocks of one sample would always meet on the same two
    ranks, and single steps of a ring be uneven (two kinds of layers over Gemma documents: Σ of the slowest steps 1.09
    of the mean, dealt in turn 1.02).

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
    work = np.atleast_2d(costs.double().cpu().numpy())
    unit = 1 / np.maximum(work.sum(1), 1)
    falling = -(unit @ work)
    if len(work) == 1 and work.max(initial=0) < 1 << 16 and (work == work.round()).all():
        falling = ~work[0].astype(np.uint16)  # the same order, and NumPy sorts short integers by radix
    by_cost = np.argsort(falling, kind="stable")
    rounds = -(-len(by_cost) // ranks)
    padded = np.zeros((len(work), rounds * ranks))
    padded[:, : len(by_cost)] = work[:, by_cost]
    hands = padded.reshape(len(work), rounds, ranks)
    # Only rounds of unequal costs depend on one another. They are small: plain lists are faster than arrays.
    uneven = (hands.max(2) > hands.min(2)).any(0)
    seats = (np.arange(rounds)[:, None] + np.arange(ranks)) % ranks
    load = [[0.0] * ranks for _ in work]
    greedy = []
    for costs_of in hands[:, uneven].swapaxes(0, 1).tolist():
        kind, by_cost_here = 0, list(range(ranks))
        if len(load) > 1:
            spreads = [(max(row) - min(row)) * scale for row, scale in zip(load, unit, strict=True)]
            kind = spreads.index(max(spreads))
            by_cost_here.sort(key=costs_of[kind].__getitem__, reverse=True)
        seat = [0] * ranks
        for block, rank in zip(by_cost_here, sorted(range(ranks), key=load[kind].__getitem__), strict=True):
            seat[block] = rank
            for row, cost in zip(load, costs_of, strict=True):
                row[rank] += cost[block]
        greedy.append(seat)
    if greedy:
        seats[uneven] = greedy
    rank_of = np.empty(len(by_cost), dtype=np.int64)
    rank_of[by_cost] = seats.flatten()[: len(by_cost)]
    return torch.from_numpy(rank_of)
