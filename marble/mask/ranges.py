"""Visible ranges of the built-in masks, in storage order.

In the right storage order the queries that see one key are one range, and the keys that one query sees are at most
two. Both are computed from spans as the hull of the visible tokens, together with their exact number: a hull is a
range if and only if it has as many tokens as are visible. `KeyRanges.exact` and `QueryRanges.exact` record that test
token by token, so nothing is assumed about the layout; what fails is left to the general path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marble.mask.storage import Storage


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """For each stored key the storage positions of the queries that see it.

    Attributes:
        lo: int64 [tokens], the first visible query.
        hi: int64 [tokens], one past the last; equal to ``lo`` where no query sees the key.
        exact: bool [tokens], whether all queries in between see the key.
    """

    lo: Tensor
    hi: Tensor
    exact: Tensor


@dataclass(frozen=True, eq=False)
class QueryRanges:
    """For each stored query the storage positions of the keys that it sees.

    Attributes:
        bounds: int64 [tokens, 4], two disjoint ranges lo₀, hi₀, lo₁, hi₁; an empty one has lo = hi.
        exact: bool [tokens], whether the two ranges hold visible keys only.
    """

    bounds: Tensor
    exact: Tensor


def visible_ranges(storage: Storage, window: int | None = None) -> tuple[KeyRanges, QueryRanges]:
    """The visible ranges of `marble.mask.modes.packed_mask` on a stored layout (padding sees nothing)."""
    spans = _Spans(storage)
    if window is None:
        keys, queries = _global_keys(spans), _global_queries(spans)
    else:
        keys, queries = _window_keys(spans, window), _window_queries(spans, window)
    padding = (spans.sample < 0)[storage.span]
    first, second = queries
    return _key_ranges(keys, padding), _query_ranges(first, second, padding)


@dataclass(frozen=True, eq=False)
class _Hull:
    """A set of stored tokens by its first, its last (plus one) and its size; the empty set has count 0."""

    lo: Tensor
    hi: Tensor
    count: Tensor

    def union(self, other: _Hull) -> _Hull:
        """The union with a disjoint set."""
        lo, hi = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        return _Hull(lo, hi, self.count + other.count)

    @property
    def low(self) -> Tensor:
        return torch.where(self.count > 0, self.lo, _FAR)

    @property
    def high(self) -> Tensor:
        return torch.where(self.count > 0, self.hi, -_FAR)

    def where(self, condition: Tensor) -> _Hull:
        """This set where the condition holds, else the empty set."""
        return _Hull(self.lo, self.hi, torch.where(condition, self.count, 0))

    def take(self, index: Tensor) -> _Hull:
        return _Hull(self.lo[index], self.hi[index], self.count[index])


_FAR = 1 << 40


class _Spans:
    """Spans by sequence order with what the ranges need of them: hulls of neighbours and of groups."""

    def __init__(self, storage: Storage) -> None:
        table = storage.layout.table
        self.storage = storage
        self.sample, self.seg, self.noise = table.sample, table.seg, table.noise >= 0
        self.start, self.length, self.stop = table.start, table.length, table.stop
        self.own = _Hull(storage.offset, storage.offset + table.length, table.length)
        self.ordinal = table.ordinal
        border = torch.cat([self.ordinal.diff() != 0, torch.ones(1, dtype=torch.bool)])
        self.sample_stop = self.stop[border][self.ordinal]
        self.sample_start = torch.cat([self.stop.new_zeros(1), self.stop[border][:-1]])[self.ordinal]
        # Groups: spans with one seg; every span without one is a group of its own, for uniform handling.
        self.group = torch.where(self.seg >= 0, self.seg, int(self.seg.max()) + 1 + torch.arange(len(self.seg)))
        self.by_group = torch.argsort(self.group, stable=True)

    def running(self, members: Tensor, *, by: Tensor, order: Tensor | None = None, after: bool) -> _Hull:
        """The hull of the members strictly before (or after) each span among the spans with an equal ``by``.

        ``order`` lists the spans so that equal values of ``by`` are neighbours (default: as they are).
        """
        index = torch.arange(len(by)) if order is None else order
        index = index.flip(0) if after else index
        key = by[index]
        hull = self.own.where(members).take(index)
        rank = torch.cat([key.new_zeros(1), (key.diff() != 0).long()]).cumsum(0) * (4 * _FAR // max(len(by), 1))
        # Scans run over all spans at once: a shift per group keeps earlier groups from mattering.
        lo = (hull.low - rank).cummin(0).values + rank
        hi = (hull.high + rank).cummax(0).values - rank
        total = hull.count.cumsum(0)
        fresh = torch.cat([torch.ones(1, dtype=torch.bool), key.diff() != 0])
        base = torch.where(fresh, total - hull.count, 0).cummax(0).values
        shifted = [torch.cat([value[:1], value[:-1]]) for value in (lo, hi, total)]
        count = torch.where(fresh, 0, shifted[2] - base)
        result = [torch.empty_like(count) for _ in range(3)]
        for target, value in zip(result, (shifted[0], shifted[1], count), strict=True):
            target[index] = value
        return _Hull(*result)

    @property
    def everyone(self) -> Tensor:
        return torch.ones(len(self.seg), dtype=torch.bool)

    def mates(self, *, after: bool) -> _Hull:
        """The other spans of each span's group, before or after it."""
        return self.running(self.everyone, by=self.group, order=self.by_group, after=after)

    def whole_group(self) -> _Hull:
        """All spans of each span's group."""
        return self.mates(after=False).union(self.own).union(self.mates(after=True))

    def group_tokens_before(self, span: Tensor, position: Tensor) -> Tensor:
        """How many tokens of a span's group lie before a sequence position, for [tokens] spans and positions."""
        order, shift = self.by_group, int(self.stop[-1]) + 1
        keys = self.group[order] * shift + self.start[order]
        at = torch.searchsorted(keys, self.group[span] * shift + position, right=True) - 1
        found = order[at.clamp(min=0)]
        before = self.mates(after=False).count[found] + (position - self.start[found]).clamp(min=0).minimum(
            self.length[found]
        )
        return torch.where((at >= 0) & (self.group[found] == self.group[span]), before, 0)


