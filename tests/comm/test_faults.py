"""Ranks that raise, stall, die or run something else, over gloo: every other rank raises in time, and can go on.

One world of four processes goes through all faults, one after another; each leaves a group broken, and the next
happens in a new one, the last two in groups without the ranks that are gone. The tests then look at what every rank
saw.
"""

import multiprocessing
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import marble
from marble import AttentionShape, Layout, Plan, TransportError
from marble.comm.transport import Wait
from marble.kernels.reference import ReferenceBackend

WORLD, LIMIT = 4, timedelta(seconds=60)
TIMEOUT = timedelta(seconds=2)
SLACK = 1.5
"""Seconds that an overloaded machine may take beyond the timeout."""
LAYOUT = Layout.from_cu_seqlens([0, 77, 128])
SHAPES = [AttentionShape(2, 1, 8), AttentionShape(2, 1, 8, window=9)]
RAISES, ELSEWHERE, PLANS, STALLS, DIES = 2, 1, 3, 1, 2
"""The rank that has each of the faults; numbers are those of the whole world."""


def plan_for(ranks: Any, layout: Layout = LAYOUT) -> Plan:
    where = {"ranks": ranks} if isinstance(ranks, int) else {"group": ranks}
    return marble.plan(layout, SHAPES, block=16, **where)


