"""Deterministic backward calls on a Hopper GPU: the same bits in all runs, as exact as the others."""

import time

import pytest
import torch
from calls import CALLS
from passes import (
    BOTH,
    REFERENCE,
    Inputs,
    backward,
    deviation,
    each_dim,
    each_dtype,
    each_heads,
    error,
    forward,
    inputs_of,
    on_gpu,
)
from torch import Tensor

from marble import AttentionShape, Layout, Mode, Span
from marble.kernels import launch
from marble.kernels.contract import Backend, Band, Varlen, Work, move
from marble.testing.exactness import GATE, Problem, distributed
from marble.testing.layouts import whole_call
from marble.workloads import WORKLOADS, build

pytestmark = on_gpu


def sums(backend: Backend, x: Inputs, work: Work) -> list[Tensor]:
    """dq, dk and dv of a call, added to zeros, against the float64 output."""
    exact, lse = forward(REFERENCE, x, work, torch.float64)
    exact, lse = exact.nan_to_num(0.0), lse.nan_to_num(-torch.inf, neginf=-torch.inf).float()
    delta = backend.delta(exact.to(x.q.dtype), x.dout)
    totals = [torch.zeros(t.shape[1], len(t), t.shape[2], device="cuda") for t in (x.q, x.k, x.v)]
    backend.backward(x.q, x.k, x.v, x.dout, lse, delta, work, *totals, scale=x.scale)
    return totals


def same_in_all_runs(backend: Backend, x: Inputs, work: Work, runs: int = 5) -> list[Tensor]:
    """`sums`, whose bits are the same however often they are computed, whatever ran before."""
    first = sums(backend, x, work)
    for run in range(1, runs):
        torch.randn(257 * run, 300, device="cuda") @ torch.randn(300, 129, device="cuda")
        for name, one, other in zip(("dq", "dk", "dv"), first, sums(backend, x, work), strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32)), f"{name} differs in run {run}"
    return first


@pytest.mark.parametrize("call", CALLS)
@each_dim
@each_dtype
@each_heads
def test_deterministic_call(
    in_order: Backend, call: str, head_dim: int, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    tiles = CALLS[call]()
    x, work = inputs_of(tiles, heads, head_dim, dtype), move(tiles, "cuda")
    ours = same_in_all_runs(in_order, x, work)
    exact, rounded = (backward(REFERENCE, x, work, kind) for kind in (torch.float64, dtype))
    for name, *results in zip(("dq", "dk", "dv"), ours, exact, rounded, strict=True):
        assert deviation(results[0], results[1]) <= GATE * deviation(results[2], results[1]) + 1e-6, name


CROWDS = {
    "causal": lambda: whole_call(Layout.from_cu_seqlens([0, 9000])),
    "full": lambda: whole_call(Layout(((Span(Mode.FULL, 5000),),))),
    "documents": lambda: whole_call(Layout.from_cu_seqlens([*range(0, 8000, 777), 8000])),
    "window": lambda: whole_call(Layout.from_cu_seqlens([0, 3000, 9000]), 1024),
}


@pytest.mark.parametrize("crowd", CROWDS)
@each_dim
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (6, 6)])
def test_deterministic_crowd(in_order: Backend, crowd: str, head_dim: int, heads: tuple[int, int]) -> None:
    """More units than multiprocessors, which meet at the same query blocks; they add what they add in any order."""
    tiles = CROWDS[crowd]()
    x, work = inputs_of(tiles, heads, head_dim, torch.bfloat16), move(tiles, "cuda")
    anyhow = launch.backend("cute")
    for one, other in zip(same_in_all_runs(in_order, x, work), sums(anyhow, x, work), strict=True):
        assert error(one, other.double()) < 1e-5


