"""Visible ranges of the built-in masks, in storage order.

In the right storage order the queries that see one key are one range, and the keys that one query sees are at most
two. Both follow from spans, in closed form for any token: the hull of the visible tokens together with their exact
number. A hull is a range if and only if it has as many tokens as are visible. `KeyRanges.exact` and
`QueryRanges.exact` record that test, so nothing is assumed about the layout; what fails is left to the general path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marble.mask.storage import Storage


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """For some stored keys the storage positions of the queries that see them.

    Attributes:
        lo: int64 [...], the first visible query.
        hi: int64 [...], one past the last; equal to ``lo`` where no query sees the key.
        exact: bool [...], whether all queries in between see the key.
    """

    lo: Tensor
    hi: Tensor
    exact: Tensor


@dataclass(frozen=True, eq=False)
class QueryRanges:
    """For some stored queries the storage positions of the keys that they see.

    Attributes:
        bounds: int64 [..., 4], two disjoint ranges lo₀, hi₀, lo₁, hi₁; an empty one has lo = hi.
        exact: bool [...], whether the two ranges hold visible keys only.
    """

    bounds: Tensor
    exact: Tensor


@dataclass(frozen=True, eq=False)
class Ramp:
    """A bound of visible ranges over neighbouring tokens: ``clamp(place + offset, first, last)``.

    Attributes:
        first: int64 [...], the bound of the first token.
        last: int64 [...], that of the last; not below ``first``.
        offset: int64 [...], where the bound rises, the bound less the token's place.
    """

    first: Tensor
    last: Tensor
    offset: Tensor


@dataclass(frozen=True, eq=False)
class SpanRanges:
    """The visible ranges of all tokens in closed form, span by span in sequence order; places count in the span.

    Attributes:
        bounds: two ramps lo, hi (of keys) or four, lo₀, hi₀, lo₁, hi₁ (of queries); an empty range has lo ≥ hi.
        exact: bool [spans], whether they are the visible ranges of every token of the span.
    """

    bounds: tuple[Ramp, ...]
    exact: Tensor

    @cached_property
    def complete(self) -> bool:
        """Whether all tokens have visible ranges."""
        return bool(self.exact.all())

    @cached_property
    def table(self) -> Tensor:
        """The bounds as one tensor, int64 [bounds, 3, spans]: first, last and offset of each."""
        return torch.stack([torch.stack([bound.first, bound.last, bound.offset]) for bound in self.bounds])


class VisibleRanges:
    """The visible ranges of `marble.mask.modes.packed_mask` on a stored layout (padding sees nothing).

    Args:
        storage: the stored layout.
        window: the layer's window, None for a global layer.
    """

    def __init__(self, storage: Storage, window: int | None = None) -> None:
        self._spans = _Spans(storage)
        self._window = window

    def keys(self, tokens: Tensor) -> KeyRanges:
        """The ranges of the keys at the storage positions ``tokens``, int64 [...]."""
        return self._keys(*self._spans.locate(tokens))

    def queries(self, tokens: Tensor) -> QueryRanges:
        """The ranges of the queries at the storage positions ``tokens``, int64 [...]."""
        return self._queries(*self._spans.locate(tokens))

    @cached_property
    def key_spans(self) -> SpanRanges:
        """The ranges of all keys, from those of each span's first and last key.

        From key to key inside a span neither end of the range falls, each rises by one at most, and if the first and
        the last key are exact, so are all between them. An end that rises is the key itself, or ``window`` behind it.
        """
        spans, window = self._spans, self._window or 0
        found = self._keys(slice(None), spans.ends)
        (lo_first, lo_last), (hi_first, hi_last) = found.lo, found.hi
        lo, hi = Ramp(lo_first, lo_last, spans.own.lo), Ramp(hi_first, hi_last, spans.own.lo + window)
        return SpanRanges((lo, hi), found.exact.all(0))

    @cached_property
    def query_spans(self) -> SpanRanges:
        """The ranges of all queries, from those of each span's first and last query, as for keys.

        A range that only some queries of a span have counts as not exact.
        """
        spans, window = self._spans, self._window or 0
        found = self._queries(slice(None), spans.ends)
        own = spans.own.lo + 1
        offsets = (own - window, own, own - window, own)
        bounds = tuple(
            Ramp(first, last, offset)
            for (first, last), offset in zip(found.bounds.permute(2, 0, 1).contiguous(), offsets, strict=True)
        )
        rising = (found.bounds[1] >= found.bounds[0]).all(-1)
        return SpanRanges(bounds, found.exact.all(0) & rising)

    def _keys(self, span: Tensor | slice, within: Tensor) -> KeyRanges:
        spans = self._spans
        if self._window is None:
            hull = _global_keys(spans, span, within)
        else:
            hull = _window_keys(spans, span, within, self._window)
        seen = (hull.count != 0) & (spans.sample[span] >= 0)
        lo, hi = torch.where(seen, hull.lo, 0), torch.where(seen, hull.hi, 0)
        return KeyRanges(lo, hi, ~seen | (hi - lo == hull.count))

    def _queries(self, span: Tensor | slice, within: Tensor) -> QueryRanges:
        spans = self._spans
        if self._window is None:
            hulls = _global_queries(spans, span, within)
        else:
            hulls = _window_queries(spans, span, within, self._window)
        bounds, exact = [], torch.ones_like(within, dtype=torch.bool)
        for hull in hulls:
            seen = (hull.count != 0) & (spans.sample[span] >= 0)
            lo, hi = torch.where(seen, hull.lo, 0), torch.where(seen, hull.hi, 0)
            exact = exact & (~seen | (hi - lo == hull.count))
            bounds += [lo.expand_as(within), hi.expand_as(within)]
        return QueryRanges(torch.stack(bounds, -1), exact)


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

    def take(self, index: Tensor | slice) -> _Hull:
        return _Hull(self.lo[index], self.hi[index], self.count[index])


_FAR = 1 << 40


class _Spans:
    """Spans by sequence order with what the ranges need of them: hulls of neighbours and of groups."""

    def __init__(self, storage: Storage) -> None:
        table = storage.table
        self.storage = storage
        self.sample, self.seg, self.noise = table.sample, table.seg, table.noise >= 0
        self.start, self.length, self.stop = table.start, table.length, table.stop
        self.own = _Hull(storage.offset, storage.offset + table.length, table.length)
        self.ordinal = table.ordinal
        border = torch.cat([self.ordinal.diff() != 0, self.noise.new_ones(1)])
        self.sample_stop = self.stop[border][self.ordinal]
        self.sample_start = torch.cat([self.stop.new_zeros(1), self.stop[border][:-1]])[self.ordinal]
        # Groups: spans with one seg; every span without one is a group of its own, for uniform handling.
        self.group = torch.where(
            self.seg >= 0, self.seg, len(self.seg) + torch.arange(len(self.seg), device=storage.device)
        )
        self.by_group = torch.argsort(self.group, stable=True)

    def running(self, members: Tensor, *, by: Tensor, order: Tensor | None = None, after: bool) -> _Hull:
        """The hull of the members strictly before (or after) each span among the spans with an equal ``by``.

        ``order`` lists the spans so that equal values of ``by`` are neighbours (default: as they are).
        """
        index = torch.arange(len(by), device=by.device) if order is None else order
        index = index.flip(0) if after else index
        key = by[index]
        hull = self.own.where(members).take(index)
        rank = torch.cat([key.new_zeros(1), (key.diff() != 0).long()]).cumsum(0) * (4 * _FAR // max(len(by), 1))
        # Scans run over all spans at once: a shift per group keeps earlier groups from mattering.
        lo = (hull.low - rank).cummin(0).values + rank
        hi = (hull.high + rank).cummax(0).values - rank
        total = hull.count.cumsum(0)
        fresh = torch.cat([members.new_ones(1), key.diff() != 0])
        base = torch.where(fresh, total - hull.count, 0).cummax(0).values
        shifted = [torch.cat([value[:1], value[:-1]]) for value in (lo, hi, total)]
        count = torch.where(fresh, 0, shifted[2] - base)
        result = [torch.empty_like(count) for _ in range(3)]
        for target, value in zip(result, (shifted[0], shifted[1], count), strict=True):
            target[index] = value
        return _Hull(*result)

    @property
    def ends(self) -> Tensor:
        """The places of each span's first and last token, int64 [2, spans]."""
        return torch.stack([torch.zeros_like(self.length), self.length - 1])

    @property
    def everyone(self) -> Tensor:
        return torch.ones_like(self.noise)

    @cached_property
    def later(self) -> _Hull:
        """The later spans of each span's sample."""
        return self.running(self.everyone, by=self.ordinal, after=True)

    def earlier(self, members: Tensor) -> _Hull:
        """The earlier members of each span's sample."""
        return self.running(members, by=self.ordinal, after=False)

    @cached_property
    def mates_before(self) -> _Hull:
        """The earlier spans of each span's group."""
        return self.running(self.everyone, by=self.group, order=self.by_group, after=False)

    @cached_property
    def mates_after(self) -> _Hull:
        """The later spans of each span's group."""
        return self.running(self.everyone, by=self.group, order=self.by_group, after=True)

    @cached_property
    def whole_group(self) -> _Hull:
        """All spans of each span's group."""
        return self.mates_before.union(self.own).union(self.mates_after)

    @cached_property
    def main_and_behind(self) -> tuple[tuple[Tensor, _Hull], tuple[Tensor, _Hull]]:
        """The spans stored in sequence order, then noise and what is set apart, each with its visible earlier ones."""
        behind = self.storage.apart | self.noise
        main, other = ((member, self.earlier(member & ~self.noise)) for member in (~behind, behind))
        return main, other

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The span of each stored token, and its place inside."""
        span = self.storage.span_order[torch.searchsorted(self.storage.stored_start, tokens, right=True) - 1]
        return span, tokens - self.storage.offset[span]

    @cached_property
    def clear_before(self) -> Tensor:
        """Tokens that are not noise before each span."""
        clear = torch.where(self.noise, 0, self.length)
        return clear.cumsum(0) - clear

    def clear_tokens_before(self, position: Tensor) -> Tensor:
        """Tokens that are not noise before a sequence position."""
        span = torch.searchsorted(self.start, position, right=True) - 1
        return self.clear_before[span] + torch.where(self.noise[span], 0, position - self.start[span])

    @cached_property
    def disturbed(self) -> Tensor:
        """Spans of samples that something is set apart in."""
        found = torch.zeros_like(self.noise)
        found[self.ordinal[self.storage.apart]] = True
        return found[self.ordinal]

    def group_tokens_before(self, span: Tensor | slice, position: Tensor) -> Tensor:
        """How many tokens of a span's group lie before a sequence position, for [tokens] spans and positions."""
        order, shift = self.by_group, int(self.stop[-1]) + 1
        keys = self.group[order] * shift + self.start[order]
        at = torch.searchsorted(keys, self.group[span] * shift + position, right=True) - 1
        found = order[at.clamp(min=0)]
        before = self.mates_before.count[found] + (position - self.start[found]).clamp(min=0).minimum(
            self.length[found]
        )
        return torch.where((at >= 0) & (self.group[found] == self.group[span]), before, 0)


