"""What an executor asks of whoever runs it: that transfers start, and that they have arrived.

The executor performs no transfer. It is a generator that yields `Start` and `Arrive`; a driver answers them. Drivers
are `marble.comm.local` (any number of ranks in one process), and with one rank per process `marble.comm.torch_dist`
(messages) and `marble.comm.one_sided` (writes into the memory of others).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from zlib import crc32

from torch import Tensor

Result = TypeVar("Result")


Reserve = Callable[[int], Tensor]
"""Gives so many bytes of memory that other ranks reach, uint8 [at least as many]. The next call may give the same."""


class Room(Protocol):
    """Where the rows of a rank lie in reserved memory. Equal rows lie at equal places on all ranks.

    Rows that move whole lie in their buffers there. Of other rows, packed copies lie beside: heads first.
    """

    def place(self, rows: Any, whole: bool) -> int:
        """Bytes before the rows, or before their packed copy."""
        ...

    def nbytes(self, rows: Any) -> int:
        """Bytes of the rows."""
        ...

    def pack(self, rows: Any) -> None:
        """Copy rows to their packed copy."""
        ...

    def unpack(self, rows: Any) -> None:
        """Copy rows from their packed copy."""
        ...


@dataclass(frozen=True)
class Start:
    """Start these transfers; ``view`` gives the rank's own rows as a tensor that aliases its buffer.

    ``transfers`` are `marble.compose.schedule.Transfer`. Until the next `Arrive` their source rows are only read and
    their target rows are not touched. ``room`` is there if the program was given memory to `Reserve`.
    """

    transfers: tuple[Any, ...]
    view: Callable[[Any], Tensor]
    room: Room | None = None


@dataclass(frozen=True)
class Arrive:
    """Go on when the transfers that were started last are done on this rank."""


Request = Start | Arrive
Program = Generator[Request, None, Result]


class Driver(Protocol):
    """Performs the transfers of one program, step by step."""

    def start(self, start: Start) -> None:
        """Start the transfers of the next step."""
        ...

    def finish(self) -> None:
        """Have what follows wait for them."""
        ...


def drive(program: Program[Result], driver: Driver) -> Result:
    """Run a program to its end."""
    while True:
        try:
            request = next(program)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Start):
            driver.start(request)
        else:
            driver.finish()


def check_timeout(timeout: timedelta | None) -> None:
    """Refuse what is not a time to wait.

    Raises:
        TypeError: if it is neither None nor a `timedelta`.
        ValueError: if it is not positive.
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout: expected a datetime.timedelta, got {type(timeout).__name__}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout: must be positive, got {timeout}")


@dataclass(frozen=True)
class Operation:
    """What a program is, and how long its steps may take.

    Attributes:
        name: for messages, such as ``layer 1, forward``.
        digest: what all ranks must have in common for their messages to belong together.
        timeout: how long a step may wait for other ranks; None for the group's own timeout.
    """

    name: str
    digest: bytes = b""
    timeout: timedelta | None = None

    def tag(self, step: int) -> int:
        """A number of 31 bits for a step, by which messages of other operations and steps are told apart."""
        return crc32(f"{self.name}, {step}".encode(), crc32(self.digest)) & 0x7FFFFFFF


class Connection(Protocol):
    """What carries the transfers between the ranks of a group."""

    def reserve(self, nbytes: int) -> Tensor:
        """Memory for rows that move, as `Reserve`."""
        ...

    def run(self, program: Program[Result], operation: Operation) -> Result:
        """Run this rank's program.

        Raises:
            TransportError: if a transfer fails or takes too long, or if one did before.
        """
        ...

    def synchronize(self, timeout: timedelta | None) -> None:
        """Wait on the host for all that has been enqueued.

        Raises:
            TransportError: if a transfer failed.
        """
        ...


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        rank: who waits, by its number in the group.
        peer: for whom, by its number in the group.
        global_peer: the same rank's number in the default group.
        operation: what the transfer belongs to, such as a layer's forward pass.
        step: the step of the operation, from 0.
        transfer: the rows that are sent or received.
    """

    rank: int
    peer: int
    global_peer: int
    operation: str
    step: int
    transfer: str

    def __str__(self) -> str:
        return (
            f"{self.operation}, step {self.step}: rank {self.rank} waits for rank {self.peer} (global rank "
            f"{self.global_peer}), {self.transfer}"
        )


class TransportError(RuntimeError):
    """Ranks lost each other: one died, stalled, raised or runs something else. Their group is of no more use.

    Attributes:
        wait: what this rank waited for; None if it left the group itself, by an error between its transfers.
    """

    def __init__(self, message: str, wait: Wait | None = None) -> None:
        super().__init__(message, wait)
        self.wait = wait

    def __str__(self) -> str:
        return str(self.args[0])
