"""The executor on virtual ranks gives the numbers of a dense softmax, in float64 and with NaN in all unset memory."""

from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from virtual import case_of, differences, nan_in_new_memory, random_inputs, run, truth

import marble
from marble import AttentionShape
from marble.compose import executor
from marble.compose.schedule import Buffer, Call, Kind, Pass, Rows, Step, Transfer
from marble.kernels.contract import State
from marble.kernels.reference import ReferenceBackend
from marble.layout import Layout, Span
from marble.testing.layouts import random_case

rngs = st.builds(Random, st.integers(0, 2**32 - 1))
SUMS = (Kind.TOKEN_SUMS, Kind.PAIR_SUMS, Kind.STATISTICS)


@pytest.fixture(scope="module", autouse=True)
def _poison():
    with nan_in_new_memory():
        yield


@settings(max_examples=120)
@given(rng=rngs)
def test_virtual_ranks_match_a_dense_softmax(rng):
    case = random_case(rng, samples=4, spans=5)
    note(repr(case))
    inputs = random_inputs(case, seed=rng.randint(0, 1000))
    assert differences(run(case.schedules(), case.order, inputs), truth(case.mask, inputs)) == []


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_head_counts_and_ring_sizes(world, heads, kv_heads):
    layout = Layout(
        [
            [Span("causal", 7), Span("full", 6), Span("causal", 3), Span("noise", 5), Span("full", 5)],
            [Span("group", 4), Span("causal", 5), Span("group", 6)],
            [Span("pad", 3)],
        ]
    )
    pieces = [[low, min(low + 4, 44), low // 4 * 2 % world] for low in range(0, 44, 4)]
    case = case_of(layout, pieces, world, 4, heads, kv_heads)
    inputs = random_inputs(case)
    assert differences(run(case.schedules(), case.order, inputs), truth(case.mask, inputs)) == []


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 33])
def test_any_length_on_any_ranks(length):
    """One document, two ranks, no divisibility: the last token counts, and a rank may have none."""
    cut = max(length // 2, 1)
    pieces = [[0, cut, 0]] + ([[cut, length, 1]] if cut < length else [])
    case = case_of(Layout([[Span("causal", length)]]), pieces, 2, 8)
    inputs = random_inputs(case)
    assert differences(run(case.schedules(), case.order, inputs), truth(case.mask, inputs)) == []


def test_padding_gives_zeros_and_no_nan():
    case = case_of(Layout([[Span("pad", 5)], [Span("causal", 3)], [Span("pad", 4)]]), [[0, 6, 0], [6, 12, 1]], 2, 4)
    result = run(case.schedules(), case.order, random_inputs(case))
    padding = torch.tensor([True] * 5 + [False] * 3 + [True] * 4)
    assert (result["lse"][padding] == -torch.inf).all()
    assert result["lse"][~padding].isfinite().all()
    for name in ("out", "dq", "dk", "dv"):
        assert (result[name][padding] == 0).all()
        assert result[name].isfinite().all()


def test_documents_do_not_leak():
    """Another document's tokens change nothing, to the last bit."""
    case = case_of(Layout.from_cu_seqlens([0, 9, 18]), [[0, 5, 0], [5, 13, 1], [13, 18, 0]], 2, 4)
    inputs = random_inputs(case)
    changed = [torch.cat([mine[:9], other[9:]]) for mine, other in zip(inputs, random_inputs(case, 1), strict=True)]
    one, other = (run(case.schedules(), case.order, x) for x in (inputs, changed))
    for name in one:
        assert torch.equal(one[name][:9], other[name][:9])
        assert not torch.equal(one[name][9:], other[name][9:])


@settings(max_examples=60)
@given(rng=rngs)
def test_buffers_that_are_summed_are_float32(rng):
    """By declaration, and as the tensors that bf16 inputs get."""
    case = random_case(rng, samples=2, spans=3)
    note(repr(case))
    q, k, v, dout = random_inputs(case, dtype=torch.bfloat16)
    for schedule in case.schedules():
        summed = set()
        for step in schedule.backward.steps:
            summed |= {add.dst.buffer for add in step.adds} | {add.src.buffer for add in step.adds}
            summed |= {name for call in step.calls for name in (call.dq, call.dkv.buffer)}
        assert {schedule.backward.buffers_by_name[name].kind for name in summed} <= {Kind.TOKEN_SUMS, Kind.PAIR_SUMS}
        assert not any(step.adds for step in schedule.forward.steps), "a forward pass that sums needs a look"
        shard = case.order.shard(schedule.rank)
        lse = torch.zeros(case.heads, len(shard))
        given = {
            "backward": {"q": q[shard], "dout": dout[shard], "lse": lse, "delta": lse},
            "forward": {"q": q[shard]},
        }
        for name, tensors in given.items():
            declared = getattr(schedule, name)
            memory = executor.Memory(declared, q, (k[shard], v[shard]), tensors)
            for buffer in declared.buffers:
                expected = torch.float32 if buffer.kind in SUMS else torch.bfloat16
                held = memory.pair(Rows("kv", 0, 0))[0] if buffer.name == "kv" else memory.tensors[buffer.name]
                assert held.dtype == expected, buffer


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_results_and_state_are_in_the_accumulation_type(dtype, sums):
    states = []

    class Spy(ReferenceBackend):
        def forward(self, q, k, v, work, state, out, lse, *, scale):
            states.append(state)
            super().forward(q, k, v, work, state, out, lse, scale=scale)

    case = case_of(Layout([[Span("causal", 12)]]), [[0, 6, 0], [6, 12, 1]], 2, 4)
    result = run(case.schedules(), case.order, random_inputs(case, dtype=dtype), Spy())
    states = [state for state in states if state is not None]
    assert len(states) == 2, "the second rank's two calls share rows, the first rank's one call does not"
    assert result["out"].dtype == dtype
    assert {result[name].dtype for name in ("lse", "dq", "dk", "dv")} == {sums}
    assert {part.dtype for state in states for part in (state.acc, state.m, state.l)} == {sums}
    assert all(isinstance(state, State) for state in states)


def test_keys_that_stay_where_they_are_are_not_copied():
    """However ragged the shard is. They are if they move, are joined by others, or something else than calls writes
    to their buffer."""
    k, v = torch.arange(30, dtype=torch.bfloat16).view(2, 5, 1, 3)
    own, behind, joined = Rows("kv", 0, 5), Rows("kv", 5, 8), Rows("kv", 0, 8)
    work = case_of(Layout([[Span("causal", 8)]]), [[0, 8, 0]], 1, 4).schedules()[0].works[0]
    kept = [(5, Step()), (8, Step()), (8, Step(calls=(Call(work, own),)))]
    copied = [
        (8, Step(calls=(Call(work, joined),))),
        (5, Step(clears=(own,))),
        (5, Step((Transfer(0, Rows("kv", 0, 3), 1, behind),))),
        (8, Step((Transfer(1, Rows("kv", 0, 3), 0, behind),))),
    ]
    names = [Buffer(name, Kind.TOKENS, 8, 1) for name in ("q", "out")] + [Buffer("lse", Kind.STATISTICS, 8, 1)]
    for rows, step in kept + copied:
        memory = executor.Memory(Pass((Buffer("kv", Kind.PAIRS, rows, 1), *names), (step,)), k, (k, v), {})
        for held, part in zip(memory.pair(Rows("kv", 1, 5)), (k, v), strict=True):
            assert torch.equal(held, part[1:])
            assert (held.data_ptr() == part[1:].data_ptr()) == ((rows, step) in kept)


class Writes(ReferenceBackend):
    """Gradients in the type of the inputs are written, and counted."""

    writes_gradients = True

    def __init__(self):
        self.written = []

    def backward(self, q, k, v, dout, lse, delta, work, *gradients, scale):
        sums = [torch.zeros_like(x, dtype=torch.float32) if x.dtype == q.dtype else x for x in gradients]
        super().backward(q, k, v, dout, lse, delta, work, *sums, scale=scale)
        for x, total in zip(gradients, sums, strict=True):
            x.copy_(total)
        self.written.append([x.dtype == q.dtype for x in gradients])


@pytest.mark.parametrize(
    ("schedule", "ranks", "ulysses", "written"),
    [
        ("ring", 1, 1, [True, True, True]),
        ("ring", 2, 1, [False, False, False]),
        ("all_gather", 2, 1, [True, False, False]),
        ("sparse_a2a", 2, 1, None),  # some calls of some ranks
        ("ring", 2, 2, [False, False, False]),
    ],
)
def test_gradients_that_one_call_makes_are_written_rounded(schedule, ranks, ulysses, written):
    """By a backend that can; all others are sums, and the results are the same bits."""
    layout = Layout([[Span("causal", 20), Span("full", 9)], [Span("pad", 3)], [Span("causal", 13)]])
    shape, results = AttentionShape(4, 2, 16), []
    plan = marble.plan(layout, shape, ranks=ranks, ulysses=ulysses, schedule=schedule, block=8)
    for backend in (ReferenceBackend(), writes := Writes()):
        make = torch.Generator().manual_seed(1)
        qkv = [torch.randn(45, h, 16, generator=make).bfloat16().requires_grad_() for h in (4, 2, 2)]
        out = marble.attention(*qkv, plan, backend=backend)
        out.backward(torch.randn(out.shape, generator=make).bfloat16())
        results.append([x.grad for x in qkv])
    assert all(map(torch.equal, *results))
    assert all(x.isfinite().all() for x in results[0])
    assert writes.written
    assert written is None or all(each == written for each in writes.written)


def test_room_for_rows_that_move_is_alike_on_ranks_that_fetch_nothing():
    """Their gradients of keys, too, lie in it as sums: it is what all ranks ask for, and the next pass's."""
    layout = Layout([[Span("causal", 16)], [Span("causal", 13)]])
    plan = marble.plan(
        layout, AttentionShape(2, 2, 16), ranks=2, schedule="sparse_a2a", order="balanced_samples", block=8
    )
    assert sorted(plan.order.lengths) == [13, 16]
    asked = []

    def reserve(nbytes):
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    for rank, schedule in plan.schedules[0].items():
        declared, rows = schedule.backward, plan.order.lengths[rank]
        assert declared.made_at_once == {"dq"}
        q = torch.ones(rows, 2, 16, dtype=torch.bfloat16)
        memory = executor.Memory(declared, q, (q, q), {}, reserve, declared.made_at_once)
        assert memory.tensors["dq"].dtype == torch.bfloat16
        assert memory.tensors["dkv"].dtype == torch.float32
    assert len(asked) == 2
    assert asked[0] == asked[1] > 0


def test_gradients_that_do_not_move_are_dense():
    """So that what reads dk or dv reads neighbours."""
    for room, dense in (({}, True), ({"whole": 8}, False), ({"split": 8}, False)):
        declared = Pass((Buffer("kv", Kind.PAIRS, 8, 1), Buffer("dkv", Kind.PAIR_SUMS, 8, 2, **room)), ())
        like = torch.ones(5, 1, 3, dtype=torch.bfloat16)
        memory = executor.Memory(declared, like, (like, like), {})
        assert memory.tensors["dkv"].shape == (8, 2, 2, 3)
        assert all(part.is_contiguous() == dense for part in memory.pair(Rows("dkv", 0, 5)))


def test_unused_rows_behind_a_ragged_shard_are_finite():
    """Whole-block loads read them (contract of `Tiles`)."""
    cleared = Step(clears=(Rows("kv", 0, 0),))
    declared = Pass((Buffer("kv", Kind.PAIRS, 8, 1), Buffer("dkv", Kind.PAIR_SUMS, 8, 1)), (cleared,))
    like = torch.ones(5, 1, 3, dtype=torch.bfloat16)
    memory = executor.Memory(declared, like, (like, like), {})
    assert memory.tensors["kv"].isfinite().all()
    assert (memory.tensors["kv"][:5] == 1).all()
    assert memory.tensors["dkv"].isnan().all()
