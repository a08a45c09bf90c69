"""PyTorch's FlexAttention, compiled, as a contender: the same mask, and block lists from the same tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.baselines.calls import BLOCK, MaskedCall
from bench.baselines.fa4 import lists_of
from bench.baselines.systems import Inputs
from marble.kernels.contract import move
from marble.mask.lowering import flex_mask_mod


def block_mask(call: MaskedCall, device: torch.device) -> Any:
    """The call's tiles as a ``BlockMask``; `create_block_mask`, which evaluates every pair, is not needed.

    Raises:
        ValueError: if a key row holds no token: FlexAttention would need a track for that.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if bool((call.cols < 0).any()):
        raise ValueError(f"{call.name}: key rows without tokens")
    tracks = call.stored.tracks
    q, k = (move(tracks.take(tokens), device) for tokens in (call.rows, call.cols))
    blocks = -(-len(call.cols) // BLOCK)
    partial, partial_at, full, full_at = lists_of(call.tiles, len(call.cols), by_key=False)
    # Older releases read the number of key blocks off the width of the lists.
    wide = [torch.nn.functional.pad(at, (0, blocks - at.shape[-1])) for at in (partial_at, full_at)]
    lists = [x.to(device) for x in (partial, wide[0], full, wide[1])]
    lengths = len(call.rows), len(call.cols)
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=flex_mask_mod(call.mask, q, k), seq_lengths=lengths
    )


class FlexAttention:
    """One compiled call; its first run compiles. It keeps its log-sum-exp to itself.

    Args:
        inputs: of the call.
        scale: softmax scale.
        mask: from `block_mask`.
        compiled: ``torch.compile(flex_attention)``, shared between buffer sets.
    """

    def __init__(self, inputs: Inputs, scale: float, mask: Any, compiled: Any) -> None:
        self.compiled, self.mask, self.scale, self.lse = compiled, mask, scale, None
        # [1, heads, rows, d], strided: the rows lie as in the inputs.
        q, k, v, self.dout = (x.transpose(0, 1).unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        self.x = [x.detach().requires_grad_() for x in (q, k, v)]
        self.grouped = q.shape[1] != k.shape[1]
        self.result = torch.empty(0)
        self.grads: tuple[Tensor, ...] = ()

    @property
    def out(self) -> Tensor:
        return self.result.detach()[0].transpose(0, 1)

    def forward(self) -> None:
        """One call; autograd keeps what its backward needs."""
        self.result = self.compiled(*self.x, block_mask=self.mask, scale=self.scale, enable_gqa=self.grouped)

    def backward(self) -> None:
        """Autograd through the last forward."""
        self.grads = torch.autograd.grad(self.result, self.x, self.dout, retain_graph=True)

    def poison(self) -> None:
        """Drop every result; each run makes new ones."""
        self.result, self.grads = torch.empty(0), ()

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv."""
        dq, dk, dv = (x[0].transpose(0, 1) for x in self.grads)
        return dq, dk, dv


def compiler() -> Any:
    """A fresh ``torch.compile(flex_attention)``; what earlier masks compiled is dropped, so no limit is reached."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)
