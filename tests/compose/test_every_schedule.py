"""Every schedule with every mode on every mix of ring and Ulysses degree: proved, then exact on virtual ranks.

The whole table of cases is too long to run, so each schedule meets every mix of degrees once, and the modes, the head
counts and the token orders take turns; `test_executor` draws more at random.
"""

import itertools

import pytest
import torch
from dense_attention import Data, assert_equal, dense, distributed, legal, make_plan

import marble
from marble import AttentionShape, Layout, Span
from marble.compose.check import check
from marble.compose.planner import ORDERS, SCHEDULES
from marble.testing import exactness

MODES: dict[str, tuple[Layout, int | None]] = {
    "causal": (Layout.from_cu_seqlens([0, 13, 14, 51, 53]), None),
    "full": (
        Layout([[Span("causal", 3), Span("full", 17), Span("causal", 5), Span("full", 9)], [Span("full", 13)]]),
        None,
    ),
    "noise": (
        Layout(
            [
                [Span("causal", 4), Span("noise", 9), Span("full", 9), Span("noise", 11), Span("full", 11)],
                [Span("causal", 6), Span("noise", 7)],
            ]
        ),
        None,
    ),
    "group": (
        Layout([[Span("causal", 3), Span("group", 8), Span("causal", 2), Span("group", 8), Span("causal", 14)]] * 2),
        None,
    ),
    "window": (Layout([[Span("causal", 21), Span("full", 10), Span("causal", 16)], [Span("causal", 9)]]), 7),
    "padded": (Layout([[Span("pad", 5)], [Span("causal", 19), Span("full", 12)], [Span("pad", 9)]]), None),
}
HEADS = ((4, 4), (8, 2), (4, 1), (12, 2), (8, 8), (12, 3))
"""Multi-head, grouped and single key/value heads; 4 ranks copy some, and 2 ranks of (12, 3) copy inside a rank too."""
DEGREES = tuple(itertools.product((1, 2, 3, 4, 8), (1, 2, 4)))
CASES = [
    (
        schedule,
        tuple(MODES)[(turn + place) % len(MODES)],
        ring,
        split,
        HEADS[(turn // 2 + place) % len(HEADS)],
        (None, *ORDERS)[(turn + 2 * place) % (len(ORDERS) + 1)],
    )
    for place, schedule in enumerate(SCHEDULES)
    for turn, (ring, split) in enumerate(DEGREES)
]


def test_the_sample_holds_every_schedule_with_every_mode_and_every_mix_of_degrees() -> None:
    assert {case[:2] for case in CASES} == set(itertools.product(SCHEDULES, MODES))
    assert {(case[0], *case[2:4]) for case in CASES} == {(name, *mix) for name in SCHEDULES for mix in DEGREES}
    assert {case[4] for case in CASES} == set(HEADS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_exact_in_float64(case: tuple) -> None:
    schedule, mode, ring, split, heads, order = case
    layout, window = MODES[mode]
    options = {"schedule": schedule, "order": order, "ulysses": split, "block": 3, "window": window}
    if window is not None and "chunk" in schedule + str(order):
        with pytest.raises(ValueError, match="sliding window"):
            make_plan(layout, heads, ring * split, **options)
        return
    plan = make_plan(layout, heads, ring * split, **options)
    assert plan.masks is not None
    check([plan.schedules[0][rank] for rank in range(plan.world)], plan.order, plan.masks[0])
    data = Data.of(layout.tokens, heads, dim=4)
    plan = make_plan(layout, heads, ring * split, dim=4, **options)
    assert_equal(distributed(plan, data), dense(data, legal(layout, window)))


LONG = Layout(
    [
        [Span("causal", 40), Span("noise", 90), Span("full", 90), Span("noise", 70), Span("full", 70)],
        [Span("causal", 153)],
    ]
)


@pytest.mark.parametrize(
    ("schedule", "ring", "split", "heads"),
    [
        ("ring", 2, 4, (4, 2)),
        ("sparse_a2a", 4, 2, (4, 1)),
        ("chunked", 4, 2, (4, 2)),
        ("chunked", 8, 1, (4, 4)),
        ("all_gather", 3, 2, (4, 4)),
        ("ring", 1, 4, (4, 2)),
    ],
)
def test_as_exact_as_a_single_call_in_bfloat16(schedule: str, ring: int, split: int, heads: tuple[int, int]) -> None:
    problem = exactness.Problem.random(LONG, AttentionShape(*heads, 32))
    plan = marble.plan(LONG, problem.shape, ranks=ring * split, schedule=schedule, ulysses=split, block=16)
    ref, single = exactness.reference(problem), exactness.single_call(problem)
    ratios = exactness.error_ratios(exactness.distributed(problem, plan), single, ref)
    assert max(ratios.values()) <= exactness.GATE, ratios
    rounded = exactness.error_ratios(exactness.distributed(problem, plan, backend="rounded"), single, ref)
    assert ring == 1 or max(rounded.values()) > exactness.GATE, "the gate must see rounding at every step"


def test_gradients_of_copied_heads_are_summed_in_float32() -> None:
    """PEERS.md, kind 12: two key/value heads, four ranks that share heads; dK is the sum over the copies."""
    layout = Layout.from_cu_seqlens([0, 30, 41])
    plan = make_plan(layout, (8, 2), 4, ulysses=4, block=4)
    for schedule in plan.schedules[0].values():
        buffers = schedule.backward.buffers_by_name
        added = [add for step in schedule.backward.steps for add in step.adds if add.dst.buffer == "dkv"]
        assert len(added) == 2, "each head has two copies, and one of them is home already"
        assert {buffers[add.src.buffer].kind for add in added} == {buffers["dkv"].kind} == {"pair sums"}
    data = Data.of(layout.tokens, (8, 2))
    found = distributed(plan, data)
    assert_equal(found, dense(data, legal(layout)))
    # What one rank alone gives is not the sum.
    alone = dense(Data(data.q[:, :2], data.k[:, :1], data.v[:, :1], data.dout[:, :2]), legal(layout))
    assert not torch.allclose(alone.dk, found.dk[:, :1], atol=1e-3)
