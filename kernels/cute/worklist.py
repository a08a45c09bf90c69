"""A call's tiles as the kernels read them: one row of integers per outer block, longest first.

The kernels know blocks by the rows that they hold, and walk an outer block's partial tiles, then its runs of full
tiles. Block tiles and dense varlen sequences lower to the same lists, so one kernel computes both.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marble.kernels.contract import Band, TileList, Tiles, Varlen, Work

BLOCK = 128
"""Rows of a whole block in every kernel of this backend."""

PARTIAL_COST = 1.1
"""A partial tile's time over a full one's, for the order of the work."""


@dataclass(frozen=True, eq=False)
class WorkList:
    """The tiles of a call by outer block.

    Attributes:
        items: int32 [items, 8], an outer block with tiles each: first outer row, outer rows, first partial tile,
            partial tiles, first run, runs, full tiles (of all its runs), touch. Most tiles first.
        parts: int32 [partial tiles, 2], (inner block, slot) as in `TileList.parts`.
        runs: int32 [runs, 2], (first inner block, blocks) as in `TileList.runs`.
        inner: int32 [inner blocks, 2], first row and rows of each inner block.
        ranges: int32 [slots, 128] as in `TileList.ranges`.
        bits: int32 [slots, 128, 4] as in `TileList.bits`.
    """

    items: Tensor
    parts: Tensor
    runs: Tensor
    inner: Tensor
    ranges: Tensor
    bits: Tensor


@dataclass(frozen=True, eq=False)
class WorkLists:
    """Both orientations of a call: outer blocks are query blocks in ``by_query`` and key blocks in ``by_key``."""

    by_query: WorkList
    by_key: WorkList


_lowered: WeakKeyDictionary[Work, WorkLists] = WeakKeyDictionary()


def lower(work: Work) -> WorkLists:
    """The lists of a call, on the device that its tensors are on. Lowered once per call object.

    Raises:
        ValueError: if its blocks are not of 128 rows.
    """
    if work not in _lowered:
        _lowered[work] = _lower_tiles(work) if isinstance(work, Tiles) else _lower_varlen(work)
    return _lowered[work]


def _lower_tiles(tiles: Tiles) -> WorkLists:
    if tiles.block != BLOCK:
        raise ValueError(f"block: the cute kernels compute blocks of {BLOCK} tokens, got {tiles.block}; plan with it")
    first = torch.arange(len(tiles.touch), device=tiles.touch.device, dtype=torch.int32) * BLOCK
    queries = torch.stack([first, (tiles.query_rows - first).clamp(max=BLOCK)], 1)
    keys = torch.stack([tiles.key_row, tiles.key_len], 1)
    return WorkLists(
        _work_list(tiles.by_query, queries, keys, tiles.touch),
        _work_list(tiles.by_key, keys, queries, torch.zeros_like(tiles.key_row)),
    )


def _work_list(tiles: TileList, outer: Tensor, inner: Tensor, touch: Tensor) -> WorkList:
    parts, runs = tiles.part_ptr.diff(), tiles.run_ptr.diff()
    full = tiles.counts().int() - parts
    columns = (outer[:, 0], outer[:, 1], tiles.part_ptr[:-1], parts, tiles.run_ptr[:-1], runs, full, touch.int())
    cost = full + PARTIAL_COST * parts
    order = torch.argsort(cost, descending=True, stable=True)[: int((cost > 0).sum())]
    items = torch.stack(columns, 1)[order].contiguous()
    tables = (tiles.parts, tiles.runs, inner, tiles.ranges, tiles.bits)
    return WorkList(items, *(table.contiguous() for table in tables))