def _global_keys(spans: _Spans, span: Tensor | slice, within: Tensor) -> _Hull:
    later = spans.later.take(span)
    tail = _Hull(spans.own.lo[span] + within, spans.own.hi[span], spans.length[span] - within)
    # Later mates are among the later spans of the sample already.
    wide = spans.mates_before.take(span).union(spans.own.take(span)).union(later)
    visible = _choose(spans.seg[span] >= 0, wide, tail.union(later))
    return _choose(spans.noise[span], spans.whole_group.take(span), visible)


def _global_queries(spans: _Spans, span: Tensor | slice, within: Tensor) -> tuple[_Hull, _Hull]:
    head = _Hull(spans.own.lo[span], spans.own.lo[span] + within + 1, within + 1)
    own = _choose(spans.seg[span] >= 0, spans.own.take(span), head).union(spans.mates_after.take(span))
    own = _choose(spans.noise[span], spans.whole_group.take(span), own)
    first, second = (before.take(span).union(own.where(member[span])) for member, before in spans.main_and_behind)
    return first, second


def _window_keys(spans: _Spans, span: Tensor | slice, within: Tensor, window: int) -> _Hull:
    key = spans.start[span] + within
    reach = torch.minimum(key + window, spans.sample_stop[span])
    forward = _Hull(key, reach, reach - key)
    group = spans.whole_group.take(span)
    overlap = spans.group_tokens_before(span, reach) - spans.group_tokens_before(span, key)
    wide = forward.union(group)
    wide = _Hull(wide.lo, wide.hi, wide.count - overlap)
    return _choose(spans.noise[span], group, _natural(spans, span, _choose(spans.seg[span] >= 0, wide, forward)))


