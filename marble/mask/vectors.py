"""Operations along the last dimension that PyTorch does slowly on one kind of device or the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def by_kernel(values: Tensor) -> bool:
    """Whether a Triton kernel works on some values: it does on a GPU, where many small operations take longer."""
    return values.is_cuda


def running_max(values: Tensor) -> Tensor:
    """The largest value up to each place of the last dimension, for int64 [..., places] above −2⁶².

    PyTorch's scan on a GPU walks along a row with 16 threads, for milliseconds over 100k places; on a CPU it finds
    places besides, which takes three times as long as NumPy's.
    """
    if values.device.type == "cpu":
        return torch.from_numpy(np.maximum.accumulate(values.numpy(), -1))
    from marble.kernels.triton.scans import running_max as by_kernel

    return by_kernel(values)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Of every row the values at some places: [..., places] and int64 [n] to [..., n].

    On a CPU `Tensor.index_select` is seven times as fast along the only dimension as along the last of several.
    """
    if rows.device.type != "cpu":
        return rows.index_select(-1, index)
    every = [row.index_select(0, index) for row in rows.flatten(0, -2)]
    return torch.stack(every).view(*rows.shape[:-1], len(index))
