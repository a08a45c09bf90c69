"""One-sided transfers by NVSHMEM (nvshmem4py). Between GPUs that reach each other they leave the multiprocessors alone.

There a put is a peer copy by a copy engine, a signal is a write and a wait a comparison that the stream itself
makes (NVSHMEM 3.4 takes stream memory operations for signals that are set, and for waits for equality; those only are
used here). Elsewhere NVSHMEM's transports do it.

The ranks of one group are the processing elements of NVSHMEM in this process: what is symmetric is allocated by all of
them, so a process can be in one such group only. A group that lost a rank cannot go on, nor can NVSHMEM in these
processes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from marble.comm.group_wires import GroupWires
from marble.comm.one_sided import OneSided, Piece, Signal

_REMEDY = (
    "That rank died, stalled or raised, lost a rank itself, or runs something else; NVSHMEM cannot lose ranks, so "
    "restart the processes of this group"
)
_connections: WeakKeyDictionary[dist.ProcessGroup, OneSided] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup, device: torch.device) -> OneSided:
    """The connection of a group of GPUs; the first time it starts NVSHMEM, which all ranks do together.

    Raises:
        ValueError: if the device is no GPU, nvshmem4py is not installed, or NVSHMEM serves another group here.
        TransportError: if another rank does not come.
    """
    if device.type != "cuda":
        raise ValueError(f"transport: 'nvshmem' carries tensors on GPUs, got {device}; use 'torch_dist'")
    if group not in _connections:
        if _connections:
            raise ValueError(
                "transport: 'nvshmem' serves another group in this process, and can serve one; use 'torch_dist' here"
            )
        _connections[group] = OneSided(NvshmemWires(group, device))
    return _connections[group]


def disconnect() -> None:
    """Give back what NVSHMEM holds and end it, if it runs; all ranks do together, with nothing under way."""
    if _connections:
        import nvshmem.core

        torch.cuda.synchronize()
        for connection in list(_connections.values()):
            assert isinstance(connection.wires, NvshmemWires)
            connection.wires.close()
        _connections.clear()
        nvshmem.core.finalize()


class NvshmemWires(GroupWires):
    """See `marble.comm.one_sided.Wires`.

    Args:
        group: the ranks, which all come here.
        device: this rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        try:
            import nvshmem.bindings
            import nvshmem.core
            from cuda.core import Device
        except ModuleNotFoundError as error:
            raise ValueError(f"transport: 'nvshmem' needs marble-attention[cuda]: {error}") from error
        super().__init__(group, device, "NVSHMEM", _REMEDY)
        self._core, self._calls = nvshmem.core, nvshmem.bindings
        self._set = int(nvshmem.core.SignalOp.SIGNAL_SET)
        self._equal = int(nvshmem.core.ComparisonType.CMP_EQ)
        uid = self.from_first(nvshmem.core.get_unique_id)
        gpu = Device(device.index)
        gpu.set_current()
        nvshmem.core.init(device=gpu, uid=uid, rank=self.rank, nranks=group.size(), initializer_method="uid")
        self._rescue = torch.cuda.Stream(device, priority=-1)
        self._buffers: dict[int, Any] = {}
        # flags[signal][rank that raises it], int64.
        self._flags = self._symmetric(len(Signal) * group.size() * 8)
        self._flags.zero_()
        self.meet("signals")

    def allow(self, peer: int, value: int) -> None:
        """See `Wires`."""
        self._raise(Signal.FREE, self.rank, value, at=peer)

    def send(self, peer: int, pieces: list[Piece], value: int) -> None:
        """See `Wires`."""
        base, stream = self.reserve(0).data_ptr(), self.lane.stream.cuda_stream
        flag = self._flag(Signal.FULL, self.rank)
        for piece in pieces[:-1]:
            self._calls.putmem_on_stream(base + piece.target, base + piece.source, piece.nbytes, peer, stream)
        if len(pieces) > 1 and not self._calls.ptr(base, peer):
            self._calls.quiet_on_stream(stream)  # a network may deliver the signal before these
        last = pieces[-1]
        self._calls.putmem_signal_on_stream(
            base + last.target, base + last.source, last.nbytes, flag, value, self._set, peer, stream
        )

    def wait(self, peer: int, signal: Signal, value: int, pieces: int) -> None:
        """See `Wires`."""
        del pieces
        flag, stream = self._flag(signal, peer), self.lane.stream.cuda_stream
        self._calls.signal_wait_until_on_stream(flag, self._equal, value, stream)
        self._raise(signal, peer, 0, at=self.rank)

    def release(self, peer: int, signal: Signal, value: int) -> None:
        """See `Wires`."""
        self._raise(signal, peer, value, at=self.rank, stream=self._rescue)

    def close(self) -> None:
        """Give back all symmetric memory; all ranks do together."""
        for buffer in self._buffers.values():
            self._core.free(buffer)
        self._buffers.clear()

    def _flag(self, signal: Signal, raiser: int) -> int:
        """The address of a signal that a rank raises; the same on all ranks, as the one that waits is said apart."""
        return self._flags.data_ptr() + 8 * (signal * self.group.size() + raiser)

    def _raise(
        self, signal: Signal, raiser: int, value: int, *, at: int, stream: torch.cuda.Stream | None = None
    ) -> None:
        handle = (self.lane.stream if stream is None else stream).cuda_stream
        self._calls.signal_op_on_stream(self._flag(signal, raiser), value, self._set, at, handle)

    def _symmetric(self, nbytes: int) -> Tensor:
        # Freed by `close` only, and all ranks together: never by garbage collection.
        buffer = self._core.buffer(nbytes, except_on_del=False)
        tensor = torch.from_dlpack(buffer).view(torch.uint8)
        self._buffers[tensor.data_ptr()] = buffer
        return tensor

    def _allocate(self, nbytes: int) -> Tensor:
        # The allocation itself would wait for ever for a rank that does not come.
        self.meet(f"{nbytes} bytes of inboxes")
        return self._symmetric(nbytes)

    def _free(self, memory: Tensor) -> None:
        self.meet("inboxes that grow")
        self._core.free(self._buffers.pop(memory.data_ptr()))
