"""The kernels on a Hopper GPU, or on a Blackwell GPU if there ever is one: as exact as the reference in the same
precision, on whatever a call may ask."""

import time
from dataclasses import replace

import pytest
import torch
from calls import BLOCK, CALLS, quartered
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

from marble import AttentionShape, Layout, Span
from marble.kernels.contract import Backend, Band, State, Touch, Varlen, Work, accumulation_dtype, move
from marble.kernels.rounded import PerStepRounding
from marble.testing.exactness import GATE, Problem, distributed, error_ratios, reference
from marble.testing.layouts import planned_storage, stored_mask, whole_call
from marble.workloads import WORKLOADS, build

pytestmark = on_gpu


def carried(backend: Backend, x: Inputs, calls: list[Work], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `forward`, of several calls over all keys, with NaN-poisoned state."""
    sums = accumulation_dtype(dtype)
    rows, heads, head_dim = x.q.shape
    state = State.empty(heads, rows, head_dim, sums, "cuda")
    out, lse = torch.empty_like(x.q, dtype=dtype), torch.empty(heads, rows, dtype=sums, device="cuda")
    for tensor in (state.acc, state.m, state.l, out, lse):
        tensor.fill_(torch.nan)
    for call in calls:
        args = (t.to(dtype) for t in (x.q, x.k, x.v))
        backend.forward(*args, call, state, out, lse, scale=x.scale)
    return out, lse


@pytest.mark.parametrize("call", CALLS)
@each_dim
@each_dtype
@each_heads
def test_one_call(cute: Backend, call: str, head_dim: int, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    tiles = CALLS[call]()
    x, work = inputs_of(tiles, heads, head_dim, dtype), move(tiles, "cuda")
    touched = (tiles.by_query.counts() > 0).repeat_interleave(BLOCK)[: len(x.q)].cuda()
    (out, lse), (exact, exact_lse), (base, _) = (
        forward(backend, x, work, kind)
        for backend, kind in ((cute, dtype), (REFERENCE, torch.float64), (REFERENCE, dtype))
    )
    assert out[~touched].isnan().all(), "a query block without tiles was written"
    assert lse[:, ~touched].isnan().all()
    assert error(out[touched], exact[touched]) <= GATE * error(base[touched], exact[touched])
    seen = exact_lse[:, touched].isfinite()
    assert torch.equal(lse[:, touched].isfinite(), seen)
    assert (lse[:, touched][~seen] == -torch.inf).all()
    torch.testing.assert_close(lse[:, touched][seen].double(), exact_lse[:, touched][seen], rtol=0, atol=1e-5)
    results = (
        backward(backend, x, work, kind)
        for backend, kind in ((cute, dtype), (REFERENCE, torch.float64), (REFERENCE, dtype))
    )
    for name, ours, ref, rounded in zip(("dq", "dk", "dv"), *results, strict=True):
        # Added to ones in float32: rounding 1 + x belongs to the sums, and so does a gradient that cancels to 0.
        assert deviation(ours, ref) <= GATE * deviation(rounded, ref) + 1e-6, name


@pytest.mark.parametrize("call", [*CALLS, "dense", "nothing"])
@pytest.mark.parametrize(("head_dim", "many"), [(64, True), (128, False), (128, True), (256, False)])
@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.bfloat16, (2, 2)), (torch.bfloat16, (6, 2)), (torch.float16, (4, 1))]
)
def test_gradients_that_are_written(
    cute: Backend,
    call: str,
    many: bool,
    head_dim: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over NaN, sums that are rounded, in rows without pairs too; by kernels also where units are few, as if there
    were ``many``. The same bits where sums have one order."""
    if not cute.writes_gradients:
        pytest.skip("this backend only adds")
    if many:
        monkeypatch.setattr("marble.kernels.cute.backend.whole_units", lambda *_: True)
    if call == "dense":
        tiles: Work = Varlen.from_cu_seqlens(
            torch.tensor([0, 0, 300, 1001]), torch.tensor([0, 40, 40, 900]), Band.CAUSAL, BOTH
        )
        x = Inputs(1001, 900, heads, head_dim, dtype)
    elif call == "nothing":
        tiles = whole_call(Layout([[Span("pad", 700)]]))
        x = Inputs(700, 700, heads, head_dim, dtype)
    else:
        tiles = CALLS[call]()
        x = inputs_of(tiles, heads, head_dim, dtype)
    work = move(tiles, "cuda")
    exact, lse = forward(REFERENCE, x, work, torch.float64)
    lse = lse.nan_to_num(-torch.inf, neginf=-torch.inf).float()
    delta = cute.delta(exact.nan_to_num(0.0).to(dtype), x.dout)
    sums = [torch.zeros_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v)]
    written = [torch.full_like(t, torch.nan, dtype=dtype) for t in sums]
    mixed = [torch.zeros_like(sums[0]), *(torch.full_like(t, torch.nan) for t in written[1:])]
    for made in (sums, written, mixed):
        cute.backward(x.q, x.k, x.v, x.dout, lse, delta, work, *(t.transpose(0, 1) for t in made), scale=x.scale)
    for total, one, other in zip(sums, written, mixed, strict=True):
        assert one.dtype == dtype
        for made in (one, other.to(dtype)):
            if head_dim == 256:
                assert torch.equal(total.to(dtype), made)
            else:
                torch.testing.assert_close(made.float(), total, rtol=torch.finfo(dtype).eps, atol=1e-4)


