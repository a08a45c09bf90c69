"""Visible ranges: exact where they say so, never too small, and found wherever the planner's orders have them."""

from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from marble.layout import Layout, Span
from marble.mask import ranges
from marble.mask.domains import dense
from marble.mask.ranges import KeyRanges, QueryRanges, VisibleRanges
from marble.mask.storage import Storage
from marble.order.set_apart import set_apart
from marble.testing.layouts import planned_storage, random_layout, random_storage, random_window, stored_mask
from marble.workloads import WORKLOADS, build

rngs = st.builds(Random, st.integers(0, 2**32 - 1))


def everywhere(storage: Storage, window: int | None = None) -> tuple[KeyRanges, QueryRanges]:
    """The ranges of all stored tokens."""
    ranges, tokens = VisibleRanges(storage, window), torch.arange(storage.layout.tokens)
    return ranges.keys(tokens), ranges.queries(tokens)


def look(storage: Storage, window: int | None = None) -> tuple[Tensor, KeyRanges, QueryRanges]:
    """The mask in storage order, and the ranges that claim to describe it."""
    mask = stored_mask(storage, window)
    keys, queries = everywhere(storage, window)
    return dense(mask.mask, mask.tracks, mask.tracks), keys, queries


def stretches(rows: Tensor) -> Tensor:
    """How many ranges the set columns of each row form."""
    return (torch.nn.functional.pad(rows.to(torch.int8), (1, 1)).diff(dim=1) == 1).sum(1)


def check_sound(legal: Tensor, keys: KeyRanges, queries: QueryRanges) -> None:
    """Hulls hold all that is visible, and exact ranges nothing else."""
    at = torch.arange(len(legal))
    seen_by = legal.T
    hull = (at >= keys.lo.unsqueeze(1)) & (at < keys.hi.unsqueeze(1))
    assert not (seen_by & ~hull).any(), "a query sees a key outside the key's hull"
    assert torch.equal(hull[keys.exact], seen_by[keys.exact])
    lo0, hi0, lo1, hi1 = (bound.unsqueeze(1) for bound in queries.bounds.T)
    first, second = (at >= lo0) & (at < hi0), (at >= lo1) & (at < hi1)
    assert not (legal & ~(first | second)).any(), "a query sees a key outside its hulls"
    exact = queries.exact
    assert torch.equal((first | second)[exact], legal[exact])
    assert not (first & second)[exact].any(), "two exact ranges of a query overlap"
    assert ((keys.lo >= 0) & (keys.lo <= keys.hi) & (keys.hi <= len(legal))).all()
    assert ((queries.bounds >= 0) & (queries.bounds <= len(legal))).all()
    nothing = ~seen_by.any(1) & keys.exact
    assert (keys.lo == keys.hi)[nothing].all()


@settings(max_examples=250)
@given(rng=rngs)
def test_ranges_are_sound_in_any_storage_order(rng):
    layout, window = random_layout(rng), random_window(rng)
    storage = random_storage(rng, layout)
    note(f"{layout.to_json()}, window {window}, stored {storage.span_order.tolist()}, apart {storage.apart.tolist()}")
    check_sound(*look(storage, window))


@settings(max_examples=150)
@given(rng=rngs)
def test_ranges_of_a_span_follow_from_its_ends(rng):
    """What `VisibleRanges.key_spans` and `query_spans` promise: clamped ramps are the ranges of every token."""
    layout, window = random_layout(rng), random_window(rng)
    storage = random_storage(rng, layout) if rng.random() < 0.5 else planned_storage(layout, window)
    note(f"{layout.to_json()}, window {window}, stored {storage.span_order.tolist()}, apart {storage.apart.tolist()}")
    ranges = VisibleRanges(storage, window)
    keys, queries = everywhere(storage, window)
    both = torch.stack([keys.lo, keys.hi], -1)
    for spans, bounds, exact in (
        (ranges.key_spans, both, keys.exact),
        (ranges.query_spans, queries.bounds, queries.exact),
    ):
        assert exact[spans.exact[storage.span]].all(), "a span counts as exact and is not"
        for ramp, bound in zip(spans.bounds, bounds.unbind(-1), strict=True):
            assert (ramp.first <= ramp.last)[spans.exact].all()
            found = (storage.within + ramp.offset[storage.span]).clamp(
                ramp.first[storage.span], ramp.last[storage.span]
            )
            assert torch.equal(found[spans.exact[storage.span]], bound[spans.exact[storage.span]])
    for span in (~ranges.key_spans.exact).nonzero().flatten().tolist():
        first = int(storage.offset[span])
        assert not keys.exact[[first, first + int(layout.table.length[span]) - 1]].all()


@settings(max_examples=250)
@given(rng=rngs)
def test_ranges_are_complete_in_the_planners_orders(rng):
    """Where a key's visible queries are one range, the planner's orders make it known."""
    layout, window = random_layout(rng), random_window(rng)
    note(f"{layout.to_json()}, window {window}")
    legal, keys, queries = look(planned_storage(layout, window), window)
    check_sound(legal, keys, queries)
    assert torch.equal(keys.exact, stretches(legal.T) <= 1)
    assert (stretches(legal) <= 2)[queries.exact].all()