def inputs() -> list[Tensor]:
    """q, k, v and the output gradient of the whole sequence, alike in every process."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(LAYOUT.tokens, heads, 8, generator=generator) for heads in (2, 1, 1, 2)]


def own_mask_plan(ranks: Any, last: int) -> Plan:
    """With a mask of the user's own that allows keys at least ``last`` tokens back, of documents of 32 tokens."""
    where = {"ranks": ranks} if isinstance(ranks, int) else {"group": ranks}
    tracks = {"document": torch.arange(LAYOUT.tokens) // 32}

    def mask(q: Any, k: Any) -> Any:
        return (q.document == k.document) & (q.pos - k.pos < last)

    return marble.plan(LAYOUT, SHAPES[:1], block=16, order="contiguous", mask=mask, tracks=tracks, **where)


def run(plan: Plan, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """out, dq, dk and dv of this process."""
    q, k, v, dout = (plan.shard(x).to(dtype) for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = marble.attention(*leaves, plan, **options)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class Strikes(ReferenceBackend):
    """Does something in the second call of the forward or the backward pass, with transfers under way."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name_of_pass, self.action, self.calls = name, action, 0

    def strike(self, name: str) -> None:
        self.calls += name == self.name_of_pass
        if self.calls == 2 and name == self.name_of_pass:
            self.action()

    def forward(self, *args: Any, **options: Any) -> None:
        self.strike("forward")
        super().forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> None:
        self.strike("backward")
        super().backward(*args, **options)


def fail() -> None:
    raise ZeroDivisionError("a fault of its own")


def send_oneself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


class Seen:
    """What this rank saw of each fault: the error, and after how many seconds; written as it goes."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, {}

    def note(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.path.write_bytes(pickle.dumps(self.found))

    def call(self, name: str, **options: Any) -> None:
        begin = time.monotonic()
        try:
            run(timeout=TIMEOUT, **options)
            error: Any = None
        except Exception as raised:
            error = raised.with_traceback(None)
        self.note(name, (error, time.monotonic() - begin))


def group_of(ranks: list[int]) -> dist.ProcessGroup:
    """A new group that only its members know of."""
    return dist.new_group(ranks, use_local_synchronization=True, timeout=LIMIT)


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    seen = Seen(folder / f"{rank}.pickle")
    everyone = list(range(WORLD))

    plan, world = plan_for(dist.group.WORLD), dist.group.WORLD
    run(plan, group=world)
    backend = Strikes("forward", fail) if rank == RAISES else "reference"
    seen.call("raises", plan=plan, group=world, backend=backend)
    seen.call("again", plan=plan, group=world)
    try:
        plan.synchronize(torch.device("cpu"), world)
    except TransportError as error:
        seen.note("synchronised", error)
    group = group_of(everyone)
    seen.note("after raises", run(plan, group=group))

    seen.call("elsewhere", plan=plan, group=group, layer=int(rank == ELSEWHERE))
    group = group_of(everyone)

    other = plan_for(group, Layout.from_cu_seqlens([0, 76, 128]))
    seen.call("plans", plan=other if rank == PLANS else plan, group=group)
    seen.call("masks", plan=own_mask_plan(group, 9 if rank == PLANS else 10), group=group)
    seen.call("types", plan=plan, group=group, dtype=torch.bfloat16 if rank == PLANS else torch.float16)
    seen.note("after plans", run(plan, group=group))

    broken, begin = group_of(everyone), time.monotonic()
    try:
        plan.unshard(torch.zeros(plan.local_tokens, 1 + (rank == PLANS)), group=broken, timeout=TIMEOUT)
    except TransportError as error:
        seen.note("widths", (error.with_traceback(None), time.monotonic() - begin))

    backend = Strikes("backward", send_oneself(signal.SIGSTOP)) if rank == STALLS else "reference"
    seen.call("stalls", plan=plan, group=group, backend=backend)
    if rank != STALLS:
        without(rank, seen)
    begin = time.monotonic()
    dist.destroy_process_group()
    seen.note("destroyed", time.monotonic() - begin)


def without(rank: int, seen: Seen) -> None:
    """Those that are left go on with three, then with two ranks."""
    group = group_of([other for other in range(WORLD) if other != STALLS])
    plan = plan_for(group)
    seen.note("after stalls", run(plan, group=group))
    backend = Strikes("forward", send_oneself(signal.SIGKILL)) if rank == DIES else "reference"
    seen.call("dies", plan=plan, group=group, backend=backend)
    group = group_of([other for other in range(WORLD) if other not in (STALLS, DIES)])
    seen.note("after dies", run(plan_for(group), group=group))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank saw, by rank. The stalled rank is woken when the others have ended."""
    folder = tmp_path_factory.mktemp("faults")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["marble"])
    processes = [context.Process(target=worker, args=(rank, folder)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + LIMIT.total_seconds()
        for rank, process in enumerate(processes):
            if rank != STALLS:
                process.join(max(deadline - time.monotonic(), 0))
        assert processes[STALLS].pid is not None
        os.kill(processes[STALLS].pid, signal.SIGCONT)
        processes[STALLS].join(max(deadline - time.monotonic(), 5))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [-signal.SIGKILL if rank == DIES else 0 for rank in range(WORLD)], "None did not end"
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(WORLD)]


def waits(seen: list[dict[str, Any]], name: str, failed: int) -> dict[int, Wait]:
    """What every rank but one waited for, by its number in the world. All of them raised, and in time."""
    found = {}
    for rank, saw in enumerate(seen):
        if rank != failed and name in saw:
            error, seconds = saw[name]
            assert isinstance(error, TransportError), (rank, error)
            assert seconds < TIMEOUT.total_seconds() + SLACK
            assert error.wait is not None
            assert str(error).startswith(str(error.wait))
            found[rank] = error.wait
    return found


def leads_to(found: dict[int, Wait], failed: int) -> bool:
    """Whether the ranks that are waited for, and those that they wait for, lead to the one that failed."""
    for rank in found:
        for _ in found:
            rank = found[rank].global_peer if rank in found else rank
        if rank != failed:
            return False
    return True


def test_a_rank_that_raises(seen: list[dict[str, Any]]) -> None:
    assert isinstance(seen[RAISES]["raises"][0], ZeroDivisionError)
    found = waits(seen, "raises", RAISES)
    assert len(found) == WORLD - 1
    assert leads_to(found, RAISES)
    # A rank that needs no more of it in the forward pass goes on to the backward pass.
    assert {wait.operation for wait in found.values()} <= {"layer 0, forward", "layer 0, backward"}
    direct = [wait for wait in found.values() if wait.peer == RAISES]
    assert direct
    for wait in direct:
        assert wait.step >= 1 or "backward" in wait.operation
        assert re.fullmatch(r"to (send|receive) \w+\[\d+:\d+\]", wait.transfer)


def test_a_broken_group_is_refused_at_once_and_says_why(seen: list[dict[str, Any]]) -> None:
    for rank, saw in enumerate(seen):
        error, seconds = saw["again"]
        assert isinstance(error, TransportError)
        assert str(error).startswith("group: it failed before")
        assert seconds < SLACK
        assert ("this rank raised ZeroDivisionError" in str(error)) == (rank == RAISES)
        assert str(saw["synchronised"]) == str(error)


def test_a_rank_in_another_layer(seen: list[dict[str, Any]]) -> None:
    """With messages of the same sizes: told apart by their tags."""
    found = waits(seen, "elsewhere", -1)
    assert len(found) == WORLD
    assert {rank: wait.operation for rank, wait in found.items()} == {
        rank: f"layer {int(rank == ELSEWHERE)}, forward" for rank in range(WORLD)
    }


@pytest.mark.parametrize("what", ["plans", "masks", "types"])
def test_a_rank_that_planned_another_batch(seen: list[dict[str, Any]], what: str) -> None:
    """Or another mask of its own, or has inputs of another type. Told on every rank, and without a timeout; the group
    is as good as before."""
    for rank, saw in enumerate(seen):
        error, seconds = saw[what]
        assert isinstance(error, ValueError)
        others = [other for other in range(WORLD) if other != PLANS] if rank == PLANS else [PLANS]
        assert str(error).startswith(f"plan: rank {rank} and ranks {others} planned different layouts")
        assert seconds < TIMEOUT.total_seconds()


def test_a_rank_that_unshards_rows_of_another_width(seen: list[dict[str, Any]]) -> None:
    """It waits, and so do the others for it; no bytes are mixed, and no process is ended by gloo."""
    found = waits(seen, "widths", -1)
    assert len(found) == WORLD
    assert all(PLANS in (rank, wait.peer) for rank, wait in found.items())


def test_a_rank_that_stalls_in_its_backward_pass(seen: list[dict[str, Any]]) -> None:
    found = waits(seen, "stalls", STALLS)
    assert len(found) == WORLD - 1
    assert leads_to(found, STALLS)
    assert {wait.operation for wait in found.values()} == {"layer 0, backward"}


def test_a_rank_that_wakes_up_again_raises_too(seen: list[dict[str, Any]]) -> None:
    assert isinstance(seen[STALLS]["stalls"][0], TransportError)


def test_a_rank_that_dies(seen: list[dict[str, Any]]) -> None:
    """In a group of the ranks 0, 2 and 3 of the world, where it is rank 1."""
    found = waits(seen, "dies", DIES)
    assert list(found) == [0, 3]
    assert leads_to(found, DIES)
    assert all((wait.peer, wait.global_peer) == (1, DIES) for wait in found.values() if wait.global_peer == DIES)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("after raises", [0, 1, 2, 3]),
        ("after plans", [0, 1, 2, 3]),
        ("after stalls", [0, 2, 3]),
        ("after dies", [0, 3]),
    ],
)
def test_those_that_are_left_go_on(seen: list[dict[str, Any]], name: str, ranks: list[int]) -> None:
    plan = plan_for(len(ranks))
    expected = [x.split(plan.order.lengths) for x in run(plan)]
    for place, rank in enumerate(ranks):
        assert all(torch.equal(x, parts[place]) for x, parts in zip(seen[rank][name], expected, strict=True))


def test_process_groups_can_be_destroyed(seen: list[dict[str, Any]]) -> None:
    assert all(saw["destroyed"] < SLACK for rank, saw in enumerate(seen) if rank != DIES)
