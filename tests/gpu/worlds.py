"""What two processes with a GPU each do together, for `test_ranks`. Nothing here takes longer than its limit."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import marble
from marble import AttentionShape, Layout, Plan, TransportError
from marble.comm import nvshmem
from marble.kernels import launch
from marble.kernels.contract import Backend
from marble.kernels.reference import ReferenceBackend
from marble.testing.exactness import Problem, Results, distributed
from marble.workloads import WORKLOADS, build

TRANSPORTS = ("torch_dist", "nvshmem")
TOKENS = 4099
MODES = {"bagel_mix": None, "bagel_long": None, "gemma_docs": 64, "molmo_video": None, "qwen_video": None}
"""Workloads and the window of their layer: together they have every mode."""
SCHEDULES = [("ring", 1), ("sparse_a2a", 1), ("chunked", 1), ("all_gather", 1), ("ring", 2)]
"""Schedule and ranks that share heads."""


def problem_of(name: str) -> Problem:
    layout = build(name, TOKENS, scale=WORKLOADS[name].demo_scale)
    return Problem.random(layout, AttentionShape(4, 2, 64, MODES[name]), seed=7, device="cuda")


def fits(name: str, schedule: str) -> bool:
    """Dense calls have no windows."""
    return schedule != "chunked" or MODES[name] is None


class Nothing:
    """A backend that computes nothing: what is left of a layer is its transfers."""

    name = "nothing"
    writes_gradients = False

    def prepare(self, works: Any, **_: Any) -> None:
        pass

    def forward(self, *args: Any, **options: Any) -> None:
        pass

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        del dout
        return torch.zeros(out.shape[1], out.shape[0], dtype=torch.float32, device=out.device)

    def backward(self, *args: Any, **options: Any) -> None:
        pass


def backends() -> dict[str, Backend]:
    """Those whose calls the host does not wait for."""
    found: dict[str, Backend] = {"nothing": Nothing()}
    try:
        found["cute"] = launch.backend("cute")
    except ValueError as error:
        print(f"without the Hopper kernels: {error}")
    return found


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End this process, with all stacks on stderr, if that takes longer; and NVSHMEM afterwards."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
        nvshmem.disconnect()
    finally:
        faulthandler.cancel_dump_traceback_later()


class Layer:
    """One layer's forward and backward pass on this rank's part of a problem."""

    def __init__(self, problem: Problem, plan: Plan, transport: str, backend: Any, layer: int = 0) -> None:
        dtype = torch.bfloat16
        self.leaves = [plan.shard(x.to(dtype)).requires_grad_() for x in (problem.q, problem.k, problem.v)]
        self.dout = plan.shard(problem.dout.to(dtype))
        self.plan = plan
        self.options: dict[str, Any] = {"transport": transport, "backend": backend, "layer": layer}

    def __call__(self, **options: Any) -> list[Tensor]:
        out = marble.attention(*self.leaves, self.plan, **(self.options | options))
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)]


# Every schedule, transport and mode


def exactness(_rank: int) -> dict[Any, Results]:
    """The results of every case, by transport, workload, schedule and ranks that share heads."""
    with limited(170):
        found = {}
        for name in MODES:
            problem = problem_of(name)
            for schedule, ulysses in SCHEDULES:
                if fits(name, schedule):
                    plan = problem.plan_here(schedule, ulysses)
                    for transport in TRANSPORTS:
                        results = distributed(problem, plan, transport=transport)
                        found[transport, name, schedule, ulysses] = {key: x.cpu() for key, x in results.items()}
        return found


# The host does not wait


def host_waits(_rank: int) -> dict[Any, tuple[float, bool, str]]:
    """By transport, backend and schedule: how long the host took to enqueue a layer behind a busy GPU, whether the GPU
    was still busy then, and what synchronised."""
    with limited(60):
        found = {}
        problem = problem_of("qwen_video")
        for name, backend in backends().items():
            for transport in TRANSPORTS:
                for schedule in ("ring", "sparse_a2a"):
                    layer = Layer(problem, problem.plan_here(schedule), transport, backend)
                    for _ in range(2):
                        layer(timeout=timedelta(seconds=20))
                    found[transport, name, schedule] = _enqueued(layer)
        return found


def _enqueued(layer: Layer) -> tuple[float, bool, str]:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # about a second
    busy = torch.cuda.Event()
    busy.record()
    begin, error = time.monotonic(), ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(timeout=timedelta(seconds=20))
    except RuntimeError as raised:
        error = str(raised)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    answer = time.monotonic() - begin, not busy.query(), error
    torch.cuda.synchronize()
    return answer


# CUDA graphs


def graphs(_rank: int) -> dict[Any, bool | str]:
    """By transport and schedule: whether a captured layer gives the bits of a layer that is not, replay after replay
    with other inputs; or why it could not be captured."""
    with limited(60):
        backend = backends().get("cute")
        if backend is None:
            return {}
        found: dict[Any, bool | str] = {}
        problem = problem_of("qwen_video")
        for transport in ("nvshmem", "torch_dist"):
            for schedule in ("ring", "sparse_a2a"):
                layer = Layer(problem, problem.plan_here(schedule), transport, backend)
                found[transport, schedule] = _replayed(layer)
        return found


def _replayed(layer: Layer) -> bool | str:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            captured = layer()
    except RuntimeError as error:
        return str(error)
    same = True
    for scale in (1.0, 0.5, -2.0):
        with torch.no_grad():
            for leaf in layer.leaves:
                leaf.mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [x.clone() for x in captured]
        # Query gradients are summed in any order by some kernels: as close as two runs are to each other.
        same &= all(torch.allclose(x, y, rtol=2e-2, atol=2e-2) for x, y in zip(replayed, layer(), strict=True))
    layer.plan.synchronize(layer.dout.device, transport=layer.options["transport"], timeout=timedelta(seconds=10))
    return same


# Plans that differ


def mismatched(rank: int) -> str:
    """What a rank is told whose plan is not that of the others, and that the group is as good as before."""
    with limited(60):
        shape, told = AttentionShape(2, 1, 64), ""
        for cuts in ([0, 700 + rank, 2048], [0, 700, 2048]):
            problem = Problem.random(Layout.from_cu_seqlens(cuts), shape, device="cuda")
            try:
                distributed(problem, problem.plan_here())
            except ValueError as error:
                told += str(error)
        return told


# Soak


def soak(rank: int, transport: str, layers: int, limit: float) -> dict[str, int]:
    """Layers with changing layouts and schedules, forward and backward; how many values were wrong, and the bytes that
    are allocated after a first round and at the end."""
    with limited(limit):
        shape, generator = AttentionShape(2, 1, 64), torch.Generator(device="cuda").manual_seed(3)
        cases = []
        for tokens in (200, 333, 512, 700):
            problem = Problem.random(Layout.from_cu_seqlens([0, tokens // 3, tokens]), shape, device="cuda")
            for schedule in ("ring", "sparse_a2a"):
                case = Layer(problem, problem.plan_here(schedule), transport, "reference")
                virtual = problem.plan(2, schedule)
                whole = [virtual.shard(x.bfloat16()).requires_grad_() for x in (problem.q, problem.k, problem.v)]
                out = marble.attention(*whole, virtual)
                assert isinstance(out, Tensor)
                every = [out.detach(), *torch.autograd.grad(out, whole, virtual.shard(problem.dout.bfloat16()))]
                cases.append((case, [x.split(virtual.order.lengths)[rank].clone() for x in every]))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        order = torch.randint(len(cases), (layers,), generator=generator, device="cuda").tolist()
        before = 0
        for number, at in enumerate([*range(len(cases)), *order]):
            case, expected = cases[at]
            for x, y in zip(case(), expected, strict=True):
                wrong += (x != y).sum()
            if number == len(cases):
                before = torch.cuda.memory_allocated()
        return {"wrong": int(wrong), "before": before, "after": torch.cuda.memory_allocated()}


# Faults


class Strikes(ReferenceBackend):
    """Does something in its first backward call, with transfers under way."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def backward(self, *args: Any, **options: Any) -> None:
        self.action()
        super().backward(*args, **options)


