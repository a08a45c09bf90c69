"""What one-sided transfers between the GPUs of a process group begin with, whichever library makes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from marble.comm import torch_dist
from marble.comm.arena import Arena
from marble.comm.lane import CudaLane, watch_gpu
from marble.comm.watchdog import Watchdog


class GroupWires(ABC):
    """The beginnings of `marble.comm.one_sided.Wires`.

    Args:
        group: the ranks, which all come here.
        device: this rank's GPU.
        library: its name, for messages.
        remedy: what to do after a failure, for messages.

    Attributes:
        rank: this rank in the group.
        timeout: the group's own.
        lane: where transfers run.
        watchdog: looks after transfers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, library: str, remedy: str) -> None:
        self.rank = group.rank()
        self.timeout: timedelta = group._get_backend(device).options._timeout
        self.lane = CudaLane(device)
        self.watchdog = Watchdog(remedy, partial(watch_gpu, device))
        self._group, self._device, self._library = ref(group), device, library
        self._arena = Arena(self._allocate, self._free)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        group = self._group()
        assert group is not None, "its process group is gone"
        return group

    def global_rank(self, peer: int) -> int:
        """See `Wires`."""
        return dist.get_global_rank(self.group, peer)

    def reserve(self, nbytes: int) -> Tensor:
        """See `Wires`."""
        return self._arena.reserve(nbytes)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on all ranks."""
        made = [make() if self.rank == 0 else None]
        first = dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(made, src=first, group=self.group, device=self._device)
        return made[0]

    def meet(self, what: str) -> None:
        """Wait on the host until all ranks have come here.

        Raises:
            TransportError: if one does not.
        """
        torch_dist.meet(self.group, self._device, f"{self._library}: {what}", self.timeout)

    @abstractmethod
    def _allocate(self, nbytes: int) -> Tensor:
        """Memory that other ranks write to, uint8; a collective."""

    @abstractmethod
    def _free(self, memory: Tensor) -> None:
        """Give it back; a collective."""
