"""Contiguous chunks of the sequence dealt to ranks so that every step of a ring is even: for the chunked ring.

Source: MARBLE, section 03, the chunk layout and its cost C (Luma AI, October 2026).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marble.mask.pieces import dense_pieces
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder

MOST_PER_RANK = 64
_MOST = 2048
"""Chunks over all ranks; beyond, the work between all pairs of them takes longer to look at than it saves."""
RANGE_COST = 2.0**19
"""τ in pairs: half a tile of queries, what a range's ragged end wastes, against 8k keys. Not fitted to kernels yet."""
_ROUNDS, _SWAPS = 120, 64
"""Rounds of refinement at most, and swaps that are tried in each; a swap costs ranks², so beyond 32 ranks fewer are."""
_PROMISING = 1.1
"""Cost, over that of the best number of chunks, up to which another number is refined too."""
_PATIENCE = 20
"""Rounds without a better swap after which refinement ends."""

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of (almost) equal length, and who gets them.

    Attributes:
        rank: int64 [chunks], the rank of each chunk, in sequence order.
        cost: C = Σ over steps of the busiest rank's pairs, plus τ · ranks · chunks per rank.
        mean: pairs of the mean rank over all steps; what C is at best.
    """

    rank: Index
    cost: float
    mean: float


def chunks(
    mask: StoredMask, ranks: int, least: int, *, tau: float = RANGE_COST, refine: bool = True, most: int = _MOST
) -> Chunks:
    """Choose the number of chunks per rank, 1, 2, 4, … 64, and deal them.

    Each number is dealt by PTRR's rule (rounds, every other one reversed), once in order of work and once in sequence
    order. The best number is refined, and so is the next if it is close: chunks of two ranks are swapped as long as
    that lowers the sum of the slowest steps. Swaps are drawn at random, from the ranks that others wait for and with a
    fixed seed, so that every rank finds the same.

    Args:
        mask: the mask over the stored tokens; dense calls must be able to express it.
        ranks: number of ranks.
        least: tokens that a chunk should have at least.
        tau: τ, what one range costs in one step, in pairs.
        refine: whether to swap.
        most: chunks over all ranks at most, but one for each.

    Raises:
        NotDenseError: if dense calls cannot express the mask.
    """
    tokens = mask.storage.layout.tokens
    finest = min(MOST_PER_RANK, max(tokens // (ranks * least), 1), max(most // ranks, 1))
    finest = per_rank = 1 << finest.bit_length() - 1
    top = ranks * finest
    while not refine and 2 * top <= most:  # one look at the mask then serves all numbers of ranks
        top *= 2
    work = _halved(mask, top, top // (ranks * finest))
    mean = float(work.sum()) / ranks
    starts = []
    while True:
        turned = np.ascontiguousarray(work.T)
        best = min((_Dealt(work, turned, rank, ranks) for rank in _dealt(work, ranks)), key=lambda dealt: dealt.cost)
        starts.append((best.cost + tau * ranks * per_rank, per_rank, best))
        if per_rank == 1:
            break
        per_rank //= 2
        work = _halved(mask, top, top // (ranks * per_rank))
    starts.sort(key=lambda start: start[:2])
    found = []
    for cost, per_rank, dealt in starts[: 2 if refine else 1]:
        if refine and cost <= _PROMISING * starts[0][0]:
            dealt.refine()
        found.append((dealt.cost + tau * ranks * per_rank, per_rank, dealt.rank))
    cost, _, rank = min(found, key=lambda each: each[:2])
    return Chunks(rank, cost, mean)


def chunk_order(mask: StoredMask, ranks: int, least: int, *, refine: bool = True) -> TokenOrder:
    """The token order of `chunks`; arguments and errors as there. Without refinement, half as many chunks at most."""
    most = _MOST if refine else _MOST // 2
    return chunked_order(
        mask.storage, ranks, torch.from_numpy(chunks(mask, ranks, least, refine=refine, most=most).rank)
    )


def chunked_order(storage: Storage, ranks: int, rank: Tensor) -> TokenOrder:
    """The token order of chunks (almost) equal in length, chunk i on rank ``rank[i]``; int64 [chunks]."""
    start, stop, chunk = chunk_segments(storage, len(rank)).T
    owner, count = torch.unique_consecutive(rank[chunk], return_counts=True)
    last = count.cumsum(0) - 1
    return TokenOrder("chunks", storage, ranks, torch.stack([start[last - count + 1], stop[last], owner], 1))


def chunk_segments(storage: Storage, count: int) -> Tensor:
    """The stored tokens by chunk of the sequence: int64 [segments, 3] of (first storage position, one past the last,
    chunk), rising; cut at spans too, and with no empty ones."""
    table, tokens = storage.layout.table, storage.layout.tokens
    borders = torch.arange(count) * tokens // count
    start = torch.unique(torch.cat([table.start, borders]))
    length = torch.cat([start[1:], start.new_full((1,), tokens)]) - start
    span = torch.searchsorted(table.start, start, right=True) - 1
    stored = storage.offset[span] + start - table.start[span]
    chunk = torch.searchsorted(borders, start, right=True) - 1
    return torch.stack([stored, stored + length, chunk], 1)[torch.argsort(stored)]


def pair_work(mask: StoredMask, count: int) -> Array:
    """Legal pairs between the queries of each chunk and the keys of each chunk, [chunks, chunks].

    From spans, not tokens: how many queries of a chunk see a stored key is a step function, summed over the stretches
    in which the chunks are stored.

    Raises:
        NotDenseError: if dense calls cannot express the mask.
    """
    segments = chunk_segments(mask.storage, count)
    pieces = dense_pieces(mask, segments[:, :2])
    chunk = segments[:, 2].numpy()
    rows, first = (pieces.stop - pieces.start).numpy(), pieces.first.numpy()
    # A piece that sees one more key from query to query sees a triangle of itself, and all before it.
    grows = (pieces.last != pieces.first).any(1).numpy()
    triangle = np.where(grows, rows * (rows - 1) / 2, 0)
    fresh = np.append(True, chunk[1:] != chunk[:-1])
    low, owner = segments[:, 0].numpy()[fresh], chunk[fresh]
    high = np.append(low[1:], mask.storage.layout.tokens)
    # A range of visible keys begins to count at lo and ends at hi, each inside some stretch.
    edge, sign = first.T.ravel(), np.repeat(np.tile([1.0, -1.0], 2), len(rows))
    number, query = sign * np.tile(rows, 4), np.tile(chunk, 4)
    some = np.repeat(first[:, [0, 2]] < first[:, [1, 3]], 2, axis=1).T.ravel()
    edge, number, query = edge[some], number[some], query[some]
    stretch = np.searchsorted(low, edge, side="right") - 1
    begin, end = np.full(count, len(low)), np.full(count, -1)
    np.minimum.at(begin, query, stretch)
    np.maximum.at(end, query, stretch)
    width = np.maximum(end - begin + 2, 0)
    offset = width.cumsum() - width
    at, total = offset[query] + stretch - begin[query], int(width.sum())
    inside = np.bincount(at, number * (high[stretch] - edge), total)
    whole = np.bincount(at + 1, number, total).cumsum()
    of = np.repeat(np.arange(count), width)
    over = np.minimum(np.arange(total) - offset[of] + begin[of], len(low) - 1)
    pairs = np.bincount(of * count + owner[over], inside + whole * (high - low)[over], count * count)
    own = np.bincount(chunk * (count + 1), triangle, count * count)
    return np.asarray(pairs + own, dtype=np.float64).reshape(count, count)


@lru_cache(maxsize=8)
def _halved(mask: StoredMask, count: int, times: int) -> Array:
    """`pair_work` of ``count`` chunks, ``times`` of them (a power of two) at a time; kept, as other numbers
    of ranks need the same."""
    if times == 1:
        return pair_work(mask, count)
    work = _halved(mask, count, times // 2)
    columns = work[:, ::2] + work[:, 1::2]
    return columns[::2] + columns[1::2]


def _dealt(work: Array, ranks: int) -> Iterator[Index]:
    """PTRR's rule over the chunks in order of work, and in sequence order."""
    place = np.arange(len(work))
    turn = np.where(place // ranks % 2 == 0, place % ranks, ranks - 1 - place % ranks)
    for order in (np.argsort(-work.sum(1), kind="stable"), place):
        rank = np.empty_like(turn)
        rank[order] = turn
        yield rank


class _Dealt:
    """Chunks with their ranks, equally many each, and the sums that tell what a swap would change.

    ``turned`` is ``work`` with rows and columns exchanged. ``queries`` [ranks, chunks] is the work of a chunk's queries
    on the keys of each rank, ``keys`` [ranks, chunks] that of each rank's queries on a chunk's keys, and ``between``
    [ranks, ranks] that of one rank's queries on another's keys.
    """

    def __init__(self, work: Array, turned: Array, rank: Index, ranks: int) -> None:
        self.work, self.rank, self.turned = work, rank, turned
        # Sums, not products with a one-hot matrix: a threaded BLAS is slower for matrices this thin.
        self.by_rank = np.argsort(rank, kind="stable").reshape(ranks, -1)
        self.queries = turned[self.by_rank].sum(1)
        self.between = self.queries[:, self.by_rank].sum(2).T
        # Rank r computes on the keys of rank r − s in step s.
        order = np.arange(ranks)
        self.step = order * ranks + (order - order[:, None]) % ranks

    @cached_property
    def keys(self) -> Array:
        """See above; only refinement needs it."""
        return self.work[self.by_rank].sum(1)

    @property
    def cost(self) -> float:
        """Σ over steps of the slowest rank's work."""
        return float(self.between.ravel()[self.step].max(1).sum())

    def refine(self) -> None:
        """Swap chunks as long as that helps."""
        draw = np.random.default_rng(0)
        failed = 0
        for _ in range(_ROUNDS):
            one, other = self._candidates(draw)
            if not len(one):
                return
            found = self._swapped(one, other)
            costs = found.reshape(len(one), -1)[:, self.step].max(2).sum(1)
            best = int(costs.argmin())
            failed = 0 if costs[best] < self.cost * (1 - 1e-6) else failed + 1
            if not failed:
                self._swap(int(one[best]), int(other[best]), found[best])
            elif failed == _PATIENCE:
                return

    def _candidates(self, draw: np.random.Generator) -> tuple[Index, Index]:
        """Pairs of chunks to swap: one whose queries or keys belong to the slowest rank of a step, and any other."""
        steps = self.between.ravel()[self.step]
        # Whole numbers below 2^53, so that every machine draws the same.
        slowest, excess = steps.argmax(1), steps.max(1) * len(steps) - steps.sum(1)
        if not excess.sum() > 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        count = max(_SWAPS * 32**2 // max(len(steps), 32) ** 2, 4)
        step = draw.choice(len(steps), count, p=excess / excess.sum())
        by_query = draw.random(count) < 0.5
        rank = np.where(by_query, slowest[step], (slowest[step] - step) % len(steps))
        one = self.by_rank[rank, draw.integers(self.by_rank.shape[1], size=count)]
        other = draw.integers(len(self.rank), size=count)
        apart = self.rank[one] != self.rank[other]
        return one[apart], other[apart]

    def _swapped(self, one: Index, other: Index) -> Array:
        """``between`` after each swap, [swaps, ranks, ranks]: two rows and two columns change."""
        at, ranks = np.arange(len(one)), len(self.between)
        change = np.zeros((len(one), ranks))
        change[at, self.rank[other]] = 1
        change[at, self.rank[one]] = -1
        work = self.work
        both = work[one, one] - work[one, other] - work[other, one] + work[other, other]
        half = 0.5 * both[:, None] * change
        rows = (self.queries[:, one] - self.queries[:, other]).T + half
        columns = (self.keys[:, one] - self.keys[:, other]).T + half
        return self.between + change[:, :, None] * rows[:, None] + columns[:, :, None] * change[:, None]

    def _swap(self, one: int, other: int, between: Array) -> None:
        to, back = self.rank[other], self.rank[one]
        self.between = between
        self.rank[one], self.rank[other] = to, back
        places = self.by_rank[back] == one, self.by_rank[to] == other
        self.by_rank[back, places[0]], self.by_rank[to, places[1]] = other, one
        for rank, sign in ((to, 1), (back, -1)):
            self.queries[rank] += sign * (self.turned[one] - self.turned[other])
            self.keys[rank] += sign * (self.work[one] - self.work[other])
