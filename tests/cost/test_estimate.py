"""Counts between ranks and estimated loads agree with the schedules that are built."""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from marble import AttentionShape, plan
from marble.compose.builders import ORDERS, build
from marble.compose.planner import estimates
from marble.compose.schedules.ulysses import HeadSplit
from marble.cost import select
from marble.cost.counts import PairCounts, countable
from marble.cost.estimate import ESTIMATES, Estimate, Place
from marble.cost.loads import Loads, loads_of, memory_of
from marble.testing.layouts import random_case
from marble.workloads import WORKLOADS
from marble.workloads import build as build_layout

ALIGNED = ("ptrr", "contiguous")
"""Orders of whole stored blocks: what is counted is exact."""
TILE_SCHEDULES = ("ring", "sparse_a2a", "all_gather")


def both(name: str, order: str, shape: AttentionShape, layout, groups: int, degree: int, node: int, block: int):
    """The estimate of a schedule, and the loads [steps, groups] and memory of what is built."""
    world = groups * degree
    made = plan(layout, shape, ranks=world, ulysses=degree, schedule=name, order=order, block=block)
    mask = made.masks[0]
    dealt = ORDERS[order](made.masks, groups, block)
    split = HeadSplit(shape.heads, shape.kv_heads, degree)
    counts = PairCounts.of(dealt, mask, block, dense=name == "chunked")
    estimate = ESTIMATES[name](counts, Place(groups, split, shape.head_dim, node, block))
    schedules = [made.schedules[0][rank] for rank in range(world)]
    loads = [loads_of(schedules, shape.head_dim, node, block=block, backward=backward) for backward in (False, True)]
    grouped = [
        Loads(*(getattr(x, f).reshape(-1, groups, degree).max(2) for f in x.__dataclass_fields__)) for x in loads
    ]
    memory = max(memory_of(which, shape.head_dim) for s in schedules for which in (s.forward, s.backward))
    return estimate, Estimate(*grouped, memory)


def slowest(loads: Loads, name: str) -> float:
    """Sum over the steps of the busiest rank's."""
    return float(getattr(loads, name).max(1).sum())