TIMEOUT = timedelta(seconds=2)
FAILS = 1
FAULTS = [("torch_dist", "killed"), ("torch_dist", "stopped")]
FAULTS += [("nvshmem", "killed"), ("nvshmem", "stopped"), ("nvshmem", "elsewhere")]
"""What becomes of a rank; NCCL does not tell layers apart whose messages have the same sizes."""


def _faulty(rank: int, folder: Path, transport: str, fault: str) -> None:
    """One rank fails; the other writes down what it saw: after which call the error came, it, how long it took, what
    the next call said, and whether it could go on alone."""
    faulthandler.dump_traceback_later(50, exit=True)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    layout, shape = Layout.from_cu_seqlens([0, 700, 2048]), AttentionShape(2, 1, 64)
    problem = Problem.random(layout, shape, device="cuda")
    plan = marble.plan(layout, [shape, shape], group=dist.group.WORLD)
    healthy = Layer(problem, plan, transport, "reference")
    for _ in range(2):
        healthy()
    plan.synchronize(healthy.dout.device, transport=transport)

    actions = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
    faulty = healthy
    if rank == FAILS:
        backend = Strikes(lambda: os.kill(os.getpid(), actions[fault])) if fault in actions else "reference"
        faulty = Layer(problem, plan, transport, backend, int(fault == "elsewhere"))
    seen: dict[str, Any] = {}
    for name in ("first", "next"):
        begin = time.monotonic()
        try:
            faulty(timeout=TIMEOUT)
            plan.synchronize(faulty.dout.device, transport=transport)
        except TransportError as error:
            seen[name] = error.with_traceback(None), time.monotonic() - begin
    if transport == "torch_dist":
        alone = dist.new_group([rank], use_local_synchronization=True)
        mine = marble.plan(layout, shape, group=alone)
        seen["alone"] = Layer(problem, mine, transport, "reference")(group=alone)[0].cpu()
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(seen))
    os._exit(0)  # neither NCCL nor NVSHMEM ends well without a rank


def seen_by_survivors(folder: Path, transport: str, fault: str) -> dict[int, dict[str, Any]]:
    """What the ranks that live saw, by rank."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_faulty, args=(rank, folder, transport, fault)) for rank in range(2)]
    for process in processes:
        process.start()
    survivors: Sequence[int] = (0, 1) if fault == "elsewhere" else (0,)
    try:
        for rank in survivors:
            processes[rank].join(60)
        codes = [processes[rank].exitcode for rank in survivors]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * len(survivors), f"exit codes {codes}: see stderr"
    return {rank: pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in survivors}
