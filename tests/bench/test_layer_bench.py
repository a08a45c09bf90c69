"""The contenders of `bench.layer` on two gloo processes: right as they are, and wrong without their transfers."""

from typing import Any

import pytest
import torch

from bench.baselines.calls import Case
from bench.baselines.layers import RESULTS, Inputs, alone, differences, of_ranks
from bench.harness import Row
from bench.layer import DIFFERENT, missed
from marble import AttentionShape
from marble.kernels.launch import backend
from marble.testing.processes import run_processes

CASES = [Case("bagel_mix", AttentionShape(4, 2, 16), 1500, 0.05), Case("gemma_docs", AttentionShape(4, 2, 16, 96), 900)]


def worker(_rank: int) -> dict[Any, dict[str, float]]:
    """Differences to one rank, by case, contender and whether its transfers are left out."""
    found, kernels = {}, backend("reference")
    for number, case in enumerate(CASES):
        inputs = Inputs.random(case, torch.device("cpu"))
        single = alone(case, inputs, kernels)
        for contender in of_ranks(case, inputs, kernels, ["torch_dist"]):
            found[number, contender.name, True] = differences(contender, single)
            found[number, contender.name, False] = differences(contender.silent(), single)
    return found


@pytest.fixture(scope="module")
def answers() -> list[dict[Any, dict[str, float]]]:
    return run_processes(worker, 2)


def test_every_contender_agrees_with_one_rank(answers: Any) -> None:
    assert answers[0] == answers[1]
    names = {name for number, name, _ in answers[0] if number == 0}
    assert names == {f"{schedule}, torch_dist" for schedule in ("ring", "sparse_a2a", "chunked", "ulysses")}
    assert {name for number, name, _ in answers[0] if number == 1} == names - {"chunked, torch_dist"}
    for (number, name, whole), found in answers[0].items():
        assert tuple(found) == RESULTS
        assert (max(found.values()) <= DIFFERENT) == whole, (number, name, found)


def test_bars_are_held() -> None:
    def rows(overlapped: float, *scaling: float) -> list[Row]:
        t3 = [Row("T3", "case", f"contender {number}", 1, ratio=ratio) for number, ratio in enumerate(scaling)]
        return [Row("T2", "case", "ring, nvshmem", 1, ratio=overlapped), *t3]

    assert missed(rows(1.02, 1.2, 1.9)) == []
    assert missed(rows(1.03, 1.9)) == ["T2 case: 1.030"]
    assert missed(rows(1.0, 1.2, 1.89)) == ["T3 case: 1.890"]