@each_dim
@pytest.mark.parametrize("band", list(Band))
def test_deterministic_dense_sequences(in_order: Backend, head_dim: int, band: Band) -> None:
    """Unaligned ones, and some that share keys on grids that do not match; rows that see nothing add nothing."""
    touch = torch.full((4,), int(BOTH), dtype=torch.uint8)
    queries = torch.tensor([[0, 300], [300, 301], [301, 1000], [1000, 1500]], dtype=torch.int32)
    keys = torch.tensor([[0, 500], [70, 70], [70, 1100], [1100, 1101]], dtype=torch.int32)
    work = move(Varlen(queries, keys, band, touch), "cuda")
    x = Inputs(1500, 1101, (4, 2), head_dim, torch.bfloat16)
    ours = same_in_all_runs(in_order, x, work)
    exact, rounded = (backward(REFERENCE, x, work, kind) for kind in (torch.float64, torch.bfloat16))
    for mine, ref, base in zip(ours, exact, rounded, strict=True):
        assert deviation(mine, ref) <= GATE * deviation(base, ref) + 1e-6


@pytest.mark.parametrize("few", [1, 2, 4])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_units_of_some_heads(
    in_order: Backend, head_dim: int, apart: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the four of each key/value head, in order and anyhow."""
    from marble.kernels.cute.backward_config import Units

    for name in ("plan_units", "plan_units_in_order"):
        monkeypatch.setattr(f"marble.kernels.cute.backward.{name}", lambda *_: Units(0, few, apart))
    tiles = CROWDS["documents"]()
    x, work = inputs_of(tiles, (8, 2), head_dim, torch.bfloat16), move(tiles, "cuda")
    exact, rounded = (backward(REFERENCE, x, work, kind) for kind in (torch.float64, torch.bfloat16))
    for ours in (same_in_all_runs(in_order, x, work), sums(launch.backend("cute"), x, work)):
        for name, mine, ref, base in zip(("dq", "dk", "dv"), ours, exact, rounded, strict=True):
            assert deviation(mine, ref) <= GATE * deviation(base, ref) + 1e-6, name


@each_dim
def test_deterministic_call_in_which_no_row_has_seen_a_key(in_order: Backend, head_dim: int) -> None:
    """Its log-sum-exps are −inf; the tiles are visited, and take their turns, all the same."""
    x = Inputs(700, 700, (4, 2), head_dim, torch.bfloat16)
    work = move(whole_call(Layout.from_cu_seqlens([0, 700])), "cuda")
    totals = [torch.zeros(t.shape[1], 700, head_dim, device="cuda") for t in (x.q, x.k, x.v)]
    lse, delta = torch.full((4, 700), -torch.inf, device="cuda"), torch.randn(4, 700, device="cuda")
    in_order.backward(x.q, x.k, x.v, x.dout, lse, delta, work, *totals, scale=x.scale)
    assert not any(total.any() for total in totals)


def test_deterministic_by_pytorchs_own_switch(cute: Backend, in_order: Backend) -> None:
    x, work = Inputs(1300, 1300, (4, 2), 64, torch.bfloat16), move(CALLS["window"](), "cuda")
    expected = sums(in_order, x, work)
    assert not cute.deterministic  # type: ignore[attr-defined]
    backward_in_any_order = cute.backward

    def switched(*args: object, **choices: object) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            backward_in_any_order(*args, **choices)  # type: ignore[arg-type]
        finally:
            torch.use_deterministic_algorithms(False)

    cute.backward = switched  # type: ignore[method-assign]
    again = move(CALLS["window"](), "cuda")  # is lowered and ordered while the switch is on
    assert all(torch.equal(*pair) for pair in zip(expected, sums(cute, x, again), strict=True))


@each_dim
def test_deterministic_ranks(in_order: Backend, head_dim: int) -> None:
    """Rings and all-to-alls of virtual ranks, whose calls lower to lists of every kind."""
    layout = build("bagel_mix", 4099, scale=WORKLOADS["bagel_mix"].demo_scale)
    seed = time.time_ns() % 2**31
    problem = Problem.random(layout, AttentionShape(4, 2, head_dim, None), seed=seed, device="cuda")
    for ranks in (1, 3, 8):
        plan = problem.plan(ranks)
        first, second = (distributed(problem, plan, backend=in_order) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first), ranks
