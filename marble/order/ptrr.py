"""Processing-time round-robin: blocks dealt by their cost, for rings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    work = np.atleast_2d(costs.cpu().numpy())
    unit = 1 / np.maximum(work.sum(1), 1)
    by_cost = _falling(work, unit)
    rounds = -(-len(by_cost) // ranks)
    padded = np.zeros((len(work), rounds * ranks), dtype=work.dtype)
    np.take(work, by_cost, 1, out=padded[:, : len(by_cost)])
    # Only rounds of unequal costs depend on one another. They are small: plain lists are faster than arrays.
    change = np.flatnonzero((padded[:, 1:] != padded[:, :-1]).any(0)) + 1
    uneven = np.unique(change[change % ranks > 0] // ranks)
    seats = (np.arange(rounds)[:, None] + np.arange(ranks)) % ranks
    hands = padded.reshape(len(work), rounds, ranks)[:, uneven]
    if len(uneven):
        seats[uneven] = _greedy(hands.swapaxes(0, 1).tolist(), unit.tolist(), ranks)
    rank_of = np.empty(len(by_cost), dtype=np.int64)
    rank_of[by_cost] = seats.flatten()[: len(by_cost)]
    return torch.from_numpy(rank_of)


def _falling(work: NDArray[Any], unit: NDArray[np.float64]) -> NDArray[np.int64]:
    """The blocks by falling cost, which is ``unit @ work``; equal ones in their own order."""
    sizes = work.max(1, initial=0) + 1
    if work.dtype.kind == "f" or np.prod(sizes.astype(np.float64)) > 1 << 16:
        return np.argsort(-(unit @ work), kind="stable")
    # Few costs are different, and NumPy sorts short integers, here the places of the costs, by radix.
    code = np.ravel_multi_index(tuple(work), tuple(sizes))
    used = np.flatnonzero(np.bincount(code, minlength=1))
    place = np.zeros(used.max(initial=0) + 1, dtype=np.uint16)
    place[used] = np.unique(-(unit @ np.stack(np.unravel_index(used, tuple(sizes)))), return_inverse=True)[1]
    return np.argsort(place[code], kind="stable")


def _greedy(rounds: list[list[list[float]]], unit: list[float], ranks: int) -> list[list[int]]:
    """The ranks that get the blocks of each round, from the costs of each kind."""
    loads = [[0.0] * ranks for _ in unit]
    dealt = []
    for costs in rounds:
        kind = 0
        if len(loads) > 1:
            spreads = [(max(load) - min(load)) * scale for load, scale in zip(loads, unit, strict=True)]
            kind = spreads.index(max(spreads))
        seat = sorted(range(ranks), key=loads[kind].__getitem__)
        if len(loads) > 1:  # blocks of one kind fall in cost already
            by_cost = sorted(range(ranks), key=costs[kind].__getitem__, reverse=True)
            for place, rank in zip(by_cost, tuple(seat), strict=True):
                seat[place] = rank
        for load, costs_of in zip(loads, costs, strict=True):
            for rank, cost in zip(seat, costs_of, strict=True):
                load[rank] += cost
        dealt.append(seat)
    return dealt