@each_dim
@pytest.mark.parametrize("shards", [2, 3, 7])
def test_state_carried_over_shards(cute: Backend, head_dim: int, shards: int) -> None:
    """Calls over key shards, first and last touch by query block, are as exact as one call, with NaN in the state."""
    tokens = 1500
    layout = Layout.from_cu_seqlens([0, 700, tokens])
    stored = stored_mask(planned_storage(layout, None), None)
    rows = torch.arange(tokens)
    x = Inputs(tokens, tokens, (4, 2), head_dim, torch.bfloat16)
    parts = [stored.tiles(rows, cols, BLOCK) for cols in rows.tensor_split(shards)]
    counts = torch.stack([part.by_query.counts() > 0 for part in parts]).int()
    seen, left = counts.cumsum(0), counts.flip(0).cumsum(0).flip(0)
    state = State.empty(4, tokens, head_dim, torch.float32, "cuda")
    for tensor in (state.acc, state.m, state.l):
        tensor.fill_(torch.nan)
    out, lse = torch.full_like(x.q, torch.nan), torch.full((4, tokens), torch.nan, device="cuda")
    start = 0
    for part, first, last, cols in zip(parts, seen == 1, left == 1, rows.tensor_split(shards), strict=True):
        touch = (first * int(Touch.FIRST) + last * int(Touch.LAST)).byte()
        work = move(replace(part, touch=touch), "cuda")
        keys = slice(start, start := start + len(cols))
        cute.forward(x.q, x.k[keys], x.v[keys], work, state, out, lse, scale=x.scale)
    one = move(whole_call(layout), "cuda")
    exact, exact_lse = forward(REFERENCE, x, one, torch.float64)
    single, _ = forward(cute, x, one, torch.bfloat16)
    assert error(out, exact) <= GATE * error(single, exact)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)


@each_dim
@pytest.mark.parametrize("band", list(Band))
def test_dense_sequences(cute: Backend, head_dim: int, band: Band) -> None:
    """Unaligned, empty and one-row sequences; then the rest of the pairs in a second call with carried state. Some
    rows see nothing in one of the calls, or in both."""
    cu_q, cu_k = torch.tensor([0, 0, 0, 1023, 1024, 1500]), torch.tensor([0, 0, 1, 2046, 2303, 2303])
    rest = {Band.CAUSAL: Band.REVERSE_CAUSAL, Band.REVERSE_CAUSAL: Band.CAUSAL}.get(band)
    touches = {band: BOTH} if rest is None else {band: Touch.FIRST, rest: Touch.LAST}
    calls: list[Work] = [move(Varlen.from_cu_seqlens(cu_q, cu_k, *each), "cuda") for each in touches.items()]
    x = Inputs(1500, 2303, (4, 2), head_dim, torch.bfloat16)
    results = []
    for backend, dtype in ((cute, torch.bfloat16), (REFERENCE, torch.float64), (REFERENCE, torch.bfloat16)):
        out, lse = carried(backend, x, calls, dtype)
        dq, dk, dv = (
            torch.zeros(n, rows, head_dim, dtype=lse.dtype, device="cuda")
            for n, rows in ((4, 1500), (2, 2303), (2, 2303))
        )
        delta = backend.delta(out, x.dout.to(dtype))
        for call in calls:
            args = (t.to(dtype) for t in (x.q, x.k, x.v, x.dout))
            backend.backward(*args, lse, delta, call, dq, dk, dv, scale=x.scale)
        results.append((out, dq, dk, dv))
    for ours, ref, rounded in zip(*results, strict=True):
        assert error(ours, ref) <= GATE * error(rounded, ref) + 1e-9


