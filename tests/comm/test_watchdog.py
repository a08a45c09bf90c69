"""The watchdog: when a step is late, what it says, and that it lets waits go until none is left."""

import threading
import time
from collections.abc import Callable

import pytest

from marble import TransportError
from marble.comm.transport import Wait
from marble.comm.watchdog import Awaited, Pending, Watchdog


class Flag:
    """An event that a test makes happen."""

    def __init__(self, happened: bool = False) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened

    def set(self) -> None:
        self.happened = True


def awaited(step: int, done: Flag, release: Callable[[], None] | None = None) -> Awaited:
    return Awaited(
        Wait(0, 2, 5, "layer 3, forward", step, "signal FULL, to receive kv[0:4]"), done, release or done.set
    )


def until(condition: Callable[[], bool], seconds: float = 2) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def test_steps_that_end_in_time_leave_no_trace() -> None:
    dog, flags = Watchdog("Restart"), [Flag() for _ in range(20)]
    for step, flag in enumerate(flags):
        dog.watch(Pending(Flag(True), (awaited(step, flag),), timeout=0.5))
    for flag in flags:
        flag.set()
        time.sleep(0.002)
    dog.check()
    assert until(lambda: not dog._steps)


def test_a_late_step_is_named_and_every_wait_released() -> None:
    """The first wait of the step is over, the second is not; the steps behind it wait for the same rank."""
    dog, over, late, behind = Watchdog("Restart"), Flag(True), Flag(), [Flag() for _ in range(5)]
    tries: list[float] = []

    def release() -> None:
        tries.append(time.monotonic())
        late.happened = len(tries) >= 3  # one try is not always enough

    begin = time.monotonic()
    dog.watch(Pending(Flag(True), (awaited(6, over), awaited(7, late, release)), timeout=0.1))
    for flag in behind:
        dog.watch(Pending(Flag(True), (awaited(8, flag),), timeout=60))
    assert until(lambda: all(flag.happened for flag in behind))
    assert len(tries) == 3
    assert 0.1 <= tries[0] - begin < 1
    with pytest.raises(TransportError) as raised:
        dog.check()
    assert raised.value.wait == awaited(7, late).wait
    assert "layer 3, forward, step 7: rank 0 waits for rank 2 (global rank 5), signal FULL" in str(raised.value)
    assert str(raised.value).endswith("not done after 0.1 s. Restart")


def test_time_counts_only_once_a_rank_has_nothing_else_to_do() -> None:
    dog, reached, done = Watchdog("Restart"), Flag(), Flag()
    dog.watch(Pending(reached, (awaited(0, done),), timeout=0.1))
    time.sleep(0.3)
    dog.check()
    reached.set()
    assert until(lambda: dog.failure is not None)
    assert done.happened


def test_a_graph_that_does_not_end_is_released() -> None:
    dog, done = Watchdog("Restart"), Flag()
    dog.captured.append(awaited(4, Flag(), done.set))
    with pytest.raises(
        TransportError, match=r"a CUDA graph is not done after 0.1 s. Rank 0 waits for one of the .*\[2\]"
    ):
        dog.synchronize(done, 0.1)


def test_a_failing_device_is_a_failure() -> None:
    class Broken(Flag):
        def query(self) -> bool:
            raise RuntimeError("unspecified launch failure")

    dog = Watchdog("Restart")
    dog.watch(Pending(Flag(True), (awaited(0, Broken()),), timeout=60))
    assert until(lambda: dog.failure is not None)
    with pytest.raises(TransportError, match="unspecified launch failure"):
        dog.check()


def test_events_end_with_the_callers() -> None:
    """Not in the watchdog's thread: where a copy to the host waits for a blocked stream, that would wait with it."""
    ended: list[int] = []

    class Owned(Flag):
        def __del__(self) -> None:
            ended.append(threading.get_ident())

    dog = Watchdog("Restart")
    for step in range(4):
        dog.watch(Pending(Owned(True), (awaited(step, Owned(True)),), timeout=60))
        assert until(lambda: not dog._steps)
        time.sleep(0.01)
    assert ended == [threading.get_ident()] * 6


def test_its_thread_ends_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marble.comm.watchdog._IDLE", 0.01)
    entered: list[int] = []
    dog = Watchdog("Restart", lambda: entered.append(threading.get_ident()))
    for number in (1, 2):
        dog.watch(Pending(Flag(True), (awaited(0, Flag(True)),), timeout=60))
        assert until(lambda: dog._thread is None)
        assert len(entered) == number
