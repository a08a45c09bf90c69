"""Replays: how long a rank's part of a layer takes on one device, without the other ranks.

The rank's own schedule runs as in training, step by step, on random data; what other ranks would send is made up where
it would arrive, and the time of every step is measured. Transfers are not made: who prices them gets a layer's time.
A replay is not a measurement of a layer on many GPUs, and is called a replay wherever it is shown.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marble.comm.transport import Start, drive
from marble.compose import executor
from marble.compose.plan import Plan
from marble.compose.schedule import Kind, Pass, Schedule
from marble.cost.waiting import ends
from marble.kernels.contract import Backend, accumulation_dtype

_LOG_SUM = 8.0
"""A log-sum-exp for made-up rows: that of some thousand keys."""
_LEAST_LEAD, _MOST_LEAD = 0.01, 0.25
"""Seconds that a GPU idles before a pass: what the host took to ask for the one before, with a margin, in bounds."""
_CYCLES = 2e9
"""Clock cycles of a second, about."""


@dataclass(frozen=True)
class StepReplay:
    """One step of a rank.

    Attributes:
        seconds: what its calls and sums took, the median of several runs.
        received: bytes that arrive in it, by the rank that sends them.
        sent: bytes that leave in it, by the rank that gets them.
    """

    seconds: float
    received: Mapping[int, int]
    sent: Mapping[int, int]


@dataclass(frozen=True)
class RankReplay:
    """A layer's part on one rank.

    Attributes:
        rank: whose.
        forward: the steps of the forward pass.
        backward: those of the backward pass.
        nbytes: memory of the buffers and states of the pass that needs more, its inputs and results included.
    """

    rank: int
    forward: tuple[StepReplay, ...]
    backward: tuple[StepReplay, ...]
    nbytes: int

    @property
    def seconds(self) -> float:
        """Of all steps, without transfers."""
        return sum(step.seconds for step in (*self.forward, *self.backward))


Price = Callable[[int, StepReplay], float]
"""Seconds that a rank's transfers of a step take."""


@dataclass(frozen=True)
class PassReplay:
    """A pass on several ranks, which wait for each other where rows move between ranks (`marble.cost.waiting`).

    Attributes:
        slowest: seconds of every step's calls and sums on the slowest rank.
        mean: the same on the mean rank.
        ends: seconds from the beginning until the last rank has ended every step.
        compute: seconds of all steps' calls and sums on the busiest rank.
        fixed: seconds that steps with transfers take beside them, over all steps.
    """

    slowest: tuple[float, ...]
    mean: tuple[float, ...]
    ends: tuple[float, ...]
    compute: float
    fixed: float

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return max(self.ends, default=0.0) + self.fixed


@dataclass(frozen=True)
class LayerReplay:
    """A layer on several ranks.

    Attributes:
        ranks: the replayed ranks. What is said of the slowest rank is said of the slowest of these.
        forward: the forward pass.
        backward: the backward pass.
    """

    ranks: tuple[RankReplay, ...]
    forward: PassReplay
    backward: PassReplay

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def compute(self) -> float:
        """Of the busiest rank of each pass, without what it waits for."""
        return self.forward.compute + self.backward.compute

    @property
    def exposed(self) -> float:
        """Seconds in which transfers and other ranks are waited for, what steps with transfers take included."""
        return self.seconds - self.compute

    @property
    def balance(self) -> float:
        """``compute`` over the mean rank's own."""
        mean = sum(self.forward.mean) + sum(self.backward.mean)
        return self.compute / mean if mean else 1.0

    @property
    def nbytes(self) -> int:
        """Memory of the rank that needs most."""
        return max(rank.nbytes for rank in self.ranks)


def replay_layer(ranks: Sequence[RankReplay], price: Price, fixed: float = 0.0) -> LayerReplay:
    """Put the replays of several ranks of one layer together.

    Args:
        ranks: of one plan and layer.
        price: seconds of a rank's transfers in a step; they run beside its calls.
        fixed: seconds that a step with transfers takes beside both.

    Raises:
        ValueError: if there is none, or they have different numbers of steps.
    """
    if not ranks or len({(len(rank.forward), len(rank.backward)) for rank in ranks}) > 1:
        raise ValueError("replay: expected one rank or more of one plan and layer")
    numbers = [rank.rank for rank in ranks]
    passes = ([getattr(rank, which) for rank in ranks] for which in ("forward", "backward"))
    forward, backward = (_pass(numbers, list(zip(*steps, strict=True)), price, fixed) for steps in passes)
    return LayerReplay(tuple(ranks), forward, backward)


def _pass(ranks: Sequence[int], steps: Sequence[Sequence[StepReplay]], price: Price, fixed: float) -> PassReplay:
    """A pass from what every rank did in every step."""
    compute = np.array([[each.seconds for each in step] for step in steps]).reshape(len(steps), len(ranks))
    links = np.array([list(map(price, ranks, step)) for step in steps]).reshape(compute.shape)
    moving = sum(any(each.received or each.sent for each in step) for step in steps)
    each_step = (compute.max(1), compute.mean(1), ends(compute, links).max(1))
    slowest, mean, last = (tuple(figures.tolist()) for figures in each_step)
    return PassReplay(slowest, mean, last, float(compute.sum(0).max()), moving * fixed)


