"""Random layouts, masks, token orders and schedules: one generator for tests, checks and benchmarks.

Every function takes a `random.Random` and nothing else that is random, so a seed names a case, and a property-based
testing library can hand in a generator of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

import torch

from marble.compose.planner import SCHEDULES
from marble.compose.schedule import Schedule
from marble.compose.schedules.ulysses import HeadSplit, ulysses
from marble.kernels.contract import MAX_BLOCK, Tiles
from marble.layout import Layout, Mode, Span
from marble.mask.algebra import MaskFn, and_masks
from marble.mask.modes import not_padding, packed_mask
from marble.mask.pieces import NotDenseError, dense_pieces
from marble.mask.ranges import VisibleRanges
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.order.balanced_samples import balanced_samples
from marble.order.chunks import chunk_order
from marble.order.contiguous import contiguous
from marble.order.ptrr import ptrr
from marble.order.set_apart import set_apart
from marble.order.token_order import TokenOrder

BLOCKS = (*range(1, 10), 33, 128)
"""Block sizes that random cases use: small ones let short sequences cross blocks and ranks."""

DEALS = ("contiguous", "ptrr", "balanced_samples", "chunks", "dealt", "pieces")
"""Ways of dealing tokens to ranks: the planner's, blocks at random, and cuts anywhere at random."""


def random_layout(rng: Random, *, samples: int = 5, spans: int = 8, length: int = 9) -> Layout:
    """A layout of 1 to ``samples`` samples of 1 to ``spans`` spans, each of 1 to ``length`` tokens, seldom of one.

    All modes occur, padding samples, and groups and noise groups with ids of their own beside those without.
    """
    built = []
    for _ in range(rng.randint(1, samples)):
        if rng.random() < 0.12:
            built.append([Span(Mode.PAD, rng.randint(1, length))])
            continue
        first_id = 10 * len(built)  # ids belong to the layout: three for groups and three for noise per sample
        modes = _palette(rng)
        built.append([_random_span(rng, rng.choice(modes), first_id, length) for _ in range(rng.randint(1, spans))])
    return Layout(tuple(map(tuple, built)))


def _palette(rng: Random) -> tuple[Mode, ...]:
    """The modes of one sample: all of them, or what one kind of model uses, where ranges are found."""
    text, full, noise, group = Mode.CAUSAL, Mode.FULL, Mode.NOISE, Mode.GROUP
    return rng.choice([(text, full, noise, group), (text, full, noise), (text, full, group), (text, full), (text,)])


def _random_span(rng: Random, mode: Mode, first_id: int, length: int) -> Span:
    tokens = 1 if rng.random() < 0.1 else rng.randint(min(2, length), length)
    linked = mode in (Mode.GROUP, Mode.NOISE) and rng.random() < 0.3
    identifier = first_id + (3 if mode is Mode.NOISE else 0) + rng.randint(0, 2) if linked else None
    return Span(mode, tokens, identifier)


def random_window(rng: Random) -> int | None:
    """No window in half the cases, else 1 to 12 tokens."""
    return rng.randint(1, 12) if rng.random() < 0.5 else None


def random_block(rng: Random) -> int:
    """One of `BLOCKS`."""
    return rng.choice(BLOCKS)


def random_storage(rng: Random, layout: Layout) -> Storage:
    """Any spans set apart, in any order; samples without such spans keep their order."""
    order, apart, first = [], [], 0
    for sample in layout.samples:
        chosen = [rng.random() < 0.3 for _ in sample]
        front, back = ([first + i for i, far in enumerate(chosen) if far is side] for side in (False, True))
        if back:
            rng.shuffle(front)
            rng.shuffle(back)
        order += front + back
        apart += chosen
        first += len(sample)
    return Storage(layout, torch.tensor(order), torch.tensor(apart))


