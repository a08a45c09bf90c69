"""The Hopper backend: `marble.kernels.contract.Backend` by the kernels of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marble.kernels.contract import State, Varlen, Work
from marble.kernels.cute import backward, forward
from marble.kernels.cute.backward_config import whole_units
from marble.kernels.cute.backward_split_sm90 import SplitConfig
from marble.kernels.cute.binding import expect, readable
from marble.kernels.cute.delta import run_delta
from marble.kernels.cute.worklist import lower, lower_all

HEAD_DIMS = (64, 128, 256)


class CuteBackend:
    """Calls on one Hopper GPU, in bfloat16 or float16, with head dimension 64, 128 or 256 and blocks of 128 rows.

    Inputs that the copy engine cannot read (outer strides that are no multiple of 16 bytes, or an unaligned base) are
    copied first.

    Args:
        multiprocessors: tells how many a device has.
        deterministic: whether equal backward calls give equal bits on GPUs of one kind, which takes longer: sums then
            have one order (`marble.kernels.cute.tickets`). None: if PyTorch's deterministic algorithms are enabled at
            the time of a call. Forward calls always do, and backward calls with head dimension 256.
    """

    name = "cute"
    writes_gradients = True

    def __init__(self, multiprocessors: Callable[[torch.device], int], deterministic: bool | None = None) -> None:
        self.multiprocessors = multiprocessors
        self._deterministic = deterministic

    @property
    def deterministic(self) -> bool:
        """Whether a backward call would be deterministic now."""
        return torch.are_deterministic_algorithms_enabled() if self._deterministic is None else self._deterministic

    def prepare(self, works: Sequence[Work], *, group: int, head_dim: int) -> None:
        """See `Backend.prepare`."""
        lower_all(works)
        for work in works:
            forward.cut(lower(work).by_query, group, head_dim)

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
        expect(self.name, q, scale, HEAD_DIMS)
        lists = lower(work).by_query
        if not len(lists.items):
            return
        state = State.empty(q.shape[1], 0, q.shape[2], torch.float32, q.device) if state is None else state
        q, k, v = readable(q), readable(k), readable(v)
        forward.run_forward(q, k, v, out, lse, state, lists, scale, self.multiprocessors(q.device))

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """See `Backend.delta`."""
        return run_delta(readable(out), readable(dout))

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
        """See `Backend.backward`.

        Raises:
            ValueError: of a deterministic call, if two of its sequences share query rows, which `Varlen` forbids.
        """
        expect(self.name, q, scale, HEAD_DIMS)
        lists, gradients, sms = lower(work), (dq, dk, dv), self.multiprocessors(q.device)
        split, in_order = q.shape[2] in SplitConfig.head_dims, self.deterministic
        if isinstance(work, Varlen):  # whose sequences may share keys
            written = [False, False, False]
        elif split:
            written = [x.dtype == q.dtype for x in gradients]
        else:
            many = whole_units(len(lists.by_key.items), k.shape[1], sms) and not in_order
            written = [False, *(2 * [many and dk.dtype == dv.dtype == q.dtype])]
        targets = []
        for x, writes in zip(gradients, written, strict=True):
            # Rows that have no pairs are in no list. All blocks of queries are known, but not what lies between keys'.
            if writes and (x is not dq or len(lists.by_query.items) < len(work.touch)):
                x.zero_()
            sums = x.dtype == q.dtype and not writes
            targets.append(torch.zeros_like(x, dtype=torch.float32) if sums else x)
        if len(lists.by_key.items):
            to_q, to_k, to_v = targets
            inputs = (readable(q), readable(k), readable(v), readable(dout), lse, delta)
            if split:
                backward.run_passes(*inputs, lists, to_q, to_k, to_v, scale, sms)
            else:
                backward.run_backward(*inputs, lists.by_key, to_q, to_k, to_v, scale, sms, deterministic=in_order)
        for x, total in zip(gradients, targets, strict=True):
            if x is not total:
                x.copy_(total)
