"""The ways of dealing tokens to ranks and of moving rows between them, by the names that a plan gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from marble.compose.schedule import Schedule
from marble.compose.schedules.chunked import chunked
from marble.compose.schedules.fetch import all_gather, sparse_a2a
from marble.compose.schedules.ring import ring
from marble.compose.schedules.ulysses import HeadSplit, ulysses
from marble.mask.pieces import NotDenseError
from marble.mask.tiles import StoredMask, work_of
from marble.order.balanced_samples import balanced_samples
from marble.order.chunks import chunk_order
from marble.order.contiguous import contiguous
from marble.order.ptrr import ptrr, ptrr_of_tiles
from marble.order.token_order import TokenOrder

Masks = tuple[StoredMask, ...]

_EVENED = 16384
"""Blocks up to which a second deal is tried for rings. Where there are more, chance evens the steps, and a deal costs
tens of milliseconds."""


class _Tiles(NamedTuple):
    """The visited tiles of several masks over one stored sequence.

    Attributes:
        costs: int64 [masks, blocks], those of each query block.
        stretches: all of them, for each mask (`StoredMask.stretches`).
    """

    costs: Tensor
    stretches: tuple[Tensor, ...]


@lru_cache(maxsize=2)
def _tiles(masks: Masks, block: int) -> _Tiles:
    """The tiles of each distinct mask. The last are kept, for other orders and numbers of ranks."""
    stretches = tuple(mask.stretches(block) for mask in {id(mask): mask for mask in masks}.values())
    blocks = -(-masks[0].storage.layout.tokens // block)
    return _Tiles(torch.stack([work_of(found, blocks) for found in stretches]), stretches)


def block_costs(masks: Masks, block: int) -> Tensor:
    """Visited tiles of each stored query block for each distinct mask, int64 [masks, blocks]."""
    return _tiles(masks, block).costs


def _deal_contiguous(masks: Masks, world: int, block: int) -> TokenOrder:
    storage = masks[0].storage
    ranks = contiguous(-(-storage.layout.tokens // block), world)
    return TokenOrder.of_blocks("contiguous", storage, world, ranks, block)


def _deal_ptrr(masks: Masks, world: int, block: int) -> TokenOrder:
    costs, stretches = _tiles(masks, block)
    ranks = ptrr(costs, world) if costs.shape[1] > _EVENED else ptrr_of_tiles(costs, stretches, world)
    return TokenOrder.of_blocks("ptrr", masks[0].storage, world, ranks, block)


def _deal_balanced_samples(masks: Masks, world: int, block: int) -> TokenOrder:
    storage = masks[0].storage
    pieces = balanced_samples(storage.layout.sample_bounds, block_costs(masks, block).cpu(), world, block, unit=block)
    return TokenOrder("balanced_samples", storage, world, pieces)


def deal_chunks(masks: Masks, world: int, block: int, *, refine: bool = True) -> TokenOrder:
    """Chunks by the first mask that dense calls can express: all global layers share one.

    Raises:
        NotDenseError: if there is none.
    """
    for mask in masks[1:]:
        with suppress(NotDenseError):
            return chunk_order(mask, world, block, refine=refine)
    return chunk_order(masks[0], world, block, refine=refine)


ORDERS: Mapping[str, Callable[[Masks, int, int], TokenOrder]] = {
    "ptrr": _deal_ptrr,
    "chunks": deal_chunks,
    "balanced_samples": _deal_balanced_samples,
    "contiguous": _deal_contiguous,
}

SCHEDULES: Mapping[str, Callable[[TokenOrder, StoredMask, int, int, int, int], Schedule]] = {
    "ring": ring,
    "sparse_a2a": sparse_a2a,
    "chunked": chunked,
    "all_gather": all_gather,
}


def build(
    name: str,
    groups: TokenOrder,
    order: TokenOrder,
    mask: StoredMask,
    block: int,
    split: HeadSplit,
    ranks: Sequence[int],
) -> Mapping[int, Schedule]:
    """The schedules of some ranks for one layer.

    Args:
        name: one of `SCHEDULES`.
        groups: the tokens of the groups of ranks that share heads.
        order: the tokens of the ranks.
        mask: the layer's mask.
        block: rows of a tile's block.
        split: the heads.
        ranks: whose schedules.

    Raises:
        NotDenseError: if dense calls are asked for and cannot express the mask.
    """
    degree = split.degree
    inner = {
        group: SCHEDULES[name](groups, mask, group, block, split.inner_heads, split.inner_kv_heads)
        for group in sorted({rank // degree for rank in ranks})
    }
    if degree == 1:
        return inner
    return {rank: ulysses(inner[rank // degree], rank, order.lengths, split) for rank in ranks}
