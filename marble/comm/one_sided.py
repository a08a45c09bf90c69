"""One-sided transfers: each rank writes rows straight to their place in the memory of others, on a lane of its own.

Two signals go with the transfers of a step from one rank to another:

* ``FREE``: raised by the receiver when its calls no longer need the rows that will be overwritten; the sender waits
  for it; it may then write.
* ``FULL``: raised by the sender behind what it has written; the receiver waits for it; it may then read.

A signal carries the operation and the step that it is about, so ranks that run different things wait and do not mix
their data. Who has waited for a signal takes it down. Between two ranks ``FREE`` and ``FULL`` take turns, so none is
raised twice before it is taken down, and a CUDA graph can repeat them.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from marble.comm.lane import Lane
from marble.comm.transport import Operation, Program, Result, Start, TransportError, Wait, drive
from marble.comm.watchdog import Awaited, Pending, Watchdog


class Signal(IntEnum):
    """See the module."""

    FREE = 0
    FULL = 1


class Piece(NamedTuple):
    """Bytes of this rank's reserved memory and the place in the target's where they go."""

    source: int
    target: int
    nbytes: int


class Wires(Protocol):
    """What writes and signals between ranks; all of it is enqueued on the lane but `reserve` and `release`.

    Attributes:
        rank: this rank in the group.
        watchdog: looks after transfers.
        timeout: how long a step may wait if its operation does not say.
    """

    rank: int
    watchdog: Watchdog
    timeout: timedelta

    @property
    def lane(self) -> Lane:
        """Where transfers run."""
        ...

    def reserve(self, nbytes: int) -> Tensor:
        """See `marble.comm.transport.Reserve`; a collective where the memory has to grow."""
        ...

    def global_rank(self, peer: int) -> int:
        """A rank's number in the default group."""
        ...

    def allow(self, peer: int, value: int) -> None:
        """Raise ``FREE`` with a value > 0 at another rank."""
        ...

    def send(self, peer: int, pieces: list[Piece], value: int) -> None:
        """Write pieces to another rank, and raise ``FULL`` with a value > 0 there behind the last."""
        ...

    def wait(self, peer: int, signal: Signal, value: int, pieces: int) -> None:
        """Wait until another rank has raised a signal with this value, and take it down. ``FULL`` stands behind so many
        pieces."""
        ...

    def release(self, peer: int, signal: Signal, value: int) -> None:
        """Let a `wait` end although nobody raises its signal. Called by the watchdog's thread, until it helps."""
        ...


class OneSided:
    """A connection between the ranks of a group.

    Args:
        wires: this rank's.
    """

    def __init__(self, wires: Wires) -> None:
        self.wires = wires

    def reserve(self, nbytes: int) -> Tensor:
        """See `marble.comm.transport.Connection`."""
        return self.wires.reserve(nbytes)

    def run(self, program: Program[Result], operation: Operation) -> Result:
        """Run this rank's program. The host waits for no transfer.

        Raises:
            TransportError: if a transfer of this or an earlier operation failed or took too long.
        """
        watchdog = self.wires.watchdog
        watchdog.check()
        driver = _Driver(self.wires, operation)
        try:
            return drive(program, driver)
        except TransportError:
            raise
        except BaseException as error:
            if driver.step >= 0:
                watchdog.fail(TransportError(f"{operation.name}, step {driver.step}: this rank raised {error!r}"))
            raise

    def synchronize(self, timeout: timedelta | None) -> None:
        """Wait on the host for all calls and transfers so far.

        Raises:
            TransportError: if one of them failed.
        """
        seconds = None if timeout is None else timeout.total_seconds()
        self.wires.watchdog.synchronize(self.wires.lane.mark_calls(), seconds)


class _Driver:
    """Performs the transfers of one program, step by step."""

    def __init__(self, wires: Wires, operation: Operation) -> None:
        self.wires, self.operation = wires, operation
        self.timeout = (operation.timeout or wires.timeout).total_seconds()
        self.step = -1
        self.awaited: list[Awaited] = []

    def start(self, start: Start) -> None:
        """Say which rows are free, and write to others when theirs are."""
        self.step += 1
        self.value = self.operation.tag(self.step) + 1
        self.opened, self.awaited = start, []
        self.sending: dict[int, list[Any]] = defaultdict(list)
        self.receiving: dict[int, list[Any]] = defaultdict(list)
        for transfer in start.transfers:
            if transfer.source == transfer.target:
                start.view(transfer.dst).copy_(start.view(transfer.src))
            elif transfer.source == self.wires.rank:
                self.sending[transfer.target].append(transfer)
                if not transfer.whole:
                    _room(start).pack(transfer.src)
            else:
                self.receiving[transfer.source].append(transfer)
        if not self.sending and not self.receiving:
            return
        self.wires.lane.fork()
        for peer in self.receiving:
            self.wires.allow(peer, self.value)
        # Not all to the same rank first.
        for peer in sorted(self.sending, key=lambda peer: (peer < self.wires.rank, peer)):
            self._await(peer, Signal.FREE, self.sending[peer], 1)
            self.wires.send(peer, _pieces(start, self.sending[peer]), self.value)

    def finish(self) -> None:
        """Let the calls that follow wait for what arrives and for what leaves."""
        if self.sending or self.receiving:
            lane, watchdog = self.wires.lane, self.wires.watchdog
            # A wait that takes a multiprocessor takes it from no call.
            lane.fork()
            reached = None if lane.capturing else lane.mark_calls()
            for peer, transfers in self.receiving.items():
                self._await(peer, Signal.FULL, transfers, len(_pieces(self.opened, transfers)))
            if reached is None:
                watchdog.captured += self.awaited
            else:
                watchdog.watch(Pending(reached, tuple(self.awaited), self.timeout))
            lane.join()
            watchdog.check()
            for transfers in self.receiving.values():
                for transfer in transfers:
                    if not transfer.whole:
                        _room(self.opened).unpack(transfer.dst)

    def _await(self, peer: int, signal: Signal, transfers: list[Any], pieces: int) -> None:
        wires, value = self.wires, self.value
        wires.wait(peer, signal, value, pieces)
        rows = ", ".join(str(transfer.dst if signal is Signal.FULL else transfer.src) for transfer in transfers)
        what = f"signal FULL, to receive {rows}" if signal is Signal.FULL else f"signal FREE, to send {rows}"
        wait = Wait(wires.rank, peer, wires.global_rank(peer), self.operation.name, self.step, what)
        self.awaited.append(Awaited(wait, wires.lane.mark(), lambda: wires.release(peer, signal, value)))


def _room(start: Start) -> Any:
    assert start.room is not None, "the program was given no memory that other ranks reach"
    return start.room


def _pieces(start: Start, transfers: list[Any]) -> list[Piece]:
    """The transfers between two ranks, those that follow one another at both ends as one. Both ranks count alike."""
    room, found = _room(start), [Piece(0, 0, 0)]
    for transfer in transfers:
        source, target = (room.place(rows, transfer.whole) for rows in (transfer.src, transfer.dst))
        nbytes = room.nbytes(transfer.src)
        last = found[-1]
        if last.source + last.nbytes == source and last.target + last.nbytes == target:
            found[-1] = last._replace(nbytes=last.nbytes + nbytes)
        else:
            found.append(Piece(source, target, nbytes))
    return [piece for piece in found if piece.nbytes]
