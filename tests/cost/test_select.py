"""What is chosen, and what it follows."""

from dataclasses import replace

import numpy as np
import pytest

from marble import AttentionShape, Layout, Span, attention, plan
from marble.compose.planner import forget, ranking
from marble.cost.loads import Loads, price
from marble.cost.profile import Profile, ProfileError
from marble.workloads import build

CLUSTER = Profile.load("h100-cluster")
ONE_NODE = Profile.load("h200")
SHAPE = AttentionShape(32, 8, 128)
DOCS, LONG = build("molmo_docs", 131072), build("bagel_long", 131072)


def loads(tiles: float = 1e4, inside: float = 0.0, across: float = 0.0) -> Loads:
    found = Loads.zeros(3, 2)
    found.tiles[:], found.inside[:], found.across[:] = tiles, inside, across
    return found


def seconds(each: Loads, profile: Profile = CLUSTER, backward: bool = False) -> float:
    return price(each, profile, 128, 128, backward=backward).seconds


def test_more_work_and_more_bytes_take_longer() -> None:
    assert seconds(loads(2e4)) == pytest.approx(2 * seconds(loads(1e4)))
    assert seconds(loads(), backward=True) > seconds(loads())
    times = [seconds(loads(inside=nbytes)) for nbytes in (0.0, 1e6, 1e9, 1e10)]
    assert times[0] == times[1] < times[2] < times[3], "small transfers hide behind compute"
    assert seconds(loads(across=1e9)) > seconds(loads(inside=1e9))
    for name in ("partial", "units", "memory"):
        more = loads()
        getattr(more, name)[:] = 1e4 if name != "memory" else 1e9
        assert seconds(more) > seconds(loads()), name


def test_a_step_lasts_as_long_as_its_calls_and_transfers() -> None:
    """One rank computes while the other receives: the step lasts as long as the longer of the two."""
    each = Loads.zeros(1, 2)
    each.tiles[0, 0], each.inside[0, 1] = 1e4, 1e9
    found = price(each, CLUSTER, 128, 128, backward=False)
    assert found.seconds == pytest.approx(max(found.compute, 1e9 / CLUSTER.inside))
    assert found.exposed == pytest.approx(found.seconds - found.compute)
    fixed = price(each, replace(CLUSTER, step=1e-3), 128, 128, backward=False)
    assert fixed.fixed == pytest.approx(1e-3)
    assert price(loads(), replace(CLUSTER, step=1e-3), 128, 128, backward=False).fixed == 0, "nothing moves"


def test_more_ranks_compute_less_and_a_larger_ring_moves_more() -> None:
    few, many = (ranking(LONG, SHAPE, ranks, CLUSTER, order="ptrr", ulysses=1) for ranks in (4, 16))
    ring = [next(c for c in found if c.schedules == ("ring",)) for found in (few, many)]
    assert ring[1].compute < ring[0].compute
    assert ring[1].memory < ring[0].memory
    slower = [
        next(
            c
            for c in ranking(LONG, SHAPE, 16, replace(CLUSTER, across=1e9), order="ptrr", ulysses=1)
            if c.schedules == ("ring",)
        )
    ]
    assert slower[0].exposed > ring[1].exposed


def test_documents_are_fetched_and_long_videos_are_not_gathered() -> None:
    best = ranking(DOCS, SHAPE, 16, CLUSTER)[0]
    assert (best.schedules, best.order) == (("sparse_a2a",), "balanced_samples")
    assert "all_gather" not in ranking(LONG, AttentionShape(28, 4, 128), 32, CLUSTER)[0].schedules


def test_picks_follow_the_bandwidth() -> None:
    """Where nodes are far from each other, heads are shared inside one; where they are not, tokens may travel."""

    def best(across: float) -> int:
        return ranking(LONG, SHAPE, 16, replace(CLUSTER, across=across, inside=400e9))[0].ulysses

    assert best(1e9) > 1
    fast = ranking(DOCS, SHAPE, 16, replace(CLUSTER, inside=1e9, across=1e12))[0]
    slow = ranking(DOCS, SHAPE, 16, replace(CLUSTER, inside=1e12, across=1e9))[0]
    assert fast.seconds != slow.seconds
    assert fast.ulysses == 1, "an all-to-all of heads over slow links"


