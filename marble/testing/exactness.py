"""Is distributed attention as exact as a single call? The gate that marble is held to.

The error ratio of a result x is ‖x − ref‖ / ‖x₁ − ref‖ in the 2-norm, with the float64 reference ref and the result
x₁ of one call over the whole sequence in the same precision. A ratio of 1 means that distribution costs no accuracy.
The reference is a plain softmax differentiated by autograd; it shares the mask with what it judges, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import marble
from marble.compose.plan import Plan
from marble.compose.shape import AttentionShape
from marble.kernels.contract import Backend, accumulation_dtype
from marble.kernels.reference import attend, differentiate, finish
from marble.layout import Layout
from marble.mask.algebra import and_masks
from marble.mask.domains import dense
from marble.mask.modes import not_padding, packed_mask
from marble.mask.tracks import Tracks

GATE = 1.02
"""Largest error ratio that counts as exact; ratios of independent roundings scatter by about 0.5 %."""

RESULTS = ("out", "dq", "dk", "dv")
_STRIP = 256


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention layer over one layout, with random inputs and a non-uniform output gradient.

    Attributes:
        layout: the packed sequence.
        shape: the layer.
        q: float64 [tokens, heads, head_dim], already rounded to the working precision; so are ``k``, ``v``, ``dout``.
        k: [tokens, kv_heads, head_dim].
        v: [tokens, kv_heads, head_dim].
        dout: like ``q``.
        mask: bool [tokens, tokens].
    """

    layout: Layout
    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Tensor

    @classmethod
    def random(
        cls,
        layout: Layout,
        shape: AttentionShape,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> Problem:
        """A problem with normally distributed inputs that ``dtype`` represents without error."""
        generator = torch.Generator(device=device).manual_seed(seed)
        tensors = [
            torch.randn(layout.tokens, heads, shape.head_dim, generator=generator, device=device, dtype=torch.float32)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        ]
        # A gradient whose size differs between tokens: a uniform one would hide keys and values mixed up in a sum.
        tensors[3] *= torch.linspace(0.5, 2, layout.tokens, device=device)[:, None, None]
        tracks = Tracks.of(layout)
        mask = dense(and_masks(packed_mask(shape.window), not_padding), tracks, tracks).to(device)
        q, k, v, dout = (tensor.to(dtype).double() for tensor in tensors)
        return cls(layout, shape, q, k, v, dout, mask)

    def plan(self, ranks: int, schedule: str = "ring", block: int = 128) -> Plan:
        """A plan of this problem on virtual ranks."""
        return marble.plan(self.layout, self.shape, ranks=ranks, schedule=schedule, block=block)

    def plan_here(self, schedule: str = "ring", ulysses: int = 1) -> Plan:
        """A plan of this problem for this process's rank in the default process group."""
        return marble.plan(self.layout, self.shape, group=dist.group.WORLD, schedule=schedule, ulysses=ulysses)


Results = dict[str, Tensor]


def reference(problem: Problem) -> Results:
    """``out``, ``dq``, ``dk`` and ``dv`` in float64, by autograd through a plain softmax."""
    shape = problem.shape
    q, k, v = (x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
    share = shape.heads // shape.kv_heads
    outs = []
    for low in range(0, len(q), _STRIP):
        rows = slice(low, low + _STRIP)
        mask = problem.mask[rows]
        columns = mask.any(0)
        keys, values = (x[columns].repeat_interleave(share, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * shape.softmax_scale
        allowed = mask[:, columns]
        # Rows without keys get output 0: their weights are cut off after a softmax over nothing but zeros.
        weights = torch.softmax(scores.masked_fill(~allowed, -1e300), -1) * allowed
        out = torch.einsum("hqk,khd->qhd", weights, values)
        out.backward(problem.dout[rows])
        outs.append(out.detach())
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return {"out": torch.cat(outs), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def single_call(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> Results:
    """The same by one flash-attention call over the whole sequence, rounded where such a kernel rounds."""
    scale = problem.shape.softmax_scale
    sums = accumulation_dtype(dtype)
    # Inputs are exact in dtype already, so heads-first tensors in the accumulation type hold the same values.
    q, k, v, dout = (x.to(sums).transpose(0, 1) for x in (problem.q, problem.k, problem.v, problem.dout))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for low in range(0, q.shape[1], _STRIP):
        rows = slice(low, low + _STRIP)
        columns = problem.mask[rows].any(0).nonzero().flatten()
        mask = problem.mask[rows][:, columns]
        part = q[:, rows], k[:, columns], v[:, columns]
        nothing = q.new_full(part[0].shape[:2], -torch.inf)
        start = torch.zeros_like(part[0]), nothing, torch.zeros_like(nothing)
        output, lse = finish(attend(*part, mask, start, scale=scale, round_to=dtype), scale=scale)
        out[:, rows] = output.to(dtype).to(sums)
        delta = (out[:, rows] * dout[:, rows]).sum(-1)
        gradients = differentiate(*part, dout[:, rows], lse, delta, mask, scale=scale, round_to=dtype)
        dq[:, rows] = gradients[0]
        dk.index_add_(1, columns, gradients[1])
        dv.index_add_(1, columns, gradients[2])
    results = (x.transpose(0, 1).to(dtype) for x in (out, dq, dk, dv))
    return dict(zip(RESULTS, results, strict=True))


def distributed(
    problem: Problem,
    plan: Plan,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | Backend = "reference",
    transport: str | None = None,
) -> Results:
    """The same by ``marble.attention`` on the plan's ranks; over processes, every rank gets all results."""
    q, k, v = (plan.shard(x.to(dtype)).requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = marble.attention(q, k, v, plan, backend=backend, transport=transport)
    assert isinstance(out, Tensor)
    out.backward(plan.shard(problem.dout.to(dtype)))
    return {
        name: plan.unshard(x.detach())
        for name, x in zip(RESULTS, (out, q.grad, k.grad, v.grad), strict=True)
        if x is not None
    }


def error_ratios(results: Results, single: Results, ref: Results) -> dict[str, float]:
    """The error ratio of each result. NaN, or an error where the single call has none, is infinite."""
    ratios = {}
    for name in RESULTS:
        error, base = ((x[name].double() - ref[name]).norm().item() for x in (results, single))
        ratios[name] = error / base if base > 0 and error == error else (1.0 if error == 0 else float("inf"))
    return ratios


def worst_difference(results: Results, ref: Results) -> float:
    """Largest absolute difference over all results; infinite for NaN."""
    worst = max((results[name].double() - ref[name]).abs().max().item() for name in RESULTS)
    return worst if worst == worst else float("inf")
