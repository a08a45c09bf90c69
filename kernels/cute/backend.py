"""The Hopper backend: `marble.kernels.contract.Backend` by the kernels of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marble.kernels.contract import State, Work
from marble.kernels.cute import backward, forward_sm90
from marble.kernels.cute.delta import run_delta
from marble.kernels.cute.worklist import lower, lower_all

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


class CuteBackend:
    """Calls on one Hopper GPU, in bfloat16 or float16, with head dimension 64, 128 or 256 and blocks of 128 rows.

    Inputs that the copy engine cannot read (outer strides that are no multiple of 16 bytes, or an unaligned base) are
    copied first.

    Args:
        multiprocessors: tells how many a device has.
    """

    name = "cute"

    def __init__(self, multiprocessors: Callable[[torch.device], int]) -> None:
        self.multiprocessors = multiprocessors

    def prepare(self, works: Sequence[Work]) -> None:
        """See `Backend.prepare`."""
        lower_all(works)

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
        _check(q, scale)
        lists = lower(work).by_query
        if not len(lists.items):
            return
        state = State.empty(q.shape[1], 0, q.shape[2], torch.float32, q.device) if state is None else state
        q, k, v = _readable(q), _readable(k), _readable(v)
        forward_sm90.run_forward(q, k, v, out, lse, state, lists, scale, self.multiprocessors(q.device))

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """See `Backend.delta`."""
        return run_delta(_readable(out), _readable(dout))

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        work: Work,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        scale: float,
    ) -> None:
        """See `Backend.backward`."""
        _check(q, scale)
        lists = lower(work).by_key
        if not len(lists.items):
            return
        q, k, v, dout = _readable(q), _readable(k), _readable(v), _readable(dout)
        sms = self.multiprocessors(q.device)
        backward.run_backward(q, k, v, dout, lse, delta, lists, dq, dk, dv, scale, sms)


def _check(q: Tensor, scale: float) -> None:
    if q.dtype not in DTYPES or q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"backend: 'cute' computes bfloat16 and float16 with head dimension 64, 128 or 256, got {q.dtype} with "
            f"{q.shape[2]}; 'reference' computes all"
        )
    if not scale > 0:
        raise ValueError(f"scale: must be > 0, got {scale}")
    if not q.is_cuda:
        raise ValueError(f"backend: 'cute' computes on GPUs, got tensors on {q.device}; 'reference' runs everywhere")


def _readable(x: Tensor) -> Tensor:
    """``x``, or a copy of it that the copy engine can read."""
    granule = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride % granule == 0 for stride in x.stride()[:-1])
    return x if aligned and x.stride(-1) == 1 else x.contiguous()
