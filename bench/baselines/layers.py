"""What `bench.layer` runs: one attention layer, forward and backward, on one GPU or on the ranks of a group.

Marble's schedules are run by the executor itself, without autograd around it: on one GPU and on several alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import marble
from bench.baselines.calls import Case
from bench.baselines.measure import relative_error
from marble.comm.choice import connect
from marble.comm.lane import CudaLane
from marble.comm.local import run_together
from marble.comm.transport import Connection, Operation, Program, Start, drive
from marble.compose import executor
from marble.compose.plan import Plan
from marble.kernels.contract import Backend
from marble.kernels.rounded import PerStepRounding
from marble.testing.exactness import RESULTS, Problem

TRANSPORTS = ("nvshmem", "nccl_rma", "torch_dist")
SCHEDULES = ("ring", "sparse_a2a", "chunked")
ONE, PER_STEP = "one GPU", "ring, torch_dist, rounded at every step"
"""The second merges by PyTorch operations, for which the host waits: its error is of interest, its time a bound."""
_SMALL = 1 << 29
"""Values of a set that may profit from being read a moment ago: 1 GiB of bfloat16, many times any L2 cache."""
_HOST_CYCLES = 40_000_000
"""Clock cycles of the GPU that it idles for, about 20 ms: longer than the host takes to ask for a layer."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Whole packs' q, k, v and output gradient in sequence order, alike on all ranks.

    Attributes:
        sets: several of them, [tokens, heads, head_dim] each; layers take them by turns.
    """

    sets: Sequence[tuple[Tensor, ...]]
    _dealt: dict[bytes, list[tuple[Tensor, ...]]] = field(default_factory=dict)

    @classmethod
    def random(cls, case: Case, device: torch.device, sets: int | None = None) -> Inputs:
        """Normally distributed ones in bfloat16; the output gradient differs in size between tokens. By default two
        sets if an L2 cache might hold one."""
        make, shape = torch.Generator(device).manual_seed(1), case.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        sizes = torch.linspace(0.5, 2, case.tokens, device=device, dtype=torch.bfloat16)[:, None, None]
        found = []
        size = [(case.tokens, h, shape.head_dim) for h in heads]
        for _ in range(sets or (1 if sum(map(math.prod, size)) > _SMALL else 2)):
            q, k, v, dout = (torch.randn(s, generator=make, device=device, dtype=torch.bfloat16) for s in size)
            found.append((q, k, v, dout.mul_(sizes)))
        return cls(found)

    @classmethod
    def of_problem(cls, problem: Problem) -> Inputs:
        """Those of a problem whose exact results are known."""
        return cls([tuple(x.bfloat16() for x in (problem.q, problem.k, problem.v, problem.dout))])

    @property
    def device(self) -> torch.device:
        return self.sets[0][0].device

    @property
    def tokens(self) -> int:
        return self.sets[0][0].shape[0]

    def of(self, index: Tensor) -> list[tuple[Tensor, ...]]:
        """Some tokens of each set; those who ask for the same tokens share them."""
        key = index.numpy().tobytes()
        if key not in self._dealt:
            there = index.to(self.device)
            self._dealt[key] = [tuple(x[there] for x in one) for one in self.sets]
        return self._dealt[key]


class Layer(Protocol):
    """A contender on one rank; all ranks call it together."""

    @property
    def index(self) -> Tensor:
        """Sequence positions of this rank's tokens, int64, on the CPU."""
        ...

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        """Forward and backward on the inputs of a turn: `RESULTS` of this rank's tokens, in the type of the inputs."""
        ...

    def synchronize(self) -> None:
        """Wait for it, and raise what went wrong."""
        ...


class OnStream:
    """A `Layer` whose errors come as they are made."""

    def synchronize(self) -> None:
        """See `Layer`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Offer:
    """A contender that may refuse: ``make`` raises, or the layer's first run does."""

    name: str
    make: Callable[[], Layer]

    def accepted(self) -> Layer | str:
        """The layer after a first run, or what kept a rank from it. Ranks must fail alike: one that fails alone within
        a collective leaves the others to its timeout."""
        layer, reason = None, ""
        try:
            layer = self.make()
            layer()
            layer.synchronize()
        except Exception as error:  # whatever a baseline raises: it is named, and the others go on
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        found = next(filter(None, reasons), "")
        return found if found or layer is None else layer


