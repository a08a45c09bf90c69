"""Visible ranges of the built-in masks, span by span: what `marble.mask.ranges` computes on a CPU, and says why.

First one program per kind of neighbours passes over the spans and keeps the hull of those it has seen. Then each span's
ranges follow from its own numbers, a few of these hulls and, with a window, binary searches. Hulls are as there: the
first token, the last plus one with its sign changed, and the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.lookup import below
from marble.kernels.triton.tuned import tuned

_FAR = tl.constexpr(1 << 40)

_GROUP, _SAMPLE, _ALL = range(3)
_KINDS = {
    "mates before": (_GROUP, False, 0b1111),
    "mates after": (_GROUP, True, 0b1111),
    "later": (_SAMPLE, True, 0b1111),
    "earlier": (_SAMPLE, False, 0b1111),
    "earlier, stored in sequence order": (_SAMPLE, False, 0b0001),
    "earlier, stored behind": (_SAMPLE, False, 0b0010),
    "later, set apart": (_SAMPLE, True, 0b1010),
    "earlier, set apart": (_SAMPLE, False, 0b1010),
    "clear before": (_ALL, False, 0b0011),
}
"""Kinds of neighbours of a span: what they share with it, whether they come later, and which spans are meant, one bit
each for clean spans in place, clean spans set apart, noise in place and noise set apart."""

# Their columns as digits of four bits, which a program picks its own from.
_SHARED, _COMES_LATER, _MEANT = (
    tl.constexpr(sum(kind[column] << 4 * number for number, kind in enumerate(_KINDS.values()))) for column in range(3)
)
_MATES_BEFORE, _MATES_AFTER, _LATER, _EARLIER, _MAIN, _BEHIND, _APART_LATER, _APART_EARLIER, _CLEAR = map(
    tl.constexpr, range(len(_KINDS))
)


@triton.jit
def _follow(fresh, lo, end, count, next_fresh, next_lo, next_end, next_count):
    """The union of neighbouring hulls, unless the second begins afresh."""
    on = next_fresh == 0
    return (
        fresh | next_fresh,
        tl.where(on, tl.minimum(lo, next_lo), next_lo),
        tl.where(on, tl.minimum(end, next_end), next_end),
        tl.where(on, count + next_count, next_count),
    )


@triton.jit
def _digit(digits, number):
    return (tl.full((), digits, tl.int64) >> 4 * number) & 15


@triton.jit
def _at(values, here):
    return tl.sum(tl.where(here, values, 0), 0)


@triton.jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=["spans"])
def _running(columns, offset, apart, by_seg, hulls, spans, CHUNK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    shared, back, meant = _digit(_SHARED, number), _digit(_COMES_LATER, number), _digit(_MEANT, number)
    grouped = shared == 0
    key = columns + tl.where(grouped, 3, 2) * spans
    line = tl.arange(0, CHUNK)
    lo, end, count = tl.full((), _FAR, tl.int64), tl.full((), _FAR, tl.int64), tl.full((), 0, tl.int64)
    for first in range(0, spans, CHUNK):
        step = first + line
        here, some = step < spans, (step < spans) & (step > 0)
        # Each span, and the one passed just before.
        span = tl.where(back > 0, spans - 1 - step, step).to(tl.int64)
        passed = span - 1 + 2 * back
        span = tl.where(grouped, tl.load(by_seg + span, here & grouped, 0), span)
        passed = tl.where(grouped, tl.load(by_seg + passed, some & grouped, 0), passed)
        of = tl.load(key + span, some, 0)
        # A seg below 0 is no group.
        same = some & ((shared == 2) | ((of == tl.load(key + passed, some, 0)) & ((shared == 1) | (of >= 0))))
        noise = tl.load(columns + 4 * spans + passed, some, 0) >= 0
        kind = tl.load(apart + passed, some, 0).to(tl.int32) + 2 * noise.to(tl.int32)
        use = same & (((meant >> kind) & 1) > 0)
        start, length = tl.load(offset + passed, use, 0), tl.load(columns + spans + passed, use, 0)
        los, ends = tl.where(use, start, _FAR), tl.where(use, -(start + length), _FAR)
        fresh, los, ends, counts = tl.associative_scan((1 - same.to(tl.int32), los, ends, length), 0, _follow)
        fresh, los, ends, counts = _follow(0, lo, end, count, fresh, los, ends, counts)
        at = hulls + 3 * number * spans + span
        tl.store(at, los, here)
        tl.store(at + spans, ends, here)
        tl.store(at + 2 * spans, counts, here)
        lo, end, count = _at(los, line == CHUNK - 1), _at(ends, line == CHUNK - 1), _at(counts, line == CHUNK - 1)


@triton.jit
def _size(hulls, number, span, spans, here):
    """How many tokens a kind of neighbours has."""
    return tl.load(hulls + (3 * number + 2) * spans + span, here, 0)


@triton.jit
def _join(lo, end, count, hulls, number, span, spans, here):
    """The union with a kind of neighbours."""
    at = hulls + 3 * number * spans + span
    lo, end = tl.minimum(lo, tl.load(at, here, _FAR)), tl.minimum(end, tl.load(at + spans, here, _FAR))
    return lo, end, count + _size(hulls, number, span, spans, here)


@triton.jit
def _choose(condition, lo, end, count, other_lo, other_end, other_count):
    return (
        tl.where(condition, lo, other_lo),
        tl.where(condition, end, other_end),
        tl.where(condition, count, other_count),
    )


@triton.jit
def _group_before(columns, by_seg, hulls, spans, seg, position, here):
    """How many tokens of a group lie before a sequence position."""
    # The spans of earlier groups, and of this one those that start at the position or before.
    low, high = tl.zeros_like(position), tl.zeros_like(position) + spans
    left = spans
    while left > 0:
        left = left // 2
        middle, on = (low + high) // 2, here & (low < high)
        span = tl.load(by_seg + middle, on, 0)
        of, start = tl.load(columns + 3 * spans + span, on, 0), tl.load(columns + span, on, 0)
        passed = (of < seg) | ((of == seg) & (start <= position))
        low, high = tl.where(on & passed, middle + 1, low), tl.where(on & ~passed, middle, high)
    some = here & (low > 0)
    span = tl.load(by_seg + low - 1, some, 0)
    some &= tl.load(columns + 3 * spans + span, some, -1) == seg
    inside = position - tl.load(columns + span, some, 0)
    inside = tl.minimum(inside, tl.load(columns + spans + span, some, 0))
    return tl.where(some, inside + _size(hulls, _MATES_BEFORE, span, spans, some), 0)


@triton.jit
def _clear_before(columns, hulls, spans, position, here):
    """How many tokens that are not noise lie before a sequence position."""
    span = below(columns, spans, position + 1, here) - 1
    noise = tl.load(columns + 4 * spans + span, here, 0) >= 0
    inside = tl.where(noise, 0, position - tl.load(columns + span, here, 0))
    return inside + _size(hulls, _CLEAR, span, spans, here)


@triton.jit
def _write(table, number, lo, end, count, lo_rises, hi_rises, span, spans, here):
    """Write the bounds of one hull of each token: their values and where they rise. Returns whether the hulls hold no
    other token, and neither bound falls from the first token to the last."""
    lo, hi = tl.where(count != 0, lo, 0), tl.where(count != 0, -end, 0)
    last = tl.arange(0, 2)[None, :]
    at = table + 6 * number * spans + span
    tl.store(at + last * spans, lo, here)
    tl.store(at + 2 * spans, lo_rises, here)
    tl.store(at + (3 + last) * spans, hi, here)
    tl.store(at + 5 * spans, hi_rises, here)
    sign = 2 * last - 1
    return (tl.max(tl.abs(hi - lo - count), 1) == 0) & (tl.sum(sign * lo, 1) >= 0) & (tl.sum(sign * hi, 1) >= 0)


_PLAIN = ["spans", "window"]
"""Arguments that no two versions are compiled for: every plan brings new sizes."""


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def _ranges(
    columns,
    offset,
    apart,
    by_seg,
    hulls,
    table,
    exact,
    spans,
    window,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPANS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    # Rows are spans, columns their first and their last token.
    span, here = line[:, None], (line < spans)[:, None]
    start, length = tl.load(columns + span, here, 0), tl.load(columns + spans + span, here, 1)
    real, seg = tl.load(columns + 2 * spans + span, here, -1) >= 0, tl.load(columns + 3 * spans + span, here, -1)
    noise, away = tl.load(columns + 4 * spans + span, here, -1) >= 0, tl.load(apart + span, here, 0) != 0
    own = tl.load(offset + span, here, 0)
    stop = own + length
    within = tl.arange(0, 2)[None, :] * (length - 1)
    linked = (seg >= 0) & ~noise
    all_lo, all_end, all_count = _join(own, -stop, length, hulls, _MATES_BEFORE, span, spans, here)
    all_lo, all_end, all_count = _join(all_lo, all_end, all_count, hulls, _MATES_AFTER, span, spans, here)
    if WINDOW:
        # A sample has the same ends in the sequence and in storage.
        sample_lo, sample_end, _ = _join(own, -stop, length, hulls, _EARLIER, span, spans, here)
        sample_lo, sample_end, _ = _join(sample_lo, sample_end, length, hulls, _LATER, span, spans, here)
        away |= _size(hulls, _APART_EARLIER, span, spans, here) + _size(hulls, _APART_LATER, span, spans, here) > 0
        token = start + within
        if KEYS:
            low, high = token, tl.minimum(token + window, -sample_end)
            lo, end, count = low, -high, high - low
        else:
            low, high = tl.maximum(token - window + 1, sample_lo), token + 1
            clear = _clear_before(columns, hulls, spans, high, here)
            clear -= _clear_before(columns, hulls, spans, low, here)
            last = tl.maximum(tl.where(noise, start, high), low)
            lo, end, count = _choose(clear > 0, low, -last, clear, _FAR, _FAR, 0)
        twice = _group_before(columns, by_seg, hulls, spans, seg, high, here & linked)
        twice -= _group_before(columns, by_seg, hulls, spans, seg, low, here & linked)
        wide = count + all_count - twice
        lo, end, count = _choose(linked, tl.minimum(lo, all_lo), tl.minimum(end, all_end), wide, lo, end, count)
        # Sequence positions are storage positions only in samples that nothing is set apart in.
        lo, end, count = _choose(away, sample_lo, sample_end, -1, lo, end, count)
        if KEYS:
            lo, end, count = _choose(noise, all_lo, all_end, all_count, lo, end, count)
        else:
            other_lo, other_end, other_count = _choose(noise, all_lo, all_end, all_count, _FAR, _FAR, 0 * within)
    elif KEYS:
        lo, end, count = _choose(linked, own, -stop, length, own + within, -stop, length - within)
        lo, end, count = _join(lo, end, count, hulls, _MATES_BEFORE, span, spans, here)
        # Later mates are among the later spans of the sample already.
        lo, end, count = _join(lo, end, count, hulls, _LATER, span, spans, here)
        lo, end, count = _choose(noise, all_lo, all_end, all_count, lo, end, count)
    else:
        lo, end, count = _choose(linked, own, -stop, length, own + 0 * within, -own - within - 1, within + 1)
        lo, end, count = _join(lo, end, count, hulls, _MATES_AFTER, span, spans, here)
        lo, end, count = _choose(noise, all_lo, all_end, all_count, lo, end, count)
        away |= noise
        other_lo, other_end, other_count = _choose(away, lo, end, count, _FAR, _FAR, 0)
        other_lo, other_end, other_count = _join(other_lo, other_end, other_count, hulls, _BEHIND, span, spans, here)
        lo, end, count = _choose(away, _FAR, _FAR, 0, lo, end, count)
        lo, end, count = _join(lo, end, count, hulls, _MAIN, span, spans, here)
    count = tl.where(real, count, 0)
    if KEYS:
        fits = _write(table, 0, lo, end, count, own, own + window, span, spans, here)
    else:
        fits = _write(table, 0, lo, end, count, own + 1 - window, own + 1, span, spans, here)
        other_count = tl.where(real, other_count, 0)
        fits &= _write(table, 1, other_lo, other_end, other_count, own + 1 - window, own + 1, span, spans, here)
    tl.store(exact + line, fits, line < spans)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The spans of a stored layout, and what each has around it.

    Attributes:
        columns: int64 [6, spans], contiguous, those of `marble.layout.SpanTable`.
        offset: int64 [spans], first storage position of each.
        apart: bool [spans], which are stored behind the others of their sample.
        by_seg: int64 [spans], the spans sorted by ``seg``, then in sequence order.
        hulls: int64 [kinds, 3, spans], the hull of each kind of neighbours.
    """

    columns: Tensor
    offset: Tensor
    apart: Tensor
    by_seg: Tensor
    hulls: Tensor

    @classmethod
    def of(cls, columns: Tensor, offset: Tensor, apart: Tensor, by_seg: Tensor) -> Neighbours:
        """Find the hulls.

        Raises:
            ValueError: if the columns are not int64 [6, spans], contiguous.
        """
        if columns.dtype != torch.int64 or len(columns) != 6 or not columns.is_contiguous():
            raise ValueError(f"spans: expected int64 columns [6, spans], got {columns.dtype} {tuple(columns.shape)}")
        kinds, spans = len(_KINDS), columns.shape[1]
        hulls = columns.new_empty(kinds, 3, spans)
        _running[(kinds,)](columns, offset, apart, by_seg, hulls, spans, **tuned("hulls"))
        return cls(columns, offset, apart, by_seg, hulls)

    def visible(self, window: int | None, *, keys: bool) -> tuple[Tensor, Tensor]:
        """The visible ranges of all spans.

        Args:
            window: the layer's window, None for a global layer.
            keys: for each key the range of queries, or for each query the two ranges of keys.

        Returns:
            Table and flags as in `marble.mask.ranges.SpanRanges`, int64 [2 or 4, 3, spans] and bool [spans].
        """
        spans = self.columns.shape[1]
        table, exact = self.columns.new_empty(2 if keys else 4, 3, spans), torch.empty_like(self.apart)
        choice = tuned("visible")
        _ranges[(triton.cdiv(spans, choice["SPANS"]),)](
            self.columns,
            self.offset,
            self.apart,
            self.by_seg,
            self.hulls,
            table,
            exact,
            spans,
            window or 0,
            KEYS=keys,
            WINDOW=window is not None,
            **choice,
        )
        return table, exact
