"""Timed calls on this machine's GPUs, for `marble.cost.fit`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from marble.cost.fit import BLOCKS, HEADS, KV_HEADS, Case
from marble.kernels.contract import MAX_BLOCK, State, move
from marble.kernels.launch import backend

_WARM, _REPEATS = 3, 15


class CudaTimer:
    """Times calls of the ``cute`` backend on the first GPU, and copies between the first two.

    Raises:
        ValueError: without a Hopper GPU, or without a second GPU that the first can write to.
    """

    def __init__(self) -> None:
        self._backend = backend("cute")
        if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
            raise ValueError("fit: two GPUs that reach each other are needed, to measure the bandwidth inside a node")
        self.machine = torch.cuda.get_device_name(0)

    def call(self, case: Case) -> float:
        """See `marble.cost.fit.Timer.call`."""
        rows, dim, device = BLOCKS * MAX_BLOCK, case.head_dim, torch.device("cuda", 0)
        q, out, dout = (torch.randn(rows, HEADS, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
        k, v = (torch.randn(rows, KV_HEADS, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
        lse = torch.zeros(HEADS, rows, device=device)
        work, scale = move(case.work(), device), dim**-0.5
        self._backend.prepare([work], group=HEADS // KV_HEADS, head_dim=dim)
        if case.backward:
            delta = self._backend.delta(out, dout)
            dq, dk, dv = (torch.zeros(h, rows, dim, device=device) for h in (HEADS, KV_HEADS, KV_HEADS))
            return _median(
                lambda: self._backend.backward(q, k, v, dout, lse, delta, work, dq, dk, dv, scale=scale), device
            )
        state = State(torch.zeros(HEADS, rows, dim, device=device), lse.clone(), lse + 1) if case.carried else None
        return _median(lambda: self._backend.forward(q, k, v, work, state, out, lse, scale=scale), device)

    def link(self, nbytes: int) -> float:
        """See `marble.cost.fit.Timer.link`."""
        here, there = (torch.empty(2, nbytes, dtype=torch.uint8, device=torch.device("cuda", at)) for at in (0, 1))
        # A copy runs on its source's current stream and holds up its target's, so the way back needs two of its own.
        back, far = torch.cuda.Stream(0), torch.cuda.Stream(1)

        def both() -> None:
            back.wait_stream(torch.cuda.current_stream(0))
            there[0].copy_(here[0], non_blocking=True)
            with torch.cuda.stream(far), torch.cuda.stream(back):
                here[1].copy_(there[1], non_blocking=True)
            torch.cuda.current_stream(0).wait_stream(back)

        return _median(both, torch.device("cuda", 0))


def _median(run: Callable[[], None], device: torch.device) -> float:
    """Seconds on the device, the median of some runs."""
    times = []
    with torch.cuda.device(device):
        for repeat in range(_WARM + _REPEATS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            if repeat >= _WARM:
                times.append(start.elapsed_time(stop) / 1e3)
    return median(times)