def test_every_split_and_order_is_looked_at() -> None:
    found = ranking(DOCS, SHAPE, 8, ONE_NODE)
    assert {c.ulysses for c in found} == {1, 2, 4, 8}
    assert {c.order for c in found} == {"ptrr", "chunks", "balanced_samples", "contiguous"}
    assert {c.schedules[0] for c in found} == {"ring", "sparse_a2a", "chunked", "all_gather"}
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    assert all(c.seconds == pytest.approx(c.compute + c.exposed + c.fixed) for c in found)


def test_one_order_and_a_schedule_for_each_kind_of_layer() -> None:
    shapes = (AttentionShape(32, 16, 128, 1024), AttentionShape(32, 16, 128)) * 2
    found = ranking(build("gemma_docs", 65536), shapes, 4, ONE_NODE, ulysses=1)
    assert all(c.layers[0] is c.layers[2] and c.layers[1] is c.layers[3] for c in found)
    assert {"ring", "sparse_a2a"} <= {c.schedules[0] for c in found}
    assert all("chunked" not in (c.schedules[0], c.schedules[2]) for c in found), "windows are not dense"
    assert found[0].schedules[0] == "sparse_a2a", "the last window"


def test_plan_takes_the_fastest_and_keeps_what_is_given() -> None:
    best = ranking(DOCS, SHAPE, 8, ONE_NODE)[0]
    made = plan(DOCS, SHAPE, ranks=8, rank=3, schedule=ONE_NODE)
    assert (made.names, made.order.name, made.ulysses) == (best.schedules, best.order, best.ulysses)
    kept = plan(DOCS, SHAPE, ranks=8, rank=3, schedule=ONE_NODE, order="ptrr", ulysses=4)
    assert (kept.order.name, kept.ulysses) == ("ptrr", 4)
    named = plan(DOCS, SHAPE, ranks=8, rank=3, schedule="ring")
    assert (named.names, named.order.name, named.ulysses) == (("ring",), "ptrr", 1)


def test_every_rank_chooses_the_same() -> None:
    plans = []
    for rank in range(4):
        forget()
        plans.append(plan(Layout(DOCS.samples), SHAPE, ranks=4, rank=rank, schedule=ONE_NODE))
    assert len({tuple(each.digest.tolist()) for each in plans}) == 1


def test_a_chosen_plan_runs() -> None:
    import torch

    layout, shape = Layout([[Span("causal", 60), Span("full", 40)]] * 3), AttentionShape(4, 2, 64)
    made = plan(layout, shape, ranks=4, schedule=ONE_NODE, block=16)
    q, k, v = (torch.randn(300, heads, 64, dtype=torch.float64) for heads in (4, 2, 2))
    out = made.unshard(attention(*map(made.shard, (q, k, v)), made))
    single = plan(layout, shape, ranks=1)
    assert torch.allclose(out, single.unshard(attention(*map(single.shard, (q, k, v)), single)))


def test_masks_without_ranges_are_priced_by_their_schedules() -> None:
    layout = Layout([[Span("causal", 512)]])
    made = plan(layout, AttentionShape(2, 1, 128), ranks=4, schedule=ONE_NODE, mask=lambda q, k: q.pos >= k.pos)
    known = plan(layout, AttentionShape(2, 1, 128), ranks=4, schedule=ONE_NODE)
    assert made.ulysses == known.ulysses
    assert made.names == known.names


def test_what_a_profile_does_not_know() -> None:
    with pytest.raises(ProfileError, match="knows no bandwidth between nodes"):
        ranking(DOCS, SHAPE, 16, ONE_NODE)
    with pytest.raises(ProfileError, match="no rates for head size 96"):
        plan(DOCS, AttentionShape(8, 8, 96), ranks=4, schedule=ONE_NODE)
    with pytest.raises(ValueError, match="dense calls can express"):
        ranking(DOCS, AttentionShape(8, 8, 128, 64), 4, ONE_NODE, order="chunks")


def test_estimates_are_finite_for_idle_ranks() -> None:
    found = ranking(Layout([[Span("causal", 100)]]), AttentionShape(8, 8, 128), 8, ONE_NODE)
    assert all(np.isfinite(c.seconds) and c.seconds > 0 for c in found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ulysses": 0}, "ulysses: must be at least 1"),
        ({"ulysses": 3}, "ulysses: 3 does not divide 4 ranks"),
        ({"order": "best"}, "order: 'best' is unknown"),
    ],
)
def test_bad_input_is_refused_before_anything_is_priced(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(DOCS, SHAPE, ranks=4, schedule=ONE_NODE, **changed)
