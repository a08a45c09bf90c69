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
