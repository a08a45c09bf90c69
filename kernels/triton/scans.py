"""Running maxima: one program per row, which it takes in chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marble.kernels.triton.tuned import tuned

_LEAST = tl.constexpr(-(1 << 62))
_PLAIN = ["places"]
"""Arguments that no two versions are compiled for: every plan brings new sizes."""


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def _running_max(values, found, places, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * places
    line = tl.arange(0, CHUNK)
    most = tl.full((CHUNK,), _LEAST, tl.int64)
    for first in range(0, places, CHUNK):
        here = first + line < places
        value = tl.load(values + row + first + line, here, other=_LEAST)
        value = tl.maximum(tl.associative_scan(value, 0, _larger), most)
        tl.store(found + row + first + line, value, here)
        most = tl.full((CHUNK,), 0, tl.int64) + tl.max(value, 0)


def running_max(values: Tensor) -> Tensor:
    """The largest value up to each place of the last dimension.

    Args:
        values: int64 [..., places], above −2⁶².

    Raises:
        ValueError: if the values are of another type.
    """
    if values.dtype != torch.int64:
        raise ValueError(f"scans: expected int64 values, got {values.dtype}")
    values = values.contiguous()
    found = torch.empty_like(values)
    if values.numel():
        places = values.shape[-1]
        _running_max[(values.numel() // places,)](values, found, places, **tuned("running_max"))
    return found
