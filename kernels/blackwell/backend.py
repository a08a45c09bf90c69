"""The Blackwell backend: `marble.kernels.contract.Backend` by FlashAttention-4's kernels. Compiled, never run.

A forward call computes the output of its pairs alone, in float32, and folds it into the state by log-sum-exp. A
backward call computes its gradients in float32 and adds them. Nothing is rounded between two calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marble.kernels.blackwell.backward_sm100 import run_backward
from marble.kernels.blackwell.forward_sm100 import run_forward
from marble.kernels.blackwell.lists import BLOCK, Grid, lower, lower_all
from marble.kernels.contract import State, Work
from marble.kernels.cute.binding import expect, readable
from marble.kernels.cute.delta import run_delta
from marble.kernels.triton.fold import add_tiles, fold_partial
from marble.kernels.triton.pack import gather_blocks

HEAD_DIMS = (64, 128)


class Kernels(NamedTuple):
    """What computes a call's pairs, and on which type of device; `run_forward` and `run_backward` say what is computed.
    Tests put PyTorch in their place."""

    device: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    delta: Callable[[Tensor, Tensor], Tensor]


SM100 = Kernels("cuda", run_forward, run_backward, run_delta)


class BlackwellBackend:
    """Calls on one Blackwell GPU, in bfloat16 or float16, with head dimension 64 or 128 and blocks of 128 rows.

    Rows of blocks that do not lie on a grid of 128 rows are packed before every call, those of dense sequences of any
    lengths most of all; so are inputs that the copy engine cannot read.

    Args:
        kernels: what computes the pairs.
    """

    name = "blackwell"
    writes_gradients = False

    def __init__(self, kernels: Kernels = SM100) -> None:
        self.kernels = kernels

    def prepare(self, works: Sequence[Work], *, group: int, head_dim: int) -> None:
        """See `Backend.prepare`."""
        del group, head_dim
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
        expect(self.name, q, scale, HEAD_DIMS, self.kernels.device)
        call = lower(work)
        if not len(call.queries):
            return
        q = _taken(call.queries, q)
        if call.empty:
            partial = (torch.zeros_like(q, dtype=torch.float32), torch.full_like(q[..., 0].T, -math.inf).float())
        else:
            partial = self.kernels.forward(q, _taken(call.keys, k), _taken(call.keys, v), call, scale)
        fold_partial(call.queries, call.touch, partial, state, out, lse, scale)

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """See `Backend.delta`."""
        return self.kernels.delta(readable(out), readable(dout))

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
        expect(self.name, q, scale, HEAD_DIMS, self.kernels.device)
        call = lower(work)
        if call.empty:
            return
        # Every weight is 2^(x − ∞) = 0 in a row that sees nothing, as in one that does not exist.
        sums = lse.masked_fill(lse == -math.inf, math.inf) * math.log2(math.e)
        statistics = call.queries.spread(sums, math.inf), call.queries.spread(delta, 0)
        rows = _taken(call.queries, q), _taken(call.keys, k), _taken(call.keys, v), _taken(call.queries, dout)
        tiles = self.kernels.backward(rows, statistics, call, scale)
        add_tiles(dq, tiles[0], call.queries, scale)
        add_tiles(dk, tiles[1], call.keys, scale)
        add_tiles(dv, tiles[2], call.keys, 1.0)


def _taken(blocks: Grid, x: Tensor) -> Tensor:
    """The rows of blocks, as the kernels number them: at most 128 for each."""
    if blocks.packed:
        return gather_blocks(x.contiguous(), blocks.first, blocks.length, BLOCK)
    return readable(x[: len(blocks) * BLOCK])
