"""One-sided transfers by NCCL (nccl4py, libnccl 2.29 or later): copy engines inside a host, the network between hosts.

NCCL counts signals instead of comparing them: a wait takes the next ones from a rank. That is enough, as between two
ranks the signals of a step come in one order, ``FREE`` before ``FULL``, and are waited for in that order; but ranks
that run different things are not told apart.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from marble.comm.group_wires import GroupWires
from marble.comm.one_sided import OneSided, Piece, Signal

NEEDS = (2, 29)
"""The first libnccl with one-sided transfers."""

_REMEDY = (
    "That rank died, stalled or raised, lost a rank itself, or runs something else; to go on, make a new group without "
    "it"
)
_connections: WeakKeyDictionary[dist.ProcessGroup, OneSided] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup, device: torch.device) -> OneSided:
    """The connection of a group of GPUs; the first time all ranks make a communicator together.

    Raises:
        ValueError: if the device is no GPU, or nccl4py or a libnccl that can do it is not there.
    """
    if device.type != "cuda":
        raise ValueError(f"transport: 'nccl_rma' carries tensors on GPUs, got {device}; use 'torch_dist'")
    check_version()
    if group not in _connections:
        _connections[group] = OneSided(NcclWires(group, device))
    return _connections[group]


def check_version() -> None:
    """Raise a ValueError that names what is there, unless libnccl has one-sided transfers."""
    try:
        import nccl.core
    except ModuleNotFoundError as error:
        raise ValueError(f"transport: 'nccl_rma' needs marble-attention[cuda]: {error}") from error
    found = nccl.core.get_version().libnccl
    if found is None or found.version.release[:2] < NEEDS:
        has = "no libnccl is loaded" if found is None else f"libnccl {found.version} is loaded, from {found.path}"
        raise ValueError(
            f"transport: 'nccl_rma' needs libnccl {NEEDS[0]}.{NEEDS[1]} or later, {has}; use 'nvshmem' or 'torch_dist'"
        )


class NcclWires(GroupWires):
    """See `marble.comm.one_sided.Wires`.

    Args:
        group: the ranks, which all come here.
        device: this rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import nccl.core

        super().__init__(group, device, "NCCL", _REMEDY)
        self._core = nccl.core
        self._communicator = nccl.core.Communicator.init(
            group.size(), self.rank, self.from_first(nccl.core.get_unique_id)
        )
        if not self._communicator.host_rma_support:
            raise ValueError("transport: 'nccl_rma': this NCCL has no one-sided transfers between these GPUs")
        self._aborted = False

    def allow(self, peer: int, value: int) -> None:
        """See `Wires`."""
        del value
        self._communicator.signal(peer, stream=self.lane.stream.cuda_stream)

    def send(self, peer: int, pieces: list[Piece], value: int) -> None:
        """See `Wires`."""
        del value
        memory, stream = self.reserve(0), self.lane.stream.cuda_stream
        for piece in pieces:
            source = memory[piece.source : piece.source + piece.nbytes]
            self._communicator.put_signal(source, peer, self._window, piece.target, stream=stream)

    def wait(self, peer: int, signal: Signal, value: int, pieces: int) -> None:
        """See `Wires`."""
        del signal, value
        descriptor = self._core.WaitSignalDesc(peer, op_count=pieces)
        self._communicator.wait_signal(descriptor, stream=self.lane.stream.cuda_stream)

    def release(self, peer: int, signal: Signal, value: int) -> None:
        """See `Wires`."""
        del peer, signal, value
        if not self._aborted:
            self._aborted = True
            self._communicator.abort()

    def _allocate(self, nbytes: int) -> Tensor:
        """Memory in a window that others write to; registering it is a collective."""
        self.meet(f"{nbytes} bytes of inboxes")
        memory = torch.from_dlpack(self._core.mem_alloc(nbytes)).view(torch.uint8)
        self._window = self._communicator.register_window(memory, self._core.WindowFlag.COLL_SYMMETRIC)
        return memory

    def _free(self, memory: Tensor) -> None:
        del memory  # goes with its last reference, once no window shows it
        self._window.close()