def replay_rank(
    plan: Plan,
    rank: int,
    backend: Backend,
    *,
    layer: int = 0,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 5,
    warmup: int = 1,
) -> RankReplay:
    """Run a rank's part of a layer, forward and backward, and time its steps.

    Args:
        plan: holds the rank's schedule.
        rank: whose part.
        backend: computes the calls.
        layer: which of the plan's layers.
        device: where.
        dtype: of q, k and v.
        repeats: timed runs.
        warmup: runs before them that are not timed. Without any, the first one pays for what kernels do once.

    Raises:
        ValueError: if the plan does not hold the rank, or there are no repeats.
    """
    if rank not in plan.schedules[layer]:
        raise ValueError(f"replay: the plan holds ranks {sorted(plan.schedules[layer])}, not {rank}")
    if repeats < 1 or warmup < 0:
        raise ValueError(f"replay: repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    where, shape = torch.device(device), plan.layers[layer]
    schedule = plan.schedules_on(where)[layer][rank]
    backend.prepare(schedule.works, group=shape.heads // shape.kv_heads, head_dim=shape.head_dim)
    make = torch.Generator(where).manual_seed(rank)
    tokens = schedule.tokens[rank]
    q, k, v, dout = (
        torch.randn(tokens, heads, shape.head_dim, generator=make, device=where, dtype=dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    )
    clocks, lead = [], _LEAST_LEAD
    for _ in range(warmup + repeats):
        ahead = _Clock(schedule.forward, rank, where, lead)
        out, lse = drive(executor.forward(schedule, backend, q, k, v, scale=shape.softmax_scale), ahead)
        ahead.end()
        back = _Clock(schedule.backward, rank, where, lead)
        drive(executor.backward(schedule, backend, q, k, v, out, lse, dout, scale=shape.softmax_scale), back)
        back.end()
        clocks.append((ahead, back))
        lead = min(max(_LEAST_LEAD, 1.5 * ahead.host, 1.5 * back.host), _MOST_LEAD)
    forward, backward = ([pair[which] for pair in clocks[warmup:]] for which in range(2))
    return RankReplay(rank, _steps(forward), _steps(backward), _nbytes(schedule, shape.head_dim, dtype))


class _Clock:
    """A driver that makes no transfer, makes up what would arrive, and notes the time of every step.

    What a pass does before its first step (keys to where they travel from, delta) counts to that step. A GPU idles for
    ``lead`` seconds first, so that the host is ahead of it and no step waits for a launch.
    """

    def __init__(self, which: Pass, rank: int, device: torch.device, lead: float) -> None:
        self.kinds = {buffer.name: buffer.kind for buffer in which.buffers}
        self.rank, self.device = rank, device
        self.marks: list[tuple[Any, Any]] = []
        self.received: list[Counter[int]] = []
        self.sent: list[Counter[int]] = []
        self.arriving: list[tuple[Tensor, Kind]] = []
        self.host = -time.perf_counter()
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(int(lead * _CYCLES))
        self.begin = self._now()

    def start(self, start: Start) -> None:
        """Begin a step."""
        self.received.append(Counter())
        self.sent.append(Counter())
        for transfer in start.transfers:
            if transfer.target == self.rank != transfer.source:
                rows = start.view(transfer.dst)
                self.received[-1][transfer.source] += rows.numel() * rows.element_size()
                self.arriving.append((rows, self.kinds[transfer.dst.buffer]))
            elif transfer.source == self.rank != transfer.target:
                rows = start.view(transfer.src)
                self.sent[-1][transfer.target] += rows.numel() * rows.element_size()
        if self.marks:
            self._close()
            self.begin = self._now()
        for transfer in start.transfers:
            if transfer.source == transfer.target:
                start.view(transfer.dst).copy_(start.view(transfer.src))

    def finish(self) -> None:
        """The step's calls have been asked for; sums that are added to others may follow."""
        self.marks.append((self.begin, self._now()))
        for rows, kind in self.arriving:
            self._make_up(rows, kind)
        self.arriving.clear()  # as a clock outlives the buffers of its pass
        self.resumed = self._now()

    def end(self) -> None:
        """The program is over."""
        if self.marks:
            self._close()
        self.host += time.perf_counter()

    def seconds(self, step: int) -> float:
        """Of a step, without what was made up in it."""
        return sum(self._between(*pair) for pair in (self.marks[2 * step], self.marks[2 * step + 1]))

    def _close(self) -> None:
        self.marks.append((self.resumed, self._now()))

    def _make_up(self, rows: Tensor, kind: Kind) -> None:
        if kind is Kind.STATISTICS:
            rows.fill_(_LOG_SUM)
        else:
            rows.normal_()

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _steps(clocks: Sequence[_Clock]) -> tuple[StepReplay, ...]:
    first = clocks[0]
    return tuple(
        StepReplay(median(clock.seconds(step) for clock in clocks), dict(first.received[step]), dict(first.sent[step]))
        for step in range(len(first.received))
    )


def _nbytes(schedule: Schedule, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of the larger pass: its buffers, and states where calls carry them."""
    sums = accumulation_dtype(dtype)

    def size(which: Pass) -> int:
        total = sum(
            buffer.rows
            * buffer.heads
            * buffer.kind.values(head_dim)
            * (sums if buffer.kind.accumulates else dtype).itemsize
            for buffer in which.buffers
        )
        carried = {call.q for step in which.steps for call in step.calls if call.carries}
        return total + sum(
            which.buffers_by_name[name].rows * which.buffers_by_name[name].heads * (head_dim + 2) * sums.itemsize
            for name in carried
        )

    return max(size(schedule.forward), size(schedule.backward))