@pytest.mark.parametrize("order", ALIGNED)
@pytest.mark.parametrize("name", TILE_SCHEDULES)
@pytest.mark.parametrize(
    ("groups", "degree", "node"), [(4, 1, 8), (4, 1, 2), (1, 4, 2), (2, 4, 4), (4, 4, 8), (3, 2, 2)]
)
def test_schedules_of_tiles_are_estimated_exactly(name: str, order: str, groups: int, degree: int, node: int) -> None:
    """Tiles, units, bytes and memory of every step and rank, but state, which is spread over a rank's steps."""
    if name == "all_gather" and groups == 1:
        pytest.skip("nothing to gather: its call is on the rank's own keys, in an earlier step")
    layout = build_layout("bagel_mix", 3072, scale=1 / 16)
    shape = AttentionShape(8, 2, 16)  # copies of key/value heads at degree 4
    found, built = both(name, order, shape, layout, groups, degree, node, 16)
    for which in ("forward", "backward"):
        one, other = getattr(found, which), getattr(built, which)
        for field in ("tiles", "partial", "units", "inside", "across"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-3), (which, field)
        assert one.memory.sum() == pytest.approx(other.memory.sum(), rel=5e-3), which
    assert found.memory == pytest.approx(built.memory, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(rng=st.builds(Random, st.integers(0, 2**32 - 1)))
def test_counts_are_those_of_the_tiles(rng: Random) -> None:
    """Any layout and order: tiles within what a block of several pieces may count twice, the rest exact."""
    case = random_case(rng, schedules=("ring",), degrees=(1,))
    assume(countable(case.mask))
    note(case.layout.to_json())
    counts = PairCounts.of(case.order, case.mask, case.block)
    shards = case.order.shards
    ranks = range(case.order.world)
    tiles = [case.mask.tiles_of(shards[rank], shards, case.block) for rank in ranks]

    def table(value) -> np.ndarray:
        return np.array([[value(each) for each in row] for row in tiles]).reshape(len(tiles), len(tiles))

    visited = table(lambda each: each.visited)
    assert (counts.query_blocks == table(lambda each: int((each.by_query.counts() > 0).sum()))).all()
    assert (counts.key_blocks == table(lambda each: int((each.by_key.counts() > 0).sum()))).all()
    assert (counts.key_rows == table(lambda each: int(each.key_len[each.by_key.counts() > 0].sum()))).all()
    assert (np.asarray(counts.tokens) == np.array(case.order.lengths)).all()
    if (case.order.pieces[:, 0] % case.block == 0).all():  # no block has two pieces
        assert (counts.tiles == visited).all()
        assert (counts.partial == table(lambda each: each.by_query.partial)).all()


@pytest.mark.parametrize(
    "workload", ["qwen_docs", "molmo_docs", "gemma_docs", "bagel_mix", "bagel_long", "molmo_video"]
)
def test_other_orders_are_estimated_closely(workload: str) -> None:
    """Whole samples and chunks end inside blocks: tiles within 2 %, partial ones within 10 %."""
    kind = WORKLOADS[workload].layers[0]
    shape = AttentionShape(kind.heads, kind.kv_heads, kind.head_dim)
    layout = build_layout(workload, 65536)
    for name, order in (("sparse_a2a", "balanced_samples"), ("ring", "chunks")):
        found, built = both(name, order, shape, layout, 4, 1, 8, 128)
        for field, tolerance in (("tiles", 0.02), ("partial", 0.1), ("units", 1e-3), ("inside", 1e-3)):
            for which in ("forward", "backward"):
                one, other = (slowest(getattr(each, which), field) for each in (found, built))
                assert one == pytest.approx(other, rel=tolerance), (name, which, field)


@pytest.mark.parametrize(
    ("workload", "tolerance"), [("bagel_long", 0.05), ("bagel_mix", 0.05), ("gemma_docs", 0.1), ("molmo_video", 0.3)]
)
def test_the_chunked_ring_is_estimated_roughly(workload: str, tolerance: float) -> None:
    """Tiles; dense sequences are counted as pieces of samples, whichever of them the builder joins."""
    kind = WORKLOADS[workload].layers[0]
    shape = AttentionShape(kind.heads, kind.kv_heads, kind.head_dim)
    found, built = both("chunked", "chunks", shape, build_layout(workload, 131072), 4, 1, 8, 128)
    assert slowest(found.forward, "tiles") == pytest.approx(slowest(built.forward, "tiles"), rel=tolerance)
    assert slowest(found.forward, "units") == pytest.approx(slowest(built.forward, "units"), rel=0.5)
    assert found.forward.inside == pytest.approx(built.forward.inside)
    assert found.backward.inside == pytest.approx(built.backward.inside)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("order", ALIGNED)
def test_built_and_counted_estimates_agree(order: str, degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that can be counted is built all the same: groups of ranks, step by step, in nodes of 4."""
    layout, shape = build_layout("bagel_mix", 3072, scale=1 / 16), AttentionShape(8, 2, 16)

    def found() -> dict[str, Estimate]:
        return estimates(layout, shape, 8, order=order, ulysses=degree, block=16, gpus_per_node=4)

    counted = found()
    monkeypatch.setattr(select, "countable", lambda _mask: False)
    monkeypatch.setattr(PairCounts, "of", None)
    built = found()
    assert list(counted) == list(built) == list(TILE_SCHEDULES)
    for name, which in itertools.product(built, ("forward", "backward")):
        one, other = getattr(counted[name], which), getattr(built[name], which)
        for field in ("tiles", "partial", "units", "inside", "across"):
            assert getattr(other, field).shape[1] == 8 // degree, (name, which, field)
            assert getattr(one, field) == pytest.approx(getattr(other, field)), (name, which, field)
        assert one.memory.shape == other.memory.shape
        assert one.memory.sum(0) == pytest.approx(other.memory.sum(0)), (name, which)
        assert counted[name].memory == pytest.approx(built[name].memory), name


def test_a_group_has_the_most_of_its_ranks() -> None:
    loads = Loads(*np.array([[[1, 2, 3, 4], [8, 7, 6, 5]]] * 6, dtype=float) + np.arange(6)[:, None, None])
    for number, name in enumerate(Loads.__dataclass_fields__):
        assert (getattr(loads.of_groups(2), name) == np.array([[2, 4], [8, 6]]) + number).all()
        assert (getattr(loads.of_groups(1), name) == getattr(loads, name)).all()


def test_a_mask_without_ranges_is_not_counted() -> None:
    made = plan(
        build_layout("qwen_docs", 256, scale=1 / 8), AttentionShape(1, 1, 8), ranks=2, mask=lambda q, k: q.pos >= k.pos
    )
    with pytest.raises(ValueError, match="build the schedules"):
        PairCounts.of(made.order, made.masks[0], 128)
    assert build("ring", made.order, made.order, made.masks[0], 128, HeadSplit(1, 1, 1), [0])
