"""Which masks dense calls can express: pieces of spans whose queries see the same keys, or one more from each to the
next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marble.mask.tiles import StoredMask


class NotDenseError(ValueError):
    """A mask that dense calls cannot express, and why."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Neighbouring stored queries of one span, by the keys that the first and the last of them see.

    Attributes:
        start: int64 [pieces], first storage position of each piece, rising.
        stop: int64 [pieces], one past the last.
        first: int64 [pieces, 4], the two ranges lo₀, hi₀, lo₁, hi₁ of visible keys of the first query, as storage
            positions; an empty one has lo = hi.
        last: int64 [pieces, 4], the same of the last query. Only hi₀ may differ, by one per query.
    """

    start: Tensor
    stop: Tensor
    first: Tensor
    last: Tensor

    def __len__(self) -> int:
        return len(self.start)


def dense_pieces(mask: StoredMask, segments: Tensor) -> Pieces:
    """The segments cut at spans, with what their queries see.

    Args:
        mask: the mask over the stored tokens.
        segments: int64 [segments, 2], storage positions from first to one past the last, rising.

    Raises:
        NotDenseError: if a query sees more than two ranges, or ranges whose other ends move too.
    """
    if mask.ranges is None:
        raise NotDenseError("a mask of one's own is known pair by pair only; use 'ring' or 'sparse_a2a'")
    start, stop = segments.T.contiguous()
    if not len(start):
        nothing = torch.zeros(0, 4, dtype=torch.int64)
        return Pieces(start, stop, nothing, nothing)
    borders = mask.storage.stored_start
    at = torch.searchsorted(start, borders, right=True) - 1
    cut = torch.unique(torch.cat([start, borders[(at >= 0) & (borders < stop[at])]]))
    end = torch.minimum(torch.cat([cut[1:], stop[-1:]]), stop[torch.searchsorted(start, cut, right=True) - 1])
    seen = mask.ranges.queries(torch.stack([cut, end - 1]))
    first, last = seen.bounds
    moved = last - first
    count = end - cut - 1
    steady = (moved[:, [0, 2, 3]] == 0).all(1) & ((moved[:, 1] == 0) | (moved[:, 1] == count))
    for problem, reason in (
        (~seen.exact.all(0), "sees keys that are not two ranges: groups or noise spans interleave; use 'ring'"),
        (~steady, "has a sliding window, which moves both ends of what a query sees; use 'sparse_a2a'"),
    ):
        if problem.any():
            position = int(mask.storage.sequence_of(cut[problem][:1])[0])
            raise NotDenseError(f"the span at position {position} {reason}")
    return Pieces(cut, end, first, last)
