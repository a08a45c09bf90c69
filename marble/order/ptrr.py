"""Processing-time round-robin: blocks dealt by their cost, for rings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORTH = 20
"""How much more even steps must become than the ranks' work becomes uneven: other schedules wait once, not in every
step."""


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


def ptrr_of_tiles(costs: Tensor, stretches: Sequence[Tensor], ranks: int) -> Tensor:
    """`ptrr` by the tiles of query blocks, or by those of key blocks too, whichever makes a ring's steps more even.

    All ranks can have the same work and a ring still wait in every step: if what is seen of one rank's keys is more
    than of another's, whoever holds them has more to do. In a long sample, where all see all, even keys make every step
    even (BAGEL's long pack, 1M tokens on 32 ranks: Σ of the slowest steps 1.20 of the mean, with them 1.005). In many
    short ones they bind what could be dealt more evenly.

    Args:
        costs: [kinds of layers, blocks], visited tiles of each query block.
        stretches: for each kind, its visited tiles: key block, first query block and one past the last, int64
            [3, stretches].
        ranks: number of ranks.

    Returns:
        int64 [blocks].
    """
    by_queries = ptrr(costs, ranks)
    if ranks == 1:
        return by_queries
    seen = [one.cpu().numpy() for one in stretches]
    blocks = costs.shape[1]
    keys = np.stack([np.bincount(key, last - first, blocks).astype(np.int64) for key, first, last in seen])
    by_both = ptrr(torch.cat([costs.cpu(), torch.from_numpy(keys)]), ranks)
    (steps, work), (steps_of_both, work_of_both) = (
        np.array([_busiest(one, rank_of.numpy(), ranks) for one in seen]).sum(0) for rank_of in (by_queries, by_both)
    )
    return by_both if steps - steps_of_both > _WORTH * max(work_of_both - work, 0) else by_queries


def _busiest(stretches: NDArray[np.int64], rank_of: NDArray[np.int64], ranks: int) -> tuple[float, float]:
    """Tiles of the slowest rank of every ring step, and those of the busiest rank, over those of the mean rank."""
    key, first, last = stretches
    tiles = np.empty((ranks, ranks))
    for rank in range(ranks):
        before = np.concatenate([[0], np.cumsum(rank_of == rank)])
        tiles[rank] = np.bincount(rank_of[key], before[last] - before[first], ranks)
    one, step = np.arange(ranks)[:, None], np.arange(ranks)
    mean = max(tiles.sum() / ranks, 1)
    return float(tiles[one, (one - step) % ranks].max(0).sum() / mean), float(tiles.sum(1).max() / mean)


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
