"""Running schedules on virtual ranks, and the dense attention that they must agree with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from marble.comm.local import run_together
from marble.compose import executor
from marble.compose.schedule import Schedule
from marble.kernels.contract import Backend
from marble.kernels.reference import ReferenceBackend
from marble.layout import Layout
from marble.mask.domains import dense
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder
from marble.testing.layouts import Case, stored_mask

SCALE = 0.7


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill all memory that PyTorch hands out uninitialised with NaN, so that reading it cannot go unnoticed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def random_inputs(case: Case, seed: int = 0, head_dim: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and dout in storage order; dout is no constant, so that no gradient is one by accident."""
    make = torch.Generator().manual_seed(seed)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    tokens = case.layout.tokens
    return [torch.randn(tokens, h, head_dim, generator=make, dtype=torch.float64).to(dtype) for h in heads]


def run(
    schedules: Sequence[Schedule], order: TokenOrder, inputs: Sequence[Tensor], backend: Backend | None = None
) -> dict[str, Tensor]:
    """Forward and backward of all ranks: out, lse, dq, dk and dv in storage order, tokens first."""
    backend = ReferenceBackend() if backend is None else backend
    shards = [order.shard(rank) for rank in range(order.world)]
    q, k, v, dout = ([x[shard] for shard in shards] for x in inputs)
    ahead = run_together(
        {s.rank: executor.forward(s, backend, q[s.rank], k[s.rank], v[s.rank], scale=SCALE) for s in schedules}
    )
    back = run_together(
        {
            s.rank: executor.backward(
                s, backend, q[s.rank], k[s.rank], v[s.rank], *ahead[s.rank], dout[s.rank], scale=SCALE
            )
            for s in schedules
        }
    )
    place = torch.argsort(torch.cat(shards))
    ranks = range(order.world)
    results = {
        "out": [ahead[rank][0] for rank in ranks],
        "lse": [ahead[rank][1].T for rank in ranks],
        **{name: [back[rank][at] for rank in ranks] for at, name in enumerate(("dq", "dk", "dv"))},
    }
    return {name: torch.cat(parts)[place] for name, parts in results.items()}


def truth(mask: StoredMask, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same from one dense softmax and PyTorch's autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    legal = dense(mask.mask, mask.tracks, mask.tracks)
    group = q.shape[1] // k.shape[1]
    scores = SCALE * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores.masked_fill(~legal, -torch.inf)
    lse = scores.logsumexp(2)
    seen = legal.any(1)
    weights = torch.where(seen.unsqueeze(1), scores, 0).softmax(2) * seen.unsqueeze(1)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), "lse": lse.detach().T, "dq": dq, "dk": dk, "dv": dv}


def differences(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-10) -> list[str]:
    """The names of results that are not equal; equal infinities are, NaN never is."""
    return [
        name
        for name in one
        if one[name].shape != other[name].shape
        or not torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance)
    ]


def case_of(layout: Layout, pieces: list, world: int, block: int, heads: int = 2, kv_heads: int = 1) -> Case:
    """A case dealt by hand."""
    mask = stored_mask(Storage.natural(layout))
    order = TokenOrder("mine", mask.storage, world, torch.tensor(pieces))
    return Case(layout, None, None, block, world, heads, kv_heads, mask, order)
