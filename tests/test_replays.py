"""Strategies replayed: who is worth it, what transfers cost, and what the command line says of it."""

import json
import sys
import time
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import marble
from marble import AttentionShape, Layout, Span
from marble.cli import main
from marble.cost.profile import Profile, ProfileError
from marble.kernels import launch
from marble.replay import RankReplay, StepReplay, replay_layer, replay_rank
from marble.replays import Expected, Strategy, plans, price_of, replay
from marble.workloads import build

CLUSTER, NODE = Profile.load("h100-cluster"), Profile.load("h200")
CPU = torch.device("cpu")
LAYOUT, SHAPE = build("bagel_mix", 4096, 0, 1 / 16), AttentionShape(4, 2, 128)
STRATEGIES = [
    Strategy(16, "ring", "ptrr"),
    Strategy(16, "ring", "ptrr", 4),
    Strategy(16, "sparse_a2a", "balanced_samples", 2),
    Strategy(16, "chunked", "chunks", 2),
    Strategy(16, "all_gather", "contiguous"),
    Strategy(4, "ring", "ptrr", 4),
]


class SlowDelta:
    """The reference, whose delta takes a while."""

    def __init__(self, seconds: float) -> None:
        self.inner, self.seconds = launch.backend("reference"), seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def delta(self, *args: Any) -> Any:
        time.sleep(self.seconds)
        return self.inner.delta(*args)


