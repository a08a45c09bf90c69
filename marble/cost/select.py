"""Which strategy is expected to be fastest: splits of the ranks, token orders and schedules, priced and ranked.

Source: MARBLE, section 04, strategy selection (Luma AI, October 2026). There a threshold on the length of spans admits
the chunked ring; here it is priced like the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import torch

from marble.compose.builders import ORDERS, SCHEDULES, block_costs, build, deal_chunks
from marble.compose.schedules.ulysses import HeadSplit
from marble.compose.shape import AttentionShape
from marble.cost.counts import PairCounts, countable
from marble.cost.estimate import ESTIMATES, Estimate, Place
from marble.cost.loads import Cost, loads_of, memory_of, price
from marble.cost.profile import Profile
from marble.mask.pieces import NotDenseError, dense_pieces
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder

_CLOSE = 1.15
"""The best of the plainly dealt chunks, if so close to the fastest, are dealt as a plan would; refining gains less."""


@dataclass(frozen=True, eq=False)
class Option:
    """One layer under one order and one schedule.

    Attributes:
        schedule: the schedule's name.
        forward: what its forward pass takes.
        backward: what its backward pass takes.
        memory: bytes of the buffers of the fullest rank.
    """

    schedule: str
    forward: Cost
    backward: Cost
    memory: float

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy for all layers of a model.

    Attributes:
        ranks: number of ranks.
        ulysses: how many of them share heads.
        order: the token order.
        layers: per layer its schedule and what it takes; layers that are alike share theirs.
    """

    ranks: int
    ulysses: int
    order: str
    layers: tuple[Option, ...]

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedule of each layer."""
        return tuple(layer.schedule for layer in self.layers)

    @property
    def seconds(self) -> float:
        """All layers, forward and backward."""
        return sum(layer.seconds for layer in self.layers)

    @property
    def compute(self) -> float:
        """Seconds in which the busiest rank of every pass computes."""
        return sum(cost.compute for cost in self._costs)

    @property
    def exposed(self) -> float:
        """Seconds that waiting adds, for transfers and for other ranks."""
        return sum(cost.exposed for cost in self._costs)

    @property
    def fixed(self) -> float:
        """Seconds that steps with transfers add beside them."""
        return sum(cost.fixed for cost in self._costs)

    @property
    def memory(self) -> float:
        """Bytes of the buffers of the layer that needs most."""
        return max(layer.memory for layer in self.layers)

    @property
    def _costs(self) -> Iterator[Cost]:
        return itertools.chain.from_iterable((layer.forward, layer.backward) for layer in self.layers)


def candidates(
    masks: tuple[StoredMask, ...],
    layers: Sequence[AttentionShape],
    world: int,
    block: int,
    profile: Profile,
    orders: Sequence[str] = tuple(ORDERS),
    degrees: Sequence[int] = (1,),
) -> list[Candidate]:
    """Every split, order and schedule of each kind of layer, the fastest first.

    Args:
        masks: per layer its mask, on the CPU; equal ones are one object.
        layers: the attention of each layer.
        world: number of ranks.
        block: rows of a tile's block.
        profile: the machine.
        orders: token orders to look at. With one group of ranks they are alike, and the last is taken.
        degrees: Ulysses degrees to look at; they divide ``world`` and every layer's query heads.

    Raises:
        ProfileError: if the profile does not hold for these layers or ranks.
        ValueError: if no order works.
    """
    chooser = _Chooser(masks, tuple(layers), world, block, profile)
    splits = [(degree, order) for degree in degrees for order in (orders if degree < world else orders[-1:])]
    if len(orders) > 1:
        block_costs(masks, block)  # once, for all orders
    with ThreadPoolExecutor(2) as pool:
        found = list(itertools.chain.from_iterable(pool.map(chooser.of, splits)))
    if not found:
        raise ValueError(f"order: {orders[0]!r} needs a mask that dense calls can express")
    fastest = min(candidate.seconds for candidate in found)
    near = [c for c in found if c.order == "chunks" and c.seconds <= _CLOSE * fastest]
    if near:
        degree = min(near, key=lambda c: c.seconds).ulysses
        found = [c for c in found if (c.order, c.ulysses) != ("chunks", degree)]
        found += chooser.under(deal_chunks(masks, world // degree, block), degree)
    return sorted(found, key=lambda c: (c.seconds, c.ulysses, c.order, c.schedules))


@dataclass(frozen=True, eq=False)
class _Chooser:
    masks: tuple[StoredMask, ...]
    layers: tuple[AttentionShape, ...]
    world: int
    block: int
    profile: Profile

    def of(self, split: tuple[int, str]) -> list[Candidate]:
        """The candidates of one degree and order; chunks are dealt plainly, which takes less time."""
        (degree, order), groups = split, self.world // split[0]
        try:
            if order == "chunks":
                return list(self.under(deal_chunks(self.masks, groups, self.block, refine=False), degree))
            return list(self.under(ORDERS[order](self.masks, groups, self.block), degree))
        except NotDenseError:
            return []

    def under(self, groups: TokenOrder, degree: int) -> Iterator[Candidate]:
        """The candidates of one split under one order: every choice of schedules for the kinds of layers."""
        kinds = [
            (id(mask), shape.heads, shape.kv_heads, shape.head_dim)
            for mask, shape in zip(self.masks, self.layers, strict=True)
        ]
        first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
        counts: dict[tuple[int, bool], PairCounts] = {}
        options = [list(self._options(number, groups, degree, counts)) for number in first.values()]
        for chosen in itertools.product(*options):
            of = dict(zip(first, chosen, strict=True))
            yield Candidate(self.world, degree, groups.name, tuple(of[kind] for kind in kinds))

    def _options(
        self, number: int, groups: TokenOrder, degree: int, counts: dict[tuple[int, bool], PairCounts]
    ) -> Iterator[Option]:
        mask, shape, profile = self.masks[number], self.layers[number], self.profile
        for name, found in estimates(mask, shape, groups, degree, self.block, profile.gpus_per_node, counts):
            yield Option(name, *priced(found, profile, shape.head_dim, self.block), found.memory)


def estimates(
    mask: StoredMask,
    shape: AttentionShape,
    groups: TokenOrder,
    degree: int,
    block: int,
    gpus_per_node: int,
    counts: dict[tuple[int, bool], PairCounts] | None = None,
) -> Iterator[tuple[str, Estimate]]:
    """What ranks do in one layer under one token order, for every schedule that the layer can have there.

    Args:
        mask: the layer's mask, on the CPU.
        shape: its heads.
        groups: the tokens of the groups of ranks that share heads.
        degree: ranks of a group.
        block: rows of a tile's block.
        gpus_per_node: ranks of a node; neighbours share one.
        counts: what is known of masks under this order, by the mask's identity; shared between layers.

    Yields:
        The schedule's name, and its loads.
    """
    counts = {} if counts is None else counts
    split = HeadSplit(shape.heads, shape.kv_heads, degree)
    place = Place(groups.world, split, shape.head_dim, gpus_per_node, block)
    # With one group nothing moves: all schedules of tiles are one call.
    for name in SCHEDULES if groups.world > 1 else ("ring",):
        dense = name == "chunked"
        if dense and groups.name != "chunks":
            continue  # any other order takes more sequences
        if not countable(mask):
            with suppress(NotDenseError):
                yield name, _built(name, mask, groups, place)
        elif not dense or _is_dense(mask):
            if (id(mask), dense) not in counts:
                counts[id(mask), dense] = PairCounts.of(groups, mask, block, dense=dense)
            yield name, ESTIMATES[name](counts[id(mask), dense], place)


def priced(found: Estimate, profile: Profile, head_dim: int, block: int) -> tuple[Cost, Cost]:
    """What the forward and the backward pass of a layer take. Errors as for `marble.cost.loads.price`."""
    forward = price(found.forward, profile, head_dim, block, backward=False)
    return forward, price(found.backward, profile, head_dim, block, backward=True)


def _built(name: str, mask: StoredMask, groups: TokenOrder, place: Place) -> Estimate:
    """From the schedules themselves, for masks without ranges; loads are those of groups, as in `ESTIMATES`."""
    degree = place.split.degree
    order = groups if degree == 1 else groups.split(degree)
    schedules = list(build(name, groups, order, mask, place.block, place.split, range(order.world)).values())
    forward, backward = (
        loads_of(schedules, place.head_dim, place.gpus_per_node, block=place.block, backward=which).of_groups(degree)
        for which in (False, True)
    )
    passes = (which for schedule in schedules for which in (schedule.forward, schedule.backward))
    return Estimate(forward, backward, max(memory_of(which, place.head_dim) for which in passes))


@lru_cache(maxsize=4)
def _is_dense(mask: StoredMask) -> bool:
    """Whether dense calls can express a mask. The last are kept, for other orders."""
    try:
        dense_pieces(mask, torch.tensor([[0, mask.storage.layout.tokens]]))
    except NotDenseError:
        return False
    return True
