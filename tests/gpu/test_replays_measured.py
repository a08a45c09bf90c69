"""Replays on a GPU: one rank's takes as long as the layer, and any rank of many can be replayed."""

from dataclasses import replace
from statistics import median

import pytest
import torch

import marble
from bench.baselines.calls import Case
from bench.baselines.layers import Inputs, alone
from marble import AttentionShape
from marble.cost.profile import Profile
from marble.kernels.launch import backend
from marble.replay import replay_rank
from marble.replays import Expected, Strategy, replay

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

CASE = Case("bagel_mix", AttentionShape(28, 4, 128), 64 * 1024)
LONG = replace(CASE, tokens=256 * 1024)


def test_a_replay_of_one_rank_takes_as_long_as_the_layer() -> None:
    """The layer also rounds its gradients, and is timed as a whole."""
    device, kernels = torch.device("cuda", torch.cuda.current_device()), backend("cute")
    layer, times = alone(CASE, Inputs.random(CASE, device, sets=1), kernels), []
    for repeat in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(40_000_000)
        start.record()
        layer()
        stop.record()
        stop.synchronize()
        times += [start.elapsed_time(stop) / 1e3] if repeat >= 2 else []
    plan = marble.plan(CASE.layout, CASE.shape, ranks=1, device=device)
    found = replay_rank(plan, 0, kernels, device=device)
    assert 0.85 <= found.seconds / median(times) <= 1.03


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(16, "ring", "ptrr", 4),
        Strategy(16, "sparse_a2a", "balanced_samples", 2),
        Strategy(16, "chunked", "chunks"),
        Strategy(16, "all_gather", "contiguous"),
    ],
    ids=str,
)
def test_any_rank_of_many_is_replayed(strategy: Strategy) -> None:
    """And no step waits for the host: the estimate, which knows none, is not far off."""
    device, profile = torch.device("cuda", torch.cuda.current_device()), Profile.load("h100-cluster")
    expected = Expected.of(LONG.layout, LONG.shape, strategy, profile)
    ranks = expected.worth_replaying(2)
    found = replay(LONG.layout, LONG.shape, expected, ranks, profile, backend("cute"), device=device)
    assert [rank.rank for rank in found.layer.ranks] == list(ranks)
    groups = [rank // strategy.ulysses for rank in ranks]
    estimate = expected.compute[:, groups].max(1).sum()
    assert 0.5 <= found.layer.compute / float(estimate) <= 3.0
    assert found.layer.nbytes <= expected.memory
