"""`bench.replay`: what it replays, what it says of it, and when a bar is missed."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import marble
from bench.baselines.calls import Case as Whole
from bench.baselines.calls import rank_pairs
from bench.baselines.replay_rows import LEAST, MEMORY, PAPER, SEED, missed, rate_rows, rows
from bench.baselines.replays import (
    CHUNKED,
    CONTIGUOUS,
    FETCH,
    GATHER,
    MI,
    PICKED,
    PTRR,
    RING,
    ULYSSES_GATHER,
    Answer,
    Case,
    Settings,
    least_seconds,
)
from bench.harness import Row, write
from bench.replay import PARTS, measure
from bench.report import REPLAYS, read
from marble import AttentionShape
from marble.cost.profile import Profile
from marble.kernels import launch
from marble.replay import RankReplay, StepReplay, replay_layer
from marble.replays import Expected, Replay, Strategy
from marble.workloads import build

CLUSTER, H200 = Profile.load("h100-cluster"), Profile.load("h200")
ROLES = (PICKED, RING, CHUNKED, FETCH, GATHER, ULYSSES_GATHER, PTRR, CONTIGUOUS)
SETTINGS = Settings(launch.backend("reference"), torch.device("cpu"), CLUSTER, H200, 0.0)


class Small(Case):
    """A case with few heads."""

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(4, 2, 128)


@dataclass(frozen=True)
class Narrow(Settings):
    """A GPU that fetched keys of all ranks do not fit on."""

    @property
    def room(self) -> float:
        return 8e6


def replayed(strategy: Strategy, seconds: float, nbytes: int, share: float = 0.9) -> Answer:
    """As if one rank of a strategy had computed for so long."""
    expected = Expected(strategy, 1, np.array([[seconds, seconds / 2]]), np.zeros((1, 2)), 2.0 * nbytes)
    step = (StepReplay(seconds / 2, {1: 1}, {}),)
    layer = replay_layer([RankReplay(0, step, step, nbytes)], lambda _rank, _step: seconds)
    return Answer(expected, Replay(expected, layer), share)


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "name"),
    [("ring", "gemma_docs"), ("sparse_a2a", "molmo_docs"), ("chunked", "bagel_mix"), ("all_gather", "bagel_mix")],
)
def test_all_ranks_together_compute_the_legal_pairs(schedule: str, name: str, ulysses: int) -> None:
    shape = AttentionShape(4, 2, 128)
    whole = Whole(name, shape, 4096, 1 / 8)
    plan = marble.plan(whole.layout, shape, ranks=8, schedule=schedule, ulysses=ulysses)
    found = sum(rank_pairs(plan.schedules[0][rank]) for rank in range(8))
    assert found == whole.whole().legal_pairs * shape.heads


def test_the_least_time_is_that_of_legal_pairs_at_the_rates_of_full_tiles() -> None:
    plan = marble.plan(build("bagel_mix", 1024, 0, 1 / 16), AttentionShape(4, 2, 128), ranks=2)
    schedule = plan.schedules[0][1]
    flop = 2 * 128 * rank_pairs(schedule)
    forward, backward = H200.rates(128)
    assert least_seconds(schedule, 128, H200) == pytest.approx(2 * flop / forward + 5 * flop / backward)


def test_the_rates_that_compute_is_held_to_are_said() -> None:
    here = replace(H200, machine="this one", forward_rate=((128, 700e12),), backward_rate=((128, 600e12),))
    forward, backward = rate_rows(here, H200)
    assert forward.case == "this one"
    assert forward.metric == "forward_rate.128, by marble fit"
    assert (forward.value, backward.value) == (700.0, 600.0)
    assert forward.ratio == pytest.approx(700e12 / H200.rates(128)[0])
    assert backward.ratio == pytest.approx(600e12 / H200.rates(128)[1])
    assert missed([forward, backward]) == []


def test_every_role_is_replayed(tmp_path: Path) -> None:
    said: list[int] = []
    cases = [Small("bagel_mix", 0, 2048, 8, ROLES, 0, 1 / 16), Small("bagel_mix", 0, -1, 8, ROLES)]

    def keep(found: list[Row], left_out: list[str]) -> None:
        said.append(len(found))
        write("replay", found, tmp_path, part="small", left_out=left_out)

    found = measure(cases, SETTINGS, keep)
    assert said == [len(found), len(found)]
    kept = json.loads((tmp_path / "replay_small.json").read_text())
    assert any("-1 tokens" in reason and "failed: ValueError" in reason for reason in kept["left_out"])
    layers = {row.metric: row for row in found if row.metric.endswith(", replay: layer")}
    assert set(layers) == {f"{role}, replay: layer" for role in ROLES}
    assert all(row.value > 0 for row in layers.values())
    for role, name in (
        (RING, "ring, "),
        (CHUNKED, "chunked, chunks"),
        (GATHER, "all_gather, "),
        (PTRR, "ring, ptrr, 8×1"),
    ):
        assert name in layers[f"{role}, replay: layer"].case
    assert layers[f"{GATHER}, replay: layer"].case.endswith("8×1")
    assert not layers[f"{ULYSSES_GATHER}, replay: layer"].case.endswith("8×1")
    beside = {row.baseline.partition(":")[0] for row in found if row.metric == "layer, replay: picked"}
    assert beside == {RING, CHUNKED, f"{FETCH}, as the seed's table", GATHER, ULYSSES_GATHER}
    (alike,) = (row for row in found if row.metric == "layer, replay: picked" and row.baseline.startswith(FETCH))
    assert alike.case.rpartition(": ")[2] == alike.baseline.rpartition(": ")[2]
    assert alike.ratio == 1.0  # what is picked is the sparse all-to-all, replayed once
    assert [row.baseline for row in found if row.metric == "layer, replay: ring on ptrr"] == [CONTIGUOUS]
    record = read(tmp_path / "replay_small.json")
    assert record.replayed
    assert record.section in REPLAYS


def test_what_does_not_fit_is_left_out_and_its_memory_is_still_said() -> None:
    kept: list[str] = []
    small = Small("bagel_mix", 0, 2048, 8, (PICKED, GATHER), 0, 1 / 16)
    narrow = Narrow(*(getattr(SETTINGS, name) for name in ("kernels", "device", "profile", "rates", "budget")))
    found = measure([small], narrow, lambda _rows, left_out: kept.extend(left_out))
    assert any("all-gather: 0.0103 GiB by the estimate do not fit" in reason for reason in kept)
    assert not any(row.metric.startswith(GATHER) for row in found)
    (memory,) = (row for row in found if row.metric == MEMORY)
    assert memory.value * 2**30 < 8e6 < memory.baseline_value * 2**30


def test_time_is_shared_out() -> None:
    settings = Settings(SETTINGS.kernels, SETTINGS.device, CLUSTER, H200, 2.5)
    strategy = Strategy(32, "ring", "ptrr")
    assert settings.runs(PICKED, strategy, 0.004) == (3, 5, 1)
    assert settings.runs(PICKED, strategy, 0.25) == (3, 2, 1)
    assert settings.runs(PICKED, strategy, 1.1) == (2, 1, 0)
    assert settings.runs(PICKED, strategy, 9.0) == (1, 1, 0)
    assert settings.runs(CONTIGUOUS, strategy, 0.25) == (32, 1, 0)
    assert settings.runs(PTRR, strategy, 0.004) == (32, 1, 1)


def test_rows_stand_beside_the_seed_for_the_mean_pack() -> None:
    case = Case("bagel_long", 0, MI, 32, ())
    one, other = Strategy(32, "ring", "ptrr", 4), Strategy(32, "all_gather", "contiguous")
    found = list(rows(case, {PICKED: replayed(one, 0.5, 2**30), GATHER: replayed(other, 1.0, 2**33)}))
    over = next(row.value for row in found if row.metric.startswith("legal pairs over the mean"))
    assert over == pytest.approx(case.over_mean_pack())
    scaled, memory = (row for row in found if row.baseline == SEED)
    assert scaled.value == pytest.approx(1e3 * (0.5 + 0.5) / over)  # transfers hide half of each pass
    assert (scaled.baseline_value, memory.baseline_value) == PAPER[MI, 32]
    assert scaled.ratio == pytest.approx(scaled.value / 407)
    exposed = next(row for row in found if row.metric == f"{PICKED}, replay: exposed communication")
    assert exposed.value == pytest.approx(500)
    assert exposed.ratio == pytest.approx(0.5)


def test_bars_are_held() -> None:
    case = Case("qwen_docs", 0, MI, 32, ())
    one, other = Strategy(32, "ring", "ptrr"), Strategy(32, "all_gather", "contiguous")

    def short(share: float, nbytes: int, of_other: float = 0.1) -> list[str]:
        found = {PICKED: replayed(one, 1.0, nbytes, share), GATHER: replayed(other, 1.0, 2**30, of_other)}
        return missed(list(rows(case, found)))

    assert short(0.85, 2**29) == []
    assert len(short(0.849, 2**29)) == 1
    assert len(short(0.9, 2**30)) == 1
    assert "0.849" in short(0.849, 2**29)[0]
    assert {row.baseline for row in rows(case, {PICKED: replayed(one, 1.0, 1)})} == {LEAST, "layer", None}


def test_the_declared_cases_are_those_of_the_issue() -> None:
    assert {(case.name, case.tokens // MI, case.ranks) for case in PARTS["long"]} == {
        ("bagel_long", 1, 32),
        ("bagel_long", 2, 32),
        ("bagel_long", 4, 32),
        ("bagel_long", 8, 64),
    }
    for part in ("models", "wide"):
        assert {(case.tokens // MI, case.ranks) for case in PARTS[part]} == {(1, 32), (2, 64), (4, 128)}
    assert {(case.name, case.shape.head_dim) for case in PARTS["wide"]} == {("qwen_docs", 256), ("qwen_video", 256)}
    keys = [case.key for part in PARTS.values() for case in part]
    assert len(set(keys)) == len(
        {(case.name, case.model, case.kind, case.tokens, case.ranks) for part in PARTS.values() for case in part}
    )
    assert [case.shape.window for case in PARTS["choice"] if case.name == "gemma_docs"] == [None, 1024]
