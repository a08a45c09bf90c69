"""What an executor asks of whoever runs it: that transfers start, and that they have arrived.

The executor performs no transfer. It is a generator that yields `Start` and `Arrive`; a driver answers them. Drivers
are `marble.comm.local` (any number of ranks in one process) and `marble.comm.torch_dist` (one rank per process).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class Start:
    """Start these transfers; ``view`` gives the rank's own rows as a tensor that aliases its buffer.

    ``transfers`` are `marble.compose.schedule.Transfer`. Until the next `Arrive` their source rows are only read and
    their target rows are not touched.
    """

    transfers: tuple[Any, ...]
    view: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Arrive:
    """Go on when the transfers that were started last are done on this rank."""


Request = Start | Arrive
Program = Generator[Request, None, Result]


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
