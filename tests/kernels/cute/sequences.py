"""Sequences of dense calls, for the tests of this folder."""

import torch
from torch import Tensor


def bounds_of(lengths: list[int], gap: int) -> Tensor:
    """First and one past the last row of sequences with gaps before, int32 [sequences, 2]."""
    at, rows = gap, []
    for length in lengths:
        rows.append([at, at + length])
        at += length + gap
    return torch.tensor(rows, dtype=torch.int32)
