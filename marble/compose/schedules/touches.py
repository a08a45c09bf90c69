"""What all builders need: which call touches a query block first and last, and rows in whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from marble.compose.schedule import Rows
from marble.kernels.contract import Tiles, Touch


def whole_blocks(rows: int, block: int) -> int:
    """``rows`` rounded up to whole blocks, so that a ragged block never reads into what lies behind it."""
    return -(-rows // block) * block


def stretches(chosen: NDArray[np.bool_], block: int, rows: int) -> list[tuple[int, int]]:
    """The row ranges of neighbouring chosen blocks, bool [blocks], of a shard with ``rows`` rows."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)) * block
    return list(zip(edges[::2].tolist(), np.minimum(edges[1::2], rows).tolist(), strict=True))


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
    # Which calls touch a block is asked of the device once; the host does the rest, in few and small steps.
    entries = torch.stack([ptr for call in calls for ptr in (call.by_query.run_ptr, call.by_query.part_ptr)])
    some = (entries.diff() > 0).cpu().numpy()
    busy = some[::2] | some[1::2]
    order = busy.cumsum(0)
    first, last = busy & (order == 1), busy & (order == order[-1:])
    flags = torch.from_numpy((first * Touch.FIRST + last * Touch.LAST).astype(np.uint8))
    flags = flags.to(entries.device, non_blocking=True)
    block, rows = calls[0].block, calls[0].query_rows
    idle = stretches(order[-1] == 0, block, rows)
    untouched = (Rows(name, start, stop) for start, stop in idle for name in ("out", "lse"))
    flagged = [replace(call, touch=flag) for call, flag in zip(calls, flags, strict=True)]
    computes, carries = ([bool(row.any()) for row in each] for each in (busy, busy & ~(first & last)))
    return Touches(flagged, computes, carries, tuple(untouched))