def random_order(rng: Random, mask: StoredMask, world: int, block: int, deal: str | None = None) -> TokenOrder:
    """A token order by one of `DEALS`; ranks may stay without tokens."""
    storage = mask.storage
    deal = rng.choice(DEALS) if deal is None else deal
    tokens = storage.layout.tokens
    blocks = -(-tokens // block)
    if deal == "contiguous":
        return TokenOrder.of_blocks(deal, storage, world, contiguous(blocks, world), block)
    if deal == "ptrr":
        costs = torch.tensor([rng.randint(0, 9) for _ in range(blocks)])
        return TokenOrder.of_blocks(deal, storage, world, ptrr(costs, world), block)
    if deal == "chunks" and is_dense(mask):
        return chunk_order(mask, world, rng.randint(1, block))
    if deal == "dealt":
        ranks = torch.tensor([rng.randrange(world) for _ in range(blocks)])
        return TokenOrder.of_blocks(deal, storage, world, ranks, block)
    if deal == "balanced_samples":
        work = mask.work(block).repeat_interleave(block)[:tokens]
        return TokenOrder(deal, storage, world, balanced_samples(storage.layout.sample_bounds, work, world, block))
    cuts = sorted({0, tokens, *(rng.randint(0, tokens) for _ in range(rng.randint(0, 3 * world)))})
    pieces = [(low, high, rng.randrange(world)) for low, high in itertools.pairwise(cuts)]
    return TokenOrder(deal, storage, world, torch.tensor(pieces))


def random_expression(rng: Random, names: tuple[str, ...] = ("sample", "seg", "noise", "pos"), depth: int = 3) -> str:
    """A mask of one's own as Python source over ``q`` and ``k``: all that a mask may use (`marble.mask.algebra`)."""
    if depth > 0 and rng.random() < 0.6:
        left, right = (random_expression(rng, names, depth - 1) for _ in range(2))
        return rng.choice([*(f"({left} {both} {right})" for both in ("&", "|", "^", "==", "!=")), f"(~{left})"])
    # One side always reads a track: a comparison of two constants would be a Python bool.
    left, right = _random_value(rng, names, 2), _random_value(rng, names, 1, constant=rng.randint(-3, 12))
    return f"({left} {rng.choice(['==', '!=', '<', '<=', '>', '>='])} {right})"


def _random_value(rng: Random, names: tuple[str, ...], depth: int, constant: int | None = None) -> str:
    if constant is not None and rng.random() < 0.4:
        return str(constant)
    if depth == 0 or rng.random() < 0.35:
        return f"{rng.choice('qk')}.{rng.choice(names)}"
    left = _random_value(rng, names, depth - 1)
    operator = rng.choice(["+", "-", "*", "//", "%", "reflected", "neg"])
    if operator in ("//", "%"):
        return f"({left} {operator} {rng.randint(1, 7)})"
    if operator == "reflected":
        return f"({rng.randint(-3, 7)} {rng.choice('+-*')} {left})"
    if operator == "neg":
        return f"(-{left})"
    return f"({left} {operator} {_random_value(rng, names, depth - 1, constant=rng.randint(-3, 7))})"


def mask_of(expression: str) -> MaskFn:
    """The mask that an expression over ``q`` and ``k`` stands for."""
    return eval(f"lambda q, k: {expression}")


def stored_mask(
    storage: Storage, window: int | None = None, *, user: str | None = None, ranges: bool = True
) -> StoredMask:
    """The layout's own mask over a storage order, with or without its ranges, or a user's mask, which has none.

    A user's mask may also read a track ``shot``.
    """
    shot = torch.arange(storage.layout.tokens) // 3 % 5 - 1
    mask = and_masks(packed_mask(window) if user is None else mask_of(user), not_padding)
    found = VisibleRanges(storage, window) if ranges and user is None else None
    return StoredMask(storage, mask, found, {"shot": shot})


def planned_storage(layout: Layout, window: int | None) -> Storage:
    """The storage order that the planner would choose for a single layer."""
    return set_apart(layout) if window is None else Storage.natural(layout)


def whole_call(layout: Layout, window: int | None = None, block: int = MAX_BLOCK) -> Tiles:
    """A layout's attention as one call, over the storage order that the planner would choose."""
    everything = torch.arange(layout.tokens)
    return stored_mask(planned_storage(layout, window), window).tiles(everything, everything, block)


@dataclass(frozen=True, eq=False)
class Case:
    """Everything that a schedule is built from. Its repr is what a failing test should print."""

    layout: Layout
    window: int | None
    user: str | None
    block: int
    world: int
    heads: int
    kv_heads: int
    mask: StoredMask
    order: TokenOrder
    schedule: str = "ring"
    groups: TokenOrder | None = None
    ulysses: int = 1

    def __repr__(self) -> str:
        return (
            f"Case({self.layout.to_json()}, window={self.window}, user={self.user}, block={self.block}, "
            f"world={self.world}, heads={self.heads}/{self.kv_heads}, order={self.order.name}, "
            f"pieces={self.order.pieces.tolist()}, schedule={self.schedule}, ulysses={self.ulysses})"
        )

    def schedules(self) -> list[Schedule]:
        """The schedules of all ranks."""
        groups = self.order if self.groups is None else self.groups
        split = HeadSplit(self.heads, self.kv_heads, self.ulysses)
        build, sizes = SCHEDULES[self.schedule], (self.block, split.inner_heads, split.inner_kv_heads)
        inner = [build(groups, self.mask, group, *sizes) for group in range(groups.world)]
        if self.ulysses == 1:
            return inner
        return [ulysses(inner[r // self.ulysses], r, self.order.lengths, split) for r in range(self.world)]


def random_case(
    rng: Random,
    *,
    samples: int = 5,
    spans: int = 8,
    ranks: tuple[int, int] = (1, 8),
    blocks: tuple[int, ...] = BLOCKS,
    schedules: tuple[str, ...] = tuple(SCHEDULES),
    degrees: tuple[int, ...] = (1, 1, 1, 1, 1, 2, 3, 4),
) -> Case:
    """A random layout, mask, token order, schedule and head count; one case in six has a mask of its user's own, and
    heads are split over one of ``degrees`` ranks. Only masks that dense calls can express get the chunked ring."""
    layout = random_layout(rng, samples=samples, spans=spans)
    user = random_expression(rng, ("sample", "seg", "noise", "pos", "shot")) if rng.random() < 1 / 6 else None
    window = random_window(rng) if user is None else None
    natural = user is not None or window is not None or rng.random() < 0.2
    mask = stored_mask(Storage.natural(layout) if natural else set_apart(layout), window, user=user)
    block, world = rng.choice(blocks), rng.randint(*ranks)
    heads, kv_heads = rng.choice([(1, 1), (2, 2), (2, 1), (4, 2)])
    degree = min(rng.choice(degrees), ranks[1])
    if degree > 1:
        world = max(world // degree, 1) * degree
        heads, kv_heads = rng.choice(((degree, 1), (degree, degree), (2 * degree, 2), (2 * degree, degree)))
    dense = is_dense(mask)
    names = tuple(name for name in schedules if dense or name != "chunked") or ("ring",)
    groups = random_order(rng, mask, world // degree, block)
    return Case(
        layout,
        window,
        user,
        block,
        world,
        heads,
        kv_heads,
        mask,
        groups if degree == 1 else groups.split(degree),
        rng.choice(names),
        groups,
        degree,
    )


def is_dense(mask: StoredMask) -> bool:
    """Whether dense calls can express a mask."""
    try:
        dense_pieces(mask, torch.tensor([[0, mask.storage.layout.tokens]]))
    except NotDenseError:
        return False
    return True
