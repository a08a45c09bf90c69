"""Calls whose tiles are all alike: all full, all partial by ranges, or all partial by random bits."""

from __future__ import annotations

import torch
from torch import Tensor

from marble.kernels.contract import TileList, Tiles, Touch

BLOCK = 128
KINDS = ("full", "range", "bit")


def uniform(kind: str, query_blocks: int, key_blocks: int, slots: int = 1000, seed: int = 0) -> Tiles:
    """Every pair of blocks as a tile of one kind.

    Args:
        kind: ``full``; ``range``, tiles whose queries each see one range of keys and whose keys each are seen by one
            range of queries, at random between them; or ``bit``, tiles of random pairs, half of them on average.
        query_blocks: query blocks of 128 rows.
        key_blocks: key blocks of 128 rows; every query block has this many tiles.
        slots: distinct predicates, dealt to the tiles by turns.
        seed: of the predicates.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
    generator = torch.Generator().manual_seed(seed)
    legal = torch.zeros(0, BLOCK, BLOCK, dtype=torch.bool)
    if kind == "range":
        legal = _staircases(slots, generator)
    elif kind == "bit":
        legal = torch.rand(slots, BLOCK, BLOCK, generator=generator) < 0.5
    slot = torch.arange(query_blocks * key_blocks).view(query_blocks, key_blocks) % max(slots, 1)
    rows = torch.arange(key_blocks, dtype=torch.int32) * BLOCK
    return Tiles(
        BLOCK,
        query_blocks * BLOCK,
        rows,
        torch.full_like(rows, BLOCK),
        _list(kind, slot, legal),
        _list(kind, slot.T, legal.transpose(1, 2)),
        torch.full((query_blocks,), int(Touch.FIRST | Touch.LAST), dtype=torch.uint8),
    )


def _staircases(slots: int, generator: torch.Generator) -> Tensor:
    """Tiles between two rising stairs: every row and every column is one range. bool [slots, block, block]."""
    half = BLOCK // 2
    lo = torch.randint(0, half, (slots, BLOCK, 1), generator=generator).sort(1).values
    hi = torch.randint(half, BLOCK + 1, (slots, BLOCK, 1), generator=generator).sort(1).values
    column = torch.arange(BLOCK)
    return (column >= lo) & (column < hi)


def _list(kind: str, slot: Tensor, legal: Tensor) -> TileList:
    """One orientation; ``slot`` is [outer blocks, inner blocks], ``legal`` [slots, outer rows, inner rows]."""
    outer, inner = slot.shape
    every = torch.arange(outer + 1, dtype=torch.int32)
    none = torch.zeros(0, 2, dtype=torch.int32)
    ranges, bits = torch.zeros(0, BLOCK, dtype=torch.int32), torch.zeros(0, BLOCK, BLOCK // 32, dtype=torch.int32)
    if kind == "full":
        runs = torch.tensor([[0, inner]], dtype=torch.int32).repeat(outer, 1)
        return TileList(every, runs, torch.zeros_like(every), none, ranges, bits)
    if kind == "range":
        first = legal.to(torch.int8).argmax(2)
        ranges = (first | (first + legal.sum(2)) << 8).int()
    else:
        words = (legal.view(*legal.shape[:2], -1, 32).long() << torch.arange(32)).sum(3)
        bits = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    numbers = torch.arange(inner).repeat(outer)
    parts = torch.stack([numbers, slot.flatten() if kind == "range" else ~slot.flatten()], 1).int()
    return TileList(torch.zeros_like(every), none, every * inner, parts, ranges, bits)
