"""The wrong way, kept as a baseline: partial results rounded at every step, as other ring attentions merge them.

Each forward call ends in a normalised output in the input type, which is merged into the running output by
log-sum-exp and rounded again; each backward call's gradients are rounded before they are added. The algebra is
exact, the rounding is not: its error grows with the number of calls. `marble check` and the demo set it beside the
exact way, so that the gate is seen to fail.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from marble.kernels.contract import Backend, State, Tiles, Touch, Work


class PerStepRounding:
    """A `Backend` that makes another one round its partial results after every call."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = f"{inner.name}, rounded per step"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, work: Work, state: State, out: Tensor, lse: Tensor, *, scale: float
    ) -> None:
        """See `Backend.forward`. The running output and log-sum-exp live in ``out`` and ``lse`` between calls."""
        partial, partial_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        self.inner.forward(q, k, v, _at_once(work), state, partial, partial_lse, scale=scale)
        fresh, later = (_rows(work, out.shape[0], first) for first in (True, False))
        out[fresh], lse[:, fresh] = partial[fresh], partial_lse[:, fresh]
        old, new = lse[:, later], partial_lse[:, later]
        total = torch.logaddexp(old, new)
        base = torch.where(total == -torch.inf, 0, total)
        weights = [(part - base).exp().T.unsqueeze(-1) for part in (old, new)]
        out[later] = (weights[0] * out[later] + weights[1] * partial[later]).to(out.dtype)
        lse[:, later] = total

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


def _rows(work: Work, rows: int, first: bool) -> Tensor:
    """The query rows of a call's first touches, or of its later ones."""
    chosen = (work.touch & int(Touch.FIRST)).bool() == first
    if isinstance(work, Tiles):
        return (chosen & (work.by_query.counts() > 0)).repeat_interleave(work.block)[:rows].nonzero().flatten()
    picked = torch.zeros(rows, dtype=torch.bool, device=work.touch.device)
    for start, stop in work.queries[chosen].tolist():
        picked[start:stop] = True
    return picked.nonzero().flatten()
