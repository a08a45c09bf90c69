"""Layouts: spans, samples, and the formats that they come from."""

from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from marble.layout import Layout, Mode, Span
from marble.mask.tracks import Tracks
from marble.testing.layouts import random_layout

rngs = st.builds(Random, st.integers(0, 2**32 - 1))


def short(layout: Layout) -> list[list[tuple]]:
    """A layout as (mode, length[, group])."""
    return [
        [(str(s.mode), s.length) + (() if s.group is None else (s.group,)) for s in sample] for sample in layout.samples
    ]


def test_spans_take_names_and_modes():
    assert Span("causal", 3) == Span(Mode.CAUSAL, 3)
    assert Span("noise", torch.tensor(3), group=torch.tensor(0)) == Span(Mode.NOISE, 3, 0)
    assert type(Span("full", torch.tensor(2)).length) is int


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("text", 3), ValueError, "'text' is not a mode; use one of 'causal'"),
        ((None, 3), ValueError, "not a mode"),
        (("causal", 0), ValueError, "at least 1 token"),
        (("causal", -2), ValueError, "at least 1 token"),
        (("causal", 2.0), TypeError, "Span.length: expected an integer"),
        (("causal", True), TypeError, "Span.length: expected an integer"),
        (("causal", "3"), TypeError, "Span.length: expected an integer"),
        (("causal", 3, 1), ValueError, "only group and noise spans"),
        (("full", 3, 1), ValueError, "only group and noise spans"),
        (("pad", 3, 1), ValueError, "only group and noise spans"),
        (("group", 3, -1), ValueError, "0 or more"),
        (("group", 3, 0.5), TypeError, "Span.group: expected an integer"),
        (("noise", 3, False), TypeError, "Span.group: expected an integer"),
    ],
)
def test_spans_are_validated(arguments, error, message):
    with pytest.raises(error, match=message):
        Span(*arguments)


TEXT, IMAGE = Span("causal", 2), Span("full", 3)


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "at least one sample"),
        ([[TEXT], []], ValueError, r"samples\[1\]: a sample needs at least one span"),
        (TEXT, TypeError, "sequence of samples"),
        ([TEXT], TypeError, "sequence of samples"),
        ([["causal"]], TypeError, "expected Span, got str"),
        ([[TEXT, Span("pad", 1)]], ValueError, r"samples\[0\]: padding cannot share"),
        (
            [[Span("group", 1, 4)], [Span("group", 1, 4)]],
            ValueError,
            r"samples\[1\]: group 4 is already used in sample 0",
        ),
        ([[Span("group", 1, 4), Span("noise", 1, 4)]], ValueError, "one id per mode"),
    ],
)
def test_layouts_are_validated(samples, error, message):
    with pytest.raises(error, match=message):
        Layout(samples)


def test_layouts_are_values():
    one, other = Layout([[TEXT, IMAGE], [TEXT]]), Layout(((TEXT, IMAGE), (TEXT,)))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Layout([[TEXT, IMAGE, TEXT]])
    assert one.tokens == 7
    assert Layout([[Span("pad", 2), Span("pad", 3)]]).tokens == 5


def test_table_by_hand():
    table = Layout(
        [
            [TEXT, Span("group", 2), Span("noise", 3), Span("group", 4), Span("noise", 1)],
            [Span("pad", 5)],
            [Span("noise", 2, 9), IMAGE, Span("noise", 2, 9), Span("group", 1, 0), Span("group", 2)],
        ]
    ).table
    assert table.start.tolist() == [0, 2, 4, 7, 11, 12, 17, 19, 22, 24, 25]
    assert table.stop.tolist() == [2, 4, 7, 11, 12, 17, 19, 22, 24, 25, 27]
    assert table.length.tolist() == [2, 2, 3, 4, 1, 5, 2, 3, 2, 1, 2]
    assert table.sample.tolist() == [0] * 5 + [-1] + [2] * 5
    # Groups without an id are one group per sample; the group with id 0 is another.
    assert table.seg.tolist() == [-1, 0, 1, 0, 2, -1, 3, 4, 3, 5, 6]
    assert table.noise.tolist() == [-1, -1, 1, -1, 2, -1, 3, -1, 3, -1, -1]
    assert table.linked.tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1]
    assert all(column.dtype == torch.int64 for column in (table.start, table.sample, table.seg, table.linked))


