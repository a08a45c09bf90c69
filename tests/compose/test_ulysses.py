"""Ulysses and USP: which heads go where, what ranks hold, and that a plan is for one degree."""

import itertools
import pickle
import warnings
from random import Random

import pytest
import torch
from dense_attention import Data, assert_equal, dense, distributed, legal, make_plan
from hypothesis import given, note, settings
from hypothesis import strategies as st

import marble
from marble import AttentionShape, Layout, Span
from marble.compose.cost import summarise
from marble.compose.schedules.ulysses import HeadSplit, ulysses
from marble.testing.layouts import random_block, random_case

SPLITS = [
    HeadSplit(heads, kv_heads, degree)
    for heads, degree in itertools.product((1, 2, 4, 6, 8, 12, 28, 36), (1, 2, 3, 4, 6, 7, 8))
    for kv_heads in range(1, heads + 1)
    if heads % degree == 0 and heads % kv_heads == 0
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split.heads}-{split.kv_heads}-{split.degree}")
def test_every_query_head_reads_its_own_key_head(split: HeadSplit) -> None:
    queries = [head for part in range(split.degree) for head in range(*split.queries(part))]
    assert queries == list(range(split.heads))
    seen: list[int] = []
    places: list[int] = []
    for part in range(split.degree):
        sources = [split.source(part, head) for head in range(split.inner_kv_heads)]
        for inner, head in enumerate(range(*split.queries(part))):
            assert sources[inner // split.group] == head // (split.heads // split.kv_heads)
        assert [head for inner, heads in split.keys[part] for head in range(*heads)] == sources, (
            "the stretches are the heads one by one"
        )
        assert [head for inner, _ in split.keys[part] for head in range(*inner)] == list(range(len(sources)))
        gradients = split.gradients[part]
        assert [at for _, at, _ in gradients] == sources
        seen += [at for _, at, copy in gradients if copy is None]
        places += [copy for _, _, copy in gradients if copy is not None]
    assert sorted(seen) == list(range(split.kv_heads)), "one copy of each head lands in the sum itself"
    assert places == list(range(split.copies)), "and the others beside it, each in a place of its own"


def test_heads_are_copied_only_where_they_must_be() -> None:
    assert HeadSplit(32, 8, 8).copies == HeadSplit(28, 4, 4).copies == HeadSplit(12, 12, 4).copies == 0
    assert HeadSplit(8, 2, 4).copies == 2, "four ranks, two heads"
    assert HeadSplit(12, 3, 2).inner_kv_heads == 3, "0 0 1 | 1 2 2: two query heads each"
    assert HeadSplit(28, 4, 7).inner_kv_heads == 4, "four query heads of one or two groups of seven"
    with pytest.raises(ValueError, match="3 ranks do not divide 8 query heads"):
        HeadSplit(8, 2, 3)


@settings(max_examples=60)
@given(rng=st.builds(Random, st.integers(0, 2**32 - 1)))
def test_ranks_of_a_group_hold_its_tokens_in_even_parts(rng: Random) -> None:
    case, parts = random_case(rng, degrees=(1,)), rng.randint(1, 5)
    note(f"{case} {parts}")
    split = case.order.split(parts)
    assert split.world == case.world * parts
    for group in range(case.world):
        shards = [split.shard(group * parts + part) for part in range(parts)]
        assert torch.equal(torch.cat(shards), case.order.shard(group))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_the_inner_schedule_must_be_that_of_the_group() -> None:
    case = random_case(Random(3), degrees=(2,), ranks=(4, 4), schedules=("ring",))
    assert case.groups is not None
    (inner, *_), split = case.schedules(), HeadSplit(4, 2, 2)
    with pytest.raises(ValueError, match="not that of rank 1's group"):
        ulysses(inner, 1, case.order.lengths, split)


@pytest.mark.parametrize("ranks", [6, 8, 64])
def test_more_ranks_than_blocks_work_and_idle_ones_are_named(ranks: int) -> None:
    layout = Layout.from_cu_seqlens([0, 5, 13])
    with pytest.warns(UserWarning, match=r"ranks \[.*\] get no tokens"):
        plan = marble.plan(layout, AttentionShape(4, 2, 8), ranks=ranks, ulysses=2, block=8)
    assert plan.idle == tuple(range(4, ranks))
    assert str(plan).endswith(f"; ranks {list(range(4, ranks))} have no work")
    data = Data.of(13, (4, 2))
    assert_equal(distributed(plan, data), dense(data, legal(layout)))


def test_ranks_without_tokens_still_compute_in_their_group() -> None:
    """Three tokens on four ranks that share heads: the rank without a token computes a head for the others."""
    layout = Layout.from_cu_seqlens([0, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = marble.plan(layout, AttentionShape(4, 4, 8), ranks=4, ulysses=4)
    assert plan.order.lengths.count(0) == 1
    assert not plan.idle
    assert all(any(step.calls for step in schedule.forward.steps) for schedule in plan.schedules[0].values())
    data = Data.of(3, (4, 4))
    assert_equal(distributed(plan, data), dense(data, legal(layout)))


def test_a_plan_says_what_it_is() -> None:
    layers = [AttentionShape(4, 2, 8), AttentionShape(4, 2, 8, window=4), AttentionShape(4, 2, 8, window=4)]
    plan = marble.plan(
        Layout.from_cu_seqlens([0, 40]), layers, ranks=4, ulysses=2, schedule=["ring", *["sparse_a2a"] * 2], block=4
    )
    assert str(plan) == "plan of 40 tokens on 2 × 2 ranks, order ptrr, schedule ring × 1, sparse_a2a × 2"


def test_plans_of_other_degrees_have_other_digests_and_survive_pickling() -> None:
    plans = [make_plan(Layout.from_cu_seqlens([0, 40]), (4, 2), 4, ulysses=degree, block=4) for degree in (1, 2, 4)]
    assert len({tuple(plan.digest.tolist()) for plan in plans}) == 3
    data = Data.of(40, (4, 2))
    for plan in plans:
        copy = pickle.loads(pickle.dumps(plan))
        assert torch.equal(copy.digest, plan.digest)
        assert copy.ulysses == plan.ulysses
        assert_equal(distributed(copy, data), distributed(plan, data))


def test_ulysses_moves_what_it_should() -> None:
    """Forward, a rank gets the other ranks' tokens as its heads, and the others' outputs of its tokens come back."""
    tokens, dim, degree, (heads, kv_heads) = 64, 8, 4, (8, 4)
    plan = make_plan(Layout.from_cu_seqlens([0, tokens]), (heads, kv_heads), degree, dim=dim, ulysses=degree)
    summary = summarise(list(plan.schedules[0].values()), dim)
    mine, others = tokens // degree, tokens - tokens // degree
    sent = others * (heads // degree + 2 * kv_heads // degree) * dim * 2
    back = mine * (heads - heads // degree) * (dim * 2 + 4)
    assert summary.forward_bytes.tolist() == [sent + back] * degree


def test_a_span_that_a_group_border_cuts() -> None:
    layout = Layout([[Span("causal", 6), Span("full", 9), Span("causal", 6)]])
    data = Data.of(layout.tokens, (4, 1))
    for schedule in ("ring", "sparse_a2a", "chunked", "all_gather"):
        plan = make_plan(layout, (4, 1), 4, ulysses=2, schedule=schedule, order="contiguous", block=5)
        assert_equal(distributed(plan, data), dense(data, legal(layout)))


def test_blocks_do_not_matter_for_which_heads_go_where() -> None:
    rng = Random(0)
    layout, data = Layout.from_cu_seqlens([0, 17, 31]), Data.of(31, (6, 3))
    expected = dense(data, legal(layout))
    for _ in range(4):
        assert_equal(distributed(make_plan(layout, (6, 3), 6, ulysses=3, block=random_block(rng)), data), expected)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_a_window_layer_fetches_the_window_from_other_groups_whatever_their_number(groups: int) -> None:
    """The last-window all-to-all inside Ulysses: between groups only the window moves, for a part of the heads."""
    window, block, layout = 20, 4, Layout.from_cu_seqlens([0, 400])
    options = {"schedule": "sparse_a2a", "order": "contiguous", "ulysses": 2, "block": block, "window": window}
    plan = make_plan(layout, (4, 2), 2 * groups, **options)
    for rank, schedule in plan.schedules[0].items():
        moves = [move for step in schedule.forward.steps for move in step.transfers if move.target == rank]
        remote = [move for move in moves if move.source // 2 != rank // 2]
        assert {move.source % 2 for move in remote} <= {rank % 2}, "from ranks with the same heads"
        assert sum(len(move.dst) for move in remote) == (0 if rank < 2 else -(-(window - 1) // block) * block)
    data = Data.of(400, (4, 2))
    assert_equal(distributed(plan, data), dense(data, legal(layout, window)))
