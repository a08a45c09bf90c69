"""Contenders of `bench.layer`: one attention layer, forward and backward, on one GPU or on the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import marble
from bench.baselines.calls import Case
from bench.baselines.measure import relative_error
from marble.comm.choice import connect
from marble.comm.local import run_together
from marble.comm.transport import Connection, Operation, Program, Start, drive
from marble.compose import executor
from marble.compose.plan import Plan
from marble.kernels.contract import Backend

RESULTS = ("out", "dq", "dk", "dv")
TRANSPORTS = ("nvshmem", "torch_dist")
_HOST_CYCLES = 40_000_000
"""Clock cycles of the GPU that it idles for, about 20 ms: longer than the host takes to ask for a layer."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """A whole pack's q, k, v and output gradient in sequence order, bfloat16, alike on all ranks."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def random(cls, case: Case, device: torch.device) -> Inputs:
        """Normally distributed ones."""
        make, shape = torch.Generator(device).manual_seed(1), case.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        size = [(case.tokens, h, shape.head_dim) for h in heads]
        return cls(tuple(torch.randn(s, generator=make, device=device, dtype=torch.bfloat16) for s in size))


class Alone:
    """The connection of a single rank."""

    reserve = None

    def run(self, program: Program[Any], operation: Operation) -> Any:
        """Run it; there is nothing to transfer."""
        del operation
        return run_together({0: program})[0]

    def synchronize(self, _timeout: None) -> None:
        """There is nobody to wait for."""


class Silent:
    """A connection whose transfers are left out: every call runs, on whatever lies in the inboxes."""

    def __init__(self, connection: Connection) -> None:
        self.reserve, self.synchronize = connection.reserve, connection.synchronize

    def run(self, program: Program[Any], operation: Operation) -> Any:
        """Run it."""
        del operation
        return drive(program, self)

    def start(self, start: Start) -> None:
        """See `marble.comm.transport.Driver`."""

    def finish(self) -> None:
        """See `marble.comm.transport.Driver`."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A layer that can be run; calling it gives `RESULTS` of this rank's tokens.

    Attributes:
        name: schedule and transport.
        plan: who holds which tokens.
        rank: whose schedule it runs.
        inputs: this rank's q, k, v and output gradient.
        kernels: computes the calls.
        connection: carries the transfers.
    """

    name: str
    plan: Plan
    rank: int
    inputs: tuple[Tensor, ...]
    kernels: Backend
    connection: Any

    def __call__(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        *qkv, dout = self.inputs
        schedule = self.plan.schedules_on(dout.device)[0][self.rank]
        options = {"scale": self.plan.layers[0].softmax_scale, "reserve": self.connection.reserve}
        ahead = executor.forward(schedule, self.kernels, *qkv, **options)
        out, lse = self.connection.run(ahead, Operation("the layer, forward"))
        back = executor.backward(schedule, self.kernels, *qkv, out, lse, dout, **options)
        return out, *self.connection.run(back, Operation("the layer, backward"))

    def silent(self) -> Contender:
        """The same calls without transfers."""
        return replace(self, connection=Silent(self.connection))

    def synchronize(self) -> None:
        """Wait for it, and raise what went wrong."""
        self.connection.synchronize(None)


def alone(case: Case, inputs: Inputs, kernels: Backend) -> Contender:
    """The whole layer on this rank's GPU."""
    return _contender("one GPU", marble.plan(case.layout, case.shape, ranks=1), 0, inputs, kernels, Alone())


def of_ranks(
    case: Case, inputs: Inputs, kernels: Backend, transports: Sequence[str] = TRANSPORTS
) -> Iterator[Contender]:
    """Every schedule that can compute the case, over some transports, in the default process group."""
    group, device = dist.group.WORLD, inputs.tensors[0].device
    assert group is not None
    for schedule, ulysses in (("ring", 1), ("sparse_a2a", 1), ("chunked", 1), ("ring", group.size())):
        if schedule == "chunked" and case.shape.window is not None:
            continue
        plan = marble.plan(case.layout, case.shape, group=group, schedule=schedule, ulysses=ulysses)
        title = schedule if ulysses == 1 else "ulysses"
        for transport in transports:
            connection = connect(transport, group, device)
            yield _contender(f"{title}, {transport}", plan, group.rank(), inputs, kernels, connection)


def _contender(name: str, plan: Plan, rank: int, inputs: Inputs, kernels: Backend, connection: Any) -> Contender:
    parts = tuple(plan.shard(x) for x in inputs.tensors)
    kernels.prepare(plan.schedules_on(parts[0].device)[0][rank].works)
    return Contender(name, plan, rank, parts, kernels, connection)


def differences(contender: Contender, expected: Contender) -> dict[str, float]:
    """‖x − y‖ / ‖y‖ of all results x of a contender and y of one GPU, the largest of any rank."""
    found = [
        relative_error(mine, contender.plan.shard(expected.plan.unshard(theirs)))
        for mine, theirs in zip(contender(), expected(), strict=True)
    ]
    contender.synchronize()
    worst = torch.tensor(found, device=contender.inputs[0].device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(RESULTS, worst.tolist(), strict=True))


def milliseconds(contenders: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[str, float]:
    """Median milliseconds of each, by turns, on whichever rank is slower. The GPUs begin together, behind the host."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    aligned = torch.zeros(1, device="cuda")
    for repeat in range(warmup + repeats):
        for name, run in contenders.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda._sleep(_HOST_CYCLES)
            dist.all_reduce(aligned)
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            if repeat >= warmup:
                taken[name].append(start.elapsed_time(stop))
    medians = torch.tensor([median(times) for times in taken.values()], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(taken, medians.tolist(), strict=True))