def expected(compute: list[list[float]], links: list[list[float]], ulysses: int = 1) -> Expected:
    strategy = Strategy(len(compute[0]) * ulysses, "ring", "ptrr", ulysses)
    return Expected(strategy, 1, np.array(compute), np.array(links), 0)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_transfers_are_priced_as_the_estimate_prices_them(strategy: Strategy) -> None:
    """All-to-alls of Ulysses, rings and fetched keys, inside nodes of 8 and across them."""
    found = Expected.of(LAYOUT, SHAPE, strategy, CLUSTER)
    ranks = found.worth_replaying(2)
    layer = replay(LAYOUT, SHAPE, found, ranks, CLUSTER, launch.backend("reference"), device=CPU, repeats=1, warmup=0)
    price = price_of(CLUSTER)
    for rank in layer.layer.ranks:
        seconds = [price(rank.rank, step) for step in (*rank.forward, *rank.backward)]
        assert seconds == pytest.approx(found.links[:, rank.rank // strategy.ulysses])
    assert found.links.any()
    assert layer.layer.nbytes <= found.memory


def test_transfers_inside_and_across_nodes_add_up_and_the_larger_direction_counts() -> None:
    step = StepReplay(0.0, {1: 10, 9: 50, 10: 20}, {2: 30, 8: 60})
    inside, across = CLUSTER.inside, CLUSTER.bandwidth_across
    assert price_of(CLUSTER)(0, step) == pytest.approx(30 / inside + 70 / across)
    assert price_of(CLUSTER)(8, step) == pytest.approx(70 / inside + 30 / across)
    with pytest.raises(ProfileError, match="no bandwidth between nodes"):
        price_of(NODE)(0, step)
    assert price_of(NODE)(0, StepReplay(0.0, {7: 10}, {})) == pytest.approx(10 / NODE.inside)


def test_every_step_that_moves_rows_takes_its_fixed_time() -> None:
    steps = StepReplay(1.0, {1: 8}, {}), StepReplay(2.0, {}, {}), StepReplay(1.0, {}, {1: 8})
    layer = replay_layer([RankReplay(0, steps, steps[1:], 7)], lambda _rank, _step: 1.5, fixed=0.25)
    assert layer.forward.seconds == 1.5 + 2.0 + 1.5 + 2 * 0.25
    assert layer.backward.seconds == 2.0 + 1.5 + 0.25
    assert layer.compute == 7.0
    assert layer.exposed == pytest.approx(layer.seconds - 7.0)


def test_the_busiest_the_dearest_and_those_waited_for_are_replayed() -> None:
    compute = [[5.0, 1.0, 1.0, 4.0], [5.0, 1.0, 7.0, 4.0]]
    links = [[0.0, 3.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]]
    found = expected(compute, links)
    assert found.worth_replaying(1) == (0,)
    assert found.worth_replaying(2) == (0, 1)
    assert found.worth_replaying(3) == (0, 1, 2)
    assert found.worth_replaying(9) == (0, 1, 2, 3)
    assert expected(compute, np.zeros((2, 4)).tolist()).worth_replaying(2) == (0, 2)
    assert expected(compute, links, 2).worth_replaying(3) == (0, 2, 4)


def test_what_the_replayed_ranks_make_up_is_said() -> None:
    found = expected([[5.0, 1.0], [1.0, 3.0]], [[0.0, 0.0], [0.0, 0.0]])
    assert found.covered([0]) == pytest.approx(6 / 8)
    assert found.covered([0, 1]) == 1.0
    assert found.balance == pytest.approx([5 / 3, 3 / 2])
    assert expected([[0.0, 0.0]], [[0.0, 0.0]]).covered([1]) == 1.0


def interleaved() -> Layout:
    """Two noise groups that alternate, so that their tokens have no visible ranges."""
    return Layout((tuple(Span("noise", 64, span % 2) for span in range(16)),))


def test_ranks_without_visible_ranges_are_estimated_by_group() -> None:
    found = Expected.of(interleaved(), SHAPE, Strategy(8, "ring", "contiguous", 4), CLUSTER)
    plain = Expected.of(Layout(((Span("causal", 1024),),)), SHAPE, Strategy(8, "ring", "contiguous", 4), CLUSTER)
    assert found.compute.shape == plain.compute.shape == found.links.shape == (9, 2)
    assert found.worth_replaying(8) == (0, 4)
    assert found.covered([3, 7]) == found.covered(range(8)) == 1.0
    assert found.covered([7]) == found.covered([4])
    assert len(found.balance) == 9


def test_few_ranks_are_planned_one_by_one_and_all_together() -> None:
    strategy = Strategy(4, "sparse_a2a", "contiguous")
    few = list(plans(LAYOUT, SHAPE, strategy, (1, 3), CPU))
    assert [(rank, list(plan.schedules[0])) for rank, plan in few] == [(1, [1]), (3, [3])]
    every = list(plans(LAYOUT, SHAPE, strategy, range(4), CPU))
    assert [rank for rank, _ in every] == [0, 1, 2, 3]
    assert len({id(plan) for _, plan in every}) == 1


def test_what_a_pass_does_before_its_first_step_is_timed() -> None:
    plan = marble.plan(LAYOUT, SHAPE, ranks=4, rank=1)
    found = replay_rank(plan, 1, SlowDelta(0.2), device="cpu", repeats=1, warmup=0)
    assert found.backward[0].seconds > 0.2


def test_impossible_strategies_are_refused() -> None:
    windowed = changed(SHAPE, window=64)
    with pytest.raises(ValueError, match="cannot be 'chunked' under the order 'ptrr'"):
        Expected.of(LAYOUT, SHAPE, Strategy(4, "chunked", "ptrr"), CLUSTER)
    with pytest.raises(ValueError, match="cannot be 'chunked' under the order 'chunks'"):
        Expected.of(LAYOUT, windowed, Strategy(4, "chunked", "chunks"), CLUSTER)
    with pytest.raises(ValueError, match="cannot be 'all_gather' where all ranks share heads"):
        Expected.of(LAYOUT, SHAPE, Strategy(4, "all_gather", "contiguous", 4), CLUSTER)
    with pytest.raises(ProfileError, match="no bandwidth between nodes"):
        Expected.of(LAYOUT, SHAPE, Strategy(16, "ring", "ptrr"), NODE)


def said(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    source: tuple[str, ...] = ("gemma_docs", "--tokens=2048"),
) -> str:
    """What `marble replay` prints for a small pack on virtual ranks of the reference backend."""
    command = ["marble", "replay", *source, "--backend=reference", "--shape=4:2:128", *words]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        main()
    out, errors = capsys.readouterr()
    return out if stop.value.code == 0 else f"exit {stop.value.code}: {errors}"


def test_the_command_line_replays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.loads(said(capsys, monkeypatch, "--ranks=4", "--schedule=ring", "--which=all", "--json"))
    assert told["kind"] == "replay"
    assert told["strategy"] == "ring, ptrr, 4×1"
    assert told["ranks"] == [0, 1, 2, 3]
    assert told["covered"] == 1.0
    assert told["seconds"] == pytest.approx(told["forward"] + told["backward"])
    assert told["seconds"] == pytest.approx(told["compute"] + told["exposed"])
    assert told["compute"] <= sum(map(sum, told["steps"]))
    assert len(told["balance"]) == sum(map(len, told["steps"])) == 4 + 5
    picked = json.loads(said(capsys, monkeypatch, "--ranks=4", "--ulysses=2", "--window=256", "--json"))
    assert picked["strategy"].endswith("2×2")
    assert len(picked["ranks"]) <= 3
    text = said(capsys, monkeypatch, "--ranks=4", "--schedule=sparse_a2a", "--which=2")
    assert "replay, not a run on 4 GPUs" in text.replace("\n", " ")
    assert "replay: ranks wait" in text


def test_the_command_line_replays_a_layout_without_visible_ranges(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "inter.json"
    path.write_text(interleaved().to_json())
    words = ("--ranks=8", "--ulysses=4", "--schedule=ring", "--order=contiguous", "--json")
    told = json.loads(said(capsys, monkeypatch, *words, source=(str(path),)))
    assert told["ranks"] == [0, 4]
    assert told["covered"] == 1.0
    assert len(told["balance"]) == sum(map(len, told["steps"])) == 9


def test_the_command_line_refuses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in (
        (("--ranks=4", "--which=4"), "ranks from 0 to 3 by commas, got '4'"),
        (("--ranks=4", "--which=some"), "got 'some'"),
        (("--ranks=16", "--profile=h200"), "no bandwidth between nodes"),
        (("--ranks=4", "--schedule=chunked", "--order=ptrr"), "cannot be 'chunked' under"),
        (("--ranks=4", "--schedule=ring", "--backend=none"), "backend: 'none' is unknown"),
    ):
        told = said(capsys, monkeypatch, *words).replace("\n", " ")
        assert told.startswith("exit 2"), told
        assert message in told
