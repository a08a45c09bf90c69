"""The domains that a mask runs on: dense values are the seed's function, and block summaries never promise too much."""

from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from marble.layout import Layout, Span
from marble.mask.algebra import and_masks, or_masks
from marble.mask.domains import BlockSummaries, dense, summarise
from marble.mask.modes import packed_mask
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.mask.tracks import Tracks
from marble.testing.layouts import (
    mask_of,
    random_block,
    random_expression,
    random_layout,
    random_storage,
    random_window,
    stored_mask,
)

rngs = st.builds(Random, st.integers(0, 2**32 - 1))
LAYOUT = Layout([[Span("causal", 5), Span("full", 4)], [Span("group", 3), Span("causal", 2), Span("group", 4)]])
NAMES = ("sample", "seg", "noise", "pos", "shot")


def seed_mask(q: dict, k: dict, window: float) -> bool:
    """The mask as the seed's page writes it, for one pair of tokens."""
    causal = 0 <= q["pos"] - k["pos"] < window
    same_span = q["seg"] == k["seg"] >= 0
    keep_noise = k["noise"] < 0 or q["noise"] == k["noise"]
    same_sample = q["sample"] == k["sample"]
    return (causal or same_span) and keep_noise and same_sample


@settings(max_examples=60)
@given(rng=rngs)
def test_dense_is_the_seeds_function(rng):
    layout, window = random_layout(rng, samples=3, spans=5, length=6), random_window(rng)
    note(f"{layout.to_json()}, window {window}")
    tracks = Tracks.of(layout)
    tokens = [
        dict(zip(tracks.columns, row, strict=True)) for row in torch.stack([*tracks.columns.values()], 1).tolist()
    ]
    limit = float("inf") if window is None else window
    expected = torch.tensor([[seed_mask(q, k, limit) for k in tokens] for q in tokens])
    assert torch.equal(dense(packed_mask(window), tracks, tracks), expected)


@settings(max_examples=60)
@given(rng=rngs)
def test_dense_of_a_users_mask_is_its_function(rng):
    layout = random_layout(rng, samples=2, spans=3, length=5)
    expression = random_expression(rng, NAMES)
    note(expression)
    mask = stored_mask(Storage.natural(layout), user=expression)
    columns = mask.tracks.columns
    index = range(layout.tokens)

    class Token:
        def __init__(self, at: int) -> None:
            self.__dict__.update({name: int(column[at]) for name, column in columns.items()})

    # On plain numbers `~True` is −2: use Python's own logic.
    source = expression.replace("~", "not ").replace("&", "and").replace("|", "or")
    scalar = eval(f"lambda q, k: bool({source})")
    tokens = [Token(at) for at in index]
    expected = torch.tensor([[scalar(q, k) and q.sample >= 0 and k.sample >= 0 for k in tokens] for q in tokens])
    assert torch.equal(dense(mask.mask, mask.tracks, mask.tracks), expected)


