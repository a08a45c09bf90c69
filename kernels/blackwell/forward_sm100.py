"""The forward pass on Blackwell: FlashAttention-4's kernel as it runs under split-KV, with one split.

Under split-KV its epilogue writes normalised outputs in float32 and their log-sum-exps, for a second kernel to combine;
here `marble.kernels.triton.fold` takes them. A thread block computes one query block: FlashAttention would pair two
that share a list, and ours have a list each.
"""

from functools import lru_cache
from typing import Any

import torch
from cutlass import Float32, Int32, cute
from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
from flash_attn.cute.utils import AuxData
from torch import Tensor

from marble.kernels.blackwell.lists import BLOCK, SparseCall
from marble.kernels.blackwell.predicates import by_row, fake_lists, fake_tables, lists_of
from marble.kernels.cute.binding import ELEMENTS, compiled, fake


@lru_cache
def compile_forward(dtype: torch.dtype, head_dim: int, group: int) -> Any:
    """The kernel for ``group`` query heads to a key/value head and every size. Needs no GPU; compiled once."""
    kind = ELEMENTS[dtype]
    rows, keys, heads, kv_heads = (cute.sym_int() for _ in range(4))
    kernel = FlashAttentionForwardSm100(
        head_dim,
        qhead_per_kvhead=group,
        is_split_kv=True,
        m_block_size=BLOCK,
        n_block_size=BLOCK,
        q_stage=1,
        is_static_persistent=False,
        mask_mod=by_row,
        has_aux_tensors=True,
    )
    return compiled(
        kernel,
        fake(kind, 1, rows, heads, head_dim),
        *(fake(kind, 1, keys, kv_heads, head_dim) for _ in range(2)),
        fake(Float32, 1, 1, rows, heads, head_dim),
        fake(Float32, 1, 1, heads, rows, aligned=False),
        Float32(1),
        *[None] * 9,
        fake_lists(heads),
        AuxData(fake_tables()),
        *[None] * 7,
        Int32(1),
    )


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: SparseCall, scale: float) -> tuple[Tensor, Tensor]:
    """The output of a call's pairs alone, normalised, and its log-sum-exp, both in float32.

    Args:
        q: rows of its query blocks, at most 128 for each: [rows, heads, head_dim].
        k: rows of its key blocks, [rows, kv_heads, head_dim].
        v: like ``k``.
        call: the blocks.
        scale: softmax scale.

    Returns:
        [rows, heads, head_dim] and [heads, rows]; 0 and −inf for rows that see no key.
    """
    rows, heads, head_dim = q.shape
    out = torch.empty(rows, heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    compile_forward(q.dtype, head_dim, heads // k.shape[1])(
        *(x.unsqueeze(0) for x in (q, k, v)),
        out[None, None],
        lse[None, None],
        scale,
        *[None] * 9,
        lists_of(call.by_query, heads),
        AuxData([call.table, call.ranges, call.bits]),
        *[None] * 7,
        rows,
    )
    return out, lse