def without(layout: Layout, *, noise: bool = False, groups: bool = False, links: bool = True) -> Layout:
    """The layout with some modes read as plain images, or without its links."""
    changed = []
    for sample in layout.samples:
        spans = []
        for span in sample:
            mode = "full" if (noise and span.mode == "noise") or (groups and span.mode == "group") else span.mode
            linked = span.group if links and mode in ("group", "noise") else None
            spans.append(Span(mode, span.length, linked))
        changed.append(tuple(spans))
    return Layout(tuple(changed))


@settings(max_examples=100)
@given(rng=rngs)
def test_groups_set_apart_always_have_ranges(rng):
    layout = without(random_layout(rng), noise=True, links=False)
    note(layout.to_json())
    legal, keys, queries = look(set_apart(layout))
    check_sound(legal, keys, queries)
    assert keys.exact.all()
    assert queries.exact.all()


@settings(max_examples=100)
@given(rng=rngs)
def test_single_noise_spans_set_apart_always_have_ranges(rng):
    layout = without(random_layout(rng), groups=True, links=False)
    note(layout.to_json())
    legal, keys, queries = look(set_apart(layout))
    check_sound(legal, keys, queries)
    assert keys.exact.all()
    assert queries.exact.all()


@settings(max_examples=60)
@given(rng=rngs)
def test_windows_over_images_always_have_ranges_of_queries(rng):
    """Gemma's layers: text and images, natural order. A query then sees one range too."""
    layout = without(random_layout(rng), noise=True, groups=True)
    window = rng.randint(1, 12)
    note(f"{layout.to_json()}, window {window}")
    legal, keys, queries = look(Storage.natural(layout), window)
    check_sound(legal, keys, queries)
    assert torch.equal(keys.exact, stretches(legal.T) <= 1)
    assert keys.exact.all()
    assert queries.exact.all()


EXCEPTIONS = {
    "interleaved groups": Layout(
        [[Span("group", 2, group=0), Span("group", 2, group=1), Span("group", 2, group=0), Span("group", 2, group=1)]]
    ),
    "interleaved noise groups of several spans": Layout(
        [[Span("noise", 2, group=0), Span("noise", 2, group=1), Span("noise", 2, group=0), Span("noise", 2, group=1)]]
    ),
    "a noise group around text": Layout([[Span("noise", 2, group=0), Span("causal", 2), Span("noise", 2, group=0)]]),
}


@pytest.mark.parametrize("layout", EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_known_exceptions_are_reported(layout):
    legal, keys, queries = look(set_apart(layout))
    check_sound(legal, keys, queries)
    broken = stretches(legal.T) > 1
    assert broken.any()
    assert torch.equal(~keys.exact, broken)


def test_a_window_over_an_order_with_spans_set_apart_is_reported():
    layout = Layout([[Span("causal", 4), Span("group", 3), Span("causal", 4), Span("group", 3)]])
    legal, keys, queries = look(set_apart(layout), 3)
    check_sound(legal, keys, queries)
    assert not keys.exact.all()


def test_a_group_in_its_natural_order_is_reported():
    """What setting apart is for: a later image's keys are seen by the earlier image, not by the text in between."""
    layout = Layout([[Span("causal", 2), Span("group", 3), Span("causal", 2), Span("group", 3)]])
    legal, keys, queries = look(Storage.natural(layout))
    check_sound(legal, keys, queries)
    assert (~keys.exact).nonzero().flatten().tolist() == [7, 8, 9]
    assert look(set_apart(layout))[1].exact.all()


def test_ranges_of_a_small_pack_by_hand():
    """``text2 noise2 clean1``: stored as text, clean, noise; padding behind it sees nothing."""
    layout = Layout([[Span("causal", 2), Span("noise", 2), Span("full", 1)], [Span("pad", 2)]])
    keys, queries = everywhere(set_apart(layout))
    assert torch.stack([keys.lo, keys.hi], 1).tolist() == [[0, 5], [1, 5], [2, 3], [3, 5], [3, 5], [0, 0], [0, 0]]
    assert queries.bounds.tolist() == [
        [0, 1, 0, 0],
        [0, 2, 0, 0],
        [0, 3, 0, 0],
        [0, 2, 3, 5],
        [0, 2, 3, 5],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert keys.exact.all()
    assert queries.exact.all()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", ["molmo_video", "bagel_mix"])
def test_a_second_thread_finds_the_same(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and ranges, bit for bit."""
    layout = build(name, 4000, scale=WORKLOADS[name].demo_scale)
    rows = torch.arange(layout.tokens)
    found = []
    for many in (1 << 30, 1):
        monkeypatch.setattr(ranges, "_MANY", many)
        mask = stored_mask(planned_storage(layout, window), window)
        assert mask.ranges is not None
        assert mask.ranges.many == (many == 1)
        tiles = mask.tiles(rows, rows, 128)
        spans = (mask.ranges.query_spans, mask.ranges.key_spans)
        lists = [x for side in (tiles.by_query, tiles.by_key) for x in vars(side).values()]
        found.append([mask.work(128), *lists, *(x for each in spans for x in (each.table, each.exact))])
    assert all(map(torch.equal, *found))