def check_summaries(rng: Random, mask: StoredMask) -> None:
    tokens, q_block, k_block = len(mask.tracks), random_block(rng), random_block(rng)
    rows, cols = (torch.tensor(sorted(rng.sample(range(tokens), rng.randint(1, tokens)))) for _ in range(2))
    q, k = mask.tracks.take(rows), mask.tracks.take(cols)
    full, maybe = summarise(mask.mask, BlockSummaries.of(q, q_block), BlockSummaries.of(k, k_block))
    legal = dense(mask.mask, q, k)
    note(f"blocks {q_block} and {k_block}")
    assert full.shape == maybe.shape == (-(-len(rows) // q_block), -(-len(cols) // k_block))
    assert not (full & ~maybe).any()
    for i, strip in enumerate(legal.split(q_block)):
        for j, tile in enumerate(strip.split(k_block, dim=1)):
            assert tile.all() or not full[i, j], f"tile {i}, {j} is not full"
            assert not tile.any() or maybe[i, j], f"tile {i}, {j} is not empty"


@settings(max_examples=120)
@given(rng=rngs)
def test_summaries_of_layouts_promise_what_is_true(rng):
    layout, window = random_layout(rng), random_window(rng)
    note(f"{layout.to_json()}, window {window}")
    check_summaries(rng, stored_mask(random_storage(rng, layout), window, ranges=False))


@settings(max_examples=200)
@given(rng=rngs)
def test_summaries_of_users_masks_promise_what_is_true(rng):
    layout, expression = random_layout(rng, samples=3, spans=4), random_expression(rng, NAMES)
    note(f"{layout.to_json()}, {expression}")
    check_summaries(rng, stored_mask(Storage.natural(layout), user=expression))


def test_summaries_decide_what_a_block_pair_shows():
    """Sound is not enough: with nothing ever decided, planning would look at every pair."""
    tracks = Tracks.of(Layout([[Span("causal", 64)], [Span("full", 64)]]))
    blocks = BlockSummaries.of(tracks, 16)
    full, maybe = summarise(packed_mask(), blocks, blocks)
    below = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(full[:4, :4], below.tril(-1))
    assert torch.equal(maybe[:4, :4], below)
    assert full[4:, 4:].all()
    assert not maybe[:4, 4:].any()
    assert not maybe[4:, :4].any()


def test_segments_of_interleaved_groups_are_told_apart():
    """Two groups whose id ranges overlap in a block: only the bitmap can tell that they share no id."""
    columns = {name: torch.zeros(4, dtype=torch.int32) for name in ("sample", "noise", "pos")}
    q = Tracks(seg=torch.tensor([1, 5, 1, 5]).int(), **columns)
    k = Tracks(seg=torch.tensor([3, 7, 3, 7]).int(), **columns)
    _, maybe = summarise(lambda q, k: q.seg == k.seg, BlockSummaries.of(q, 4), BlockSummaries.of(k, 4))
    assert not maybe.any()
    k = Tracks(seg=torch.tensor([3, 5 + 64, 3, 5 + 64]).int(), **columns)
    _, maybe = summarise(lambda q, k: q.seg == k.seg, BlockSummaries.of(q, 4), BlockSummaries.of(k, 4))
    assert maybe.all()  # residues collide: unknown, never wrong


PYTHON_LOGIC = {
    "and": lambda q, k: (q.pos >= k.pos) and (q.seg == k.seg),
    "or": lambda q, k: (q.pos >= k.pos) or (q.seg == k.seg),
    "not": lambda q, k: not (q.pos >= k.pos),
    "chained comparison": lambda q, k: 0 <= q.pos - k.pos < 4,
    "if": lambda q, k: (q.pos >= k.pos) if q.seg == k.seg else (q.pos < k.pos),
    "track as a condition": lambda q, k: q.seg and (q.pos >= k.pos),
}


@pytest.mark.parametrize("mask", PYTHON_LOGIC.values(), ids=PYTHON_LOGIC)
def test_python_logic_is_refused(mask):
    tracks = Tracks.of(LAYOUT)
    blocks = BlockSummaries.of(tracks, 4)
    everything = torch.arange(len(tracks))
    stored = StoredMask(Storage.natural(LAYOUT), mask)
    with pytest.raises(TypeError, match=r"& \| ~|compare tracks"):
        summarise(mask, blocks, blocks)
    with pytest.raises(TypeError, match=r"& \| ~|compare tracks"):
        stored.tiles(everything, everything, 4)
    with pytest.raises(TypeError, match=r"& \| ~|compare tracks"):
        stored.work(4)


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: q.pos - k.pos,
        lambda q, k: True,  # noqa: ARG005
        lambda q, k: None,  # noqa: ARG005
        lambda q, k: (q.pos >= k.pos) & 1,
        lambda q, k: q.pos + 0.5 >= k.pos,
        lambda q, k: q.pos >= k.pos * 0.5,
        lambda q, k: q.pos // k.pos == 1,
        lambda q, k: q.pos % 0 == k.pos,
        lambda q, k: q.pos // -2 == k.pos,
    ],
    ids=["integer", "constant", "None", "condition & integer", "float", "float factor", "by a track", "by 0", "by −2"],
)
def test_what_is_no_mask_is_refused(mask):
    tracks = Tracks.of(LAYOUT)
    blocks = BlockSummaries.of(tracks, 4)
    with pytest.raises(TypeError, match="mask"):
        summarise(mask, blocks, blocks)


@pytest.mark.parametrize("mask", [lambda q, k: q.pos - k.pos, lambda q, k: True, lambda q, k: None])  # noqa: ARG005
def test_dense_refuses_what_is_not_boolean(mask):
    tracks = Tracks.of(LAYOUT)
    with pytest.raises(TypeError, match="boolean"):
        dense(mask, tracks, tracks)


