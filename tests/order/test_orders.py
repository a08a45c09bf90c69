"""Token orders: who gets which tokens."""

import doctest
import importlib
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from marble.layout import Layout, Span
from marble.mask.storage import Storage
from marble.mask.tiles import work_of
from marble.order.balanced_samples import balanced_samples
from marble.order.contiguous import contiguous
from marble.order.ptrr import ptrr, ptrr_of_tiles
from marble.order.set_apart import set_apart
from marble.order.token_order import TokenOrder
from marble.testing.layouts import (
    planned_storage,
    random_block,
    random_layout,
    random_order,
    random_storage,
    random_window,
    stored_mask,
)

rngs = st.builds(Random, st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("name", ["ptrr", "contiguous"])
def test_documented_examples(name):
    module = importlib.import_module(f"marble.order.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


@settings(max_examples=100)
@given(rng=rngs)
def test_ptrr_deals_by_cost_in_rounds(rng):
    """The rule, step by step: in rounds of one block per rank, the costliest goes to the rank with the least so far.

    Rounds of equal costs are dealt in turn, each from the next rank on.
    """
    costs, ranks = [rng.randint(0, 6) for _ in range(rng.randint(0, 40))], rng.randint(1, 12)
    note(f"{costs} on {ranks}")
    expected, load = [0] * len(costs), [0] * ranks
    left = sorted(range(len(costs)), key=lambda block: (-costs[block], block))
    for number in range(-(-len(left) // ranks)):
        hand = left[number * ranks :][:ranks]
        by_load = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        missing = [0] * (ranks - len(hand))
        if len({costs[block] for block in hand} | set(missing)) == 1:
            by_load = [(number + seat) % ranks for seat in range(ranks)]
        for block, rank in zip(hand, by_load, strict=False):
            expected[block] = rank
            load[rank] += costs[block]
    dealt = ptrr(torch.tensor(costs, dtype=torch.int64), ranks)
    assert dealt.tolist() == expected
    assert dealt.dtype == torch.int64
    sizes = Counter(dealt.tolist())
    assert max((sizes[rank] for rank in range(ranks)), default=0) - min(sizes[rank] for rank in range(ranks)) <= 1


def test_ptrr_evens_single_steps_for_two_kinds_of_layers():
    """Documents of 3 to 16 blocks under a global and a window layer: no two ranks meet more often than others."""
    rng, ranks = Random(0), 8
    lengths = [rng.randint(3, 16) for _ in range(1500)]
    first = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    place = torch.arange(sum(lengths)) - torch.repeat_interleave(first, torch.tensor(lengths))
    costs = torch.stack([place + 1, (place + 1).clamp(max=9)])
    dealt = ptrr(costs, ranks)
    for cost in costs:
        query = torch.repeat_interleave(cost)
        key = query - (torch.arange(len(query)) - (cost.cumsum(0) - cost)[query])
        step = (dealt[query] - dealt[key]) % ranks
        work = torch.bincount(dealt[query] * ranks + step, minlength=ranks * ranks).view(ranks, ranks)
        assert work.amax(0).sum() <= 1.05 * work.sum(1).double().mean()
        assert work.sum(1).max() <= 1.001 * work.sum(1).double().mean()


def ring_tiles(stretches, dealt, ranks):
    """Tiles of each rank (first index) in each step of a ring (second index), pair by pair."""
    tiles = torch.zeros(ranks, ranks, dtype=torch.int64)
    for key, first, last in stretches.T.tolist():
        for query in range(first, last):
            tiles[dealt[query], (dealt[query] - dealt[key]) % ranks] += 1
    return tiles


def long_sample(spans):
    """A causal sample of random spans, every other one seen by itself alone, as noise is."""
    rng, ends = Random(2), [0]
    for _ in range(spans):
        ends.append(ends[-1] + rng.randint(1, 12))
    stretches = [
        (key, low if span % 2 else key, high if span % 2 else ends[-1])
        for span, (low, high) in enumerate(pairwise(ends))
        for key in range(low, high)
    ]
    return torch.tensor(stretches).T, ends[-1]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ptrr_of_tiles_evens_the_steps_of_long_samples(ranks):
    stretches, blocks = long_sample(100)
    work = work_of(stretches, blocks)
    slowest = {}
    for name, dealt in (("queries", ptrr(work, ranks)), ("tiles", ptrr_of_tiles(work[None], [stretches], ranks))):
        tiles = ring_tiles(stretches, dealt, ranks)
        assert tiles.sum(1).max() <= 1.004 * tiles.sum() / ranks
        slowest[name] = float(tiles.amax(0).sum() / (tiles.sum() / ranks))
    assert slowest["tiles"] <= 1 + 0.005 * ranks
    assert slowest["queries"] >= slowest["tiles"] + 0.01


def test_ptrr_of_tiles_keeps_the_deal_whose_steps_are_more_even():
    """Short causal documents, and work that would no longer be even, are dealt by queries alone."""
    rng, ranks = Random(1), 8
    ends = torch.tensor([rng.randint(2, 12) for _ in range(150)]).cumsum(0)
    first = torch.arange(int(ends[-1]))
    stretches = torch.stack([first, first, ends[torch.searchsorted(ends, first, right=True)]])
    work = work_of(stretches, len(first))
    dealt = ptrr(work, ranks)
    assert torch.equal(ptrr_of_tiles(work[None], [stretches], ranks), dealt)
    one = torch.tensor([[0], [0], [1]])
    assert ptrr_of_tiles(torch.ones(1, 1, dtype=torch.int64), [one], 4).tolist() == [0]


def test_ptrr_with_more_ranks_than_blocks():
    assert ptrr(torch.tensor([1, 3, 2]), 8).tolist() == [2, 0, 1]


@settings(max_examples=50)
@given(blocks=st.integers(0, 60), ranks=st.integers(1, 70))
def test_contiguous_keeps_neighbours_together(blocks, ranks):
    dealt = contiguous(blocks, ranks)
    sizes = torch.bincount(dealt, minlength=ranks)
    assert len(dealt) == blocks
    assert dealt.tolist() == sorted(dealt.tolist())
    assert sizes.max() - sizes.min() <= 1


@settings(max_examples=120)
@given(rng=rngs)
def test_balanced_samples_partition_the_tokens(rng):
    layout, ranks, block = random_layout(rng), rng.randint(1, 8), random_block(rng)
    work = torch.tensor([rng.randint(0, 9) for _ in range(layout.tokens)])
    note(f"{layout.to_json()}, {ranks} ranks, block {block}, work {work.tolist()}")
    samples = layout.sample_bounds
    pieces = balanced_samples(samples, work, ranks, block)
    start, stop, rank = pieces.T
    assert start[0] == 0
    assert stop[-1] == layout.tokens
    assert torch.equal(start[1:], stop[:-1])
    assert (start < stop).all()
    assert ((rank >= 0) & (rank < ranks)).all()
    home = torch.searchsorted(samples[:, 1].contiguous(), start.contiguous(), right=True)
    assert (stop <= samples[home, 1]).all(), "a piece leaves its sample"
    cut = start - samples[home, 0]
    assert (cut % block == 0).all(), "a cut that is no multiple of the block"


def test_samples_below_a_share_stay_whole():
    samples = torch.tensor([[0, 40], [40, 80], [80, 120], [120, 160]])
    pieces = balanced_samples(samples, torch.ones(160), 2, 8)
    assert pieces[:, :2].tolist() == samples.tolist()
    assert Counter(pieces[:, 2].tolist()) == {0: 2, 1: 2}


@settings(max_examples=60)
@given(rng=rngs)
@example(rng=Random(52813))  # 8 samples of 13 tokens: a share of 1 + 2⁻⁵²
def test_samples_stay_whole_when_the_first_deal_is_even(rng):
    """Equal samples, as many for every rank: nothing has a reason to be cut."""
    ranks, each, length = rng.randint(1, 8), rng.randint(1, 4), rng.randint(1, 20)
    stop = torch.arange(1, ranks * each + 1) * length
    samples = torch.stack([stop - length, stop], 1)
    work = torch.arange(length).repeat(ranks * each) + 1
    pieces = balanced_samples(samples, work, ranks, random_block(rng))
    assert torch.equal(pieces[:, :2], samples)
    assert torch.bincount(pieces[:, 2], minlength=ranks).tolist() == [each] * ranks


def test_a_sample_that_fills_several_ranks_is_cut():
    pieces = balanced_samples(torch.tensor([[0, 800], [800, 900], [900, 1000]]), torch.ones(1000), 4, 10)
    load = torch.zeros(4).index_add_(0, pieces[:, 2], (pieces[:, 1] - pieces[:, 0]).float())
    assert load.max() / load.mean() < 1.1


def test_balanced_samples_evens_out_work_and_tokens():
    rng = Random(1)
    lengths = torch.tensor([rng.randint(10, 400) for _ in range(60)])
    stop = lengths.cumsum(0)
    samples = torch.stack([stop - lengths, stop], 1)
    work = torch.cat([torch.arange(1, length + 1) for length in lengths.tolist()])
    pieces = balanced_samples(samples, work, 4, 16)
    before = torch.cat([torch.zeros(1), work.cumsum(0)])
    for amount in (before[pieces[:, 1]] - before[pieces[:, 0]], (pieces[:, 1] - pieces[:, 0]).float()):
        load = torch.zeros(4).index_add_(0, pieces[:, 2], amount)
        assert load.max() / load.mean() < 1.1


def test_balanced_samples_without_work():
    """Padding only: the tokens still count."""
    pieces = balanced_samples(torch.tensor([[0, 10], [10, 20]]), torch.zeros(20), 2, 5)
    assert torch.zeros(2).index_add_(0, pieces[:, 2], torch.full((len(pieces),), 1.0)).min() > 0


@settings(max_examples=100)
@given(rng=rngs)
def test_orders_deal_every_token_once(rng):
    layout, window, block, world = random_layout(rng), random_window(rng), random_block(rng), rng.randint(1, 8)
    mask = stored_mask(planned_storage(layout, window), window)
    order = random_order(rng, mask, world, block)
    note(f"{layout.to_json()}, {order.name}, block {block}, {world} ranks")
    shards = [order.shard(rank) for rank in range(world)]
    assert sorted(torch.cat(shards).tolist()) == list(range(layout.tokens))
    assert tuple(map(len, shards)) == order.lengths
    for rank, shard in enumerate(shards):
        assert (shard.diff() > 0).all(), "a rank's tokens are not in storage order"
        assert torch.equal(order.index(rank), mask.storage.sequence[shard])
    if order.name in ("contiguous", "ptrr", "dealt"):
        where = torch.cat([torch.full((len(shard),), rank) for rank, shard in enumerate(shards)])
        by_token = torch.empty_like(where)
        by_token[torch.cat(shards)] = where
        assert all(len(part.unique()) == 1 for part in by_token.split(block)), "a block is on two ranks"


STORAGE = Storage.natural(Layout([[Span("causal", 10)]]))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([[0, 4, 0]], "cover"),
        ([[1, 10, 0]], "cover"),
        ([[0, 4, 0], [5, 10, 1]], "cover"),
        ([[0, 6, 0], [5, 10, 1]], "cover"),
        ([[0, 5, 0], [5, 5, 1], [5, 10, 0]], "cover"),
        ([[0, 11, 0]], "cover"),
        ([[5, 10, 0], [0, 5, 1]], "cover"),
        ([[0, 5, 0], [5, 10, 2]], "ranks 0 to 1"),
        ([[0, 5, -1], [5, 10, 1]], "ranks 0 to 1"),
    ],
)
def test_token_orders_are_validated(pieces, message):
    with pytest.raises(ValueError, match=message):
        TokenOrder("mine", STORAGE, 2, torch.tensor(pieces))


def test_blocks_become_pieces():
    order = TokenOrder.of_blocks("mine", STORAGE, 3, torch.tensor([2, 2, 0, 2]), 3)
    assert order.pieces.tolist() == [[0, 6, 2], [6, 9, 0], [9, 10, 2]]
    assert order.lengths == (3, 0, 7)
    assert order.shard(2).tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert order.shard(1).tolist() == []


def test_set_apart_as_documented():
    """``text₀ noise₁ clean₂ text₃ noise₄ clean₅`` is stored as ``text₀ clean₂ text₃ clean₅ noise₄ noise₁``."""
    modes = ("causal", "noise", "full", "causal", "noise", "full")
    storage = set_apart(Layout([[Span(mode, 2) for mode in modes]]))
    assert storage.span_order.tolist() == [0, 2, 3, 5, 4, 1]
    assert storage.apart.tolist() == [False, True, False, False, True, False]
    assert storage.sequence.tolist() == [0, 1, 4, 5, 6, 7, 10, 11, 8, 9, 2, 3]


def test_set_apart_takes_groups_before_noise_and_leaves_linked_noise():
    groups = [Span("noise", 1), Span("group", 1), Span("causal", 1), Span("group", 1), Span("noise", 1)]
    linked = [Span("noise", 1, group=3), Span("causal", 1), Span("noise", 1, group=3), Span("noise", 1)]
    single = [Span("noise", 1, group=7), Span("causal", 1)]
    storage = set_apart(Layout([groups, linked, single]))
    assert storage.span_order.tolist() == [0, 2, 4, 3, 1, 5, 6, 7, 8, 10, 9]


@settings(max_examples=100)
@given(rng=rngs)
def test_storage_permutes_inside_samples(rng):
    layout = random_layout(rng)
    storage = set_apart(layout) if rng.random() < 0.5 else random_storage(rng, layout)
    note(f"{layout.to_json()}, stored {storage.span_order.tolist()}")
    assert sorted(storage.sequence.tolist()) == list(range(layout.tokens))
    for low, high in layout.sample_bounds.tolist():
        assert sorted(storage.sequence[low:high].tolist()) == list(range(low, high))
    table = layout.table
    assert torch.equal(table.start[storage.span] + storage.within, storage.sequence)
    for span in range(len(table.start)):
        there = storage.sequence[int(storage.offset[span]) :][: int(table.length[span])]
        assert there.tolist() == list(range(int(table.start[span]), int(table.stop[span])))
    if not storage.apart.any():
        assert torch.equal(storage.sequence, torch.arange(layout.tokens))