def _window_queries(spans: _Spans, span: Tensor | slice, within: Tensor, window: int) -> tuple[_Hull, _Hull]:
    query, noise = spans.start[span] + within, spans.noise[span]
    first = torch.maximum(query - window + 1, spans.sample_start[span])
    last = torch.where(noise, torch.minimum(query + 1, spans.start[span]), query + 1)
    last = torch.maximum(first, last)
    backward = _Hull(first, last, spans.clear_tokens_before(query + 1) - spans.clear_tokens_before(first))
    group = spans.whole_group.take(span)
    overlap = spans.group_tokens_before(span, query + 1) - spans.group_tokens_before(span, first)
    wide = backward.union(group)
    wide = _Hull(wide.lo, wide.hi, wide.count - overlap)
    main = _choose((spans.seg[span] >= 0) & ~noise, wide, backward)
    return _natural(spans, span, main), group.where(noise)


def _natural(spans: _Spans, span: Tensor | slice, hull: _Hull) -> _Hull:
    """Sequence positions are storage positions only in samples that nothing is set apart in; elsewhere, no range."""
    wrong = spans.disturbed[span]
    lo = torch.where(wrong, spans.sample_start[span], hull.lo)
    hi = torch.where(wrong, spans.sample_stop[span], hull.hi)
    return _Hull(lo, hi, torch.where(wrong, -1, hull.count))


def _choose(condition: Tensor, yes: _Hull, no: _Hull) -> _Hull:
    return _Hull(*(torch.where(condition, getattr(yes, part), getattr(no, part)) for part in ("lo", "hi", "count")))