class Alone:
    """The connection of a single rank."""

    reserve = None

    def run(self, program: Program[Any], operation: Operation) -> Any:
        """Run it; there is nothing to transfer."""
        del operation
        return run_together({0: program})[0]

    def synchronize(self, _timeout: None) -> None:
        """There is nobody to wait for."""


class Kept:
    """A connection that keeps what arrives.

    Args:
        connection: carries the transfers.
        rank: this rank.

    Attributes:
        arrivals: the rows that arrive in every step of every pass, in order.
    """

    def __init__(self, connection: Connection, rank: int) -> None:
        self.connection, self.reserve, self.synchronize = connection, connection.reserve, connection.synchronize
        self.rank = rank
        self.arrivals: list[list[Tensor]] = []

    def run(self, program: Program[Any], operation: Operation) -> Any:
        """Run it."""
        return self.connection.run(self._kept(program), operation)

    def _kept(self, program: Program[Any]) -> Program[Any]:
        while True:
            try:
                request = next(program)
            except StopIteration as stop:
                return stop.value
            yield request
            if isinstance(request, Start):
                arriving = arrivals(request, self.rank)
            else:
                self.arrivals.append([rows.clone() for rows in arriving])


class Silent:
    """A connection without transfers: what arrived in an earlier run is copied from this GPU's own memory, beside the
    calls. Without it they would compute on zeros, which a GPU at its power limit does faster.

    Args:
        kept: of a run forward and backward.
        device: the GPU; on a CPU copies and calls take turns.
    """

    def __init__(self, kept: Kept, device: torch.device) -> None:
        self.reserve, self.synchronize = kept.reserve, kept.synchronize
        self._rank, self._arrivals = kept.rank, cycle(kept.arrivals)
        self._lane = CudaLane(device) if device.type == "cuda" else None

    def run(self, program: Program[Any], operation: Operation) -> Any:
        """Run it."""
        del operation
        return drive(program, self)

    def start(self, start: Start) -> None:
        """See `marble.comm.transport.Driver`."""
        if self._lane is not None:
            self._lane.fork()
        with nullcontext() if self._lane is None else torch.cuda.stream(self._lane.stream):
            for rows, kept in zip(arrivals(start, self._rank), next(self._arrivals), strict=True):
                rows.copy_(kept)

    def finish(self) -> None:
        """See `marble.comm.transport.Driver`."""
        if self._lane is not None:
            self._lane.join()


def arrivals(start: Start, rank: int) -> list[Tensor]:
    """The rows that a step's transfers fill on a rank."""
    return [start.view(transfer.dst) for transfer in start.transfers if transfer.target == rank]


@dataclass(frozen=True, eq=False)
class Ours:
    """Marble's layer.

    Attributes:
        plan: who holds which tokens.
        rank: whose schedule it runs.
        sets: this rank's q, k, v and output gradient, by turns.
        kernels: computes the calls.
        connection: carries the transfers.
    """

    plan: Plan
    rank: int
    sets: list[tuple[Tensor, ...]]
    kernels: Backend
    connection: Any

    @property
    def index(self) -> Tensor:
        """See `Layer`."""
        return self.plan.index

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        """See `Layer`."""
        *qkv, dout = self.sets[turn % len(self.sets)]
        schedule = self.plan.schedules_on(dout.device)[0][self.rank]
        options = {"scale": self.plan.layers[0].softmax_scale, "reserve": self.connection.reserve}
        ahead = executor.forward(schedule, self.kernels, *qkv, **options)
        out, lse = self.connection.run(ahead, Operation("the layer, forward"))
        back = executor.backward(schedule, self.kernels, *qkv, out, lse, dout, **options)
        gradients = self.connection.run(back, Operation("the layer, backward"))
        return out, *(x.to(out.dtype, copy=True) for x in gradients)

    def silent(self) -> Ours:
        """The same calls without transfers; all ranks ask together."""
        kept = Kept(self.connection, self.rank)
        replace(self, connection=kept)()
        self.synchronize()
        return replace(self, connection=Silent(kept, self.sets[0][0].device))

    def synchronize(self) -> None:
        """See `Layer`."""
        self.connection.synchronize(None)


