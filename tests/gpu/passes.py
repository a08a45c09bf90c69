"""One call's passes on NaN-poisoned buffers, by any backend, and how far they are from each other."""

import pytest
import torch
from torch import Tensor

from marble.kernels import launch
from marble.kernels.contract import Backend, Tiles, Touch, Work, accumulation_dtype
from marble.kernels.reference import ReferenceBackend

CHIPS = (launch.HOPPER, *launch.BLACKWELL)
KNOWN = torch.cuda.is_available() and torch.cuda.get_device_capability() in CHIPS
on_gpu = pytest.mark.skipif(not KNOWN, reason="needs a Hopper or Blackwell GPU")

REFERENCE = ReferenceBackend()
BOTH = Touch.FIRST | Touch.LAST
each_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
each_heads = pytest.mark.parametrize("heads", [(2, 2), (4, 1), (6, 2)])


class Inputs:
    """Random inputs of a call. Keys and values are views of one buffer, as in the executor."""

    def __init__(self, queries: int, keys: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
        self.scale = head_dim**-0.5
        self.q, self.dout = (torch.randn(queries, heads[0], head_dim, device="cuda", dtype=dtype) for _ in range(2))
        self.dout *= torch.linspace(0.5, 2, queries, device="cuda")[:, None, None]
        self.k, self.v = torch.randn(keys, 2, heads[1], head_dim, device="cuda", dtype=dtype).unbind(1)


def forward(backend: Backend, x: Inputs, work: Work, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp on NaN-poisoned buffers."""
    out = torch.full_like(x.q, torch.nan, dtype=dtype)
    lse = x.q.new_full((x.q.shape[1], len(x.q)), torch.nan, dtype=accumulation_dtype(dtype))
    backend.forward(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), work, None, out, lse, scale=x.scale)
    return out, lse


def backward(backend: Backend, x: Inputs, work: Work, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, added to ones, against the float64 output."""
    exact, lse = forward(REFERENCE, x, work, torch.float64)
    sums = accumulation_dtype(dtype)
    exact, lse = exact.nan_to_num(0.0), lse.nan_to_num(-torch.inf, neginf=-torch.inf).to(sums)
    delta = backend.delta(exact.to(dtype), x.dout.to(dtype))
    dq = torch.ones(x.q.shape, dtype=sums, device="cuda").transpose(0, 1)
    dk, dv = (
        part.transpose(0, 1) for part in torch.ones(len(x.k), 2, *x.k.shape[1:], dtype=sums, device="cuda").unbind(1)
    )
    args = (t.to(dtype) for t in (x.q, x.k, x.v, x.dout))
    backend.backward(*args, lse, delta, work, dq, dk, dv, scale=x.scale)
    return tuple(part - 1 for part in (dq, dk, dv))


def error(x: Tensor, ref: Tensor) -> float:
    return float((x.double() - ref).norm() / ref.norm())


def deviation(x: Tensor, ref: Tensor) -> float:
    """Root mean square of what differs; unlike `error`, of use where the truth is 0."""
    return float((x.double() - ref).square().mean().sqrt())


def inputs_of(tiles: Tiles, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Inputs:
    return Inputs(tiles.query_rows, int((tiles.key_row + tiles.key_len).max()), heads, head_dim, dtype)
