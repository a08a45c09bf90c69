"""The forward pass: one kernel for each head dimension, compiled once per process and launched on a list of work."""

import math
from functools import lru_cache
from typing import Any

import torch
from cutlass import Float32, Int32, cute
from torch import Tensor

from marble.kernels.contract import State
from marble.kernels.cute.binding import ELEMENTS, compiled, fake, fake_lists, lists_of
from marble.kernels.cute.forward_config import CONFIGS, Carried
from marble.kernels.cute.forward_sm90 import ForwardSm90
from marble.kernels.cute.parts import PART, PartList, parts_of
from marble.kernels.cute.units import counter_of
from marble.kernels.cute.worklist import WorkList


@lru_cache
def compile_forward(dtype: torch.dtype, head_dim: int) -> Any:
    """The forward kernel for every size, stride, scale and mask. Needs no GPU; compiled once per process."""
    element, sym = ELEMENTS[dtype], cute.sym_int
    tokens = [fake(element, sym(), sym(), head_dim) for _ in range(4)]
    heads = sym()
    statistics = [fake(Float32, heads, sym(), aligned=False) for _ in range(3)]
    return compiled(
        ForwardSm90(element, CONFIGS[head_dim]),
        *tokens,
        statistics[0],
        Carried(fake(Float32, sym(), sym(), head_dim), *statistics[1:]),
        fake_lists(parts=True),
        Int32(0),
        fake(Int32, 1, aligned=False),
        Float32(1),
        Int32(1),
    )


def cut(lists: WorkList, group: int, head_dim: int) -> PartList:
    """What the kernel reads for ``group`` query heads to a key/value head."""
    return parts_of(lists, group=group, together=CONFIGS[head_dim].keys // PART)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: State, lists: WorkList, scale: float, sms: int
) -> None:
    """Run the kernel on the current stream. Shapes as in `marble.kernels.contract.Backend.forward`."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    parts = cut(lists, group, q.shape[2])
    units = kv_heads * (parts.strips * (group // 2) + len(parts.items) - parts.strips)
    if units:
        compile_forward(q.dtype, q.shape[2])(
            q,
            k,
            v,
            out,
            lse,
            (state.acc, state.m, state.l),
            lists_of(parts),
            parts.strips,
            counter_of(q.device),
            scale * math.log2(math.e),
            min(sms, units),
        )
