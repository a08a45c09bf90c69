"""One-sided transfers without a GPU: threads or processes that share memory by files, each with a lane of its own."""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from marble.comm.one_sided import Piece, Signal
from marble.comm.watchdog import Watchdog

ROOM = 1 << 20
"""Bytes that every rank reserves, once."""


class Flag:
    """An event of a lane."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()


class ThreadLane:
    """Runs what is enqueued one after the other, in a thread. The calls are the host's, so they wait there."""

    capturing = False

    def __init__(self, pause: Callable[[], None]) -> None:
        self.pause = pause
        self.todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while True:
            self.todo.get()()

    def enqueue(self, action: Callable[[], None]) -> None:
        self.todo.put(self.pause)
        self.todo.put(action)

    def fork(self) -> None:
        pass

    def join(self) -> None:
        self.mark().happened.wait()

    def mark(self) -> Flag:
        flag = Flag()
        self.todo.put(flag.happened.set)
        return flag

    def mark_calls(self) -> Flag:
        flag = Flag()
        flag.happened.set()
        return flag


class SharedWires:
    """`Wires` between threads or processes.

    Args:
        folder: of the shared files.
        rank: this rank.
        world: number of ranks.
        timeout: how long a step may wait.
        pause: called between any two actions of the lane.
        heedless: whether to write to others without waiting until their rows are free.

    Attributes:
        sent: the values of what has been sent.
        unheeded: whether a signal was raised that had been raised before and not been taken down.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        timeout: timedelta = timedelta(seconds=30),
        pause: Callable[[], None] = lambda: None,
        heedless: bool = False,
    ) -> None:
        self.rank, self.timeout, self.heedless = rank, timeout, heedless
        self.unheeded = torch.tensor(False)
        self.sent: list[int] = []
        self.lane, self.watchdog = ThreadLane(pause), Watchdog("Start again")
        names = [str(folder / str(peer)) for peer in range(world)]
        self.memories = [torch.from_file(f"{name}.room", True, ROOM, dtype=torch.uint8) for name in names]
        self.flags = [
            torch.from_file(f"{name}.flags", True, 2 * world, dtype=torch.int64).view(2, world) for name in names
        ]

    def reserve(self, nbytes: int) -> Tensor:
        assert nbytes <= ROOM
        return self.memories[self.rank]

    def global_rank(self, peer: int) -> int:
        return peer + 10

    def allow(self, peer: int, value: int) -> None:
        self.lane.enqueue(lambda: self.put(peer, Signal.FREE, value))

    def send(self, peer: int, pieces: list[Piece], value: int) -> None:
        for source, target, nbytes in pieces:
            here, there = self.memories[self.rank][source:], self.memories[peer][target:]
            self.lane.enqueue(lambda here=here[:nbytes], there=there[:nbytes]: there.copy_(here))
        self.lane.enqueue(lambda: self.put(peer, Signal.FULL, value))
        self.lane.enqueue(lambda: self.sent.append(value))

    def put(self, peer: int, signal: Signal, value: int) -> None:
        self.unheeded |= self.flags[peer][signal, self.rank] != 0
        self.flags[peer][signal, self.rank] = value

    def wait(self, peer: int, signal: Signal, value: int, pieces: int) -> None:
        assert pieces > 0
        flag = self.flags[self.rank][signal]

        def look() -> None:
            while flag[peer] != value and not (self.heedless and signal is Signal.FREE):
                time.sleep(0)
            flag[peer] = 0

        self.lane.enqueue(look)

    def release(self, peer: int, signal: Signal, value: int) -> None:
        self.flags[self.rank][signal, peer] = value