def alone(case: Case, inputs: Inputs, kernels: Backend) -> Ours:
    """The whole layer on this rank's GPU."""
    return on_rank(marble.plan(case.layout, case.shape, ranks=1), 0, inputs, kernels, Alone())


def of_ranks(case: Case, inputs: Inputs, kernels: Backend, transports: Sequence[str] = TRANSPORTS) -> Iterator[Offer]:
    """Every schedule over some transports in the default process group, and the ring in which every step rounds."""
    make = partial(of_group, case, inputs)
    for name, schedule, degree in (
        *((name, name, 1) for name in SCHEDULES),
        ("ulysses", "ring", dist.get_world_size()),
    ):
        for transport in transports:
            yield Offer(f"{name}, {transport}", partial(make, kernels, schedule, transport, ulysses=degree))
    yield Offer(PER_STEP, partial(make, PerStepRounding(kernels), "ring", "torch_dist"))


def of_group(case: Case, inputs: Inputs, kernels: Backend, schedule: str, transport: str, **how: Any) -> Ours:
    """This rank's part of a layer in the default process group; ``how`` as for `marble.plan`."""
    group = dist.group.WORLD
    assert group is not None
    plan = marble.plan(case.layout, case.shape, group=group, schedule=schedule, **how)
    return on_rank(plan, group.rank(), inputs, kernels, connect(transport, group, inputs.device))


def on_rank(plan: Plan, rank: int, inputs: Inputs, kernels: Backend, connection: Any) -> Ours:
    """A rank's part of a plan's only layer."""
    shape = plan.layers[0]
    works = plan.schedules_on(inputs.device)[0][rank].works
    kernels.prepare(works, group=shape.heads // shape.kv_heads, head_dim=shape.head_dim)
    return Ours(plan, rank, inputs.of(plan.index.cpu()), kernels, connection)


def whole(layer: Layer, tokens: int) -> dict[str, Tensor]:
    """All ranks' results in sequence order, on every rank."""
    found = {}
    for name, mine in zip(RESULTS, layer(), strict=True):
        every = mine.new_zeros(tokens, *mine.shape[1:])
        every[layer.index.to(mine.device)] = mine
        if len(layer.index) < tokens:
            dist.all_reduce(every)
        found[name] = every
    layer.synchronize()
    return found


def differences(layer: Layer, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """‖x − y‖ / ‖y‖ of a layer's results x and whole results y, the largest of any rank."""
    results = dict(zip(RESULTS, layer(), strict=True))
    layer.synchronize()
    found = []
    for name, mine in results.items():
        found.append(relative_error(mine, expected[name][layer.index.to(mine.device)]))
    worst = torch.tensor(found, device=mine.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(RESULTS, worst.tolist(), strict=True))


def milliseconds(layers: Mapping[str, Layer], repeats: int, warmup: int = 2) -> dict[str, float]:
    """Median milliseconds of each, by turns, on whichever rank is slower. The GPUs begin together, behind the host."""
    taken: dict[str, list[float]] = {name: [] for name in layers}
    aligned = torch.zeros(1, device="cuda")
    for turn in range(warmup + repeats):
        for name, run in layers.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda._sleep(_HOST_CYCLES)
            dist.all_reduce(aligned)
            start.record()
            run(turn)
            stop.record()
            torch.cuda.synchronize()
            if turn >= warmup:
                taken[name].append(start.elapsed_time(stop))
    medians = torch.tensor([median(times) for times in taken.values()], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(taken, medians.tolist(), strict=True))
