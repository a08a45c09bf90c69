"""What all builders need: which call touches a query block first and last, and rows in whole blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marble.compose.schedule import Rows
from marble.kernels.contract import TileList, Tiles, Touch
from marble.mask.shards import numbers


def whole_blocks(rows: int, block: int) -> int:
    """``rows`` rounded up to whole blocks, so that a ragged block never reads into what lies behind it."""
    return -(-rows // block) * block


def stretches(chosen: Tensor, block: int, rows: int) -> list[tuple[int, int]]:
    """The row ranges of neighbouring chosen blocks, bool [blocks], of a shard with ``rows`` rows."""
    edges = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1)).diff()
    starts, stops = ((edges == sign).nonzero().flatten() * block for sign in (1, -1))
    return list(zip(starts.tolist(), stops.clamp(max=rows).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Touches:
    """The calls of a forward pass, flagged.

    Attributes:
        calls: the calls with their flags.
        busy: for each, whether it computes anything.
        carries: for each, whether it carries state.
        untouched: the rows of ``out`` and ``lse`` that no call touches, to be cleared.
    """

    calls: list[Tiles]
    busy: list[bool]
    carries: list[bool]
    untouched: tuple[Rows, ...]


def flag_touches(calls: Sequence[Tiles]) -> Touches:
    """Flag the first and last touch of every query block over the calls of a forward pass.

    Args:
        calls: in the order in which they run, all over the same query rows.
    """
    busy = _visited([call.by_query for call in calls]) > 0
    order = busy.long().cumsum(0)
    first, last = busy & (order == 1), busy & (order == order[-1:])
    flags = (first * int(Touch.FIRST) + last * int(Touch.LAST)).to(torch.uint8)
    # One copy to the host answers all that is asked there.
    asked = torch.cat([busy.any(1), (busy & ~(first & last)).any(1), ~busy.any(0)]).cpu()
    some, carries, idle = asked.split([len(calls), len(calls), len(asked) - 2 * len(calls)])
    block, rows = calls[0].block, calls[0].query_rows
    untouched = (Rows(name, start, stop) for start, stop in stretches(idle, block, rows) for name in ("out", "lse"))
    flagged = [replace(call, touch=flag) for call, flag in zip(calls, flags, strict=True)]
    return Touches(flagged, some.tolist(), carries.tolist(), tuple(untouched))


def _visited(lists: Sequence[TileList]) -> Tensor:
    """Visited tiles of each outer block, int64 [lists, outer], for lists with equally many outer blocks."""
    base = [0, *itertools.accumulate(len(tiles.runs) for tiles in lists)]
    total = torch.nn.functional.pad(torch.cat([tiles.runs[:, 1] for tiles in lists]).cumsum(0), (1, 0))
    ptr = torch.stack([tiles.run_ptr for tiles in lists])
    full = total[ptr + numbers(base[:-1], ptr.device).unsqueeze(1)].diff(dim=1)
    return full + torch.stack([tiles.part_ptr for tiles in lists]).diff(dim=1)
