"""Two public schemes around any masked kernel: every key to every rank, and heads for tokens (Ulysses).

On FlashAttention-4 under a ``mask_mod`` these are the strongest that users can put together today. The first is
FlashMask's scheme: balanced queries, keys gathered in one piece, key gradients summed across ranks in their own type.
Both get marble's storage order, its balance and its tile lists as a gift, and the cheaper of two masks: two comparisons
where every key is seen by one range of queries, as in FlashMask, the four tracks elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import marble
from bench.baselines import systems
from bench.baselines.calls import BLOCK, DENSE_CAUSAL, Case, MaskedCall
from bench.baselines.fa4 import FlashAttention4, Masked
from bench.baselines.layers import Inputs, Layer, Offer, OnStream
from bench.baselines.systems import System

Attend = Callable[[MaskedCall, systems.Inputs], System]
"""A contender that computes a call, on buffers that are filled before each of its runs."""


def gathered_call(case: Case) -> tuple[MaskedCall, Tensor]:
    """This rank's queries against all keys, rank after rank, and the sequence positions of its tokens.

    Raises:
        ValueError: if the shards are not alike in length and whole blocks, as gathering in one piece needs.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = marble.plan(case.layout, case.shape, ranks=world, rank=rank, order="ptrr")
    _check_lengths(plan.order.lengths, BLOCK)
    assert plan.masks is not None
    shards = [plan.order.shard(other) for other in range(world)]
    return MaskedCall.joined(f"{case.title}, all keys", case.shape, plan.masks[0], shards[rank], shards), plan.index


class Gathered(OnStream):
    """All keys on every rank, then one call.

    Args:
        case: the layer.
        inputs: of the whole pack.
        attend: computes the call.
    """

    def __init__(self, case: Case, inputs: Inputs, attend: Attend) -> None:
        call, self.index = gathered_call(case)
        self.sets = inputs.of(self.index)
        shape, like = case.shape, self.sets[0][1]
        self.keys = [like.new_empty(len(call.cols), shape.kv_heads, shape.head_dim) for _ in range(2)]
        self.systems = [attend(call, systems.Inputs(q, *self.keys, dout)) for q, _, _, dout in self.sets]

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        """See `Layer`."""
        turn %= len(self.sets)
        system = self.systems[turn]
        for every, mine in zip(self.keys, self.sets[turn][1:3], strict=True):
            dist.all_gather_into_tensor(every, mine)
        system.forward()
        system.backward()
        dq, *gradients = system.gradients()
        mine = [torch.empty_like(x) for x in self.sets[turn][1:3]]
        for own, every in zip(mine, gradients, strict=True):
            dist.reduce_scatter_tensor(own, every.contiguous())
        return system.out, dq, *mine


class Ulysses(OnStream):
    """All tokens on every rank for its share of the heads, then one call. Arguments as of `Gathered`."""

    def __init__(self, case: Case, inputs: Inputs, attend: Attend) -> None:
        shape, self.world = case.shape, dist.get_world_size()
        if shape.kv_heads % self.world:
            raise ValueError(f"{self.world} ranks cannot share {shape.kv_heads} key/value heads")
        plan = marble.plan(case.layout, shape, ranks=self.world, rank=dist.get_rank(), order="contiguous")
        _check_lengths(plan.order.lengths, 1)
        self.index = plan.index
        self.sets = inputs.of(self.index)
        call = case.whole()
        assert torch.equal(call.rows, torch.cat([plan.order.shard(rank) for rank in range(self.world)]))
        few = replace(shape, heads=shape.heads // self.world, kv_heads=shape.kv_heads // self.world)
        size = [(case.tokens, x.shape[1] // self.world, x.shape[2]) for x in self.sets[0]]
        self.buffers = [x.new_empty(s) for x, s in zip(self.sets[0], size, strict=True)]
        self.system = attend(replace(call, shape=few), systems.Inputs(*self.buffers))

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        """See `Layer`."""
        for every, mine in zip(self.buffers, self.sets[turn % len(self.sets)], strict=True):
            by_rank = mine.unflatten(1, (self.world, -1)).transpose(0, 1)
            dist.all_to_all_single(every, by_rank.reshape(every.shape))
        self.system.forward()
        self.system.backward()
        return tuple(self.collect(x) for x in (self.system.out, *self.system.gradients()))

    def collect(self, every: Tensor) -> Tensor:
        """All heads of this rank's tokens, from all tokens of its heads."""
        by_heads = torch.empty_like(every, memory_format=torch.contiguous_format)
        dist.all_to_all_single(by_heads, every.contiguous())
        return by_heads.unflatten(0, (self.world, -1)).transpose(0, 1).flatten(1, 2)


def offers(case: Case, inputs: Inputs) -> Iterator[Offer]:
    """Both schemes on FlashAttention-4, and Ulysses on its dense causal kernel."""
    yield Offer("all-gather, FA4 mask_mod", partial(_build, Gathered, case, inputs, _masked))
    yield Offer("Ulysses, FA4 mask_mod", partial(_build, Ulysses, case, inputs, _masked))
    yield Offer("Ulysses, FA4 dense causal", partial(_dense_causal, case, inputs))


def _build(build: Callable[[Case, Inputs, Attend], Layer], case: Case, inputs: Inputs, attend: Attend) -> Layer:
    if inputs.device.type != "cuda":
        raise ValueError("FlashAttention-4 needs a GPU")
    return build(case, inputs, attend)


def _masked(call: MaskedCall, inputs: systems.Inputs) -> System:
    try:
        masked = Masked.of(call, "two", inputs.q.device)
    except ValueError:
        masked = Masked.of(call, "four", inputs.q.device)
    return FlashAttention4(inputs, call.shape.softmax_scale, masked)


def _causal(call: MaskedCall, inputs: systems.Inputs) -> System:
    return FlashAttention4(inputs, call.shape.softmax_scale, causal=True)


def _dense_causal(case: Case, inputs: Inputs) -> Layer:
    if case.name != DENSE_CAUSAL:
        raise ValueError("the dense causal kernel computes one causal sample and nothing else")
    return _build(Ulysses, case, inputs, _causal)


def _check_lengths(lengths: tuple[int, ...], unit: int) -> None:
    if len(set(lengths)) > 1 or lengths[0] % unit:
        raise ValueError(f"shards of {lengths} tokens are not alike, in units of {unit}; choose another length")
