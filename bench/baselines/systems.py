"""What every contender looks like to the bench, and marble's own kernels as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from bench.baselines.calls import BLOCK, MaskedCall
from marble.kernels.contract import Backend, State, Touch, Work, accumulation_dtype, move


@dataclass(frozen=True, eq=False)
class Inputs:
    """Random inputs of one call: ``q`` and ``dout`` [query rows, heads, d], ``k`` and ``v`` [key rows, kv_heads, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, call: MaskedCall, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
        """Normally distributed; ``dout`` differs in size between rows."""
        shape, rows, keys = call.shape, len(call.rows), len(call.cols)
        return cls.of(rows, keys, (shape.heads, shape.kv_heads, shape.head_dim), seed, device, dtype)

    @classmethod
    def of(
        cls,
        rows: int,
        keys: int,
        heads: tuple[int, int, int],
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Inputs:
        """The same for ``rows`` queries, ``keys`` keys and (heads, kv_heads, head_dim)."""
        generator = torch.Generator(device=device).manual_seed(seed)
        query_heads, kv_heads, head_dim = heads
        # Storage to whole blocks: what lies behind a ragged block may be read.
        q, k, v, dout = (
            torch.randn(count + -count % BLOCK, number, head_dim, generator=generator, device=device, dtype=dtype)[
                :count
            ]
            for count, number in ((rows, query_heads), (keys, kv_heads), (keys, kv_heads), (rows, query_heads))
        )
        return cls(q, k, v, dout.mul_(torch.linspace(0.5, 2, rows, device=device, dtype=dtype)[:, None, None]))

    def keys(self, start: int, stop: int) -> Inputs:
        """The same queries with some of the keys."""
        return Inputs(self.q, self.k[start:stop], self.v[start:stop], self.dout)


class System(Protocol):
    """A contender on one set of buffers: `forward`, then `backward` against what it left."""

    @property
    def out(self) -> Tensor:
        """[query rows, heads, d]."""
        ...

    @property
    def lse(self) -> Tensor | None:
        """[heads, query rows], the natural logarithm; None where a contender keeps none."""
        ...

    def forward(self) -> object: ...

    def backward(self) -> object: ...

    def poison(self) -> None:
        """Fill every result with NaN."""
        ...

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv shaped like q, k and v."""
        ...


class Ours:
    """Marble's kernels over one call, or over several that carry state.

    A whole backward pass is what autograd pays for: delta, zeroing the fp32 sums, the kernels, and the gradients
    rounded to the type of the inputs, all of which FlashAttention's backward does inside its own call too. A single
    call whose backend writes gradients writes them.

    Args:
        works: the calls in order, on the device of the inputs, all over the same queries.
        inputs: queries and keys of all calls.
        backend: runs the calls.
        scale: softmax scale.
        keys: first and one past the last key row of each call.
    """

    def __init__(
        self, works: Sequence[Work], inputs: Inputs, backend: Backend, scale: float, keys: Sequence[tuple[int, int]]
    ) -> None:
        self.inputs, self.backend, self.scale = inputs, backend, scale
        sums, device = accumulation_dtype(inputs.q.dtype), inputs.q.device
        rows, heads, head_dim = inputs.q.shape
        self.calls = [(work, start, stop) for work, (start, stop) in zip(works, keys, strict=True)]
        carried = any(bool((work.touch != int(Touch.FIRST | Touch.LAST)).any()) for work in works)
        self.state = State.empty(heads, rows, head_dim, sums, device) if carried else None
        self.out = torch.empty_like(inputs.q)
        self.lse = torch.empty(heads, rows, dtype=sums, device=device)
        self.rounded = [torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)]
        self.adds = len(works) > 1 or not backend.writes_gradients
        self.sums = [torch.empty_like(x, dtype=sums) for x in self.rounded] if self.adds else self.rounded
        self.delta = torch.empty(0)

    def forward(self) -> None:
        """All calls."""
        x = self.inputs
        for work, start, stop in self.calls:
            k, v = x.k[start:stop], x.v[start:stop]
            self.backend.forward(x.q, k, v, work, self.state, self.out, self.lse, scale=self.scale)

    def backward(self) -> None:
        """A whole backward pass."""
        self.delta = self.backend.delta(self.out, self.inputs.dout)
        if self.adds:
            for total in self.sums:
                total.zero_()
        self.backward_kernels()
        if self.adds:
            for rounded, total in zip(self.rounded, self.sums, strict=True):
                rounded.copy_(total)

    def backward_kernels(self) -> None:
        """The backward calls alone; sums are added to what is there."""
        x, (dq, dk, dv) = self.inputs, (total.transpose(0, 1) for total in self.sums)
        for work, start, stop in self.calls:
            keys = (x.k[start:stop], x.v[start:stop])
            sums = (dq, dk[:, start:stop], dv[:, start:stop])
            self.backend.backward(x.q, *keys, x.dout, self.lse, self.delta, work, *sums, scale=self.scale)

    def poison(self) -> None:
        """Fill results and state with NaN."""
        carried = () if self.state is None else (self.state.acc, self.state.m, self.state.l)
        for x in (self.out, self.lse, *self.sums, *self.rounded, *carried):
            x.fill_(float("nan"))

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv in the type of the inputs."""
        dq, dk, dv = self.rounded
        return dq, dk, dv


def on_device(calls: Sequence[MaskedCall], device: torch.device) -> list[Work]:
    """The tiles of some calls on a device, moved once for all buffer sets."""
    return [move(call.tiles, device) for call in calls]


def key_rows(calls: Sequence[MaskedCall]) -> list[tuple[int, int]]:
    """First and one past the last key row of each call, where the calls' keys follow one another."""
    ends = list(accumulate(len(call.cols) for call in calls))
    return list(zip([0, *ends[:-1]], ends, strict=True))
