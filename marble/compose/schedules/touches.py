"""What all builders need: which call touches a query block first and last, and rows in whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from marble.compose.schedule import Rows
from marble.kernels.contract import Tiles, Touch


def whole_blocks(rows: int, block: int) -> int:
    """``rows`` rounded up to whole blocks, so that a ragged block never reads into what lies behind it."""
    return -(-rows // block) * block


def stretches(chosen: Tensor, block: int, rows: int) -> list[tuple[int, int]]:
    """The row ranges of neighbouring chosen blocks, bool [blocks], of a shard with ``rows`` rows."""
    edges = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1)).diff()
    starts, stops = ((edges == sign).nonzero().flatten() * block for sign in (1, -1))
    return list(zip(starts.tolist(), stops.clamp(max=rows).tolist(), strict=True))


def flag_touches(calls: Sequence[Tiles]) -> tuple[list[Tiles], list[bool], tuple[Rows, ...]]:
    """Flag the first and last touch of every query block over the calls of a forward pass.

    Args:
        calls: in the order in which they run, all over the same query rows.

    Returns:
        The calls with their flags; for each, whether it carries state; and the rows of ``out`` and ``lse`` that no call
        touches, to be cleared.
    """
    busy = torch.stack([call.by_query.counts() > 0 for call in calls])
    order = busy.long().cumsum(0)
    first, last = busy & (order == 1), busy & (order == order[-1:])
    flags = (first * int(Touch.FIRST) + last * int(Touch.LAST)).to(torch.uint8)
    carries = (busy & ~(first & last)).any(1).tolist()
    block, rows = calls[0].block, calls[0].query_rows
    untouched = tuple(
        Rows(buffer, start, stop) for start, stop in stretches(~busy.any(0), block, rows) for buffer in ("out", "lse")
    )
    return [replace(call, touch=flag) for call, flag in zip(calls, flags, strict=True)], carries, untouched
