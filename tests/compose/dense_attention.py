"""A dense attention to compare with, and the public API run over virtual ranks, for the tests in this folder.

The mask is spelled out pair by pair from the spans, without marble's own mask code, and gradients are autograd's.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import marble
from marble import AttentionShape, Layout
from marble.compose.plan import Plan

HEADS = {"MHA": (2, 2), "GQA": (4, 2)}
ORDERS = ("ptrr", "balanced_samples", "contiguous")
each_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)


@dataclass(frozen=True)
class Data:
    """Inputs and the output gradient of one layer over the whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def of(cls, tokens: int, heads: tuple[int, int], dim: int = 8, dtype: Any = torch.float64, seed: int = 0) -> "Data":
        generator = torch.Generator().manual_seed(seed)
        sizes = ((tokens, heads[0], dim), (tokens, heads[1], dim), (tokens, heads[1], dim), (tokens, heads[0], dim))
        return cls(*(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes))

    def map(self, change: Any) -> "Data":
        return Data(*(change(x) for x in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.dout


@dataclass(frozen=True)
class Result:
    """What an attention answers over the whole sequence; ``lse`` is [tokens, heads]."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def items(self) -> list[tuple[str, Tensor]]:
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]


def legal(layout: Layout, window: int | None = None) -> Tensor:
    """Who sees whom, bool [queries, keys], by the words of `marble.Mode`."""
    rows = []
    for index, sample in enumerate(layout.samples):
        for place, span in enumerate(sample):
            mode = span.mode.value
            default = ("sample", index) if mode == "group" else ("span", index, place)
            link = default if span.group is None else span.group
            rows += [(index, mode, link)] * span.length
    names = {link: number for number, link in enumerate({row[2] for row in rows})}
    sample = torch.tensor([row[0] for row in rows])
    link = torch.tensor([names[row[2]] for row in rows])
    is_mode = {mode: torch.tensor([row[1] == mode for row in rows]) for mode in ("causal", "noise", "pad")}
    distance = torch.arange(len(rows)).unsqueeze(1) - torch.arange(len(rows))
    linked = (link.unsqueeze(1) == link) & ~is_mode["causal"]
    past = (distance >= 0) & (distance < (len(rows) if window is None else window)) & ~is_mode["noise"]
    real = ~is_mode["pad"]
    return (linked | past) & (sample.unsqueeze(1) == sample) & real & real.unsqueeze(1)


def dense(data: Data, mask: Tensor, scale: float | None = None) -> Result:
    """Plain attention in float64 with autograd's gradients; a query without keys gets 0 and −inf."""
    q, k, v = (x.double().requires_grad_() for x in (data.q.detach(), data.k.detach(), data.v.detach()))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
    seen = mask.any(1)
    # Queries without keys attend to everything here and are zeroed below: autograd then has no −inf − (−inf).
    scores = scores.masked_fill(~(mask | ~seen.unsqueeze(1)), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1)) * seen.view(-1, 1, 1)
    gradients = torch.autograd.grad(out, (q, k, v), data.dout.double())
    lse = scores.logsumexp(-1).masked_fill(~seen, -torch.inf).T
    return Result(out.detach(), lse.detach(), *gradients)


def distributed(plan: Plan, data: Data, layer: int = 0, backend: str = "reference") -> Result:
    """The same through the public API: shard, attend, unshard, differentiate."""
    q, k, v = (x.detach().requires_grad_() for x in (data.q, data.k, data.v))
    local = [plan.shard(x) for x in (q, k, v)]
    out, lse = marble.attention(*local, plan, layer=layer, backend=backend, return_lse=True)
    out = plan.unshard(out)
    out.backward(data.dout)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return Result(out.detach(), plan.unshard(lse), q.grad, k.grad, v.grad)


def make_plan(layout: Layout, heads: tuple[int, int], ranks: int, *, dim: int = 8, **options: Any) -> Plan:
    shape = AttentionShape(*heads, dim, options.pop("window", None), options.pop("scale", None))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "marble.plan: ranks .* get no tokens")
        return marble.plan(layout, shape, ranks=ranks, **options)


def assert_equal(actual: Result, expected: Result) -> None:
    """Equal to a few units of float64; −inf where −inf."""
    for name, value in actual.items():
        assert not value.isnan().any(), f"{name} has NaN"
        torch.testing.assert_close(value, getattr(expected, name), rtol=1e-10, atol=1e-11, msg=lambda m, n=name: n + m)


def check(layout: Layout, heads: tuple[int, int], ranks: int, **options: Any) -> Result:
    """Plan, run and compare with the dense attention; returns what was found."""
    data = Data.of(layout.tokens, heads)
    found = distributed(make_plan(layout, heads, ranks, **options), data)
    assert_equal(found, dense(data, legal(layout, options.get("window"))))
    return found


def differ(a: Result, b: Result, names: Sequence[str] = ("out", "dq", "dk", "dv")) -> bool:
    return all(not torch.allclose(getattr(a, name), getattr(b, name), atol=1e-3) for name in names)
