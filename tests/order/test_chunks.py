"""Chunks for the chunked ring: the work between them, how they are dealt, and what refinement is worth."""

import itertools
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from marble.layout import Layout, Span
from marble.mask.domains import dense
from marble.mask.pieces import NotDenseError, dense_pieces
from marble.mask.tiles import StoredMask
from marble.order.chunks import _dealt, chunk_order, chunk_segments, chunks, pair_work
from marble.testing.layouts import is_dense, planned_storage, random_layout, random_window, stored_mask
from marble.workloads import build

rngs = st.builds(Random, st.integers(0, 2**32 - 1))


def dense_mask(rng: Random) -> StoredMask | None:
    layout, window = random_layout(rng), random_window(rng) if rng.random() < 0.3 else None
    note(f"{layout.to_json()}, window {window}")
    mask = stored_mask(planned_storage(layout, window), window)
    return mask if is_dense(mask) else None


def owners(mask: StoredMask, count: int) -> torch.Tensor:
    """The chunk of each stored token."""
    chunk = torch.full((mask.storage.layout.tokens,), -1)
    for start, stop, number in chunk_segments(mask.storage, count).tolist():
        assert (chunk[start:stop] == -1).all()
        chunk[start:stop] = number
    return chunk


def brute_force(mask: StoredMask, owner: torch.Tensor, count: int) -> torch.Tensor:
    """Legal pairs between owners, pair by pair."""
    member = torch.nn.functional.one_hot(owner, count).double()
    return member.T @ dense(mask.mask, mask.tracks, mask.tracks).double() @ member


@settings(max_examples=120)
@given(rng=rngs)
def test_work_between_chunks_is_counted_without_looking_at_pairs(rng):
    mask, count = dense_mask(rng), rng.choice([1, 2, 3, 5, 16, 40])
    if mask is not None:
        found = torch.from_numpy(pair_work(mask, count))
        assert torch.equal(found, brute_force(mask, owners(mask, count), count))


