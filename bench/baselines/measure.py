"""Interleaved timing: every contender once, then all of them again, so that a drifting clock meets all alike.

A GPU at its power limit goes on at the clock that the last call has left it: of two equal backward passes, the one
behind a kernel that takes less power was 5 ms faster. So rounds differ in their order (Williams, Experimental designs
balanced for the estimation of residual effects of treatments, 1949): each contender follows each other one as often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

Run = Callable[[], object]

_ROWS = 16384
"""Rows whose errors are reckoned at once."""

_CYCLES = 2_000_000_000
"""Clock cycles of the GPU in a second, or somewhat more."""


def interleave(contenders: Mapping[str, Sequence[Run]], repeats: int, warmup: int = 1) -> dict[str, float]:
    """Median milliseconds of each contender.

    Before a timed call the GPU idles for as long as the host takes to ask for it, so launches cost nothing.

    Args:
        contenders: by name, the same work on different buffers; repetitions take them by turns, so that what one
            leaves in the L2 cache is not what the next reads.
        repeats: timed calls of each contender.
        warmup: calls of each contender on each of its buffers before that.
    """
    idle = {}
    for name, runs in contenders.items():
        for run in [*runs] * warmup:
            run()
        idle[name] = _host_seconds(runs[0])
    clock = _device_clock if torch.cuda.is_available() else _host_clock
    taken: dict[str, list[Callable[[], float]]] = {name: [] for name in contenders}
    names = list(contenders)
    for repeat in range(repeats):
        for name in (names[place] for place in balanced_order(len(names), repeat)):
            runs = contenders[name]
            taken[name].append(clock(runs[repeat % len(runs)], idle[name]))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {name: median(read() for read in reads) for name, reads in taken.items()}


def balanced_order(count: int, turn: int) -> list[int]:
    """The order of a round: in ``2 · count`` successive rounds every number stands equally often at every place, and
    follows every other number equally often within them."""
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [(turn + step) % count for step in zigzag]
    return order[::-1] if turn // count % 2 else order


def copy_bandwidth(device: torch.device, size: int = 1 << 31, repeats: int = 20) -> float:
    """Bytes read plus bytes written per second by device copies of random data."""
    buffers = [torch.randint(256, (size,), dtype=torch.uint8, device=device) for _ in range(2)]
    target = torch.empty_like(buffers[0])
    runs = [lambda source=source: target.copy_(source) for source in buffers]
    return 2 * size / (interleave({"copy": runs}, repeats)["copy"] * 1e-3)


def relative_error(x: Tensor, ref: Tensor) -> float:
    """‖x − ref‖ / ‖ref‖ in float64, some rows at a time; infinite if ``x`` is not finite where ``ref`` is."""
    error = norm = torch.zeros((), dtype=torch.float64, device=x.device)
    same = True
    for part, of in zip(x.split(_ROWS), ref.split(_ROWS), strict=True):
        known = torch.isfinite(of)
        error = error + ((part.double() - of.double())[known] ** 2).sum()
        norm = norm + (of.double()[known] ** 2).sum()
        same &= torch.equal(part[~known].double(), of[~known].double())
    ratio = (error / norm).sqrt()
    return float(ratio) if same and bool(torch.isfinite(ratio)) else float("inf")


def _host_seconds(run: Run) -> float:
    """How long the host takes for a call; on a GPU, to ask for it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _device_clock(run: Run, idle: float) -> Callable[[], float]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(1.5 * idle * _CYCLES))
    start.record()
    run()
    stop.record()
    return lambda: start.elapsed_time(stop)


def _host_clock(run: Run, _idle: float) -> Callable[[], float]:
    taken = _host_seconds(run) * 1e3
    return lambda: taken
