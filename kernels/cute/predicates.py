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

SLOTS_AT_ONCE = 4096
"""Predicates that are packed together: about 80 MB are needed meanwhile."""


def packed(ranges: Tensor, bits: Tensor) -> Tensor:
    """The predicates of a `TileList`, then `EVERY` and `NONE`: int16 [slots, 2 halves of the columns, 128 rows, 4
    threads].

    Args:
        ranges: as there, the first slots.
        bits: as there, the slots behind these.
    """
    words = [_range_words(some) for some in ranges.split(SLOTS_AT_ONCE)]
    words += [some.long() & 0xFFFFFFFF for some in bits.split(SLOTS_AT_ONCE)]
    table = torch.cat([_by_thread(some) for some in words])
    table = pad(table, (0, 0, 0, 0, 0, 0, 0, 2))
    table[EVERY] = -1
    return table


def quarters(which: Tensor) -> Tensor:
    """In which quarters of predicates there is one of some words, bool [slots, 2, 128, 4] as in a table: int64 [slots],
    bit 2 · half of the rows + half of the columns."""
    found = which.unflatten(2, (2, BLOCK // 2)).flatten(3).any(3).transpose(1, 2)
    return (found.flatten(1).long() << torch.arange(4, device=which.device)).sum(1)


def _range_words(ranges: Tensor) -> Tensor:
    """The columns in the two ranges of each row, int64 [slots, 128, 4 words of 32 columns]."""
    first = 32 * torch.arange(BLOCK // 32, device=ranges.device)
    below = [(1 << ((ranges >> shift & 255).long().unsqueeze(2) - first).clamp(0, 32)) - 1 for shift in (0, 8, 16, 24)]
    return (below[1] & ~below[0]) | (below[3] & ~below[2])


def _by_thread(words: Tensor) -> Tensor:
    """int64 words of 32 columns [slots, 128, 4] by thread: int16 [slots, 2, 128, 4]."""
    shift = 2 * torch.arange(THREADS, device=words.device)
    # Four pairs of bits, 8 apart, move next to each other above 24 others; no terms overlap.
    eight = (words.unsqueeze(3) >> shift & 0x03030303) * 0x01041040 >> 24 & 0xFF
    halves = eight.unflatten(2, (2, 2))
    word = halves[:, :, :, 0] | halves[:, :, :, 1] << 8
    return word.transpose(1, 2).to(torch.int32).to(torch.int16).contiguous()
