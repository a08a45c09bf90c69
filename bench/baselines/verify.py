"""Is a contender right? Sampled query rows and key rows of one call against a float64 reference."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from bench.baselines.calls import MaskedCall
from bench.baselines.measure import relative_error
from bench.baselines.systems import Inputs, System
from marble.kernels.reference import attend, differentiate, finish

LIMIT = 1e-2
"""Largest relative error of a correct bfloat16 kernel; one that skips or adds a tile is far above it."""


class Reference:
    """The truth for some rows of a call. Samples hold the first, the last and random rows of queries and keys.

    Args:
        call: the call; its mask is evaluated pair by pair, its tiles are not read.
        inputs: of the call.
        scale: softmax scale.
        samples: query rows, and key rows, that are looked at.
        seed: which ones.
    """

    def __init__(self, call: MaskedCall, inputs: Inputs, scale: float, samples: int = 64, seed: int = 0) -> None:
        self.call, self.inputs, self.scale = call, inputs, scale
        generator = torch.Generator().manual_seed(seed)
        real = (call.cols >= 0).nonzero().flatten()
        self.rows = _sample(torch.arange(len(call.rows)), samples, generator)
        self.cols = _sample(real, samples, generator)

    @cached_property
    def _queries(self) -> dict[str, Tensor]:
        """``out`` and ``dq`` [rows, heads, d] of the sampled queries."""
        x, device = self.inputs, self.inputs.q.device
        q, dout = (_exact(t[self.rows.to(device)]) for t in (x.q, x.dout))
        k, v = _exact(x.k), _exact(x.v)
        mask = self.call.legal(self.rows, torch.arange(len(self.call.cols))).to(device)
        nothing = q.new_full(q.shape[:2], -torch.inf)
        start = torch.zeros_like(q), nothing, torch.zeros_like(nothing)
        seen = attend(q, k, v, mask, start, scale=self.scale, round_to=torch.float64)
        out, lse = finish(seen, scale=self.scale)
        delta = (out * dout).sum(-1)
        dq = differentiate(q, k, v, dout, lse, delta, mask, scale=self.scale, round_to=torch.float64)[0]
        return {"out": out.transpose(0, 1), "lse": lse, "dq": dq.transpose(0, 1)}

    def forward_errors(self, system: System) -> dict[str, float]:
        """Relative errors of what `System.forward` left."""
        if not bool(torch.isfinite(system.out).all()):
            return {"out": float("inf")}
        rows = self.rows.to(system.out.device)
        errors = {"out": relative_error(system.out[rows], self._queries["out"])}
        if system.lse is not None:
            errors["lse"] = relative_error(system.lse[:, rows], self._queries["lse"])
        return errors

    def backward_errors(self, system: System, lse: Tensor) -> dict[str, float]:
        """Relative errors of what `System.backward` left; ``lse`` [heads, query rows] is a checked system's."""
        x, device = self.inputs, self.inputs.q.device
        dq, dk, dv = system.gradients()
        if not all(bool(torch.isfinite(grad[: len(self.call.cols)]).all()) for grad in (dq, dk, dv)):
            return {"gradients": float("inf")}
        rows, cols = self.rows.to(device), self.cols.to(device)
        q, dout = _exact(x.q), _exact(x.dout)
        delta = (_exact(system.out) * dout).sum(-1)
        mask = self.call.legal(torch.arange(len(self.call.rows)), self.cols).to(device)
        _, ref_dk, ref_dv = differentiate(
            q, _exact(x.k[cols]), _exact(x.v[cols]), dout, lse.double(), delta, mask,
            scale=self.scale, round_to=torch.float64,
        )  # fmt: skip
        errors = {"dq": relative_error(dq[rows], self._queries["dq"])}
        for name, grad, ref in (("dk", dk, ref_dk), ("dv", dv, ref_dv)):
            errors[name] = relative_error(grad[cols], ref.transpose(0, 1))
        return errors

    def check(
        self, name: str, system: System, beside: System | None = None, *, backward: bool = True
    ) -> dict[str, float]:
        """Poison, run and compare a contender: sampled rows with the truth, all rows with another contender.

        Args:
            name: of the contender, for the message.
            system: the contender.
            beside: one that was checked before and still holds its results; its log-sum-exp serves a contender that
                keeps none.
            backward: whether to check gradients too.

        Raises:
            RuntimeError: if an error is above `LIMIT`.
        """
        system.poison()
        system.forward()
        errors = self.forward_errors(system)
        if backward:
            system.backward()
            kept = system if system.lse is not None else beside
            assert kept is not None
            assert kept.lse is not None
            errors |= self.backward_errors(system, kept.lse)
        if beside is not None:
            errors["all rows, out"] = relative_error(system.out, beside.out)
            if backward:
                pairs = zip(("dq", "dk", "dv"), system.gradients(), beside.gradients(), strict=True)
                errors |= {f"all rows, {key}": relative_error(mine, other) for key, mine, other in pairs}
        if not all(error <= LIMIT for error in errors.values()):
            figures = ", ".join(f"{key} {error:.2e}" for key, error in errors.items())
            raise RuntimeError(f"{self.call.name}: {name} is wrong: {figures} (limit {LIMIT})")
        return errors


def _sample(members: Tensor, count: int, generator: torch.Generator) -> Tensor:
    chosen = members[torch.randperm(len(members), generator=generator)[:count]]
    return torch.unique(torch.cat([members[:1], chosen, members[-1:]]))


def _exact(x: Tensor) -> Tensor:
    """[rows, heads, d] in any type as float64 [heads, rows, d]."""
    return x.double().transpose(0, 1)
