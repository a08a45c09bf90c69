"""Blackwell's kernels in PyTorch: what FlashAttention-4 computes from the lists and tables that it is given."""

import math

import torch
from torch import Tensor

from marble.kernels.blackwell.lists import BLOCK, Lists, SparseCall
from marble.kernels.reference import ReferenceBackend, differentiate


def visible(call: SparseCall, queries: int, keys: int) -> Tensor:
    """How often the forward lists compute each pair of rows, int32 [queries, keys]; pair by pair, as `by_pair`."""
    return _visible(call, call.by_query, queries, keys)


def visible_by_key(call: SparseCall, queries: int, keys: int) -> Tensor:
    """The same of the backward lists."""
    return _visible(call, call.by_key, queries, keys, transposed=True)


def _visible(call: SparseCall, lists: Lists, queries: int, keys: int, *, transposed: bool = False) -> Tensor:
    count = torch.zeros(len(call.queries) * BLOCK, len(call.keys) * BLOCK, dtype=torch.int32)
    for outer in range(len(lists.partial)):
        for size, numbers, partial in (
            (lists.partial_count, lists.partial, True),
            (lists.full_count, lists.full, False),
        ):
            named = numbers[outer, : size[outer]].tolist()
            assert named == sorted(set(named))
            for inner in named:
                m, n = (inner, outer) if transposed else (outer, inner)
                tile = pairs(call, m, n) if partial else 1
                count[m * BLOCK : (m + 1) * BLOCK, n * BLOCK : (n + 1) * BLOCK] += tile
    assert not count[queries:].any()
    assert not count[:, keys:].any()
    return count[:queries, :keys]


def pairs(call: SparseCall, m: int, n: int) -> Tensor:
    """The pairs of a partial tile by the table and what it points to, bool [128, 128]."""
    q, k = torch.arange(BLOCK).unsqueeze(1) + m * BLOCK, torch.arange(BLOCK) + n * BLOCK
    slot, row, column = int(call.table[q[0, 0] // BLOCK, k[0] // BLOCK]), q % BLOCK, k % BLOCK
    if slot < 0:
        return (call.bits[~slot][row, column // 32] >> column % 32 & 1).bool()
    word = call.ranges[slot][row]
    first, second = ((column >= (word >> at & 255)) & (column < (word >> at + 8 & 255)) for at in (0, 16))
    return first | second


def forward(q: Tensor, k: Tensor, v: Tensor, call: SparseCall, scale: float) -> tuple[Tensor, Tensor]:
    """As `run_forward`, in float64 up to the result; NaN where a row sees nothing, which nobody may read."""
    legal = visible(call, len(q), len(k)).bool()
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = scale * torch.einsum("qhd,khd->hqk", q, k).masked_fill(~legal, -torch.inf)
    lse = scores.logsumexp(2)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(2), v)
    return out.float(), lse.float()


def backward(rows, statistics, call: SparseCall, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `run_backward`, in float64 up to the result."""
    q, k, v, dout = (x.double().transpose(0, 1) for x in rows)
    legal = visible_by_key(call, q.shape[1], k.shape[1]).bool()
    log_sums, delta = (x.double()[:, : q.shape[1]] for x in statistics)
    assert statistics[0].shape[1] == len(call.queries) * BLOCK
    lse = torch.where(log_sums == torch.inf, -torch.inf, log_sums * math.log(2))
    dq, dk, dv = differentiate(q, k, v, dout, lse, delta, legal, scale=scale, round_to=torch.float64)
    return as_tiles(dq / scale, len(call.queries)), as_tiles(dk / scale, len(call.keys)), as_tiles(dv, len(call.keys))


def as_tiles(rows: Tensor, blocks: int) -> Tensor:
    """[heads, rows, head_dim] as the tiles that `add_tiles` reads."""
    heads, count, head_dim = rows.shape
    whole = torch.zeros(heads, blocks * BLOCK, head_dim)
    whole[:, :count] = rows
    return whole.view(heads, blocks, BLOCK, head_dim // 4, 4).transpose(2, 3).flatten(1)


def delta(out: Tensor, dout: Tensor) -> Tensor:
    """As `run_delta`."""
    return ReferenceBackend().delta(out, dout)
