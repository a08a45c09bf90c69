"""The public op over one-sided wires between processes, one of which is killed or stopped: the others raise in time."""

import multiprocessing
import os
import pickle
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_wires import SharedWires

import marble
from marble import AttentionShape, Layout, Plan, TransportError
from marble.comm.one_sided import OneSided
from marble.compose import attention as public_op
from marble.compose import plan as plan_module
from marble.kernels.reference import ReferenceBackend

WORLD, FAILS = 3, 1
TIMEOUT = timedelta(seconds=1)
SLACK = 1.5
"""Seconds that an overloaded machine may take beyond the timeout."""
LAYOUT = Layout.from_cu_seqlens([0, 77, 128])


def layer(plan: Plan, backend: Any = "reference", timeout: timedelta | None = None) -> list[torch.Tensor]:
    """out, dq, dk and dv of this process."""
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(LAYOUT.tokens, heads, 8, generator=generator) for heads in (2, 1, 1, 2)]
    *leaves, dout = map(plan.shard, whole)
    leaves = [x.requires_grad_() for x in leaves]
    out = marble.attention(*leaves, plan, backend=backend, timeout=timeout)
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class Strikes(ReferenceBackend):
    """Gets a signal in its first backward call, with transfers under way."""

    def __init__(self, number: int) -> None:
        self.number = number

    def backward(self, *args: Any, **options: Any) -> None:
        os.kill(os.getpid(), self.number)
        super().backward(*args, **options)


def worker(rank: int, folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    connection = OneSided(SharedWires(folder, rank, WORLD))
    public_op.connect = plan_module.connect = lambda *_: connection
    plan = marble.plan(LAYOUT, AttentionShape(2, 1, 8), group=dist.group.WORLD, block=16)
    found: dict[str, Any] = {"bits": layer(plan)}
    plan.synchronize(torch.device("cpu"))
    for name in ("fault", "again"):
        begin = time.monotonic()
        try:
            layer(plan, Strikes(number) if rank == FAILS else "reference", TIMEOUT)
        except TransportError as error:
            found[name] = error, time.monotonic() - begin
    try:
        plan.synchronize(torch.device("cpu"))
    except TransportError as error:
        found["synchronised"] = error
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    os._exit(0)  # gloo would wait for the rank that is gone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_survivors_raise_in_time(number: signal.Signals, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["marble"])
    processes = [context.Process(target=worker, args=(rank, tmp_path, number)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            if rank != FAILS:
                process.join(60)
                assert process.exitcode == 0, rank
    finally:
        for process in processes:
            process.kill()
    plan = marble.plan(LAYOUT, AttentionShape(2, 1, 8), ranks=WORLD, block=16)
    expected = [part.split(plan.order.lengths) for part in layer(plan)]
    for rank in range(WORLD):
        if rank == FAILS:
            continue
        found = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        assert all(torch.equal(x, parts[rank]) for x, parts in zip(found["bits"], expected, strict=True))
        error, seconds = found["fault"]
        assert seconds < TIMEOUT.total_seconds() + SLACK
        assert error.wait.operation == "layer 0, backward"
        assert f"step {error.wait.step}: rank {rank} waits for rank {error.wait.peer}" in str(error)
        again, seconds = found["again"]
        assert str(again).startswith("group: it failed and is of no more use. ")
        assert seconds < SLACK
        assert found["synchronised"].wait == error.wait