def _global_keys(spans: _Spans) -> _Hull:
    later = spans.running(spans.everyone, by=spans.ordinal, after=True)
    # Later mates are among the later spans of the sample already.
    both_ways = spans.mates(after=False).union(spans.own).union(later)
    span, within = spans.storage.span, spans.storage.within
    tail = _Hull(spans.own.lo[span] + within, spans.own.hi[span], spans.length[span] - within)
    causal = tail.union(later.take(span))
    wide = both_ways.take(span)
    alone = spans.whole_group().take(span)
    return _choose(spans.noise[span], alone, _choose(spans.seg[span] >= 0, wide, causal))


def _global_queries(spans: _Spans) -> tuple[_Hull, _Hull]:
    behind = spans.storage.apart | spans.noise
    span, within = spans.storage.span, spans.storage.within
    head = _Hull(spans.own.lo[span], spans.own.lo[span] + within + 1, within + 1)
    own = _choose(spans.seg[span] >= 0, spans.own.take(span), head)
    own = own.union(spans.mates(after=True).take(span))
    own = _choose(spans.noise[span], spans.whole_group().take(span), own)
    result = []
    for member in (~behind, behind):
        before = spans.running(member & ~spans.noise, by=spans.ordinal, after=False).take(span)
        result.append(before.union(own.where(member[span])))
    return result[0], result[1]


def _window_keys(spans: _Spans, window: int) -> _Hull:
    span, key = spans.storage.span, spans.storage.sequence
    reach = torch.minimum(key + window, spans.sample_stop[span])
    forward = _Hull(key, reach, reach - key)
    group = spans.whole_group().take(span)
    overlap = spans.group_tokens_before(span, reach) - spans.group_tokens_before(span, key)
    wide = forward.union(group)
    wide = _Hull(wide.lo, wide.hi, wide.count - overlap)
    return _choose(spans.noise[span], group, _natural(spans, _choose(spans.seg[span] >= 0, wide, forward)))


def _window_queries(spans: _Spans, window: int) -> tuple[_Hull, _Hull]:
    span, query = spans.storage.span, spans.storage.sequence
    clear = torch.cat([query.new_zeros(1), torch.repeat_interleave((~spans.noise).long(), spans.length).cumsum(0)])
    first = torch.maximum(query - window + 1, spans.sample_start[span])
    last = torch.where(spans.noise[span], torch.minimum(query + 1, spans.start[span]), query + 1)
    last = torch.maximum(first, last)
    backward = _Hull(first, last, clear[query + 1] - clear[first])
    group = spans.whole_group().take(span)
    overlap = spans.group_tokens_before(span, query + 1) - spans.group_tokens_before(span, first)
    wide = backward.union(group)
    wide = _Hull(wide.lo, wide.hi, wide.count - overlap)
    noise, linked = spans.noise[span], spans.seg[span] >= 0
    main = _choose(linked & ~noise, wide, backward)
    return _natural(spans, main), group.where(noise)


def _natural(spans: _Spans, hull: _Hull) -> _Hull:
    """Sequence positions are storage positions only in samples that nothing is set apart in; elsewhere, no range."""
    disturbed = torch.zeros(int(spans.ordinal[-1]) + 1, dtype=torch.bool)
    disturbed[spans.ordinal[spans.storage.apart]] = True
    wrong = disturbed[spans.ordinal][spans.storage.span]
    lo = torch.where(wrong, spans.sample_start[spans.storage.span], hull.lo)
    hi = torch.where(wrong, spans.sample_stop[spans.storage.span], hull.hi)
    return _Hull(lo, hi, torch.where(wrong, -1, hull.count))


def _choose(condition: Tensor, yes: _Hull, no: _Hull) -> _Hull:
    return _Hull(*(torch.where(condition, getattr(yes, part), getattr(no, part)) for part in ("lo", "hi", "count")))


def _key_ranges(hull: _Hull, padding: Tensor) -> KeyRanges:
    seen = (hull.count != 0) & ~padding
    lo, hi = torch.where(seen, hull.lo, 0), torch.where(seen, hull.hi, 0)
    return KeyRanges(lo, hi, ~seen | (hi - lo == hull.count))


def _query_ranges(first: _Hull, second: _Hull, padding: Tensor) -> QueryRanges:
    bounds, exact = [], torch.ones_like(padding)
    for hull in (first, second):
        seen = (hull.count != 0) & ~padding
        lo, hi = torch.where(seen, hull.lo, 0), torch.where(seen, hull.hi, 0)
        exact = exact & (~seen | (hi - lo == hull.count))
        bounds += [lo, hi]
    return QueryRanges(torch.stack(bounds, 1), exact)
