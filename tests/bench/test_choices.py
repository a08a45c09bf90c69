"""`bench.choices`: measured on two gloo processes, and judged on measurements whose truth is known."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.baselines.calls import DENSE_CAUSAL, Case
from bench.baselines.choices import CHUNKED, Chunked, Settings, as_record, cases, digest, key, of_record, strategies
from bench.baselines.fitting import START, Judged, fitted
from bench.baselines.judging import ALWAYS, CLOSE_RUNS, FEWEST_CASES, PICK, judged, missed
from bench.baselines.layers import Inputs, Layer, alone, differences, whole
from bench.choices import judge, measure
from bench.harness import head
from marble import AttentionShape
from marble.comm.choice import connect
from marble.cost.profile import Profile
from marble.kernels.launch import backend
from marble.order.chunks import RANGE_COST, chunks
from marble.replays import Strategy
from marble.testing.processes import run_processes

CPU = torch.device("cpu")
SMALL = AttentionShape(4, 2, 64)
TINY = Case("bagel_mix", AttentionShape(4, 2, 16), 1024, 1 / 16)
WINDOW = Case("gemma_docs", AttentionShape(4, 2, 16, 100), 1024, 1 / 4)
TRUTH = replace(
    START,
    forward_rate=tuple((dim, 0.6 * rate) for dim, rate in START.forward_rate),
    backward_rate=tuple((dim, 0.5 * rate) for dim, rate in START.backward_rate),
    forward_partial=1.6,
    memory=2e12,
    inside=150e9,
    step=60e-6,
)
PACKS = [
    Case(name, AttentionShape(heads, kv_heads, dim), tokens)
    for name in ("qwen_docs", "molmo_video", "bagel_mix", DENSE_CAUSAL)
    for heads, kv_heads, dim, tokens in ((32, 8, 128, 8192), (16, 16, 64, 16384))
]


def timed(layers: Mapping[str, Layer]) -> dict[str, float]:
    """Milliseconds of one run of each."""
    found = {}
    for name, layer in layers.items():
        begun = time.perf_counter()
        layer()
        found[name] = 1e3 * (time.perf_counter() - begun)
    return found


def worker(_rank: int) -> dict[str, Any]:
    """All that two processes do together."""
    group = dist.group.WORLD
    assert group is not None
    settings = Settings(backend("reference"), CPU, connect("torch_dist", group, CPU), timed)
    kept: list[dict[str, int]] = []

    def keep(raw: dict[str, Any]) -> None:
        kept.append({name: len(found) for name, found in raw.items()})

    long = replace(TINY, name="bagel_long", scale=1 / 12)
    raw = measure([TINY, WINDOW, replace(TINY, tokens=-1)], [(long, 1), (long, 4)], settings, 600, keep)
    late = measure([TINY], [], settings, -1.0, keep)
    inputs = Inputs.random(TINY, CPU, sets=1)
    expected = whole(alone(TINY, inputs, backend("reference")), TINY.tokens)
    layers, _ = settings.accepted(TINY)
    wrong = {name: max(differences(layer, expected).values()) for name, layer in layers.items()}
    return {
        "raw": head("choices") | {"transport": "torch_dist", "ranks": 2} | raw,
        "kept": kept,
        "late": late,
        "wrong": wrong,
    }


@pytest.fixture(scope="module")
def measured() -> Any:
    first, second = run_processes(worker, 2)
    assert second["kept"] == []
    return first


def test_every_strategy_is_measured_and_right(measured: Any) -> None:
    pack, window = measured["raw"]["cases"]
    names = {str(strategy) for strategy in strategies(2, 4)}
    assert len(names) == 4 * 3 + 1 + 1
    assert set(pack["ms"]) == names
    assert all(ms > 0 for ms in pack["ms"].values())
    assert set(measured["wrong"]) == names
    assert max(measured["wrong"].values()) < 1e-2
    assert set(window["ms"]) | set(window["refused"]) == names
    assert all("chunks" in name and why.startswith("ValueError") for name, why in window["refused"].items())
    assert len(window["refused"]) == 4
    assert pack["pieces"]["ring, contiguous, 1×2"] > pack["pieces"]["ring, ptrr, 2×1"] == 2 * 1 + 2 * 2 + 1
    for case in (pack, window):
        fastest = case["replay"]["strategy"]
        assert case["ms"][fastest] == min(case["ms"].values())
        assert 0.1 < case["replay"]["ms"] / case["ms"][fastest] < 10


def test_what_is_measured_is_kept_case_by_case(measured: Any) -> None:
    assert measured["kept"] == [
        *({"cases": 0, "chunked": count, "left_out": 0} for count in (1, 2)),
        *({"cases": count, "chunked": 2, "left_out": 0} for count in (1, 2)),
        {"cases": 2, "chunked": 2, "left_out": 1},
    ]
    assert "failed: RuntimeError" in measured["raw"]["left_out"][0]
    assert measured["late"] == {"cases": [], "chunked": [], "left_out": [f"{key(TINY)}: no time left"]}


def test_measurements_are_judged(measured: Any, tmp_path: Path) -> None:
    """From the file, without a GPU; so few cases miss the bars."""
    path = tmp_path / "raw.json"
    path.write_text(json.dumps(measured["raw"]))
    # Head size 16 has no rates to begin with.
    raw = json.loads(path.read_text())
    for case in raw["cases"]:
        case["shape"]["head_dim"] = 64
    path.write_text(json.dumps(raw))
    assert judge(path, tmp_path, tmp_path / "fitted.toml") == 1
    profile = Profile.load(tmp_path / "fitted.toml")
    assert profile.machine == "fitted to 2 layers of two ranks"
    assert dict(profile.sources)["step"].startswith("fitted to 2 layers")
    assert dict(profile.sources)["forward_rate.128"] == dict(START.sources)["forward_rate.128"]
    kept = json.loads((tmp_path / "choices.json").read_text())
    assert {row["bar"] for row in kept["rows"]} == {"C1", "constants", "tau", "replay"}
    layers = [row for row in kept["rows"] if row["metric"] == "layer, replay"]
    assert len(layers) == 2 + 2
    assert all(row["ratio"] == pytest.approx(row["value"] / row["baseline_value"]) for row in layers)
    most = next(row["value"] for row in kept["rows"] if row["metric"] == "replay over measured, most")
    assert most == max(row["ratio"] for row in layers)
    assert "over torch_dist" in kept["left_out"][0]


def test_measuring_needs_no_scipy() -> None:
    code = "import sys; sys.modules['scipy'] = None; import bench.choices, bench.replay"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)


def test_cases_are_many_different_and_shuffled() -> None:
    found = cases()
    assert len({key(case) for case in found}) == len(found) >= 72
    assert [key(of_record(json.loads(json.dumps(as_record(case))))) for case in found] == list(map(key, found))
    assert found == sorted(found, key=digest)
    half = {case.name for case in found[: len(found) // 2]}
    assert half == {case.name for case in found}
    assert {case.shape.window for case in found} == {None, 1024}
    assert len(set(CHUNKED)) == 9


def test_degrees_that_do_not_divide_the_heads_are_no_strategies() -> None:
    assert {strategy.ulysses for strategy in strategies(4, 6)} == {1, 2}
    assert [str(each) for each in strategies(2, 2) if each.ulysses == 2] == ["ring, contiguous, 1×2"]


def test_c_of_given_chunks_is_that_of_the_order() -> None:
    case = Case("bagel_long", AttentionShape(4, 2, 16), 4096, 1 / 12)
    for per_rank in (1, 2, 4):
        found = Chunked.of(case, 2, per_rank)
        assert found.ranges == 2 * per_rank
        assert sorted(found.rank.tolist()) == sorted([0, 1] * per_rank)
        plan = found.plan(case, 1)
        assert plan.order.lengths == (2048, 2048)
        assert found.pairs >= chunks(found.mask, 2, 4096 // (2 * per_rank), tau=0.0, refine=False).mean
    assert Chunked.of(case, 2, 2).rank.tolist() == [0, 1, 1, 0]


def known(case: Case, noise: np.random.Generator, size: float = 0.01) -> dict[str, Any]:
    """A case as if it had been measured where the true constants hold."""
    names = [str(each) for each in strategies(2, case.shape.heads)]
    record = as_record(case) | {"ms": dict.fromkeys(names, 1.0), "pieces": dict.fromkeys(names, 2)}
    found = Judged.of(record, 2).predicted(TRUTH)
    return record | {
        "ms": {str(each): ms * float(np.exp(size * noise.standard_normal())) for each, ms in found.items()}
    }


@pytest.fixture(scope="module")
def synthetic() -> dict[str, Any]:
    noise = np.random.default_rng(1)
    pairs = [1e9, 2e9, 4e9]
    runs = [
        as_record(TINY) | {"chunks": k, "ranges": 2 * k, "pairs": p, "ms": 2e-8 * (p + 2.0**21 * 2 * k)}
        for p in pairs
        for k in (2, 16, 64)
    ]
    return {"ranks": 2, "cases": [known(case, noise) for case in PACKS], "chunked": runs}


def test_constants_are_found_where_they_hold(synthetic: dict[str, Any]) -> None:
    """Whole layers tell the time of a tile in both passes together, not in each."""
    cases = [Judged.of(record, 2) for record in synthetic["cases"]]
    found = fitted(cases)
    for dim in (64, 128):
        both, true = (sum(4 / a + 10 / b for a, b in [profile.rates(dim)]) for profile in (found, TRUTH))
        assert both == pytest.approx(true, rel=0.05)
    assert found.step == pytest.approx(TRUTH.step, rel=0.1)
    assert found.inside == pytest.approx(TRUTH.inside, rel=0.1)
    errors = [each.predicted(found)[strategy] / ms - 1 for each in cases for strategy, ms in each.ms.items()]
    assert np.abs(errors).mean() < 0.015


def test_good_picks_hold_every_bar_but_the_number_of_cases(synthetic: dict[str, Any]) -> None:
    rows = judged(synthetic)
    short = missed(rows)
    assert len(short) == 1
    assert short[0].startswith("C1 cases: ")
    assert rows[0].baseline_value == FEWEST_CASES
    shares = [row.value for row in rows if row.metric.startswith("picks within")]
    assert min(shares[:2]) == 1.0
    rules = [row for row in rows if (row.baseline or "").startswith(ALWAYS)]
    assert len(rules) == 14
    assert all(row.value <= row.baseline_value for row in rules)
    assert len([row for row in rows if row.metric == PICK]) == rows[0].value


def test_picks_of_a_wrong_model_miss(synthetic: dict[str, Any]) -> None:
    """The same times, dealt to other strategies."""
    noise = np.random.default_rng(2)
    shuffled = []
    for record in synthetic["cases"]:
        times = noise.permutation(list(record["ms"].values())).tolist()
        shuffled.append(record | {"ms": dict(zip(record["ms"], times, strict=True))})
    rows = judged(synthetic | {"cases": shuffled})
    far = [row.case for row in rows if row.metric.startswith("transfers and sums")]
    assert far == [row.case for row in rows if row.metric == PICK and row.ratio > 1.05] != []
    short = missed(rows)
    assert {"picks within 10% of the fastest", "picks within 5% of the fastest"} <= {
        text.removeprefix("C1 ").partition(":")[0] for text in short
    }


def test_no_case_is_judged_by_constants_that_it_was_fitted_to(
    synthetic: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[bytes]] = []

    def spy(cases: list[Judged]) -> Any:
        seen.append([digest(each.case) for each in cases])
        return replace(TRUTH, machine=str(len(seen) - 1))

    def picked(self: Judged, profile: Any) -> Strategy:
        if profile is not START:
            assert digest(self.case) not in seen[int(profile.machine)]
        return next(iter(self.ms))

    monkeypatch.setattr("bench.baselines.judging.fitted", spy)
    monkeypatch.setattr(Judged, "picked", picked)
    judged(synthetic)
    assert len(seen) == 2
    assert set(seen[0]).isdisjoint(seen[1])
    assert len(seen[0]) + len(seen[1]) == len(PACKS)


def test_tau_is_found_and_runs_that_c_misses_are_counted(synthetic: dict[str, Any]) -> None:
    tau, close, others, *layers = (row for row in judged(synthetic | {"cases": []}) if row.bar == "tau")
    assert tau.value == pytest.approx(2.0**21)
    assert tau.value != RANGE_COST
    assert close.value == others.value == 9
    assert len(layers) == 9
    off = [run | {"ms": run["ms"] * (1.1 if number < 2 else 1.0)} for number, run in enumerate(synthetic["chunked"])]
    found = judged({"ranks": 2, "cases": [], "chunked": off})
    assert next(row for row in found if row.metric.endswith("of C")).value < CLOSE_RUNS
    assert any(text.startswith("tau runs within 3% of C") for text in missed(found))
    assert len(missed(judged({"ranks": 2, "cases": [], "chunked": []}))) == 2
