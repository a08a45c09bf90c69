"""Planning on another device: everything follows the device that was asked for."""

import pickle

import pytest
import torch

import marble
from marble import AttentionShape, Layout, Span
from marble.compose import planner
from marble.compose.packing import Packed

LAYOUT = Layout(
    [
        [Span("causal", 50), Span("group", 41), Span("causal", 33), Span("group", 70)],
        [Span("causal", 20), Span("noise", 64), Span("full", 64), Span("causal", 9)],
        [Span("noise", 9, group=0), Span("causal", 12), Span("noise", 9, group=0), Span("causal", 30)],
        [Span("pad", 11)],
    ]
)
SHAPES = (AttentionShape(4, 2, 8), AttentionShape(4, 2, 8, window=40))


@pytest.mark.parametrize("schedule", ["ring", "sparse_a2a", "all_gather"])
@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES], ids=["global", "windows too"])
def test_planning_says_everywhere_where_its_tensors_lie(schedule: str, shapes: tuple[AttentionShape, ...]) -> None:
    """What does not follow the device that was asked for lands on one where it cannot be used."""
    request = planner._request(LAYOUT, shapes, (3, None), schedule, "ptrr", 1, 16, torch.device("cpu"))
    plan = marble.plan(LAYOUT, shapes, ranks=3, schedule=schedule, order="ptrr", block=16)
    with torch.device("meta"):
        blind = planner._make(request, None, None)
    assert pickle.dumps(Packed.of(blind.schedules)) == pickle.dumps(Packed.of(plan.schedules))


@pytest.mark.parametrize(("schedule", "order"), [("chunked", "chunks"), ("ring", "chunks"), ("chunked", "ptrr")])
def test_chunks_and_dense_calls_are_planned_on_the_host(schedule: str, order: str) -> None:
    """Whatever device is asked for: on this one nothing could be looked at."""
    layout, how = Layout([LAYOUT.samples[1]]), {"ranks": 3, "schedule": schedule, "order": order, "block": 16}
    here, there = (marble.plan(layout, SHAPES[0], device=device, **how) for device in ("cpu", "meta"))
    assert pickle.dumps(Packed.of(there.schedules)) == pickle.dumps(Packed.of(here.schedules))
    assert there.order.storage.device == torch.device("cpu")