@each_dim
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize(("name", "window"), [("bagel_mix", None), ("gemma_docs", 300), ("molmo_video", None)])
def test_ring_degrees(cute: Backend, name: str, window: int | None, heads: tuple[int, int], head_dim: int) -> None:
    """The error does not grow with the ring degree; rounding at every step fails the same gate."""
    layout = build(name, 4099, scale=WORKLOADS[name].demo_scale)
    problem = Problem.random(
        layout, AttentionShape(*heads, head_dim, window), seed=time.time_ns() % 2**31, device="cuda"
    )
    ref, single = reference(problem), distributed(problem, problem.plan(1), backend=cute)
    for ranks in (2, 4, 8, 16):
        ratios = error_ratios(distributed(problem, problem.plan(ranks), backend=cute), single, ref)
        assert max(ratios.values()) <= GATE, (ranks, ratios)
    rounded = error_ratios(distributed(problem, problem.plan(8), backend=PerStepRounding(cute)), single, ref)
    assert max(rounded.values()) > GATE


@each_dim
@pytest.mark.parametrize(("name", "heads"), [("qwen_docs", (32, 8)), ("gemma_docs", (28, 4))])
def test_thread_blocks_that_take_state_unit_after_unit(
    cute: Backend, name: str, heads: tuple[int, int], head_dim: int
) -> None:
    """Many units for each thread block, whose loads of state delay all else that is read: as exact as without state,
    and the same bits every time."""
    layout = build(name, 8192, scale=WORKLOADS[name].demo_scale)
    problem = Problem.random(layout, AttentionShape(*heads, head_dim), seed=time.time_ns() % 2**31, device="cuda")
    ref, single = reference(problem), distributed(problem, problem.plan(1), backend=cute)
    first = distributed(problem, problem.plan(2), backend=cute)
    ratios = error_ratios(first, single, ref)
    assert max(ratios.values()) <= GATE, ratios
    for _ in range(5):
        assert torch.equal(distributed(problem, problem.plan(2), backend=cute)["out"], first["out"])


@each_dim
@pytest.mark.parametrize("heads", [(32, 8), (28, 4)])
def test_thread_blocks_that_carry_state_through_long_units(
    cute: Backend, heads: tuple[int, int], head_dim: int
) -> None:
    """Units of many tiles, several for each thread block, before and behind which state is left, taken or both: the
    warpgroups begin them apart. As exact as a call in the type of the inputs, and the same bits every time."""
    rows, shards = 2304, 3
    x = Inputs(rows, shards * rows, heads, head_dim, torch.bfloat16)
    queries = torch.tensor([[0, rows]], dtype=torch.int32)
    calls: list[Work] = [
        move(Varlen(queries, queries + rows * i, Band.FULL, torch.tensor([touch], dtype=torch.uint8)), "cuda")
        for i, touch in enumerate((Touch.FIRST, Touch.CARRY, Touch.LAST))
    ]
    first, exact = carried(cute, x, calls, torch.bfloat16)[0], carried(REFERENCE, x, calls, torch.float64)[0]
    assert error(first, exact) <= GATE * error(carried(REFERENCE, x, calls, torch.bfloat16)[0], exact)
    for _ in range(5):
        assert torch.equal(carried(cute, x, calls, torch.bfloat16)[0], first)


