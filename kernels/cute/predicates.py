"""Predicates of partial tiles as the kernels read them: bits in the order of the computing threads' columns.

Of the four threads that hold a row of a tile, thread t owns the columns 8j + 2t + {0, 1}. So of a half of the columns
it owns 16, which are one word. They are packed once for a call, so that the copy engine can bring the words of any rows
and half of the columns to shared memory, and no warp of a kernel has to turn one into the other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Rows of a whole block in every kernel of this backend."""

THREADS = 4
"""Threads that hold a row."""

EVERY, NONE = -2, -1
"""The last two slots of every table: all columns, and none."""


def packed(ranges: Tensor, bits: Tensor) -> Tensor:
    """The predicates of a `TileList`, then `EVERY` and `NONE`: int16 [slots, 2 halves of the columns, 128 rows, 4
    threads].

    Args:
        ranges: as there, the first slots.
        bits: as there, the slots behind these.
    """
    below = _below(ranges.device)
    first, last, again, end = (below[ranges >> shift & 255] for shift in (0, 8, 16, 24))
    rows = torch.cat([last & ~first | end & ~again, _by_thread(bits)])
    table = pad(rows.transpose(1, 2), (0, 0, 0, 0, 0, 0, 0, 2))
    table[EVERY] = -1
    return table


def quarters(which: Tensor) -> Tensor:
    """In which quarters of predicates there is one of some words, bool [slots, 2, 128, 4] as in a table: int64 [slots],
    bit 2 · half of the rows + half of the columns."""
    found = which.unflatten(2, (2, BLOCK // 2)).flatten(3).any(3).transpose(1, 2)
    return (found.flatten(1).long() << torch.arange(4, device=which.device)).sum(1)


def _below(device: torch.device) -> Tensor:
    """The columns below each limit from 0 to 128, by thread: int16 [129, 2, 4]."""
    limit, column = torch.arange(BLOCK + 1, device=device), torch.arange(BLOCK, device=device)
    bits = (column < limit[:, None]).unflatten(1, (4, 32)).long() << torch.arange(32, device=device)
    return _by_thread(bits.sum(2).int())


def _by_thread(words: Tensor) -> Tensor:
    """int32 words of 32 columns [..., 4] by thread: int16 [..., 2, 4]."""
    shift = 2 * torch.arange(THREADS, dtype=torch.int32, device=words.device)
    # Four pairs of bits, 8 apart, move next to each other in the highest byte; no terms overlap, and what does not fit
    # into 32 bits is not wanted.
    eight = (words.unsqueeze(-1) >> shift & 0x03030303) * 0x01041040 >> 24 & 0xFF
    halves = eight.unflatten(-2, (2, 2))
    return (halves[..., 0, :] | halves[..., 1, :] << 8).short()
