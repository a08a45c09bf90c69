"""A lane: where transfers run beside the calls, in the order in which they are enqueued. On GPUs, a CUDA stream."""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """Something that happens on a lane, or among the calls."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...


class Lane(Protocol):
    """What a driver asks of a lane. The host waits for nothing here, unless the calls are the host's."""

    @property
    def capturing(self) -> bool:
        """Whether what is enqueued goes into a CUDA graph instead of being run: its events never happen."""
        ...

    def fork(self) -> None:
        """What is enqueued on the lane from now on runs after the calls enqueued so far."""
        ...

    def join(self) -> None:
        """The calls enqueued from now on run after what has been enqueued on the lane."""
        ...

    def mark(self) -> Event:
        """Happens when what has been enqueued on the lane is done."""
        ...

    def mark_calls(self) -> Event:
        """Happens when the calls enqueued so far are done."""
        ...


class CudaLane:
    """A stream of its own beside whichever is current.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of high priority, so that it shares no hardware queue with streams of calls.
        self.stream = torch.cuda.Stream(device, priority=-1)

    @property
    def capturing(self) -> bool:
        """See `Lane`."""
        return torch.cuda.is_current_stream_capturing()

    def fork(self) -> None:
        """See `Lane`."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """See `Lane`."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def mark(self) -> Event:
        """See `Lane`."""
        return self.stream.record_event()

    def mark_calls(self) -> Event:
        """See `Lane`."""
        return torch.cuda.current_stream(self.device).record_event()


def watch_gpu(device: torch.device) -> None:
    """Prepare a thread that asks for events of a GPU: asking must not disturb graphs that other threads capture."""
    from cuda.bindings import runtime

    torch.cuda.set_device(device)
    error, _ = runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaThreadExchangeStreamCaptureMode: {error}")
