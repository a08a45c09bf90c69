"""A strategy replayed: which ranks are worth it, their plans one at a time, and the price of what they exchange.

Ranks wait for the slowest where rows move, so few ranks say most of a layer: the busiest, those whose transfers take
longest, and those that others wait for, all by the estimate. How much of the estimate's layer the chosen ranks make up
is kept beside the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from marble.compose.plan import Plan
from marble.compose.planner import estimates, plan
from marble.compose.shape import AttentionShape
from marble.cost.estimate import Estimate
from marble.cost.loads import compute_seconds, transfer_seconds
from marble.cost.profile import Profile
from marble.cost.waiting import Array, ends
from marble.kernels.contract import Backend
from marble.layout import Layout
from marble.replay import LayerReplay, Price, StepReplay, replay_layer, replay_rank


@dataclass(frozen=True)
class Strategy:
    """How a layer is spread over ranks, in the words of `marble.plan`."""

    ranks: int
    schedule: str
    order: str
    ulysses: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}, {self.order}, {self.ranks // self.ulysses}×{self.ulysses}"


@dataclass(frozen=True, eq=False)
class Expected:
    """What the estimate says of every rank.

    Attributes:
        strategy: whose layer it is.
        forward: steps of the forward pass, which come first.
        compute: seconds that every group of ranks that share heads computes, float64 [steps, groups].
        links: seconds that its transfers take, float64 [steps, groups].
        memory: bytes of the buffers of the fullest rank.
    """

    strategy: Strategy
    forward: int
    compute: Array
    links: Array
    memory: float

    @classmethod
    def of(cls, layout: Layout, layer: AttentionShape, strategy: Strategy, profile: Profile) -> Expected:
        """Estimate one layer.

        Raises:
            ValueError: if the layer cannot have the schedule under the order, or the profile does not hold for it.
        """
        order, degree, node = strategy.order, strategy.ulysses, profile.gpus_per_node
        found = estimates(layout, layer, strategy.ranks, order=order, ulysses=degree, gpus_per_node=node)
        if strategy.schedule not in found:
            where = f"under the order {strategy.order!r}"
            if strategy.ulysses == strategy.ranks:
                where = "where all ranks share heads, so that nothing moves between groups; use 'ring'"
            raise ValueError(f"schedule: this layer cannot be {strategy.schedule!r} {where}")
        return cls.priced(strategy, found[strategy.schedule], profile, layer.head_dim)

    @classmethod
    def priced(cls, strategy: Strategy, found: Estimate, profile: Profile, head_dim: int) -> Expected:
        """The seconds of an estimate's loads, in blocks of 128."""
        passes = ((found.forward, False), (found.backward, True))
        compute = [compute_seconds(loads, profile, head_dim, 128, backward=backward) for loads, backward in passes]
        links = [transfer_seconds(loads, profile) for loads, _ in passes]
        return cls(strategy, len(compute[0]), np.concatenate(compute), np.concatenate(links), found.memory)

    def seconds(self, groups: Sequence[int] | slice = slice(None)) -> float:
        """Both passes, as if some groups were all, without what steps with transfers take beside them."""
        passes = slice(self.forward), slice(self.forward, None)
        return sum(float(ends(self.compute[at, groups], self.links[at, groups]).max(initial=0.0)) for at in passes)

    @property
    def balance(self) -> list[float]:
        """Of every step the slowest rank's compute over the mean's; 1 where nobody computes."""
        mean = self.compute.mean(1)
        return np.divide(self.compute.max(1), mean, out=np.ones_like(mean), where=mean > 0).tolist()

    def covered(self, ranks: Sequence[int]) -> float:
        """The layer of some ranks alone over that of all: 1 if nothing waits for another rank."""
        whole = self.seconds()
        return self.seconds(sorted({rank // self.strategy.ulysses for rank in ranks})) / whole if whole else 1.0

    def worth_replaying(self, count: int) -> tuple[int, ...]:
        """The busiest rank, the one whose transfers take longest if any do, and then those with which the layer lasts
        longest, ``count`` in all at most; the first rank of each group, rising."""
        chosen = [int(self.compute.sum(0).argmax())]
        if self.links.any():
            chosen.append(int(self.links.sum(0).argmax()))
        chosen = list(dict.fromkeys(chosen))[:count]
        while len(chosen) < min(count, self.compute.shape[1]):
            others = [group for group in range(self.compute.shape[1]) if group not in chosen]
            chosen.append(max(others, key=lambda group: self.seconds([*chosen, group])))
        return tuple(sorted(group * self.strategy.ulysses for group in chosen))


@dataclass(frozen=True, eq=False)
class Replay:
    """A layer of a strategy, replayed.

    Attributes:
        expected: what the estimate says.
        layer: the replayed ranks, with the profile's price of their transfers.
    """

    expected: Expected
    layer: LayerReplay

    @property
    def covered(self) -> float:
        """See `Expected.covered`, of the replayed ranks."""
        return self.expected.covered([rank.rank for rank in self.layer.ranks])


def replay(
    layout: Layout,
    layer: AttentionShape,
    expected: Expected,
    ranks: Sequence[int],
    profile: Profile,
    backend: Backend,
    *,
    device: torch.device,
    repeats: int = 5,
    warmup: int = 1,
) -> Replay:
    """Replay some ranks of a layer, one after the other; each is planned alone unless all are asked for.

    Args:
        layout: the packed sequence.
        layer: its attention.
        expected: the strategy's estimate.
        ranks: whom to replay, e.g. `Expected.worth_replaying`.
        profile: prices the transfers.
        backend: computes the calls.
        device: where.
        repeats: as for `marble.replay.replay_rank`; so is ``warmup``.

    Raises:
        ValueError: if no ranks are given, or one is not of the strategy's.
    """
    found = [
        replay_rank(planned, rank, backend, device=device, repeats=repeats, warmup=warmup)
        for rank, planned in plans(layout, layer, expected.strategy, ranks, device)
    ]
    return Replay(expected, replay_layer(found, price_of(profile), profile.step or 0.0))


def plans(
    layout: Layout, layer: AttentionShape, strategy: Strategy, ranks: Sequence[int], device: torch.device
) -> Iterator[tuple[int, Plan]]:
    """Some ranks, each with a plan that holds it: one plan for all, or one for each, so that a few fit anywhere."""
    how: dict[str, Any] = {"schedule": strategy.schedule, "order": strategy.order, "ulysses": strategy.ulysses}
    every = plan(layout, layer, ranks=strategy.ranks, device=device, **how) if len(ranks) == strategy.ranks else None
    for rank in ranks:
        yield rank, every or plan(layout, layer, ranks=strategy.ranks, rank=rank, device=device, **how)


def price_of(profile: Profile) -> Price:
    """What a rank's transfers of a step take on a machine: bytes received or sent, whichever are more, inside the node
    at one bandwidth and then across nodes at the other, as the estimate has it (`marble.cost.loads`).

    The price raises ProfileError where nodes are crossed and the profile has no bandwidth between them.
    """

    def seconds(rank: int, step: StepReplay) -> float:
        node = rank // profile.gpus_per_node
        total = 0.0
        for far in (False, True):
            moved = max(
                sum(nbytes for other, nbytes in way.items() if (other // profile.gpus_per_node != node) is far)
                for way in (step.received, step.sent)
            )
            if moved:
                total += moved / (profile.bandwidth_across if far else profile.inside)
        return total

    return seconds