@each_dim
@pytest.mark.parametrize("state", [False, True])
def test_thread_blocks_that_write_ragged_blocks_unit_after_unit(cute: Backend, head_dim: int, state: bool) -> None:
    """Many short sequences, whose outputs pass through shared memory row by row, between those of whole blocks: as
    exact as a call in the type of the inputs, and the same bits every time."""
    lengths = torch.randint(1, 300, (60,))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = int(cu[-1])
    bands = {Band.CAUSAL: Touch.FIRST, Band.REVERSE_CAUSAL: Touch.LAST} if state else {Band.FULL: BOTH}
    calls: list[Work] = [move(Varlen.from_cu_seqlens(cu, cu, *each), "cuda") for each in bands.items()]
    x = Inputs(rows, rows, (32, 8), head_dim, torch.bfloat16)

    def output(backend: Backend, dtype: torch.dtype) -> Tensor:
        return (carried(backend, x, calls, dtype) if state else forward(backend, x, calls[0], dtype))[0]

    first, exact = output(cute, torch.bfloat16), output(REFERENCE, torch.float64)
    assert error(first, exact) <= GATE * error(output(REFERENCE, torch.bfloat16), exact)
    for _ in range(5):
        assert torch.equal(output(cute, torch.bfloat16), first)


@each_dim
@pytest.mark.parametrize("state", [False, True])
def test_strips_without_pairs(cute: Backend, head_dim: int, state: bool) -> None:
    """Rows of a warpgroup see nothing of parts of tiles, wherever these stand in a unit, also one after the other: as
    exact as a call in the type of the inputs, and the same bits every time."""
    single, *halves = quartered(1300, 1250)
    calls: list[Work] = [move(single, "cuda")]
    if state:
        touches = (Touch.FIRST, Touch.LAST)
        calls = [
            move(replace(half, touch=torch.full_like(half.touch, int(touch))), "cuda")
            for half, touch in zip(halves, touches, strict=True)
        ]
    x = Inputs(1300, 1250, (32, 8), head_dim, torch.bfloat16)

    def results(backend: Backend, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return carried(backend, x, calls, dtype) if state else forward(backend, x, calls[0], dtype)

    (out, lse), (exact, exact_lse) = results(cute, torch.bfloat16), results(REFERENCE, torch.float64)
    assert error(out, exact) <= GATE * error(results(REFERENCE, torch.bfloat16)[0], exact)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)
    assert (lse[:, 128:192] == -torch.inf).all()
    assert not out[128:192].any()
    for _ in range(5):
        again = results(cute, torch.bfloat16)
        assert all(torch.equal(one, other) for one, other in zip(again, (out, lse), strict=True))


def test_inputs_that_the_copy_engine_cannot_read(cute: Backend) -> None:
    work = move(CALLS["causal"](), "cuda")
    x = Inputs(1000, 1000, (4, 2), 64, torch.bfloat16)
    expected, _ = forward(cute, x, work, torch.bfloat16)
    for name in ("q", "k", "v"):
        held = getattr(x, name)
        odd = torch.empty(held.shape[0], held.shape[1], held.shape[2] + 1, device="cuda", dtype=held.dtype)[..., 1:]
        setattr(x, name, odd.copy_(held))
    assert torch.equal(forward(cute, x, work, torch.bfloat16)[0], expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 7.0])
def test_scales(cute: Backend, scale: float) -> None:
    work = move(CALLS["documents"](), "cuda")
    x = Inputs(2267, 2267, (2, 1), 64, torch.bfloat16)
    x.scale = scale
    (out, _), (exact, _), (base, _) = (
        forward(backend, x, work, kind)
        for backend, kind in ((cute, torch.bfloat16), (REFERENCE, torch.float64), (REFERENCE, torch.bfloat16))
    )
    assert error(out, exact) <= GATE * error(base, exact)


def test_offsets_beyond_31_bits(cute: Backend) -> None:
    """The last document of a tensor with 2³¹ elements and more."""
    tokens, heads = 2**17 + 200, 128
    layout = Layout.from_cu_seqlens([*range(0, tokens - 200, 2**15), tokens - 200, tokens])
    tiles = whole_call(layout)
    last = slice(tokens - 200, tokens)
    x = Inputs(tokens, tokens, (heads, heads), 128, torch.bfloat16)
    out, _ = forward(cute, x, move(tiles, "cuda"), torch.bfloat16)
    few = Inputs(200, 200, (heads, heads), 128, torch.bfloat16)
    few.q, few.k, few.v = x.q[last], x.k[last], x.v[last]
    small = move(whole_call(Layout.from_cu_seqlens([0, 200])), "cuda")
    exact, _ = forward(REFERENCE, few, small, torch.float64)
    base, _ = forward(REFERENCE, few, small, torch.bfloat16)
    assert error(out[last], exact) <= GATE * error(base, exact)