@settings(max_examples=60)
@given(rng=rngs)
def test_chunks_are_equal_stretches_of_the_sequence(rng):
    layout = random_layout(rng)
    storage, count = planned_storage(layout, None), rng.choice([1, 2, 3, 7, 50])
    owner = owners(stored_mask(storage), count)
    expected = torch.arange(layout.tokens) * 0 - 1
    for chunk in range(count):
        expected[chunk * layout.tokens // count : (chunk + 1) * layout.tokens // count] = chunk
    assert torch.equal(owner, expected[storage.sequence])


@settings(max_examples=40)
@given(rng=rngs)
def test_the_cost_is_what_a_ring_pays(rng):
    """C of the chosen layout, recounted pair by pair from the token order."""
    mask, ranks, least, tau = dense_mask(rng), rng.randint(1, 5), rng.randint(1, 9), rng.choice([0.0, 3.0])
    if mask is None:
        return
    chosen = chunks(mask, ranks, least, tau=tau)
    per_rank, rest = divmod(len(chosen.rank), ranks)
    assert not rest
    assert per_rank & (per_rank - 1) == 0
    assert np.bincount(chosen.rank, minlength=ranks).tolist() == [per_rank] * ranks
    between = brute_force(mask, torch.from_numpy(chosen.rank)[owners(mask, len(chosen.rank))], ranks)
    steps = [max(between[rank, (rank - step) % ranks] for rank in range(ranks)) for step in range(ranks)]
    assert float(sum(steps)) + tau * ranks * per_rank == pytest.approx(chosen.cost, rel=1e-9)
    assert chosen.mean == pytest.approx(float(between.sum()) / ranks)


@settings(max_examples=40)
@given(rng=rngs)
def test_the_token_order_is_the_chosen_chunks(rng):
    mask, ranks, least = dense_mask(rng), rng.randint(1, 5), rng.randint(1, 9)
    if mask is None:
        return
    rank = torch.from_numpy(chunks(mask, ranks, least).rank)
    expected, order = rank[owners(mask, len(rank))], chunk_order(mask, ranks, least)
    for number in range(ranks):
        assert torch.equal(order.shard(number), (expected == number).nonzero().flatten())


def test_ptrr_rule_in_order_of_work_and_of_sequence():
    work = np.diag([1.0, 8.0, 2.0, 7.0, 3.0, 6.0])
    by_work, by_place = _dealt(work, 2)
    assert by_place.tolist() == [0, 1, 1, 0, 0, 1]
    # Costs 8, 7 | 6, 3 | 2, 1 go to ranks 0, 1 | 1, 0 | 0, 1.
    assert by_work.tolist() == [1, 0, 0, 1, 0, 1]


def test_refinement_beats_the_plain_deal_and_is_deterministic():
    layout = build("bagel_long", 2**19, scale=0.5)
    mask = stored_mask(planned_storage(layout, None))
    plain, one, two = (chunks(mask, 8, 128, tau=0.0, refine=refine) for refine in (False, True, True))
    assert one.cost < plain.cost
    assert np.array_equal(one.rank, two.rank)
    assert one.mean <= one.cost < 1.1 * one.mean


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_short_sequences_get_few_chunks_and_every_rank_its_share(ranks):
    layout = Layout([[Span("causal", 50), Span("full", 27)]])
    order = chunk_order(stored_mask(planned_storage(layout, None)), ranks, 128)
    assert max(order.lengths) - min(order.lengths) <= 1
    assert sum(order.lengths) == 77


def test_a_range_costs_more_where_few_chunks_do():
    """With a high τ one chunk per rank is best."""
    layout = build("bagel_long", 2**18, scale=0.5)
    mask = stored_mask(planned_storage(layout, None))
    assert len(chunks(mask, 4, 128, tau=1e12).rank) == 4
    assert len(chunks(mask, 4, 128, tau=0.0).rank) > 4


@settings(max_examples=80)
@given(rng=rngs)
def test_pieces_say_what_their_first_and_last_queries_see(rng):
    layout, window = random_layout(rng), random_window(rng)
    mask = stored_mask(planned_storage(layout, window), window)
    note(f"{layout.to_json()}, window {window}")
    legal = dense(mask.mask, mask.tracks, mask.tracks)
    cuts = sorted({0, layout.tokens, *(rng.randint(0, layout.tokens) for _ in range(4))})
    segments = [pair for pair in itertools.pairwise(cuts) if rng.random() < 0.8]
    try:
        pieces = dense_pieces(mask, torch.tensor(segments).reshape(-1, 2))
    except NotDenseError:
        # Some span's queries do not all see the same, nor one key more each.
        kinds = []
        for start, stop in segments:
            for token in range(start, stop):
                edges = torch.nn.functional.pad(legal[token].to(torch.int8), (1, 1)).diff()
                kinds.append(int((edges == 1).sum()))
        assert window is not None or max(kinds) > 1
        return
    covered = [
        token
        for start, stop in zip(pieces.start.tolist(), pieces.stop.tolist(), strict=True)
        for token in range(start, stop)
    ]
    assert covered == [token for start, stop in segments for token in range(start, stop)]
    for at in range(len(pieces)):
        grows = int(pieces.last[at, 1] - pieces.first[at, 1]) > 0
        for step, token in enumerate(range(int(pieces.start[at]), int(pieces.stop[at]))):
            lo0, hi0, lo1, hi1 = pieces.first[at].tolist()
            seen = torch.zeros(layout.tokens, dtype=torch.bool)
            seen[lo0 : hi0 + step * grows] = True
            seen[lo1:hi1] = True
            assert torch.equal(seen, legal[token])


def test_masks_of_ones_own_are_not_dense():
    layout = Layout([[Span("causal", 5)]])
    mask = stored_mask(planned_storage(layout, None), user="q.pos >= k.pos")
    with pytest.raises(NotDenseError, match="mask of one's own"):
        dense_pieces(mask, torch.tensor([[0, 5]]))
