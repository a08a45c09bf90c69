"""Rings and Ulysses groups taken from device meshes, beside data and tensor parallel dimensions, over gloo.

Every case gives the bits of virtual ranks. Ranks of a group are not ranks of the world in most of them.
"""

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import marble
from marble import AttentionShape, Layout, Plan, Span

WORLD = 4
LAYOUTS = (
    Layout([[Span("causal", 13), Span("full", 29), Span("causal", 8)], [Span("causal", 41)], [Span("pad", 6)]]),
    Layout([[Span("causal", 5)], [Span("causal", 9), Span("noise", 20), Span("full", 11)]]),
)
SHAPE = AttentionShape(4, 2, 8)
HALF = AttentionShape(2, 1, 8)
"""A tensor-parallel rank's heads."""
TIMEOUT = timedelta(seconds=20)


def run(plan: Plan, place: int = 0, half: int | None = None, **options: Any) -> list[Tensor]:
    """out, dq, dk and dv of the whole sequence: of layout ``place``, and of all heads or of half of them."""
    generator = torch.Generator().manual_seed(place)
    tensors = [torch.randn(LAYOUTS[place].tokens, heads, 8, generator=generator) for heads in (4, 2, 2, 4)]
    if half is not None:
        tensors = [x.chunk(2, 1)[half] for x in tensors]
    q, k, v, dout = map(plan.shard, tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = marble.attention(*leaves, plan, **options)
    assert isinstance(out, Tensor)
    return [plan.unshard(x, **options) for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]


def data_beside_ring(rank: int) -> list[Tensor]:
    """Two replicas with a batch each; each is a ring."""
    ring = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))["ring"]
    plan = marble.plan(LAYOUTS[rank // 2], SHAPE, group=ring, block=8)
    assert (plan.rank, plan.world, plan.ulysses) == (rank % 2, 2, 1)
    return run(plan, rank // 2, group=ring, timeout=TIMEOUT)


def ring_beside_tensor(rank: int) -> list[Tensor]:
    """The ranks of a ring are not neighbours: tensor parallelism comes first."""
    ring = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tp"))["ring"]
    plan = marble.plan(LAYOUTS[0], HALF, group=ring, block=8)
    assert (plan.rank, plan.world) == (rank // 2, 2)
    return run(plan, 0, rank % 2, group=ring, timeout=TIMEOUT)


def tensor_beside_ulysses(rank: int) -> list[Tensor]:
    """Ranks with half of the heads share them further."""
    split = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ulysses"))["ulysses"]
    plan = marble.plan(LAYOUTS[0], HALF, group=split, ulysses=2, block=8)
    assert (plan.rank, plan.world, plan.ulysses) == (rank % 2, 2, 2)
    return run(plan, 0, rank // 2, group=split, timeout=TIMEOUT)


def ring_of_ulysses(rank: int) -> list[Tensor]:
    """Two dimensions: the last one shares heads."""
    both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))["ring", "ulysses"]
    plan = marble.plan(LAYOUTS[0], SHAPE, group=both, block=8)
    assert (plan.rank, plan.world, plan.ulysses) == (rank, 4, 2)
    found = run(plan, group=both, timeout=TIMEOUT)
    groups = dist.distributed_c10d._world.group_count
    again = run(plan, group=both, timeout=TIMEOUT)
    assert dist.distributed_c10d._world.group_count == groups, "a mesh has one group"
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    return found


def two_dimensions_around_another(rank: int) -> list[Tensor]:
    """A ring of ranks that share heads with nobody, as two dimensions with tensor parallelism between them."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("ring", "tp", "ulysses"))["ring", "ulysses"]
    plan = marble.plan(LAYOUTS[0], HALF, group=mesh, block=8)
    assert (plan.rank, plan.world, plan.ulysses) == (rank // 2, 2, 1)
    return run(plan, 0, rank % 2, group=mesh, timeout=TIMEOUT)


def refusals(rank: int) -> dict[str, str]:
    """What bad meshes are told, by name."""
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ring", "tp", "ulysses"))
    plan = marble.plan(LAYOUTS[0], SHAPE, group=cube["ring"], block=8)
    q, k, v = (torch.zeros(plan.local_tokens, heads, 8) for heads in (4, 2, 2))
    shared = marble.plan(LAYOUTS[0], SHAPE, ranks=4, rank=rank, ulysses=4, block=8)
    whole = init_device_mesh("cpu", (4,))
    crossed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("ring", "ulysses"))
    part = DeviceMesh("cpu", [0, 3])
    calls = {
        "three dimensions": lambda: marble.plan(LAYOUTS[0], SHAPE, group=cube),
        "another size": lambda: marble.attention(q, k, v, plan, group=whole),
        "two dimensions": lambda: marble.attention(q, k, v, plan, group=cube["ring", "ulysses"]),
        "another degree": lambda: marble.plan(LAYOUTS[0], SHAPE, group=cube["ring", "ulysses"], ulysses=4),
        "planned with another degree": lambda: shared.process_group(cube["ring", "ulysses"]),
        "crossed": lambda: marble.plan(LAYOUTS[0], SHAPE, group=crossed),
        "elsewhere": lambda: marble.plan(LAYOUTS[0], SHAPE, group=part),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


CASES = (data_beside_ring, ring_beside_tensor, tensor_beside_ulysses, ring_of_ulysses, two_dimensions_around_another)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    answers: dict[str, Any] = {case.__name__: case(rank) for case in CASES}
    answers["refusals"] = refusals(rank)
    torch.save(answers, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, by rank."""
    folder = tmp_path_factory.mktemp("mesh")
    multiprocessing.set_forkserver_preload(["marble"])
    context = mp.start_processes(worker, (str(folder),), WORLD, join=False, start_method="forkserver")
    deadline = time.monotonic() + 60
    try:
        while not context.join(max(deadline - time.monotonic(), 0)):
            assert time.monotonic() < deadline, "a rank hangs"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("case", "shape", "ranks", "ulysses", "place", "half"),
    [
        (data_beside_ring, SHAPE, 2, 1, lambda rank: rank // 2, None),
        (ring_beside_tensor, HALF, 2, 1, None, lambda rank: rank % 2),
        (tensor_beside_ulysses, HALF, 2, 2, None, lambda rank: rank // 2),
        (ring_of_ulysses, SHAPE, 4, 2, None, None),
        (two_dimensions_around_another, HALF, 2, 1, None, lambda rank: rank % 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bits_of_virtual_ranks(
    answers: list[dict[str, Any]], case: Any, shape: AttentionShape, ranks: int, ulysses: int, place: Any, half: Any
) -> None:
    for rank, found in enumerate(answers):
        batch = place(rank) if place else 0
        plan = marble.plan(LAYOUTS[batch], shape, ranks=ranks, ulysses=ulysses, block=8)
        expected = run(plan, batch, half(rank) if half else None)
        assert all(x.isfinite().all() and x.any() for x in expected)
        assert all(torch.equal(x, y) for x, y in zip(found[case.__name__], expected, strict=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("three dimensions", "group: the mesh has 3 dimensions; take one, the ring's, or two"),
        ("another degree", "ulysses: 4 differs from the 2 ranks in the last dimension of the mesh; leave it out"),
        ("two dimensions", "group: the plan has 1 ranks share heads, the mesh has 2 in its last dimension; plan for"),
        ("planned with another degree", "group: the plan has 4 ranks share heads, the mesh has 2 in its last"),
        ("crossed", "group: the mesh has its ranks in the order [0, 2, 1, 3], process groups have them ascending"),
    ],
)
def test_refusals(answers: list[dict[str, Any]], name: str, message: str) -> None:
    assert all(found["refusals"][name].startswith(message) for found in answers)


def test_a_mesh_of_another_size(answers: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(answers):
        assert found["refusals"]["another size"] == (
            f"group: the plan is for rank {rank // 2} of 2, the group has this process as rank {rank} of 4; plan for "
            "this group"
        )


def test_a_mesh_without_this_process(answers: list[dict[str, Any]]) -> None:
    told = [found["refusals"].get("elsewhere", "") for found in answers]
    assert told == ["", *["group: this process is not in the mesh"] * 2, ""]
