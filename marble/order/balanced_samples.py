"""Whole samples dealt to ranks, for schedules that fetch only what a rank's queries see."""

from __future__ import annotations

import torch
from torch import Tensor

_GOAL = 1.07
"""Largest share that is good enough: every further cut makes ranks fetch keys of a sample that they hold in part."""
_FINEST = 1 / 64


def balanced_samples(samples: Tensor, work: Tensor, ranks: int, block: int) -> Tensor:
    """Samples dealt so that ranks get equal work and equal tokens; only samples too large for that are cut.

    Pieces, the largest first, go to the rank that stays lowest in the larger of its share of work and its share of
    tokens. As long as the fullest rank is too full, pieces above a halved limit are cut in two and dealt anew.

    Args:
        samples: int64 [samples, 2], first token and one past the last of every sample, without gaps.
        work: [tokens] or [kinds of layers, tokens], work of each token as a query, in any unit; every kind is balanced.
        ranks: number of ranks.
        block: cuts fall on multiples of this, counted from the sample's first token.

    Returns:
        int64 [pieces, 3] of (first token, one past the last, rank).
    """
    tokens = torch.ones(1, int(samples[-1, 1]), dtype=torch.float64)
    spent = torch.cat([torch.atleast_2d(work).double(), tokens]).cumsum(1)
    # What all tokens before a position take, as a share of what one rank should get; tokens are the last kind.
    before = torch.nn.functional.pad(spent * ranks / spent[:, -1:].clamp(min=1e-9), (1, 0))
    best, best_peak = samples.new_zeros(0, 3), float("inf")
    limit = 1.0
    pieces = samples
    while limit >= _FINEST:
        pieces = _cut(pieces, before, limit, block)
        ranks_of, peak = _deal(pieces, before, ranks)
        if peak < best_peak - 1e-9:
            best, best_peak = torch.cat([pieces, ranks_of.unsqueeze(1)], 1), peak
        if peak <= _GOAL:
            break
        limit /= 2
    return best


def _shares(pieces: Tensor, before: Tensor) -> Tensor:
    """Each piece's share of what one rank should get, [pieces, kinds and tokens]."""
    start, stop = pieces.T
    return (before[:, stop] - before[:, start]).T


def _cut(pieces: Tensor, before: Tensor, limit: float, block: int) -> Tensor:
    """Pieces above ``limit`` of a rank's fair share in even parts."""
    start, stop = pieces.T
    parts = (_shares(pieces, before).amax(1) / limit).ceil().long().clamp(min=1)
    parts = torch.minimum(parts, -(-(stop - start) // block))
    owner = torch.repeat_interleave(torch.arange(len(pieces)), parts)
    part = torch.arange(len(owner)) - (parts.cumsum(0) - parts)[owner]
    blocks = -(-(stop - start) // block)
    low = start[owner] + (part * blocks[owner] // parts[owner]) * block
    high = torch.minimum(start[owner] + ((part + 1) * blocks[owner] // parts[owner]) * block, stop[owner])
    return torch.stack([low, high], 1)


def _deal(pieces: Tensor, before: Tensor, ranks: int) -> tuple[Tensor, float]:
    shares = _shares(pieces, before)
    load = torch.zeros(ranks, shares.shape[1], dtype=torch.float64)
    ranks_of = torch.empty(len(pieces), dtype=torch.int64)
    for piece in torch.argsort(shares.amax(1), descending=True, stable=True).tolist():
        after = (load + shares[piece]).amax(1)
        rank = int(after.argmin())
        load[rank] += shares[piece]
        ranks_of[piece] = rank
    return ranks_of, float(load.max())
