"""The Hopper backend: `marble.kernels.contract.Backend` by the kernels of this folder."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from marble.kernels.contract import State, Work
from marble.kernels.cute import forward_sm90
from marble.kernels.cute.worklist import lower


class CuteBackend:
    """Calls on one Hopper GPU, bfloat16 and float16, head dimensions 64 and 128, blocks of 128 rows.

    Inputs with strides that the copy engine cannot read (outer strides that are no multiple of 16 bytes, or an
    unaligned base) are copied first.
    """

    name = "cute"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: Work,
        state: State | None,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
    ) -> None:
        """See `Backend.forward`."""
        lists = lower(work).by_query
        if not len(lists.items):
            return
        state = State.empty(q.shape[1], 0, q.shape[2], torch.float32, q.device) if state is None else state
        forward_sm90.launch(*(_readable(x) for x in (q, k, v)), out, lse, state, lists, scale, _sms(q.device))


def _readable(x: Tensor) -> Tensor:
    """``x``, or a copy of it that the copy engine can read."""
    granule = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride % granule == 0 for stride in x.stride()[:-1])
    return x if aligned and x.stride(-1) == 1 else x.contiguous()


@lru_cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
