"""Whole samples dealt to ranks, for schedules that fetch only what a rank's queries see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_GOAL = 1.07
"""Largest share that is good enough: every further cut makes ranks fetch keys of a sample that they hold in part."""
_FINEST = 1 / 64
_ROUNDING = 1e-9
"""Shares this far apart are the same: a sample of exactly a rank's share must not be cut for the last bit of a sum."""


def balanced_samples(samples: Tensor, work: Tensor, ranks: int, block: int, *, unit: int = 1) -> Tensor:
    """Samples dealt so that ranks get equal work and equal tokens; only samples too large for that are cut.

    Pieces, the largest first, go to the rank that stays lowest in the larger of its share of work and its share of
    tokens. As long as the fullest rank is too full, pieces above a halved limit are cut in two and dealt anew.

    Args:
        samples: int64 [samples, 2], first token and one past the last of every sample, without gaps.
        work: [tokens / unit] or [kinds of layers, tokens / unit], what every ``unit`` tokens cost as queries; every
            kind is balanced.
        ranks: number of ranks.
        block: cuts fall on multiples of this, counted from the sample's first token.
        unit: tokens that an entry of ``work`` stands for; the last may stand for fewer.

    Returns:
        int64 [pieces, 3] of (first token, one past the last, rank).
    """
    tokens = int(samples[-1, 1])
    spent = torch.atleast_2d(work).double()
    width = torch.full((spent.shape[1],), unit, dtype=torch.float64)
    width[-1] = tokens - unit * (len(width) - 1)
    spent = torch.cat([spent, width.unsqueeze(0)])  # tokens are the last kind
    start = torch.nn.functional.pad(spent.cumsum(1), (1, 0))
    rate = torch.nn.functional.pad(spent / width, (0, 1))
    scale = ranks / start[:, -1].clamp(min=1e-9)

    def before(position: Tensor) -> Tensor:
        """What all tokens before a position take, as shares of what one rank should get, [positions, kinds]."""
        at = position // unit
        return (start[:, at] + rate[:, at] * (position - at * unit)).T * scale

    best, best_peak = samples.new_zeros(0, 3), float("inf")
    limit = 1.0
    pieces = samples
    while limit >= _FINEST:
        pieces = _cut(pieces, before, limit, block)
        ranks_of, peak = _deal(pieces, before, ranks)
        if peak < best_peak - _ROUNDING:
            best, best_peak = torch.cat([pieces, ranks_of.unsqueeze(1)], 1), peak
        if peak <= _GOAL:
            break
        limit /= 2
    return best


Before = Callable[[Tensor], Tensor]


def _shares(pieces: Tensor, before: Before) -> Tensor:
    """Each piece's share of what one rank should get, [pieces, kinds and tokens]."""
    start, stop = pieces.T
    return before(stop) - before(start)


def _cut(pieces: Tensor, before: Before, limit: float, block: int) -> Tensor:
    """Pieces above ``limit`` of a rank's fair share in even parts."""
    start, stop = pieces.T
    parts = (_shares(pieces, before).amax(1) / limit - _ROUNDING).ceil().long().clamp(min=1)
    parts = torch.minimum(parts, -(-(stop - start) // block))
    owner = torch.repeat_interleave(torch.arange(len(pieces)), parts)
    part = torch.arange(len(owner)) - (parts.cumsum(0) - parts)[owner]
    blocks = -(-(stop - start) // block)
    low = start[owner] + (part * blocks[owner] // parts[owner]) * block
    high = torch.minimum(start[owner] + ((part + 1) * blocks[owner] // parts[owner]) * block, stop[owner])
    return torch.stack([low, high], 1)


def _deal(pieces: Tensor, before: Before, ranks: int) -> tuple[Tensor, float]:
    shares = _shares(pieces, before).numpy()
    load = np.zeros((ranks, shares.shape[1]))
    ranks_of = np.empty(len(pieces), dtype=np.int64)
    for piece in np.argsort(-shares.max(1), kind="stable"):
        after = load + shares[piece]
        rank = int(after.max(1).argmin())
        load[rank] = after[rank]
        ranks_of[piece] = rank
    return torch.from_numpy(ranks_of), float(load.max())
