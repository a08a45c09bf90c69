"""Visible ranges of the built-in masks, in storage order.

In the right storage order the queries that see one key are one range, and the keys that one query sees are at most
two. Both follow from spans, in closed form for any token: the hull of the visible tokens together with their exact
number. A hull is a range if and only if it has as many tokens as are visible. `KeyRanges.exact` and
`QueryRanges.exact` record that test, so nothing is assumed about the layout; what fails is left to the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marble.mask.storage import Storage
from marble.mask.vectors import by_kernel, running_max

if TYPE_CHECKING:
    from marble.kernels.triton.spans import Neighbours

_MANY = 1 << 14  # spans whose ranges are worth a second thread


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
        table: int64 [bounds, 3, spans], contiguous: first, last and offset of each bound, as in `Ramp`.
        exact: bool [spans], whether they are the visible ranges of every token of the span.
    """

    table: Tensor
    exact: Tensor

    @property
    def bounds(self) -> tuple[Ramp, ...]:
        """Two ramps lo, hi (of keys) or four, lo₀, hi₀, lo₁, hi₁ (of queries); an empty range has lo ≥ hi."""
        return tuple(Ramp(*bound) for bound in self.table)

    @cached_property
    def complete(self) -> bool:
        """Whether all tokens have visible ranges."""
        return bool(self.exact.all())


