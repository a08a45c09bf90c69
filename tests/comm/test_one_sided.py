"""One-sided transfers over shared memory: the bits of virtual ranks whatever the timing, and errors in time.

The wires are threads that share memory; all above them is what NVSHMEM and NCCL's one-sided calls run under.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from shared_wires import SharedWires
from torch import Tensor

import marble
from marble import AttentionShape, Layout, Plan, Span, TransportError
from marble.comm.local import run_together
from marble.comm.one_sided import OneSided
from marble.comm.transport import Operation, Program
from marble.compose import executor
from marble.compose.inboxes import InboxError, watched
from marble.compose.schedule import Schedule
from marble.kernels.reference import ReferenceBackend

LAYOUTS = [
    Layout([[Span("causal", 13), Span("full", 29), Span("causal", 8)], [Span("causal", 41)], [Span("pad", 6)]]),
    Layout.from_cu_seqlens([0, 3, 10]),
    Layout([[Span("causal", 9), Span("noise", 20), Span("full", 30), Span("noise", 11)], [Span("causal", 40)]]),
]
SHAPE = AttentionShape(6, 3, 8)
CASES = [(schedule, ulysses) for schedule in ("ring", "sparse_a2a", "chunked", "all_gather") for ulysses in (1, 2)]


def plan_of(layout: Layout, schedule: str, ulysses: int, groups: int = 3) -> Plan:
    return marble.plan(layout, SHAPE, ranks=groups * ulysses, schedule=schedule, ulysses=ulysses, block=4)


def inputs(plan: Plan, dtype: torch.dtype) -> list[list[Tensor]]:
    """q, k, v and dout of each rank."""
    generator = torch.Generator().manual_seed(plan.tokens)
    whole = [torch.randn(plan.tokens, heads, 8, generator=generator).to(dtype) for heads in (6, 3, 3, 6)]
    return [list(parts) for parts in zip(*(plan.shard(x).split(plan.order.lengths) for x in whole), strict=True)]


Run = Callable[[Program[Any], str], Any]


def layer(schedule: Schedule, x: list[Tensor], run: Run, backend: Any = None, **options: Any) -> list[Tensor]:
    """out, lse, dq, dk and dv of one rank."""
    backend = ReferenceBackend() if backend is None else backend
    *qkv, dout = x
    ahead = run(executor.forward(schedule, backend, *qkv, scale=0.3, **options), "forward")
    back = run(executor.backward(schedule, backend, *qkv, *ahead, dout, scale=0.3, **options), "backward")
    return [part.clone() for part in (*ahead, *back)]


def virtually(plan: Plan, dtype: torch.dtype) -> list[list[Tensor]]:
    """The same of all ranks, by virtual ones."""
    x, backend = inputs(plan, dtype), ReferenceBackend()
    ranks, schedules = range(plan.world), plan.schedules[0]
    ahead = run_together({r: executor.forward(schedules[r], backend, *x[r][:3], scale=0.3) for r in ranks})
    back = run_together(
        {r: executor.backward(schedules[r], backend, *x[r][:3], *ahead[r], x[r][3], scale=0.3) for r in ranks}
    )
    return [[*ahead[r], *back[r]] for r in ranks]


def on_threads(folder: Path, world: int, work: Callable[[int, OneSided], Any], **options: Any) -> list[Any]:
    """What ``work(rank, connection)`` returns or raises, on one thread per rank."""
    wires = [SharedWires(folder, rank, world, **options) for rank in range(world)]
    answers: list[Any] = [TimeoutError("it did not end")] * world

    def enter(rank: int) -> None:
        try:
            answers[rank] = work(rank, OneSided(wires[rank]))
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=enter, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (
        options.get("heedless")
        or not any(each.unheeded for each in wires)
        or any(each.watchdog.failure for each in wires)
    )
    return answers


def pauses(seed: int) -> Callable[[], None]:
    """Now and then a moment."""
    rng = Random(seed)
    return lambda: time.sleep(rng.random() * 0.002) if rng.random() < 0.2 else None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("schedule", "ulysses"), CASES)
def test_bits_of_virtual_ranks(schedule: str, ulysses: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Layer after layer in the same inboxes, whatever their layout and what the last one left there."""
    plans = [plan_of(layout, schedule, ulysses) for layout in LAYOUTS]
    world = plans[0].world

    def work(rank: int, connection: OneSided) -> list[list[Tensor]]:
        connection.reserve(1).fill_(255)  # NaN in every type
        found = []
        for number, plan in enumerate(plans):
            operations = {name: Operation(f"layer {number}, {name}") for name in ("forward", "backward")}
            found.append(
                layer(
                    plan.schedules[0][rank],
                    inputs(plan, dtype)[rank],
                    lambda program, name, operations=operations: connection.run(program, operations[name]),
                    reserve=connection.reserve,
                )
            )
        return found

    answers = on_threads(tmp_path, world, work, pause=pauses(len(schedule)))
    for number, plan in enumerate(plans):
        for rank, expected in enumerate(virtually(plan, dtype)):
            assert isinstance(answers[rank], list), answers[rank]
            for x, y in zip(answers[rank][number], expected, strict=True):
                assert torch.equal(x, y), (number, rank)


