"""Real processes over gloo give the bits of virtual ranks.

Each world is spawned once and runs all cases; every process plans for itself. Tests then compare what was gathered
with the same plan on virtual ranks in this process.
"""

import datetime
import multiprocessing
import pickle
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import marble
from marble import AttentionShape, Layout, Span
from marble.comm import torch_dist
from marble.compose.plan import Plan

LIMIT = 60
WORLDS = (2, 4)
SHAPES = (AttentionShape(4, 2, 16), AttentionShape(4, 2, 16, window=7))
LAYOUTS = {
    "even": Layout.from_cu_seqlens([0, 64, 128]),
    "ragged": Layout(
        [[Span("causal", 13), Span("full", 29), Span("causal", 8)], [Span("causal", 41)], [Span("pad", 6)]]
    ),
    "spans apart": Layout(
        [[Span("causal", 9), Span("noise", 20), Span("full", 30), Span("noise", 11)], [Span("causal", 3)]]
    ),
    "one rank has it all": Layout.from_cu_seqlens([0, 7, 12]),
    "padding only": Layout([[Span("pad", 37)]]),
}
CASES = [
    (name, order, dtype)
    for name in LAYOUTS
    for order, dtype in (
        ("ptrr", torch.float32),
        ("ptrr", torch.bfloat16),
        ("balanced_samples", torch.float32),
        ("chunks", torch.bfloat16),
    )
]


def plan_for(name: str, order: str, **ranks: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "marble.plan: ranks .* get no tokens")
        if order == "chunks":  # dense calls have no windows; two ranks share heads
            layers, schedule, ulysses = (SHAPES[0], replace(SHAPES[0], scale=0.3)), ["chunked", "sparse_a2a"], 2
        else:
            layers, ulysses = SHAPES, 1
            schedule = "ring" if order == "ptrr" else ["sparse_a2a", "all_gather"]
        return marble.plan(LAYOUTS[name], layers, schedule=schedule, order=order, ulysses=ulysses, block=16, **ranks)


def inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output gradient of the whole sequence, alike in every process."""
    generator = torch.Generator().manual_seed(len(name))
    tokens = LAYOUTS[name].tokens
    return [torch.randn(tokens, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]


def run(plan: Plan, tensors: list[Tensor], layer: int, **options: Any) -> list[Tensor]:
    """out, lse, dq, dk and dv over the whole sequence."""
    q, k, v, dout = (plan.shard(x) for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = marble.attention(q, k, v, plan, layer=layer, return_lse=True, **options)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    unshard = {name: value for name, value in options.items() if name == "group"}
    return [plan.unshard(x, **unshard) for x in (out.detach(), lse, *gradients)]


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    answers: dict[Any, Any] = {}
    for name, order, dtype in CASES:
        plan = plan_for(name, order, group=dist.group.WORLD)
        answers[name, order, dtype] = [run(plan, inputs(name, dtype), layer) for layer in range(len(SHAPES))]
        answers["tokens", name, order] = plan.local_tokens
    answers["watched"] = run(
        plan_for("ragged", "chunks", group=dist.group.WORLD), inputs("ragged", torch.bfloat16), 1, debug=True
    )
    answers["digests"] = digests_exchanged()
    answers["ids"] = unshard_ids(dist.group.WORLD)
    answers["refused"] = refusals(rank, world)
    answers["disagreement"] = disagreement(rank, world)
    pairs = [dist.new_group(list(range(low, low + 2))) for low in range(0, world, 2)]
    mine = pairs[rank // 2]
    plan = plan_for("ragged", "ptrr", group=mine)
    answers["pair"] = run(plan, inputs("ragged", torch.float32), 0, group=mine)
    try:
        run(plan, inputs("ragged", torch.float32), 0)
    except ValueError as error:
        answers["pair without its group"] = str(error)
    torch.save(answers, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def digests_exchanged() -> list[int]:
    """How many digests are exchanged: by a new plan, by its second use, by a copy of it, and by another plan."""
    counts, gather = [], torch_dist.gather

    def counting(x: Tensor, lengths: Any, group: Any, what: str, timeout: Any = None) -> list[Tensor]:
        counts[-1] += 1
        return gather(x, lengths, group, what, timeout)

    def plan_of(cut: int) -> Plan:
        return marble.plan(Layout.from_cu_seqlens([0, cut, 128]), SHAPES, group=dist.group.WORLD, block=16)

    plan = plan_of(50)
    torch_dist.gather = counting
    try:
        for used in (plan, plan, pickle.loads(pickle.dumps(plan)), plan_of(51)):
            counts.append(0)
            marble.attention(*(used.shard(x) for x in inputs("even", torch.float32)[:3]), used)
    finally:
        torch_dist.gather = gather
    return counts


def unshard_ids(group: Any) -> list[Tensor]:
    """Token numbers along the first, a middle and the last dimension, sharded and put together again."""
    plan = plan_for("ragged", "ptrr", group=group)
    ids = torch.arange(plan.tokens)
    full = [ids, ids.view(1, -1, 1).expand(2, -1, 3), ids.double().expand(3, -1)]
    return [plan.unshard(plan.shard(x, dim), dim) for x, dim in zip(full, (0, 1, -1), strict=True)]


def refusals(rank: int, world: int) -> list[str]:
    """What rank 0 is told about plans for another group; the others make no call, so a message would hang or fail."""
    found = []
    if rank == 0:
        for ranks, planned in ((world * 2, 0), (world, 1), (1, 0)):
            plan = plan_for("even", "ptrr", ranks=ranks, rank=planned)
            x = [plan.shard(x) for x in inputs("even", torch.float32)]
            for call in (
                lambda plan=plan, x=x: marble.attention(*x[:3], plan),
                lambda plan=plan, x=x: plan.unshard(x[0]),
            ):
                try:
                    call()
                except ValueError as error:
                    found.append(str(error))
    dist.barrier()
    return found


def disagreement(rank: int, world: int) -> str:
    """What a rank is told when rank 0 planned another batch of as many tokens; neither was used before."""
    layout = Layout.from_cu_seqlens([0, 60, 128] if rank == 0 else [0, 62, 128])
    plan = marble.plan(layout, SHAPES, ranks=world, rank=rank, block=16)
    x = [plan.shard(x) for x in inputs("even", torch.float32)[:3]]
    try:
        marble.attention(*x, plan)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def answers(request: Any, tmp_path_factory: Any) -> list[dict[Any, Any]]:
    """What every rank of a world found, by rank."""
    world, folder = request.param, tmp_path_factory.mktemp("gloo")
    # Processes that are forked from one that has imported marble start in no time.
    multiprocessing.set_forkserver_preload(["marble"])
    context = mp.start_processes(worker, (world, str(folder)), world, join=False, start_method="forkserver")
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(max(deadline - time.monotonic(), 0)):
            if time.monotonic() > deadline:
                waiting = [rank for rank in range(world) if not Path(folder, f"{rank}.pt").exists()]
                pytest.fail(f"the ranks {waiting} of {world} did not end within {LIMIT} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize(("name", "order", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_bits_of_virtual_ranks(answers: Any, name: str, order: str, dtype: torch.dtype) -> None:
    plan = plan_for(name, order, ranks=len(answers))
    for layer in range(len(SHAPES)):
        expected = run(plan, inputs(name, dtype), layer)
        assert all(value.isfinite().all() for index, value in enumerate(expected) if index != 1)
        for rank, found in enumerate(answers):
            for part, x, y in zip(
                ("out", "lse", "dq", "dk", "dv"), found[name, order, dtype][layer], expected, strict=True
            ):
                assert x.dtype == y.dtype
                assert torch.equal(x, y), f"layer {layer}: {part} on rank {rank} differs from virtual ranks"


def test_a_plan_is_compared_between_ranks_once(answers: Any) -> None:
    assert [found["digests"] for found in answers] == [[1, 0, 0, 1]] * len(answers)


def test_watching_inboxes_changes_nothing(answers: Any) -> None:
    for found in answers:
        plain = found["ragged", "chunks", torch.bfloat16][1]
        assert all(torch.equal(x, y) for x, y in zip(found["watched"], plain, strict=True))


def test_cases_hold_ragged_shards_and_idle_ranks(answers: Any) -> None:
    def tokens(name: str) -> list[int]:
        return [found["tokens", name, "ptrr"] for found in answers]

    assert len(set(tokens("ragged"))) > 1
    assert min(tokens("one rank has it all")) == 0
    assert [sum(tokens(name)) for name in LAYOUTS] == [layout.tokens for layout in LAYOUTS.values()]


def test_unshard_restores_the_sequence_on_every_rank(answers: Any) -> None:
    ids = torch.arange(LAYOUTS["ragged"].tokens)
    for found in answers:
        assert torch.equal(found["ids"][0], ids)
        assert torch.equal(found["ids"][1], ids.view(1, -1, 1).expand(2, -1, 3))
        assert torch.equal(found["ids"][2], ids.double().expand(3, -1))


def test_a_plan_for_another_group_is_refused_before_any_message(answers: Any) -> None:
    world, refused = len(answers), answers[0]["refused"]
    assert len(refused) == 6
    for message in refused:
        assert message.startswith("group: the plan is for rank ")
        assert message.endswith(f"the group has this process as rank 0 of {world}; plan for this group")
    assert f"for rank 0 of {world * 2}" in refused[0]
    assert f"for rank 1 of {world}" in refused[2]
    assert "for rank 0 of 1" in refused[4]


def test_a_part_of_the_processes(answers: Any) -> None:
    expected = run(plan_for("ragged", "ptrr", ranks=2), inputs("ragged", torch.float32), 0)
    for found in answers:
        assert all(torch.equal(x, y) for x, y in zip(found["pair"], expected, strict=True))
        assert len(answers) == 2 or found["pair without its group"].startswith("group: the plan is for rank ")


def test_ranks_that_planned_different_batches_are_told_on_every_rank(answers: Any) -> None:
    world = len(answers)
    for rank, found in enumerate(answers):
        others = list(range(1, world)) if rank == 0 else [0]
        assert found["disagreement"].startswith(f"plan: rank {rank} and ranks {others} planned different layouts")