class VisibleRanges:
    """The visible ranges of `marble.mask.modes.packed_mask` on a stored layout (padding sees nothing).

    Args:
        storage: the stored layout.
        window: the layer's window, None for a global layer.
        spans: what was found about the spans already.
    """

    def __init__(self, storage: Storage, window: int | None = None, spans: _Spans | None = None) -> None:
        self._spans = _Spans(storage) if spans is None else spans
        self._window = window

    @property
    def many(self) -> bool:
        """Whether there are so many spans that a second thread is worth it."""
        return self._spans.many

    def with_window(self, window: int | None) -> VisibleRanges:
        """Those of a layer with another window; what both need of the layout is found once."""
        return VisibleRanges(self._spans.storage, window, self._spans)

    def keys(self, tokens: Tensor) -> KeyRanges:
        """The ranges of the keys at the storage positions ``tokens``, int64 [...]."""
        bounds, exact = self._keys(*self._spans.locate(tokens))
        return KeyRanges(bounds[..., 0], bounds[..., 1], exact)

    def queries(self, tokens: Tensor) -> QueryRanges:
        """The ranges of the queries at the storage positions ``tokens``, int64 [...]."""
        return QueryRanges(*self._queries(*self._spans.locate(tokens)))

    @cached_property
    def key_spans(self) -> SpanRanges:
        """The ranges of all keys, from those of each span's first and last key.

        From key to key inside a span neither end of the range falls, each rises by one at most, and if the first and
        the last key are exact, so are all between them. An end that rises is the key itself, or ``window`` behind it.
        """
        if by_kernel(self._spans.start):
            return SpanRanges(*self._spans.neighbours.visible(self._window, keys=True))
        own = self._spans.start_stored
        bounds, exact = self._keys(slice(None), self._spans.ends)
        return SpanRanges(_ramps(bounds, (own, own + (self._window or 0))), exact.all(0))

    @cached_property
    def query_spans(self) -> SpanRanges:
        """The ranges of all queries, from those of each span's first and last query, as for keys.

        A range that only some queries of a span have counts as not exact.
        """
        if by_kernel(self._spans.start):
            return SpanRanges(*self._spans.neighbours.visible(self._window, keys=False))
        own = self._spans.start_stored + 1
        bounds, exact = self._queries(slice(None), self._spans.ends)
        back = own - (self._window or 0)
        rising = (bounds[1] >= bounds[0]).all(-1)
        return SpanRanges(_ramps(bounds, (back, own, back, own)), exact.all(0) & rising)

    def _keys(self, span: Tensor | slice, within: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds lo, hi, int64 [..., 2], and whether they are exact, bool [...]."""
        spans = self._spans
        if self._window is None:
            hull = _global_keys(spans, span, within)
        else:
            hull = _window_keys(spans, span, within, self._window)
        return hull.range(spans.real[span])

    def _queries(self, span: Tensor | slice, within: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds lo₀, hi₀, lo₁, hi₁, int64 [..., 4], and whether they are exact, bool [...]."""
        spans = self._spans
        if self._window is None:
            hulls = _global_queries(spans, span, within)
        else:
            hulls = _window_queries(spans, span, within, self._window)
        bounds, exact = _Hull.stack(*hulls).range(spans.real[span].unsqueeze(-1))
        return bounds.flatten(-2), exact.all(-1)


def _ramps(bounds: Tensor, offsets: Sequence[Tensor]) -> Tensor:
    """The table of `SpanRanges`, from the bounds of each span's first and last token, int64 [2, spans, bounds], and the
    offset of each bound."""
    return torch.cat([bounds.permute(2, 0, 1), torch.stack(list(offsets)).unsqueeze(1)], 1)


_FAR = 1 << 40


@lru_cache
def _far(device: torch.device) -> Tensor:
    """`_FAR` where a GPU can read it: a plain number is first written there, by a kernel of its own."""
    return torch.full((), _FAR, device=device)


@dataclass(frozen=True, eq=False)
class _Hull:
    """Sets of stored tokens by their ends and sizes.

    Attributes:
        ends: int64 [..., 2], the first token, and the last plus one with its sign changed, so that the ends of a union
            are the smaller ones; `_FAR` twice for the empty set.
        count: int64 [...], the size.
    """

    ends: Tensor
    count: Tensor

    @classmethod
    def of(cls, lo: Tensor, hi: Tensor, count: Tensor) -> _Hull:
        """Sets that are not empty."""
        return cls(torch.stack(torch.broadcast_tensors(lo, -hi), -1), count)

    @classmethod
    def stack(cls, *hulls: _Hull) -> _Hull:
        """Sets side by side, on a new last dimension."""
        ends, counts = ([getattr(hull, part) for hull in hulls] for part in ("ends", "count"))
        return cls(torch.stack(torch.broadcast_tensors(*ends), -2), torch.stack(torch.broadcast_tensors(*counts), -1))

    def union(self, other: _Hull, twice: Tensor | int = 0) -> _Hull:
        """The union with a set that ``twice`` tokens belong to as well."""
        return _Hull(torch.minimum(self.ends, other.ends), self.count + other.count - twice)

    def where(self, condition: Tensor) -> _Hull:
        """This set where the condition holds, else the empty set."""
        return _Hull(torch.where(condition.unsqueeze(-1), self.ends, _far(self.ends.device)), self.count * condition)

    def take(self, index: Tensor | slice | int) -> _Hull:
        """The sets of some spans."""
        if not isinstance(index, Tensor):
            return _Hull(self.ends[index], self.count[index])
        # On a CPU this is four times as fast as indexing.
        ends, count = (part.index_select(0, index.flatten()) for part in (self.ends, self.count))
        return _Hull(ends.view(index.shape + self.ends.shape[1:]), count.view(index.shape + self.count.shape[1:]))

    def range(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Where ``real`` holds, lo and hi, int64 [..., 2], equal for the empty set; and whether there is no other token
        between them."""
        count = self.count * real
        ends = self.ends * (count != 0).unsqueeze(-1)
        return ends.abs(), count + ends.sum(-1) == 0


class _Spans:
    """Spans by sequence order with what the ranges need of them: hulls of neighbours and of groups."""

    def __init__(self, storage: Storage) -> None:
        table = storage.table
        self.storage = storage
        self.seg, self.start, self.length, self.start_stored = table.seg, table.start, table.length, storage.offset

    @cached_property
    def neighbours(self) -> Neighbours:
        """What a kernel finds the ranges of all spans by."""
        from marble.kernels.triton.spans import Neighbours

        by_seg = torch.argsort(self.seg, stable=True)
        return Neighbours.of(self.storage.table.columns, self.start_stored, self.storage.apart, by_seg)

    @property
    def many(self) -> bool:
        """Whether a second thread is worth it."""
        return self.start.device.type == "cpu" and len(self.start) >= _MANY

    @cached_property
    def real(self) -> Tensor:
        """Spans that are not padding."""
        return self.storage.table.sample >= 0

    @cached_property
    def noise(self) -> Tensor:
        """Noise spans."""
        return self.storage.table.noise >= 0

    @cached_property
    def stop(self) -> Tensor:
        """One past the last token of each span, in sequence order."""
        return self.storage.table.stop

    @cached_property
    def ordinal(self) -> Tensor:
        """A number for each span's sample, rising."""
        return self.storage.table.ordinal

    @cached_property
    def own(self) -> _Hull:
        """Each span alone."""
        return _Hull.of(self.start_stored, self.start_stored + self.length, self.length)

    @cached_property
    def sample_stop(self) -> Tensor:
        """One past the last token of each span's sample, in sequence order."""
        return torch.zeros_like(self.stop).scatter_reduce(0, self.ordinal, self.stop, "amax")[self.ordinal]

    @cached_property
    def sample_start(self) -> Tensor:
        """The first token of each span's sample, in sequence order."""
        first = torch.full_like(self.start, _FAR).scatter_reduce(0, self.ordinal, self.start, "amin")
        return first[self.ordinal]

    @cached_property
    def group(self) -> Tensor:
        """Groups: spans with one seg; every span without one is a group of its own, for uniform handling."""
        alone = torch.arange(len(self.seg), 2 * len(self.seg), device=self.seg.device)
        return torch.where(self.seg >= 0, self.seg, alone)

    @cached_property
    def by_group(self) -> Tensor:
        """The spans, group after group."""
        return torch.argsort(self.group, stable=True)

    @cached_property
    def behind(self) -> Tensor:
        """Spans stored behind those that keep the order of the sequence: noise and what is set apart."""
        return self.storage.apart | self.noise

    @cached_property
    def _neighbours(self) -> list[_Hull]:
        """Of each span's group the earlier spans, and the later ones; of its sample the later spans, the earlier ones
        in sequence order, and the earlier ones behind, the last two without noise."""
        place, everyone = torch.arange(len(self.seg), device=self.seg.device), torch.ones_like(self.noise)
        order = torch.stack([self.by_group, self.by_group.flip(0), place.flip(0), place, place])
        members = torch.stack([everyone, everyone, everyone, ~self.behind, self.behind & ~self.noise])
        all_of = members, torch.stack([self.group] * 2 + [self.ordinal] * 3), order
        if not self.many:
            return self._running(*all_of)
        with ThreadPoolExecutor(1) as pool:
            groups = pool.submit(self._running, *(rows[:2] for rows in all_of))
            samples = self._running(*(rows[2:] for rows in all_of))
        return groups.result() + samples

    def _running(self, members: Tensor, by: Tensor, order: Tensor) -> list[_Hull]:
        """The hulls of the members before each span among the spans with an equal ``by``.

        Args:
            members: bool [hulls, spans].
            by: int64 [hulls, spans].
            order: int64 [hulls, spans], the spans in an order in which equal values of ``by`` are neighbours.
        """
        key = by.gather(1, order)
        fresh = torch.ones_like(members)
        torch.ne(key[:, 1:], key[:, :-1], out=fresh[:, 1:])
        hull = self.own.take(order).where(members.gather(1, order))
        # Scans run over all spans at once: a shift per group keeps earlier groups from mattering.
        shift = (fresh.cumsum(1) * (4 * _FAR // max(by.shape[1], 1))).unsqueeze(-1)
        ends = shift - running_max((shift - hull.ends).movedim(-1, 0)).movedim(0, -1)
        total = hull.count.cumsum(1)
        base = running_max((total - hull.count) * fresh)
        hull = _Hull(ends.roll(1, 1), total.roll(1, 1) - base)
        hull = hull.where((hull.count > 0) & ~fresh)
        found = _Hull(
            torch.empty_like(hull.ends).scatter_(1, order.unsqueeze(-1).expand_as(ends), hull.ends),
            torch.empty_like(hull.count).scatter_(1, order, hull.count),
        )
        return [found.take(number) for number in range(len(members))]

    @cached_property
    def ends(self) -> Tensor:
        """The places of each span's first and last token, int64 [2, spans]."""
        return torch.stack([torch.zeros_like(self.length), self.length - 1])

    @property
    def later(self) -> _Hull:
        """The later spans of each span's sample."""
        return self._neighbours[2]

    @property
    def mates_before(self) -> _Hull:
        """The earlier spans of each span's group."""
        return self._neighbours[0]

    @property
    def mates_after(self) -> _Hull:
        """The later spans of each span's group."""
        return self._neighbours[1]

    @cached_property
    def whole_group(self) -> _Hull:
        """All spans of each span's group."""
        return self.mates_before.union(self.own).union(self.mates_after)

    @property
    def main_and_behind(self) -> tuple[tuple[Tensor, _Hull], tuple[Tensor, _Hull]]:
        """The spans stored in sequence order, then noise and what is set apart, each with its visible earlier ones."""
        *_, main, other = self._neighbours
        return (~self.behind, main), (self.behind, other)

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The span of each stored token, and its place inside."""
        span = self.storage.span_order[torch.searchsorted(self.storage.stored_start, tokens, right=True) - 1]
        return span, tokens - self.start_stored[span]

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
        apart = self.storage.apart.long()
        return torch.zeros_like(apart).index_add_(0, self.ordinal, apart)[self.ordinal] > 0

    @cached_property
    def _starts_by_group(self) -> Tensor:
        """A number for each span's group and start, rising."""
        return self.group[self.by_group] * (self.storage.layout.tokens + 1) + self.start[self.by_group]

    def group_tokens_before(self, span: Tensor | slice, position: Tensor) -> Tensor:
        """How many tokens of a span's group lie before a sequence position, for [..., tokens] spans and positions."""
        group = self.group[span]
        wanted = group * (self.storage.layout.tokens + 1) + position
        at = torch.searchsorted(self._starts_by_group, wanted, right=True) - 1
        found = self.by_group[at.clamp_(min=0)]
        inside = (position - self.start[found]).clamp_(min=0).minimum(self.length[found])
        return (self.mates_before.count[found] + inside) * (self.group[found] == group)


def _global_keys(spans: _Spans, span: Tensor | slice, within: Tensor) -> _Hull:
    own, later = spans.own.take(span), spans.later.take(span)
    tail = _Hull.of(spans.start_stored[span] + within, -own.ends[..., 1], own.count - within)
    # Later mates are among the later spans of the sample already.
    wide = spans.mates_before.take(span).union(own).union(later)
    visible = _choose(spans.seg[span] >= 0, wide, tail.union(later))
    return _choose(spans.noise[span], spans.whole_group.take(span), visible)


def _global_queries(spans: _Spans, span: Tensor | slice, within: Tensor) -> tuple[_Hull, _Hull]:
    start = spans.start_stored[span]
    head = _Hull.of(start, start + within + 1, within + 1)
    own = _choose(spans.seg[span] >= 0, spans.own.take(span), head).union(spans.mates_after.take(span))
    own = _choose(spans.noise[span], spans.whole_group.take(span), own)
    first, second = (before.take(span).union(own.where(member[span])) for member, before in spans.main_and_behind)
    return first, second


def _window_keys(spans: _Spans, span: Tensor | slice, within: Tensor, window: int) -> _Hull:
    key = spans.start[span] + within
    reach = torch.minimum(key + window, spans.sample_stop[span])
    forward = _Hull.of(key, reach, reach - key)
    group = spans.whole_group.take(span)
    before, behind = spans.group_tokens_before(span, torch.stack([key, reach]))
    wide = forward.union(group, behind - before)
    return _choose(spans.noise[span], group, _natural(spans, span, _choose(spans.seg[span] >= 0, wide, forward)))


def _window_queries(spans: _Spans, span: Tensor | slice, within: Tensor, window: int) -> tuple[_Hull, _Hull]:
    query, noise = spans.start[span] + within, spans.noise[span]
    first = torch.maximum(query - window + 1, spans.sample_start[span])
    last = torch.where(noise, torch.minimum(query + 1, spans.start[span]), query + 1)
    last = torch.maximum(first, last)
    reach = torch.stack([first, query + 1])
    before, until = spans.clear_tokens_before(reach)
    backward = _Hull.of(first, last, until - before)
    backward = backward.where(backward.count > 0)
    group = spans.whole_group.take(span)
    before, until = spans.group_tokens_before(span, reach)
    wide = backward.union(group, until - before)
    main = _choose((spans.seg[span] >= 0) & ~noise, wide, backward)
    return _natural(spans, span, main), group.where(noise)


def _natural(spans: _Spans, span: Tensor | slice, hull: _Hull) -> _Hull:
    """Sequence positions are storage positions only in samples that nothing is set apart in; elsewhere, no range."""
    whole = _Hull.of(spans.sample_start[span], spans.sample_stop[span], torch.full_like(hull.count, -1))
    return _choose(spans.disturbed[span], whole, hull)


def _choose(condition: Tensor, yes: _Hull, no: _Hull) -> _Hull:
    ends = torch.where(condition.unsqueeze(-1), yes.ends, no.ends)
    return _Hull(ends, torch.where(condition, yes.count, no.count))
