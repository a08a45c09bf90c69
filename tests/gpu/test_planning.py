"""Planning on a GPU: the same plan, in milliseconds; and plans that travel there from pinned memory."""

import pickle
import time

import pytest
import torch

import marble
from marble import AttentionShape, Layout, Span
from marble.compose.packing import Packed
from marble.compose.planner import forget
from marble.workloads import WORKLOADS, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LINKED = Layout(
    [
        [Span("noise", 200, group=0), Span("causal", 120), Span("noise", 300, group=0), Span("causal", 30)],
        [Span("causal", 500), Span("group", 410), Span("causal", 330), Span("group", 700)],
        [Span("pad", 111)],
    ]
)
CASES = {name: build(name, 256 * 1024) for name in WORKLOADS} | {"linked noise, window over groups": LINKED}


@pytest.mark.parametrize("schedule", ["ring", "sparse_a2a"])
@pytest.mark.parametrize("layout", CASES.values(), ids=CASES)
def test_a_gpu_plans_the_same(layout: Layout, schedule: str) -> None:
    shapes = [AttentionShape(8, 2, 64), *([AttentionShape(8, 2, 64, 300)] if layout is LINKED else [])]
    here, there = (
        marble.plan(layout, shapes, ranks=4, rank=1, schedule=schedule, device=device) for device in ("cpu", "cuda")
    )
    assert torch.equal(here.digest, there.digest)
    assert pickle.dumps(Packed.of(here.schedules)) == pickle.dumps(Packed.of(there.schedules))
    (call, *_) = (call for step in there.schedules[0][1].forward.steps for call in step.calls)
    assert call.work.by_query.ranges.is_cuda
    assert there.schedules_on(torch.device("cuda", torch.cuda.current_device())) is there.schedules


@pytest.mark.parametrize(
    ("schedule", "order"), [("chunked", "chunks"), ("ring", "chunks"), ("all_gather", "contiguous")]
)
def test_plans_of_chunks_and_of_gathered_keys_are_the_same_too(schedule: str, order: str) -> None:
    """Those of chunks are made on the CPU."""
    layout, shape = CASES["bagel_mix"], AttentionShape(8, 2, 64)
    here, there = (
        marble.plan(layout, shape, ranks=4, rank=1, schedule=schedule, order=order, device=device)
        for device in ("cpu", "cuda")
    )
    assert pickle.dumps(Packed.of(here.schedules)) == pickle.dumps(Packed.of(there.schedules))
    works = there.schedules_on(torch.device("cuda", torch.cuda.current_device()))[0][1].works
    assert all(work.touch.is_cuda for work in works)


def test_a_gpu_plans_in_milliseconds() -> None:
    layout = build("bagel_mix", 4 * 1024 * 1024)
    seconds = []
    for _ in range(5):
        fresh = Layout(layout.samples)
        forget()
        torch.cuda.synchronize()
        start = time.perf_counter()
        marble.plan(fresh, AttentionShape(28, 4, 128), ranks=8, rank=0, device="cuda")
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1, seconds


def test_pinned_plans_give_the_same_tables() -> None:
    plan = marble.plan(build("molmo_docs", 64 * 1024), AttentionShape(8, 2, 64), ranks=2, rank=0)
    pinned = plan.pin_memory()
    assert all(buffer.is_pinned() for buffer in pinned._packed.buffers.values())
    device = torch.device("cuda", torch.cuda.current_device())
    moved, expected = pinned.schedules_on(device), plan.schedules
    torch.cuda.synchronize()
    one, other = (found[0][0].forward.steps[0].calls[0].work.by_query for found in (moved, expected))
    for name in ("run_ptr", "runs", "part_ptr", "parts", "ranges"):
        assert torch.equal(getattr(one, name).cpu(), getattr(other, name))


def test_a_loader_pins_the_plans_of_its_workers() -> None:
    """``pin_memory=True`` calls `Plan.pin_memory` on what a worker made."""
    plan = marble.plan(build("gemma_docs", 32 * 1024), AttentionShape(8, 2, 64), ranks=2, rank=0)
    loader = torch.utils.data.DataLoader([plan], batch_size=None, num_workers=1, pin_memory=True)
    (found,) = loader
    assert all(buffer.is_pinned() for buffer in found._packed.buffers.values())
