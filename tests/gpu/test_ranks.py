"""Real ranks on GPUs: NCCL processes give the bits of virtual ranks, and both are as exact as a single call."""

import pytest
import torch

from marble import AttentionShape, Layout
from marble.testing.exactness import GATE, RESULTS, Problem, distributed, error_ratios, reference, single_call
from marble.testing.processes import run_processes
from marble.workloads import WORKLOADS, build

GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

CASES = [("bagel_mix", None), ("gemma_docs", 64), ("molmo_video", None)]


def _problem(layout: Layout, window: int | None, heads: tuple[int, int]) -> Problem:
    return Problem.random(layout, AttentionShape(*heads, 64, window), seed=7, device="cuda")


def _on_nccl(
    _rank: int, layout: str, window: int | None, heads: tuple[int, int], schedule: str
) -> dict[str, torch.Tensor]:
    problem = _problem(Layout.from_json(layout), window, heads)
    return distributed(problem, problem.plan_here(schedule))


@needs_gpu
@pytest.mark.parametrize(("name", "window"), CASES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_virtual_ranks_on_a_gpu_are_exact(name: str, window: int | None, heads: tuple[int, int]) -> None:
    problem = _problem(build(name, 4099, scale=WORKLOADS[name].demo_scale), window, heads)
    ref, single = reference(problem), single_call(problem)
    for ranks in (1, 2, 4, 8):
        ratios = error_ratios(distributed(problem, problem.plan(ranks)), single, ref)
        assert max(ratios.values()) <= GATE, (ranks, ratios)
    rounded = error_ratios(distributed(problem, problem.plan(4), backend="rounded"), single, ref)
    assert max(rounded.values()) > GATE


@needs_two
@pytest.mark.parametrize(("name", "window"), CASES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("schedule", ["ring", "sparse_a2a"])
def test_nccl_ranks_equal_virtual_ranks(name: str, window: int | None, heads: tuple[int, int], schedule: str) -> None:
    layout = build(name, 4099, scale=WORKLOADS[name].demo_scale)
    problem = _problem(layout, window, heads)
    virtual = distributed(problem, problem.plan(2, schedule))
    for results in run_processes(_on_nccl, 2, layout.to_json(), window, heads, schedule, backend="nccl"):
        for result in RESULTS:
            assert torch.equal(results[result], virtual[result].cpu()), result
