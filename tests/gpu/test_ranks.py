"""Real ranks on GPUs: as exact as a single call, with a host that never waits, and errors in time.

``python -m pytest tests/gpu/test_ranks.py -v -s`` on a host with two GPUs; every world of two processes ends itself
after a minute or two, whatever happens. Started by ``torchrun``, rank 0 does the same and the others skip.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import (
    FAULTS,
    MODES,
    SCHEDULES,
    TIMEOUT,
    TRANSPORTS,
    exactness,
    fits,
    graphs,
    host_waits,
    mismatched,
    problem_of,
    seen_by_survivors,
    soak,
)

from marble.comm import nccl_rma
from marble.testing.exactness import GATE, RESULTS, distributed, error_ratios, reference, single_call
from marble.testing.processes import run_processes

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(os.environ.get("RANK", "0") != "0", reason="rank 0 starts the processes")
needs_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@needs_gpu
@pytest.mark.parametrize("name", MODES)
def test_virtual_ranks_on_a_gpu_are_exact(name: str) -> None:
    problem = problem_of(name)
    ref, single = reference(problem), single_call(problem)
    for ranks in (1, 2, 4, 8):
        ratios = error_ratios(distributed(problem, problem.plan(ranks)), single, ref)
        assert max(ratios.values()) <= GATE, (ranks, ratios)
    rounded = error_ratios(distributed(problem, problem.plan(4), backend="rounded"), single, ref)
    assert max(rounded.values()) > GATE


@pytest.fixture(scope="module")
def answers() -> list[dict[Any, Any]]:
    """Results of every case, by rank."""
    return run_processes(exactness, 2, backend="nccl")


@needs_two
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_schedule_transport_and_mode_is_exact(answers: Any, transport: str, name: str) -> None:
    """The error ratio, and on both ranks the bits that the other transport gives."""
    problem = problem_of(name)
    ref, single = (
        {key: x.cpu() for key, x in results.items()} for results in (reference(problem), single_call(problem))
    )
    for schedule, ulysses in SCHEDULES:
        if not fits(name, schedule):
            continue
        case = (name, schedule, ulysses)
        results = answers[0][transport, *case]
        ratios = error_ratios(results, single, ref)
        print(f"{transport} {name} {schedule} x {ulysses}: " + ", ".join(f"{k} {v:.4f}" for k, v in ratios.items()))
        assert max(ratios.values()) <= GATE, (case, ratios)
        for rank, key in ((rank, key) for rank in range(2) for key in RESULTS):
            assert torch.equal(answers[rank][transport, *case][key], answers[0]["torch_dist", *case][key]), (case, key)


@needs_two
def test_the_host_waits_for_no_transfer() -> None:
    for rank, found in enumerate(run_processes(host_waits, 2, backend="nccl")):
        for case, (seconds, busy, error) in found.items():
            print(f"rank {rank} {case}: a layer enqueued in {seconds * 1e3:.1f} ms behind a busy GPU")
            assert not error, (rank, case, error)
            assert busy, f"rank {rank}, {case}: the host waited for the GPU, {seconds:.2f} s"


@needs_two
def test_a_layer_is_captured_and_replayed() -> None:
    for rank, found in enumerate(run_processes(graphs, 2, backend="nccl")):
        if not found:
            pytest.skip("needs the Hopper kernels: the reference cannot be captured")
        print(f"rank {rank}: {found}")
        wrong = {case: answer for case, answer in found.items() if case[0] == "nvshmem" and answer is not True}
        assert not wrong, wrong


@needs_two
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_soak(transport: str) -> None:
    """T6: 1000 layers with changing layouts."""
    for found in run_processes(soak, 2, transport, 1000, 200, backend="nccl"):
        print(found)
        assert found["wrong"] == 0
        assert found["after"] - found["before"] < 1 << 24


@needs_two
def test_ranks_that_planned_differently_are_told() -> None:
    """T7: a mismatched plan; once, as the second plans agree."""
    for rank, told in enumerate(run_processes(mismatched, 2, backend="nccl")):
        assert told.startswith(f"plan: rank {rank} and ranks [{1 - rank}] planned different layouts")
        assert told.count("plan: rank") == 1


@needs_two
@pytest.mark.parametrize(("transport", "fault"), FAULTS)
def test_survivors_raise_in_time(transport: str, fault: str, tmp_path: Path) -> None:
    """T7: a rank that is killed, stopped, or runs another layer."""
    seen = seen_by_survivors(tmp_path, transport, fault)
    for rank, saw in seen.items():
        error, seconds = saw["first"]
        print(f"rank {rank}, {seconds:.2f} s: {error}")
        assert seconds < TIMEOUT.total_seconds() + 3
        assert error.wait.rank == rank
        assert error.wait.peer == 1 - rank
        assert error.wait.operation.startswith("layer 0" if rank == 0 else "layer 1")
        again, seconds = saw["next"]
        assert str(again).startswith("group: it failed")
        assert seconds < 1
        if transport == "torch_dist":
            assert saw["alone"].isfinite().all()
        else:
            assert "restart the processes" in str(error)


@needs_gpu
def test_nccl_without_one_sided_transfers_names_its_version() -> None:
    """Where libnccl can do it, nothing is refused, and `bench.layer` measures the transport beside the others."""
    pytest.importorskip("nccl.core")
    version = torch.cuda.nccl.version()
    if version >= (2, 29):
        nccl_rma.check_version()
    else:
        with pytest.raises(ValueError, match=r"needs libnccl 2\.29 or later, (libnccl 2\.\d+|no libnccl is loaded)"):
            nccl_rma.check_version()