def test_soak(tmp_path: Path) -> None:
    """Many layers without a pause: signals of neighbouring ones are not mixed up."""
    plans = [plan_of(layout, schedule, 1, 2) for layout in LAYOUTS for schedule in ("ring", "sparse_a2a")]
    expected = [virtually(plan, torch.float64) for plan in plans]

    def work(rank: int, connection: OneSided) -> int:
        for number in range(60):
            plan = plans[number % len(plans)]
            found = layer(
                plan.schedules[0][rank],
                inputs(plan, torch.float64)[rank],
                lambda program, name, number=number: connection.run(program, Operation(f"{number}, {name}")),
                reserve=connection.reserve,
            )
            assert all(map(torch.equal, found, expected[number % len(plans)][rank])), number
        return 60

    assert on_threads(tmp_path, 2, work) == [60, 60]


class Late(ReferenceBackend):
    """Takes its time for its second call: a moment from when it says that it reads."""

    def __init__(self, reading: threading.Event, moment: Callable[[], None]) -> None:
        self.reading, self.moment, self.calls = reading, moment, 0

    def forward(self, *args: Any, **options: Any) -> None:
        super().forward(*args, **options)
        self.calls += 1
        if self.calls == 2:
            self.reading.set()
            self.moment()


@pytest.mark.parametrize("heedless", [False, True])
def test_rows_are_written_when_they_are_free_and_not_before(heedless: bool, tmp_path: Path) -> None:
    """Rank 1 reads an inbox for long. Rank 0 goes on to the next layer, and if its wires do not wait for ``FREE`` they
    overwrite it, which the debug mode sees."""
    plan = plan_of(LAYOUTS[2], "ring", 1, 2)
    reading = threading.Event()
    others: list[OneSided] = []

    def until_written() -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not (others and len(others[0].wires.sent) == 2):  # type: ignore[attr-defined]
            time.sleep(0.001)

    def work(rank: int, connection: OneSided) -> None:
        schedule, x = plan.schedules[0][rank], inputs(plan, torch.float32)[rank]
        backend = Late(reading, until_written) if rank == 1 else ReferenceBackend()
        for number in range(2):
            if number == 1 and rank == 0:
                others.append(connection)
                reading.wait()
            changed = [part + number for part in x[:3]]
            program = executor.forward(schedule, backend, *changed, scale=0.3, reserve=connection.reserve)
            connection.run(watched(program, schedule.forward, rank), Operation(f"layer {number}"))

    answers = on_threads(tmp_path, 2, work, heedless=heedless, timeout=timedelta(seconds=5))
    if heedless:
        assert isinstance(answers[1], InboxError)
        assert "were overwritten while they are read" in str(answers[1])
    else:
        assert answers == [None, None]


class Strikes(ReferenceBackend):
    """Does something in its second call of a pass."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action, self.calls = action, 0

    def backward(self, *args: Any, **options: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.action()
        super().backward(*args, **options)


def fail() -> None:
    raise ZeroDivisionError("a fault of its own")


@pytest.mark.parametrize("fault", ["raises", "stalls", "elsewhere"])
def test_every_other_rank_raises_in_time(fault: str, tmp_path: Path) -> None:
    plan = plan_of(LAYOUTS[0], "ring", 1, 3)
    failing, timeout = 1, timedelta(seconds=0.5)
    actions: dict[str, Callable[[], None]] = {"raises": fail, "stalls": lambda: time.sleep(3)}

    def work(rank: int, connection: OneSided) -> tuple[BaseException, float, BaseException]:
        backend = Strikes(actions[fault]) if rank == failing and fault in actions else ReferenceBackend()
        number = int(fault == "elsewhere" and rank == failing)
        errors, seconds = [], 0.0
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises((TransportError, ZeroDivisionError)) as raised:
                layer(
                    plan.schedules[0][rank],
                    inputs(plan, torch.float32)[rank],
                    lambda program, name: connection.run(program, Operation(f"layer {number}, {name}")),
                    backend,
                    reserve=connection.reserve,
                )
            errors.append(raised.value)
            seconds = seconds or time.monotonic() - begin
        return errors[0], seconds, errors[1]

    answers = on_threads(tmp_path, 3, work, timeout=timeout)
    for rank, answer in enumerate(answers):
        assert isinstance(answer, tuple), answer
        first, seconds, second = answer
        assert isinstance(second, TransportError)
        assert str(second).startswith("group: it failed and is of no more use. ")
        if fault == "raises" and rank == failing:
            assert isinstance(first, ZeroDivisionError)
            assert "this rank raised ZeroDivisionError" in str(second)
            continue
        assert isinstance(first, TransportError)
        assert first.wait is not None
        assert first.wait.rank == rank
        assert first.wait.global_peer == first.wait.peer + 10
        assert "signal F" in first.wait.transfer
        if rank != failing:
            assert seconds < timeout.total_seconds() + 1.5
            name = "layer 0, forward" if fault == "elsewhere" else "layer 0, backward"
            assert first.wait.operation == name
            assert f"{name}, step {first.wait.step}: rank {rank} waits for rank {first.wait.peer}" in str(first)
    direct = [answer[0].wait for rank, answer in enumerate(answers) if rank != failing]
    assert any(wait.peer == failing for wait in direct)
