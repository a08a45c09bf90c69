"""Replays run a rank's own schedule, time its steps, and count what would arrive."""

import time
import weakref
from typing import Any

import pytest
import torch

import marble
from marble import AttentionShape, Layout, Span
from marble.compose import executor
from marble.compose.cost import summarise
from marble.kernels import launch
from marble.kernels.contract import accumulation_dtype
from marble.replay import RankReplay, StepReplay, replay_layer, replay_rank

LAYOUT = Layout([[Span("causal", 300), Span("full", 400), Span("causal", 90)], [Span("noise", 200), Span("full", 210)]])
SHAPE = AttentionShape(4, 2, 32)
SCHEDULES = [("ring", 1), ("ring", 2), ("sparse_a2a", 1), ("chunked", 1), ("all_gather", 1), ("sparse_a2a", 2)]


class Slow:
    """The reference, whose every call takes a while."""

    def __init__(self, seconds: float) -> None:
        self.inner, self.seconds = launch.backend("reference"), seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any, **options: Any) -> None:
        time.sleep(self.seconds)
        self.inner.forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> None:
        time.sleep(2 * self.seconds)
        self.inner.backward(*args, **options)


@pytest.mark.parametrize(("schedule", "ulysses"), SCHEDULES)
def test_bytes_are_those_of_the_schedules(schedule: str, ulysses: int) -> None:
    plan = marble.plan(LAYOUT, SHAPE, ranks=4, schedule=schedule, ulysses=ulysses)
    replays = [replay_rank(plan, rank, launch.backend("reference"), device="cpu", repeats=1) for rank in range(4)]
    expected = summarise([plan.schedules[0][rank] for rank in range(4)], SHAPE.head_dim)
    for which, total in (("forward", expected.forward_bytes), ("backward", expected.backward_bytes)):
        steps = [getattr(replay, which) for replay in replays]
        assert [sum(sum(step.received.values()) for step in rank) for rank in steps] == total.tolist()
        for number in range(len(steps[0])):
            sent = {(a, b): n for a in range(4) for b, n in steps[a][number].sent.items()}
            received = {(a, b): n for b in range(4) for a, n in steps[b][number].received.items()}
            assert sent == received
    assert sum(total.tolist())


def test_buffers_do_not_outlive_their_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-gather's take most of a GPU, so those of several runs do not fit."""
    alive: list[int] = []
    held: weakref.WeakSet[executor.Memory] = weakref.WeakSet()

    class Counted(executor.Memory):
        def __init__(self, *given: Any) -> None:
            held.add(self)
            alive.append(len(held))
            super().__init__(*given)

    monkeypatch.setattr(executor, "Memory", Counted)
    plan = marble.plan(LAYOUT, SHAPE, ranks=4, schedule="all_gather")
    replay_rank(plan, 1, launch.backend("reference"), device="cpu", repeats=4)
    assert alive == [1] * 10


def test_the_time_of_a_step_is_that_of_its_calls() -> None:
    plan = marble.plan(LAYOUT, SHAPE, ranks=3)
    schedule = plan.schedules[0][1]
    begin = time.monotonic()
    replay = replay_rank(plan, 1, Slow(0.03), device="cpu", repeats=3)
    taken = time.monotonic() - begin
    for steps, which, each in ((replay.forward, schedule.forward, 0.03), (replay.backward, schedule.backward, 0.06)):
        for step, declared in zip(steps, which.steps, strict=True):
            assert step.seconds >= each * len(declared.calls)
    assert 4 * replay.seconds <= 1.5 * taken  # four runs, and what is made up is not counted


@pytest.mark.parametrize(("schedule", "ulysses"), SCHEDULES)
def test_memory_is_that_of_the_buffers(schedule: str, ulysses: int) -> None:
    plan = marble.plan(LAYOUT, SHAPE, ranks=4, schedule=schedule, ulysses=ulysses)
    own = plan.schedules[0][2]
    q, k = (torch.zeros(own.tokens[2], heads, 32, dtype=torch.bfloat16) for heads in (4, 2))
    totals = []
    for which in (own.forward, own.backward):
        memory = executor.Memory(which, q, (k, k), {})
        carried = {call.q for step in which.steps for call in step.calls if call.carries}
        states = sum(memory.tensors[name][..., 0].numel() * (32 + 2) for name in carried)
        sums = accumulation_dtype(torch.bfloat16).itemsize
        totals.append(sum(x.numel() * x.element_size() for x in memory.tensors.values()) + states * sums)
    assert replay_rank(plan, 2, launch.backend("reference"), device="cpu", repeats=1).nbytes == max(totals)


def test_ranks_wait_for_each_other_where_rows_move() -> None:
    one, two = (
        RankReplay(rank, (StepReplay(a, {1 - rank: 10}, {}), StepReplay(b, {}, {})), (StepReplay(c, {}, {}),), 0)
        for rank, (a, b, c) in enumerate([(1.0, 4.0, 2.0), (3.0, 1.0, 3.0)])
    )
    layer = replay_layer([one, two], lambda rank, step: (0.5 + 0.3 * rank) * sum(step.received.values()))
    assert layer.forward.slowest == (3, 4)
    assert layer.forward.mean == (2, 2.5)
    assert layer.forward.ends == (8, 9), "rank 0 receives until 5 and computes until 9, rank 1 until 8 and 9"
    assert layer.compute == 5 + 3
    assert layer.seconds == 9 + 3
    assert layer.exposed == 4
    assert layer.balance == pytest.approx(8 / 7)


def test_ranks_without_tokens_are_replayed() -> None:
    plan = marble.plan(Layout([[Span("full", 20)]]), SHAPE, ranks=3)
    assert all(replay_rank(plan, rank, launch.backend("reference"), device="cpu").seconds >= 0 for rank in range(3))


def test_bad_input_is_refused() -> None:
    plan = marble.plan(LAYOUT, SHAPE, ranks=2, rank=1)
    kernels = launch.backend("reference")
    with pytest.raises(ValueError, match=r"holds ranks \[1\], not 0"):
        replay_rank(plan, 0, kernels, device="cpu")
    with pytest.raises(ValueError, match="repeats must be at least 1 and warmup at least 0, got 0 and 1"):
        replay_rank(plan, 1, kernels, device="cpu", repeats=0)
    replay = replay_rank(plan, 1, kernels, device="cpu", repeats=1)
    with pytest.raises(ValueError, match="one plan and layer"):
        replay_layer([replay, RankReplay(0, (), (), 0)], lambda _rank, _step: 0.0)
    with pytest.raises(ValueError, match="one rank or more"):
        replay_layer([], lambda _rank, _step: 0.0)
