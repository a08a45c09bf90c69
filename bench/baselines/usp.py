"""yunchang 0.6.4 (USP): its zigzag ring, and its Ulysses all-to-all around the same kernel. One causal sample only.

Its kernels are those of flash-attn 2, whose package cannot be installed beside flash-attn-4; where it is missing,
PyTorch's copy of the same kernels is lent to it (on a CPU, PyTorch's CPU kernel). With flash-attn 3 yunchang 0.6.4
drops ``causal``, and with PyTorch's kernels its ring has no backward pass, so neither can be a baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.baselines.calls import DENSE_CAUSAL, Case
from bench.baselines.layers import Inputs, Offer, OnStream

_ATEN = torch.ops.aten


class ZigzagRing(OnStream):
    """``LongContextAttention`` with a zigzag ring over all ranks.

    Raises:
        ValueError: for anything but one causal sample.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        _check(case)
        import yunchang
        from yunchang import globals as has
        from yunchang import kernels

        world, rank = dist.get_world_size(), dist.get_rank()
        yunchang.set_seq_parallel_pg(1, world, rank, world)
        if not has.HAS_FLASH_ATTN:
            kernels.flash_attn_forward, kernels.flash_attn_backward = _forward, _backward
        self.attention = yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=kernels.AttnType.FA)
        every = torch.arange(case.tokens).unsqueeze(0)
        self.index = yunchang.zigzag_extract_local(every, rank, world, rd=world, ud=1)[0]
        self.sets, self.scale = inputs.of(self.index), case.shape.softmax_scale

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        """See `bench.baselines.layers.Layer`."""
        *qkv, dout = (x.unsqueeze(0) for x in self.sets[turn % len(self.sets)])
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = self.attention(*leaves, softmax_scale=self.scale, causal=True)
        return tuple(x.detach()[0] for x in (out, *torch.autograd.grad(out, leaves, dout)))


class Ulysses(ZigzagRing):
    """``UlyssesAttention`` over all ranks; it raises as the ring does."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        _check(case)
        import yunchang
        from yunchang import globals as has
        from yunchang.kernels import AttnType

        kind = AttnType.FA if has.HAS_FLASH_ATTN else AttnType.TORCH_FLASH
        self.attention = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=kind)
        if not has.HAS_FLASH_ATTN:
            self.attention.attn_fn = _attend
        self.index = torch.arange(case.tokens).chunk(dist.get_world_size())[dist.get_rank()]
        self.sets, self.scale = inputs.of(self.index), case.shape.softmax_scale


def offers(case: Case, inputs: Inputs) -> Iterator[Offer]:
    """Both."""
    yield Offer("yunchang, zigzag ring", partial(ZigzagRing, case, inputs))
    yield Offer("yunchang, Ulysses", partial(Ulysses, case, inputs))


def _check(case: Case) -> None:
    if case.name != DENSE_CAUSAL:
        raise ValueError("it computes one causal sample and nothing else")


def _attend(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **_options: Any) -> Tensor:
    # Not nn.functional's: PyTorch's ring replaces that function while it runs, and in 2.11 for good if it fails.
    grouped = q.shape[2] != k.shape[2]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = _ATEN.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, scale=softmax_scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, _dropout: float, scale: float, causal: bool, **_options: Any
) -> tuple[Tensor, Tensor]:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    on_gpu = q.device.type == "cuda"
    attend = _ATEN._scaled_dot_product_flash_attention if on_gpu else _ATEN._scaled_dot_product_flash_attention_for_cpu
    out, log_sums, *_ = attend(*heads_first, 0.0, causal, scale=scale)
    return out.transpose(1, 2), log_sums


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *rest: Any, **_options: Any
) -> None:
    *buffers, _dropout, scale, causal = rest[:6]
    args = [x.transpose(1, 2) for x in (dout, q, k, v, out)] + [log_sums.contiguous()]
    if q.device.type == "cuda":
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[1], k.shape[1])
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            *args, *lengths, 0.0, causal, unused, unused, scale=scale
        )
    else:
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, causal, scale=scale)
    for buffer, gradient in zip(buffers, found, strict=True):
        buffer.copy_(gradient.transpose(1, 2))
