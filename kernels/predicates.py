"""Reading the predicates of partial tiles on the host: the inverse of how the planner packs them."""

from __future__ import annotations

import torch
from torch import Tensor

from marble.kernels.contract import TileList


def tile_mask(tiles: TileList, slot: int, columns: int) -> Tensor:
    """One partial tile as bool [block, columns], with outer rows first."""
    if slot >= 0:
        word = tiles.ranges[slot].long()
        column = torch.arange(columns, device=word.device)
        lo0, hi0, lo1, hi1 = ((word >> shift & 255).unsqueeze(1) for shift in (0, 8, 16, 24))
        return ((column >= lo0) & (column < hi0)) | ((column >= lo1) & (column < hi1))
    words = tiles.bits[~slot].long()
    bits = words.unsqueeze(-1) >> torch.arange(32, device=words.device) & 1
    return bits.flatten(-2).bool()[:, :columns]


def covered(tiles: TileList, outer_rows: int, inner_rows: int, block: int) -> Tensor:
    """How often each pair is computed, int32 [outer rows, inner rows]; for tests and the checker."""
    count = torch.zeros(outer_rows, inner_rows, dtype=torch.int32, device=tiles.runs.device)
    run_ptr, part_ptr = tiles.run_ptr.tolist(), tiles.part_ptr.tolist()
    runs, parts = tiles.runs.tolist(), tiles.parts.tolist()
    for outer in range(tiles.outer):
        strip = count[outer * block : (outer + 1) * block]
        for first, blocks in runs[run_ptr[outer] : run_ptr[outer + 1]]:
            strip[:, first * block : (first + blocks) * block] += 1
        for inner, slot in parts[part_ptr[outer] : part_ptr[outer + 1]]:
            window = strip[:, inner * block : (inner + 1) * block]
            window += tile_mask(tiles, slot, window.shape[1])[: len(strip)]
    return count
