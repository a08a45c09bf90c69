"""The backward pass on Blackwell: FlashAttention-4's kernel against the final log-sum-exp, up to its float32 sums.

It adds dQ, and for grouped heads dK and dV, to float32 tiles, which FlashAttention then rounds;
`marble.kernels.triton.fold.add_tiles` adds them to our sums instead.
"""

import warnings
from functools import lru_cache
from typing import Any

import torch
from cutlass import Float32, cute
from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100
from flash_attn.cute.utils import AuxData
from torch import Tensor

from marble.kernels.blackwell.lists import BLOCK, SparseCall
from marble.kernels.blackwell.predicates import by_pair, fake_lists, fake_tables, lists_of
from marble.kernels.cute.binding import ELEMENTS, compiled, fake


class SummingBackward(FlashAttentionBackwardSm100):
    """FlashAttention's kernel with dK and dV added to float32 tiles however many query heads share a key head.

    By itself it does so for two and more, and otherwise stores them in the type of the inputs.
    """

    @property
    def dKV_postprocess(self) -> bool:  # noqa: N802
        """Whether they are added up in float32, unscaled."""
        return True

    @dKV_postprocess.setter
    def dKV_postprocess(self, _: bool) -> None:  # noqa: N802
        """The kernel sets what it would choose."""


@lru_cache
def compile_backward(dtype: torch.dtype, head_dim: int, group: int) -> Any:
    """The kernel for ``group`` query heads to a key/value head and every size. Needs no GPU; compiled once."""
    kind = ELEMENTS[dtype]
    rows, keys, padded, heads, kv_heads = (cute.sym_int() for _ in range(5))
    kernel = SummingBackward(
        head_dim, qhead_per_kvhead=group, tile_m=BLOCK, tile_n=BLOCK, mask_mod=by_pair, has_aux_tensors=True
    )
    return compiled(
        kernel,
        fake(kind, 1, rows, heads, head_dim),
        *(fake(kind, 1, keys, kv_heads, head_dim) for _ in range(2)),
        fake(kind, 1, rows, heads, head_dim),
        *(fake(Float32, 1, heads, padded) for _ in range(2)),
        fake(Float32, 1, heads, cute.sym_int()),
        *(fake(Float32, 1, kv_heads, cute.sym_int()) for _ in range(2)),
        Float32(1),
        *[None] * 9,
        AuxData(fake_tables()),
        fake_lists(heads),
        None,
    )


def run_backward(
    rows: tuple[Tensor, Tensor, Tensor, Tensor], statistics: tuple[Tensor, Tensor], call: SparseCall, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of a call's pairs in float32, tile by tile as `add_tiles` reads them; dQ and dK lack the scale.

    Args:
        rows: q, k, v and dout, the rows of the call's blocks.
        statistics: float32 [heads, 128 · query blocks]: the log-sum-exp to base 2, and delta. +inf says that a row
            adds nothing.
        call: the blocks.
        scale: softmax scale.

    Raises:
        RuntimeError: if PyTorch's deterministic algorithms are enabled: sums have no order here.
    """
    if torch.are_deterministic_algorithms_enabled():
        text = (
            "backend: 'blackwell' adds gradients in any order, but torch.use_deterministic_algorithms(True) was called;"
            " 'cute' on Hopper GPUs and 'reference' have an order"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=2)
    q, k, _, _ = rows
    _, heads, head_dim = q.shape
    sums = tuple(
        torch.zeros(count, len(blocks) * BLOCK * head_dim, dtype=torch.float32, device=q.device)
        for count, blocks in ((heads, call.queries), (k.shape[1], call.keys), (k.shape[1], call.keys))
    )
    compile_backward(q.dtype, head_dim, heads // k.shape[1])(
        *(x.unsqueeze(0) for x in (*rows, *statistics, *sums)),
        scale,
        *[None] * 9,
        AuxData([call.table, call.ranges, call.bits]),
        lists_of(call.by_key, heads),
        None,
    )
    return sums
