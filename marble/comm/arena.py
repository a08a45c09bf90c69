"""Memory for what moves between ranks: allocated once, and given to one pass after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_GRANULE = 1 << 21
"""Bytes that sizes are rounded up to."""


class Arena:
    """The largest piece that anybody asked for so far.

    What one pass left there is overwritten by the next, in the order of their calls: a pass on another stream waits for
    what has been enqueued on the stream of the last one. Replays of a CUDA graph are the caller's to order.

    Args:
        allocate: makes so many bytes of memory, uint8 [bytes]. Where it is a collective, all ranks ask for the same.
        free: gives such memory back; by default it just goes.
    """

    def __init__(self, allocate: Callable[[int], Tensor], free: Callable[[Tensor], None] | None = None) -> None:
        self._allocate, self._free = allocate, free
        self._memory: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, nbytes: int) -> Tensor:
        """Memory of at least so many bytes, uint8; the same as the last time if that was large enough.

        Raises:
            RuntimeError: if it had to grow while a CUDA graph is captured.
        """
        if self._memory is None or nbytes > len(self._memory):
            self._grow(-(-nbytes // _GRANULE) * _GRANULE)
        assert self._memory is not None
        if self._memory.is_cuda:
            stream = torch.cuda.current_stream(self._memory.device)
            if self._stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
            self._stream = stream
        return self._memory

    def _grow(self, nbytes: int) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("inboxes: they cannot grow while a CUDA graph is captured; run the layer once before")
        if self._memory is not None:
            if self._memory.is_cuda:
                torch.cuda.synchronize(self._memory.device)  # whoever still reads them, here
            old, self._memory = self._memory, None
            if self._free is not None:
                self._free(old)
        self._memory = self._allocate(nbytes)
