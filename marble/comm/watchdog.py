"""A watchdog: a stream that waits for another rank cannot raise, so a thread looks after it.

A step that waits too long becomes a `TransportError`, and what the stream waits for is released, so that it runs on,
with wrong values. Whoever calls next is told.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from marble.comm.lane import Event
from marble.comm.transport import TransportError, Wait

_TICK = 0.002
"""Seconds between two looks."""

_IDLE = 5.0
"""Seconds after which a thread with nothing to watch ends."""


@dataclass(frozen=True, eq=False)
class Awaited:
    """A signal that a lane waits for.

    Attributes:
        wait: who waits for what.
        done: happens when the lane waits no more.
        release: lets it wait no more, or takes another try at that.
    """

    wait: Wait
    done: Event
    release: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Pending:
    """A step whose transfers are under way.

    Attributes:
        reached: happens when nothing but the transfers is left to do: from then on the rank waits.
        awaited: in the order in which the lane comes to them; not empty.
        timeout: seconds that the rank may wait.
    """

    reached: Event
    awaited: tuple[Awaited, ...]
    timeout: float


class Watchdog:
    """Looks after the steps of one group, oldest first.

    Args:
        remedy: what to do after a failure, for messages.
        enter: what the thread does first.

    Attributes:
        failure: the first one; the group is of no more use.
        captured: what waits in CUDA graphs: nobody can see whether they have come to it.
    """

    def __init__(self, remedy: str, enter: Callable[[], None] = lambda: None) -> None:
        self.remedy, self.failure = remedy, None
        self.captured: list[Awaited] = []
        self._enter = enter
        self._steps: deque[Pending] = deque()
        # Steps that are over. Destroying an event can wait for a lock of CUDA that a copy to the host holds as long as
        # its stream is blocked, so that is left to the callers, who wait for nothing then.
        self._over: list[Pending] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    failure: TransportError | None

    def check(self) -> None:
        """Raise the failure if there was one."""
        if self.failure is not None:
            raise TransportError(f"group: it failed and is of no more use. {self.failure}", self.failure.wait)

    def fail(self, error: TransportError) -> None:
        """Note a failure; the first counts."""
        if self.failure is None:
            self.failure = error

    def watch(self, step: Pending) -> None:
        """Look after a step until its transfers are done."""
        with self._changed:
            self._over.clear()
            self._steps.append(step)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="marble watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()

    def synchronize(self, done: Event, timeout: float | None) -> None:
        """Wait on the host until something has happened, whatever it waits for, CUDA graphs included.

        Args:
            done: what.
            timeout: seconds after which what graphs wait for is released; None if no graph may wait that long. Steps
                outside of graphs keep their own timeouts.

        Raises:
            TransportError: if anything failed.
        """
        begin = time.monotonic()
        while not done.query():
            if timeout is not None and time.monotonic() - begin >= timeout and self.captured:
                peers = sorted({awaited.wait.peer for awaited in self.captured})
                wait = self.captured[0].wait
                self.fail(
                    TransportError(
                        f"{wait.operation}: a CUDA graph is not done after {timeout} s. Rank {wait.rank} waits for one "
                        f"of the ranks {peers}. {self.remedy}",
                        wait,
                    )
                )
                for awaited in self.captured:
                    awaited.release()
            time.sleep(_TICK)
        self.check()

    def _run(self) -> None:
        self._enter()
        since: float | None = None
        while True:
            with self._changed:
                if not self._steps and not self._changed.wait_for(lambda: bool(self._steps), _IDLE):
                    self._thread = None
                    return
                step = self._steps[0]
            try:
                late = [awaited for awaited in step.awaited if not awaited.done.query()]
                if late and since is None and step.reached.query():
                    since = time.monotonic()
            except RuntimeError as error:  # the device itself failed: there is nothing left to look after
                self.fail(TransportError(f"{step.awaited[0].wait}: {error}", step.awaited[0].wait))
                late = []
            if not late:
                since = None
                with self._changed:
                    self._over.append(self._steps.popleft())
                    del step  # the last reference to it must not end here
                continue
            if since is not None and time.monotonic() - since >= step.timeout:
                self.fail(
                    TransportError(f"{late[0].wait}: not done after {step.timeout:g} s. {self.remedy}", late[0].wait)
                )
            if self.failure is not None:
                for awaited in late:
                    awaited.release()
            time.sleep(_TICK)