def test_combining_needs_functions():
    for combine in (and_masks, or_masks):
        with pytest.raises(TypeError, match="functions"):
            combine()
        with pytest.raises(TypeError, match="functions"):
            combine(packed_mask(), True)


def test_constants_combine_with_conditions():
    tracks = Tracks.of(LAYOUT)
    blocks = BlockSummaries.of(tracks, 3)
    for source, same in (("True & (q.pos >= k.pos)", "q.pos >= k.pos"), ("(q.pos >= k.pos) | False", "q.pos >= k.pos")):
        assert torch.equal(dense(mask_of(source), tracks, tracks), dense(mask_of(same), tracks, tracks))
        for one, other in zip(
            summarise(mask_of(source), blocks, blocks), summarise(mask_of(same), blocks, blocks), strict=True
        ):
            assert torch.equal(one, other)


CAUSAL = "(q.pos >= k.pos)"
EQUIVALENT = {
    f"{CAUSAL} == True": CAUSAL,
    f"{CAUSAL} != False": CAUSAL,
    f"{CAUSAL} != True": f"~{CAUSAL}",
    f"False == {CAUSAL}": f"~{CAUSAL}",
    f"{CAUSAL} ^ True": f"~{CAUSAL}",
    f"{CAUSAL} == (q.seg == k.seg)": f"({CAUSAL} & (q.seg == k.seg)) | (~{CAUSAL} & ~(q.seg == k.seg))",
    f"{CAUSAL} != (q.seg == k.seg)": f"({CAUSAL} & ~(q.seg == k.seg)) | (~{CAUSAL} & (q.seg == k.seg))",
}


@pytest.mark.parametrize(("source", "same"), EQUIVALENT.items())
def test_conditions_are_compared(source, same):
    """By value, on tensors, on summaries and so in plans; not by identity, as Python would."""
    tracks = Tracks.of(LAYOUT)
    one, other = mask_of(source), mask_of(same)
    assert torch.equal(dense(one, tracks, tracks), dense(other, tracks, tracks))
    single = BlockSummaries.of(tracks, 1)
    assert all(map(torch.equal, summarise(one, single, single), summarise(other, single, single)))
    everything, natural = torch.arange(len(tracks)), Storage.natural(LAYOUT)
    ours, theirs = (StoredMask(natural, mask).tiles(everything, everything, 4) for mask in (one, other))
    assert torch.equal(ours.by_query.counts(), theirs.by_query.counts())


CONDITION = [lambda c, d: c <= d, lambda c, d: c + d, lambda c, d: c * 1, lambda c, d: abs(c), lambda c, d: -c]  # noqa: ARG005
NUMBER = [abs, lambda x: x**2, lambda x: 100 // x, lambda x: x ^ x, lambda x: ~x, lambda x: x << 1, lambda x: x < 2**70]


@pytest.mark.parametrize("misuse", CONDITION)
def test_conditions_are_no_numbers(misuse):
    blocks = BlockSummaries.of(Tracks.of(LAYOUT), 4)
    with pytest.raises(TypeError, match=r"^mask: conditions are combined with & \| ~ \^ == and !="):
        summarise(lambda q, k: misuse(q.pos >= k.pos, q.seg == k.seg), blocks, blocks)


@pytest.mark.parametrize("misuse", NUMBER)
def test_what_is_not_computed_with_tracks_is_refused(misuse):
    blocks = BlockSummaries.of(Tracks.of(LAYOUT), 4)
    with pytest.raises((TypeError, ValueError), match=r"^mask: "):
        summarise(lambda q, k: misuse(q.pos) >= k.pos, blocks, blocks)


def test_values_beyond_int32_mean_the_same_in_both_domains():
    """Positions of a long pack, squared: a summary must not promise what the tensors then compute otherwise."""
    column = torch.tensor([50_000], dtype=torch.int32)
    tracks = Tracks(sample=column * 0, seg=column * 0, noise=column * 0, pos=column)
    mask = mask_of("q.pos * k.pos >= 0")
    full, maybe = summarise(mask, BlockSummaries.of(tracks, 1), BlockSummaries.of(tracks, 1))
    legal = bool(dense(mask, tracks, tracks))
    assert legal or not bool(full)
    assert not legal or bool(maybe)
