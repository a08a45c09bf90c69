"""Sequences of dense calls, and predicates as kernels read them, for the tests of this folder."""

import torch
from torch import Tensor

from marble.kernels.cute.predicates import BLOCK, THREADS


def bounds_of(lengths: list[int], gap: int) -> Tensor:
    """First and one past the last row of sequences with gaps before, int32 [sequences, 2]."""
    at, rows = gap, []
    for length in lengths:
        rows.append([at, at + length])
        at += length + gap
    return torch.tensor(rows, dtype=torch.int32)


def predicate(table: Tensor, slot: int) -> Tensor:
    """A slot of a table, bool [128, 128]: column 8j + 2t + i of a half is bit 2j + i of thread t's word."""
    pairs = torch.zeros(BLOCK, BLOCK, dtype=torch.bool)
    for half in range(2):
        for t in range(THREADS):
            for bit in range(16):
                column = BLOCK // 2 * half + bit // 2 * 8 + 2 * t + bit % 2
                pairs[:, column] = (table[slot, half, :, t].int() >> bit & 1).bool()
    return pairs