def test_tracks_by_hand():
    layout = Layout([[TEXT, Span("group", 1), Span("noise", 2)], [Span("pad", 1)], [IMAGE]])
    tracks = Tracks.of(layout, {"shot": torch.arange(9)})
    assert tracks.sample.tolist() == [0] * 5 + [-1] + [2] * 3
    assert tracks.seg.tolist() == [-1, -1, 0, 1, 1, -1, 2, 2, 2]
    assert tracks.noise.tolist() == [-1, -1, -1, 1, 1, -1, -1, -1, -1]
    assert tracks.pos.tolist() == list(range(9))
    assert all(column.dtype == torch.int32 for column in tracks.columns.values())
    assert len(tracks) == 9
    taken = tracks.take(torch.tensor([8, 3]))
    assert [column.tolist() for column in taken.columns.values()] == [[2, 0], [2, 1], [-1, 1], [8, 3], [8, 3]]
    assert list(tracks.columns) == ["sample", "seg", "noise", "pos", "shot"]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"pos": torch.arange(2)}, "own tracks"),
        ({"shot": torch.arange(3)}, "one integer per token"),
        ({"shot": torch.zeros(2)}, "one integer per token"),
        ({"shot": torch.zeros(2, 1).long()}, "one integer per token"),
        ({"shot": torch.tensor([0, 2**40 + 1])}, "shot.*int32"),  # or it would silently become 1
    ],
)
def test_user_tracks_are_validated(user, message):
    with pytest.raises(ValueError, match=message):
        Tracks.of(Layout([[TEXT]]), user)


@settings(max_examples=100)
@given(rng=rngs)
def test_tables_and_tracks_follow_the_spans(rng):
    layout = random_layout(rng)
    note(layout.to_json())
    table, tracks = layout.table, Tracks.of(layout)
    spans = [(index, span) for index, sample in enumerate(layout.samples) for span in sample]
    assert table.length.tolist() == [span.length for _, span in spans]
    assert len(tracks) == layout.tokens == sum(span.length for _, span in spans)
    assert (table.start[1:] == table.stop[:-1]).all()
    mates: dict[int, set] = {}
    for at, (index, span) in enumerate(spans):
        assert table.sample[at] == (-1 if span.mode is Mode.PAD else index)
        assert (table.seg[at] >= 0) == (span.mode in (Mode.FULL, Mode.GROUP, Mode.NOISE))
        assert table.noise[at] == (table.seg[at] if span.mode is Mode.NOISE else -1)
        assert table.linked[at] == (span.mode is Mode.GROUP)
        alone = span.group is None and span.mode is not Mode.GROUP
        if table.seg[at] >= 0:
            mates.setdefault(int(table.seg[at]), set()).add((index, span.mode, span.group, at if alone else None))
        for name in ("sample", "seg", "noise"):
            column = getattr(tracks, name)[int(table.start[at]) : int(table.stop[at])]
            assert (column == getattr(table, name)[at]).all()
    assert all(len(owners) == 1 for owners in mates.values())
    assert len({next(iter(owners)) for owners in mates.values()}) == len(mates), "one group has two ids"
    assert list(mates) == sorted(mates) == list(range(len(mates))), "ids do not grow with the sequence"


@settings(max_examples=100)
@given(rng=rngs)
def test_json_round_trip(rng):
    layout = random_layout(rng)
    assert Layout.from_json(layout.to_json()) == layout


def test_json_by_hand():
    text = '{"samples": [[["causal", 12], ["group", 83, 0]], [["pad", 4]]]}'
    layout = Layout.from_json(text)
    assert short(layout) == [[("causal", 12), ("group", 83, 0)], [("pad", 4)]]
    assert layout.to_json() == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "{}",
        '{"samples": 3}',
        '{"samples": null}',
        '{"samples": []}',
        '{"samples": [[]]}',
        '{"samples": [["causal", 3]]}',
        '{"samples": [[["causal"]]]}',
        '{"samples": [[["causal", 3, 0, 0]]]}',
        '{"samples": [[["causal", 1.5]]]}',
        '{"samples": [[["text", 3]]]}',
        '{"samples": [[[["causal"], 3]]]}',
        '{"samples": [[{"mode": "causal", "length": 3}]]}',
    ],
)
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match=r"layout JSON|Span|Layout"):
        Layout.from_json(text)


@pytest.mark.parametrize(
    ("bounds", "tokens", "expected"),
    [
        ([0, 3, 7], None, [[("causal", 3)], [("causal", 4)]]),
        ([0, 0, 3, 3, 3, 5], None, [[("causal", 3)], [("causal", 2)]]),
        (torch.tensor([0, 7]), 10, [[("causal", 7)], [("pad", 3)]]),
        (torch.tensor([0, 7], dtype=torch.int32), 7, [[("causal", 7)]]),
        ((0, 0), 4, [[("pad", 4)]]),
        ([0, 3, 3], 4, [[("causal", 3)], [("pad", 1)]]),
    ],
)
def test_from_cu_seqlens(bounds, tokens, expected):
    assert short(Layout.from_cu_seqlens(bounds, tokens=tokens)) == expected


@pytest.mark.parametrize(
    ("bounds", "tokens", "error", "message"),
    [
        ([], None, ValueError, "start at 0"),
        ([0], None, ValueError, "start at 0"),
        ([1, 4], None, ValueError, "start at 0"),
        ([0, 5, 3], None, ValueError, "cannot decrease"),
        ([0, 5], 4, ValueError, "less than the 5 tokens"),
        ([0, 0], None, ValueError, "all documents are empty"),
        ([0, 0], 0, ValueError, "all documents are empty"),
        ([0, 2.5], None, TypeError, "cu_seqlens: expected an integer"),
        (torch.tensor([0.0, 2.0]), None, TypeError, "cu_seqlens: expected an integer"),
        ([0, 5], 5.0, TypeError, "tokens: expected an integer"),
    ],
)
def test_cu_seqlens_are_validated(bounds, tokens, error, message):
    with pytest.raises(error, match=message):
        Layout.from_cu_seqlens(bounds, tokens=tokens)


