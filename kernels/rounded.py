"""The wrong way, kept as a baseline: partial results rounded to the type of the inputs at every step.

Each forward call ends in a normalised output in the input type; these are merged by log-sum-exp in the accumulation
type and rounded once more. Each backward call's gradients are rounded before they are added. PyTorch's context
parallelism, yunchang and ring-flash-attention do this. The algebra is exact, the rounding is not: its error grows
with the number of calls. `marble check` and the demo set it beside the exact way, so that the gate is seen to fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from marble.kernels.contract import Backend, State, Tiles, Touch, Work


class PerStepRounding:
    """A `Backend` that makes another one round its partial results after every call."""

    writes_gradients = False

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = f"{inner.name}, rounded per step"

    def prepare(self, works: Sequence[Work], *, group: int, head_dim: int) -> None:
        """See `Backend.prepare`."""
        self.inner.prepare(works, group=group, head_dim=head_dim)

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
        """See `Backend.forward`. Between calls ``state`` holds the running output and, as m, its log-sum-exp."""
        partial, partial_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        self.inner.forward(q, k, v, _at_once(work), None, partial, partial_lse, scale=scale)
        rows, flags = _touched(work)
        merged, total = partial[rows].to(lse.dtype), partial_lse[:, rows]
        if state is not None:
            old = torch.where((flags & int(Touch.FIRST)).bool(), -torch.inf, state.m[:, rows])
            new, total = total, torch.logaddexp(old, total)
            base = torch.where(total == -torch.inf, 0, total)
            before = torch.where((old == -torch.inf).unsqueeze(-1), 0, state.acc[:, rows]).transpose(0, 1)
            weights = [(part - base).exp().T.unsqueeze(-1) for part in (old, new)]
            merged = weights[0] * before + weights[1] * merged
            state.acc[:, rows], state.m[:, rows] = merged.transpose(0, 1), total
        last = (flags & int(Touch.LAST)).bool()
        out[rows[last]], lse[:, rows[last]] = merged[last].to(out.dtype), total[:, last]

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """See `Backend.delta`."""
        return self.inner.delta(out, dout)

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
        steps = [torch.zeros_like(total) for total in (dq, dk, dv)]
        self.inner.backward(q, k, v, dout, lse, delta, work, *steps, scale=scale)
        for total, step in zip((dq, dk, dv), steps, strict=True):
            total += step.to(q.dtype)


def _at_once(work: Work) -> Work:
    """The same work with every touch the first and the last."""
    return replace(work, touch=torch.full_like(work.touch, int(Touch.FIRST | Touch.LAST)))


def _touched(work: Work) -> tuple[Tensor, Tensor]:
    """The query rows that a call computes, and the flags of each."""
    if isinstance(work, Tiles):
        busy = (work.by_query.counts() > 0).repeat_interleave(work.block)[: work.query_rows]
        return busy.nonzero().flatten(), work.touch.repeat_interleave(work.block)[: work.query_rows][busy]
    lengths = work.queries[:, 1] - work.queries[:, 0]
    first = torch.repeat_interleave(work.queries[:, 0] - (lengths.cumsum(0) - lengths), lengths)
    return first + torch.arange(len(first), device=first.device), work.touch.repeat_interleave(lengths)
