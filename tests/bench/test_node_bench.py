"""The bench of all GPUs of a host: its rows on two processes without a GPU, and its bars."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench.baselines.calls import Case
from bench.baselines.layer_runs import Settings
from bench.baselines.layers import ONE, PER_STEP
from bench.harness import Row
from bench.node import exactness, main, missed, scaling
from marble import AttentionShape
from marble.kernels.launch import backend
from marble.testing.exactness import GATE, RESULTS
from marble.testing.processes import run_processes

CASE = Case("bagel_mix", AttentionShape(4, 2, 64), 768, scale=1 / 64)


def worker(_rank: int) -> Any:
    """Both bars on a small pack, with a clock that stands still."""
    settings = Settings(backend("reference"), torch.device("cpu"), 512, lambda layers: dict.fromkeys(layers, 1.0))
    return exactness(CASE, settings), scaling(CASE, settings)


@pytest.fixture(scope="module")
def answers() -> Any:
    first, second = run_processes(worker, 2)
    assert [[row.metric for row in rows] for rows, _ in first] == [[row.metric for row in rows] for rows, _ in second]
    return first


def test_errors_are_those_of_one_process_and_rounding_at_every_step_shows(answers: Any) -> None:
    rows, refusals = answers[0]
    assert {row.case for row in rows} == {"bagel_mix, 512 tokens, d64, 4:2 heads, 2 ranks"}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        assert (row.bar, row.baseline) == ("N1", ONE)
        ratios.setdefault(row.metric.rpartition(": ")[0], []).append(row.ratio)
    assert set(ratios) == {"ring 2×1, torch_dist", "sparse_a2a 2×1, torch_dist", PER_STEP}
    assert all(len(each) == len(RESULTS) for each in ratios.values())
    assert max(ratios["ring 2×1, torch_dist"] + ratios["sparse_a2a 2×1, torch_dist"]) <= GATE
    assert max(ratios[PER_STEP]) > GATE
    assert refusals["ring 2×1, nvshmem"].startswith("ValueError: transport: 'nvshmem'")
    assert refusals["all-gather, FA4 mask_mod"] == "ValueError: FlashAttention-4 needs a GPU"


def test_a_layer_as_slow_as_on_one_gpu_has_half_of_the_ideal_on_two(answers: Any) -> None:
    rows, refusals = answers[1]
    shares = {row.metric: row.value for row in rows if row.metric.endswith(": share of ideal")}
    names = [name.removesuffix(": share of ideal") for name in shares]
    assert set(shares.values()) == {0.5}
    picked = [name for name in names if name.startswith("picked: ")]
    assert len(picked) == 1
    assert picked[0].endswith(", torch_dist")
    alternatives = ("ring 2×1", "sparse_a2a 2×1", "chunked 2×1", "ring 1×2")
    assert sorted(set(names) - set(picked)) == sorted(f"{name}, torch_dist" for name in alternatives)
    assert all(why.startswith("ValueError") for why in refusals.values())


def test_bars_are_held() -> None:
    exact = Row("N1", "case", "ring 4×2, nvshmem: dq", 1e-3, "", ONE, 1e-3, 1.0)
    pick = Row("N2", "case", "picked: ring 8×1 on ptrr, nvshmem: share of ideal", 0.96)
    slower = replace(pick, metric=pick.metric.replace("nvshmem", "torch_dist"), value=0.9)
    assert missed([exact, pick, slower], 8) == []
    for ratio in (1.03, math.nan, None):
        assert len(missed([replace(exact, ratio=ratio)], 2)) == 1
    assert missed([replace(exact, metric=f"{PER_STEP}: dq", ratio=1.2)], 2) == []
    assert missed([slower], 8) == ["N2 case: 0.900"]
    assert missed([slower], 2) == []


def whole_bench(_rank: int, folder: str) -> int:
    """`main`, on gloo."""
    settings = Settings(backend("reference"), torch.device("cpu"), 256, lambda layers: dict.fromkeys(layers, 1.0))
    with (
        mock.patch("bench.node.join", return_value=settings),
        mock.patch("bench.layer.nvshmem.disconnect"),
        mock.patch("bench.layer.dist.destroy_process_group"),
        mock.patch("bench.node.AttentionShape", lambda *shape: AttentionShape(4, 2, 16, shape[3])),
        mock.patch("bench.node.cases", return_value=[replace(CASE, name="nothing")]),
    ):
        return main(["--workloads", "bagel_mix", "--each", "256", "--all", "0", "--out", folder])


def test_the_bench_writes_what_it_measured_and_says_what_failed(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run_processes(whole_bench, 2, str(tmp_path)) == [1, 1]
    record = json.loads((tmp_path / "node_2.json").read_text())
    assert {row["bar"] for row in record["rows"]} == {"N1"}
    assert record["command"].startswith("python -m bench.node")
    told = capfd.readouterr().out
    assert "failed: ['nothing, 768 tokens, d64, 2 ranks']" in told
    assert "no bar missed" in told
