"""Timed calls on this machine's GPUs, for `marble.cost.fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch

from marble.cost.fit import BLOCKS, HEADS, KV_HEADS, Case
from marble.kernels.contract import MAX_BLOCK, State, move
from marble.kernels.launch import backend

_WARM, _REPEATS = 3, 15
_CYCLES = 2e9
"""Of a GPU in a second, at most."""
_MOST_LEAD = 0.1
"""Seconds; the first runs, which compile kernels, take the host much longer."""


class CudaTimer:
    """Times calls of the ``cute`` backend on the first GPU, and copies between the first two.

    Raises:
        ValueError: without a Hopper GPU.
    """

    def __init__(self) -> None:
        self._backend = backend("cute")
        self.machine = torch.cuda.get_device_name(0)

    def calls(self, cases: Sequence[Case]) -> list[float]:
        """See `marble.cost.fit.Timer.calls`."""
        return _medians([self._call(case) for case in cases], torch.device("cuda", 0))

    def _call(self, case: Case) -> Callable[[], None]:
        rows, dim, device = BLOCKS * MAX_BLOCK, case.head_dim, torch.device("cuda", 0)
        q, out, dout = (torch.randn(rows, HEADS, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
        k, v = (torch.randn(rows, KV_HEADS, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
        lse = torch.zeros(HEADS, rows, device=device)
        work, scale = move(case.work(), device), dim**-0.5
        self._backend.prepare([work], group=HEADS // KV_HEADS, head_dim=dim)
        if case.backward:
            delta = self._backend.delta(out, dout)
            dq, dk, dv = (torch.zeros(h, rows, dim, device=device) for h in (HEADS, KV_HEADS, KV_HEADS))
            return lambda: self._backend.backward(q, k, v, dout, lse, delta, work, dq, dk, dv, scale=scale)
        state = State(torch.zeros(HEADS, rows, dim, device=device), lse.clone(), lse + 1) if case.carried else None
        return lambda: self._backend.forward(q, k, v, work, state, out, lse, scale=scale)

    def link(self, nbytes: int) -> float:
        """See `marble.cost.fit.Timer.link`.

        Raises:
            ValueError: without a second GPU that the first can write to.
        """
        if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
            raise ValueError(
                "fit: measuring the bandwidth inside a node takes two GPUs that reach each other; give it as inside, "
                "in bytes/s"
            )
        here, there = (torch.empty(2, nbytes, dtype=torch.uint8, device=torch.device("cuda", at)) for at in (0, 1))
        # A copy runs on its source's current stream and holds up its target's, so the way back needs two of its own.
        back, far = torch.cuda.Stream(0), torch.cuda.Stream(1)

        def both() -> None:
            back.wait_stream(torch.cuda.current_stream(0))
            there[0].copy_(here[0], non_blocking=True)
            with torch.cuda.stream(far), torch.cuda.stream(back):
                here[1].copy_(there[1], non_blocking=True)
            torch.cuda.current_stream(0).wait_stream(back)

        return _medians([both], torch.device("cuda", 0))[0]


def _medians(runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Seconds on the device of each of some runs, made by turns.

    The GPU idles first for longer than the host takes to ask for them all, so that no time has a launch in it.
    """
    times: list[list[float]] = [[] for _ in runs]
    lead = 0.0
    with torch.cuda.device(device):
        for repeat in range(_WARM + _REPEATS):
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs]
            torch.cuda._sleep(int(min(1.5 * lead, _MOST_LEAD) * _CYCLES))
            begun = perf_counter()
            for run, (start, stop) in zip(runs, marks, strict=True):
                start.record()
                run()
                stop.record()
            lead = perf_counter() - begun
            torch.cuda.synchronize()
            if repeat >= _WARM:
                for taken, (start, stop) in zip(times, marks, strict=True):
                    taken.append(start.elapsed_time(stop) / 1e3)
    return [median(taken) for taken in times]