MOLMO = {0: "causal", 1: "group"}


@pytest.mark.parametrize(
    ("types", "options", "expected"),
    [
        ([0, 0, 1, 1, 1, 0], {}, [[("causal", 2), ("full", 3), ("causal", 1)]]),
        ([0, 0, 1, 1, 1, 0, 1], {"modes": MOLMO}, [[("causal", 2), ("group", 3), ("causal", 1), ("group", 1)]]),
        ([0, 1, 1, 1, 0], {"cu_seqlens": [0, 2, 5]}, [[("causal", 1), ("full", 1)], [("full", 2), ("causal", 1)]]),
        ([0, 1, 1], {"cu_seqlens": torch.tensor([0, 0, 3, 3])}, [[("causal", 1), ("full", 2)]]),
        ([[0, 1, 1], [1, 1, 0]], {}, [[("causal", 1), ("full", 2)], [("full", 2), ("causal", 1)]]),
        (
            [[0, 0, 1, 1], [0, 1, 1, 0]],
            {"attention_mask": [[0, 1, 1, 1], [1, 1, 1, 0]]},
            [[("pad", 1)], [("causal", 1), ("full", 2)], [("causal", 1), ("full", 2)], [("pad", 1)]],
        ),
        ([[0, 0], [0, 0]], {"attention_mask": [[0, 0], [1, 1]]}, [[("pad", 2)], [("causal", 2)]]),
        ([5, 5, 0], {"attention_mask": [0, 0, 1]}, [[("pad", 2)], [("causal", 1)]]),  # padding needs no mode
        (
            [0, 7, 7, -1],
            {"modes": {0: "causal", 7: Mode.NOISE, -1: "full"}},
            [[("causal", 1), ("noise", 2), ("full", 1)]],
        ),
    ],
    ids=[
        "Gemma",
        "Molmo",
        "documents",
        "empty documents",
        "batch",
        "padded batch",
        "a row of padding",
        "no mode",
        "any id",
    ],
)
def test_from_token_types(types, options, expected):
    for dtype in (torch.int64, torch.int32, torch.int8):
        assert short(Layout.from_token_types(torch.tensor(types, dtype=dtype), **options)) == expected
    assert short(Layout.from_token_types(types, **options)) == expected


def test_gemma_and_molmo_differ():
    """Text, image, text, image: Gemma's images are spans of their own, Molmo's are one group."""
    types = [0, 0, 1, 1, 1, 0, 1, 1, 1]
    gemma, molmo = Layout.from_token_types(types), Layout.from_token_types(types, modes=MOLMO)
    assert gemma.table.seg.tolist() == [-1, 0, -1, 1]
    assert molmo.table.seg.tolist() == [-1, 0, -1, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_the_largest_type_id_is_no_padding(dtype):
    top = torch.iinfo(dtype).max
    types = torch.tensor([0, top, top], dtype=dtype)
    assert short(Layout.from_token_types(types, modes={0: "causal", top: "full"})) == [[("causal", 1), ("full", 2)]]


def test_boolean_token_types_are_refused_by_name():
    with pytest.raises(ValueError, match="token_type_ids: expected integers"):
        Layout.from_token_types(torch.tensor([False, True, True]))


@pytest.mark.parametrize(
    ("types", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([[[0]]], {}, "token_type_ids: expected integers"),
        ([0.0, 1.0], {}, "token_type_ids: expected integers"),
        ([0, 2], {}, "no mode for token type 2"),
        ([0, 1], {"modes": {0: "causal"}}, "no mode for token type 1"),
        ([0, 1], {"modes": {0: "causal", 1: "image"}}, "modes: 'image' is not a mode"),
        ([0, 1], {"cu_seqlens": [0, 1]}, "cu_seqlens"),
        ([0, 1], {"cu_seqlens": [1, 2]}, "cu_seqlens"),
        ([0, 1], {"cu_seqlens": [0, 2, 1, 2]}, "cu_seqlens"),
        ([[0, 1]], {"cu_seqlens": [0, 2]}, "one sample per row"),
        ([0, 1], {"attention_mask": [1]}, "attention_mask"),
        ([[0, 1]], {"attention_mask": [1, 1]}, "attention_mask"),
    ],
)
def test_token_types_are_validated(types, options, message):
    with pytest.raises(ValueError, match=message):
        Layout.from_token_types(types, **options)


@pytest.mark.parametrize("bounds", [[], torch.tensor([], dtype=torch.int64)])
def test_empty_sample_borders_are_refused(bounds):
    with pytest.raises(ValueError, match="cu_seqlens"):
        Layout.from_token_types([0, 1], cu_seqlens=bounds)
