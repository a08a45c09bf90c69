"""PyTorch's context parallelism: its ring of scaled dot-product attention, and FlexAttention over gathered keys.

The ring computes one causal sample, dealt head to tail; packs it cannot. FlexAttention takes any mask: PyTorch's own
all-gather (and, backward, reduce-scatter in the type of the keys) around a compiled call. PyTorch would evaluate every
pair to find that call's blocks and balance them; here it gets marble's storage order, balance and tile lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.baselines.calls import DENSE_CAUSAL, Case
from bench.baselines.exchanged import gathered_call
from bench.baselines.flex import block_mask, compiler
from bench.baselines.layers import Inputs, Offer, OnStream

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


class SdpaRing(OnStream):
    """``scaled_dot_product_attention`` under ``context_parallel``.

    Raises:
        ValueError: for anything but one causal sample.
    """

    def __init__(self, case: Case, inputs: Inputs, kernel: SDPBackend) -> None:
        if case.name != DENSE_CAUSAL:
            raise ValueError("it computes one causal sample and nothing else")
        self.mesh = init_device_mesh(inputs.device.type, (dist.get_world_size(),))
        # Tokens are dealt by PyTorch: what becomes of their positions says where they went.
        self.positions = torch.arange(case.tokens, device=inputs.device)
        with context_parallel(self.mesh, buffers=[self.positions], buffer_seq_dims=[0]):
            self.index = self.positions.clone().cpu()
        self.sets = [_heads_first(one) for one in inputs.of(self.index)]
        self.kernel, self.scale = kernel, case.shape.softmax_scale
        # Loading a kernel may wait for the whole GPU, and the ring's messages wait for the other rank.
        self._attend(0)
        self.synchronize()

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        """See `bench.baselines.layers.Layer`."""
        with context_parallel(self.mesh, buffers=[self.positions], buffer_seq_dims=[0]):
            return self._attend(turn)

    def _attend(self, turn: int) -> tuple[Tensor, ...]:
        *qkv, dout = self.sets[turn % len(self.sets)]
        leaves = [x.detach().requires_grad_() for x in qkv]
        grouped = qkv[0].shape[1] != qkv[1].shape[1]
        with sdpa_kernel(self.kernel):
            out = nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
            gradients = torch.autograd.grad(out, leaves, dout)
        return _tokens_first(out, *gradients)


class FlexAllGather(OnStream):
    """``flex_attention`` of a rank's queries over all keys.

    Args:
        case: the layer.
        inputs: of the whole pack.
        attend: ``flex_attention``, compiled.
    """

    def __init__(self, case: Case, inputs: Inputs, attend: Callable[..., Tensor]) -> None:
        call, self.index = gathered_call(case)
        self.sets = [_heads_first(one) for one in inputs.of(self.index)]
        self.attend, self.scale = attend, case.shape.softmax_scale
        self.mask = block_mask(call, inputs.device)

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        """See `bench.baselines.layers.Layer`."""
        from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather

        *qkv, dout = self.sets[turn % len(self.sets)]
        q, k, v = leaves = [x.detach().requires_grad_() for x in qkv]
        group = dist.group.WORLD
        assert group is not None
        every = flex_cp_allgather(k, v, 2, group.group_name)
        grouped = q.shape[1] != k.shape[1]
        out = self.attend(q, *every, block_mask=self.mask, scale=self.scale, enable_gqa=grouped)
        return _tokens_first(out, *torch.autograd.grad(out, leaves, dout))


def offers(case: Case, inputs: Inputs) -> Iterator[Offer]:
    """The ring on each of PyTorch's kernels, and FlexAttention."""
    for name, kernel in KERNELS.items():
        yield Offer(f"PyTorch CP, SDPA ring, {name}", partial(SdpaRing, case, inputs, kernel))
    yield Offer("PyTorch CP, Flex all-gather", lambda: FlexAllGather(case, inputs, compiler()))


def _heads_first(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """[1, heads, tokens, head_dim], strided: the rows lie as they were."""
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach()[0].transpose(0, 1) for x in tensors)
