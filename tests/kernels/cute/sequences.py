"""Sequences of dense calls, and predicates as kernels read them, for the tests of this folder."""

import torch
from torch import Tensor

from marble.kernels.cute.predicates import BLOCK


def bounds_of(lengths: list[int], gap: int) -> Tensor:
    """First and one past the last row of sequences with gaps before, int32 [sequences, 2]."""
    at, rows = gap, []
    for length in lengths:
        rows.append([at, at + length])
        at += length + gap
    return torch.tensor(rows, dtype=torch.int32)


def predicate(table: Tensor, slot: int) -> Tensor:
    """A slot of a table, bool [128, 128]: column 8j + 2t + i of a half is bit 2j + i of thread t's word."""
    bits = table[slot].int().unsqueeze(3) >> torch.arange(16) & 1
    by_column = bits.unflatten(3, (8, 2)).permute(1, 0, 3, 2, 4)  # [row, half, j, t, i]
    return by_column.reshape(BLOCK, BLOCK).bool()
