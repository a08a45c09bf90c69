"""What FlashAttention-4's block-sparse kernels read: lists of tiles, and a ``mask_mod`` for the predicates of partial
ones, which serves every mask.

It finds a tile's slot in `SparseCall.table`, and its row's ranges or bits under that slot.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32, Uint64, cute
from flash_attn.cute.block_sparsity import BlockSparseTensors
from torch import Tensor

from marble.kernels.blackwell.lists import BLOCK, Lists
from marble.kernels.cute.binding import fake


@cute.jit
def columns_below(limit: Int32) -> Uint32:
    """Bits of the columns 0 to 31 that are below a limit, which may lie anywhere."""
    return Uint32((Uint64(1) << Uint64(cutlass.min(cutlass.max(limit, 0), 32))) - 1)


@cute.jit
def row_words(ranges: cute.Tensor, bits: cute.Tensor, slot: Int32, row: Int32) -> cute.Tensor:
    """The bits of a row of a predicate, uint32 [4]: column c is bit c % 32 of word c // 32."""
    words = cute.make_rmem_tensor(4, Uint32)
    if slot >= 0:
        word = ranges[slot, row]
        limits = [word >> shift & 255 for shift in (0, 8, 16, 24)]
        for c in cutlass.range_constexpr(4):
            low, high, low1, high1 = (columns_below(limit - 32 * c) for limit in limits)
            words[c] = high & ~low | high1 & ~low1
    else:
        for c in cutlass.range_constexpr(4):
            words[c] = Uint32(bits[-1 - slot, row, c])
    return words


@cute.jit
def by_row(batch, head, q_idx, kv_idx, seqlen_info, tables):  # noqa: ARG001
    """The 128 columns of a row, for the forward pass, whose threads own a row of a tile each.

    FlashAttention asks with the row's query, repeated, and the tile's keys, the first of which always exists.
    """
    q, k = q_idx[0], kv_idx[0]
    table, ranges, bits = tables
    return row_words(ranges, bits, table[q // BLOCK, k // BLOCK], q % BLOCK)


by_row.__vec_size__ = BLOCK


@cute.jit
def by_pair(batch, head, q_idx, kv_idx, seqlen_info, tables):  # noqa: ARG001
    """One pair, for the backward pass, which asks pair by pair."""
    q, k = q_idx[0], kv_idx[0]
    table, ranges, bits = tables
    slot, row, column = table[q // BLOCK, k // BLOCK], q % BLOCK, k % BLOCK
    # Both are read, as a branch for every pair compiles to more; there is always a slot to read.
    limits = ranges[cutlass.max(slot, 0), row]
    low, high, low1, high1 = (limits >> shift & 255 for shift in (0, 8, 16, 24))
    inside = (low <= column) & (column < high) | (low1 <= column) & (column < high1)
    bit = (bits[cutlass.max(-1 - slot, 0), row, column // 32] >> column % 32 & 1) != 0
    return cute.full((1,), (slot >= 0) & inside | (slot < 0) & bit, Boolean)


def fake_tables() -> list[Any]:
    """Tables of unknown sizes: slots, ranges and bits."""
    table = fake(Int32, cute.sym_int(), cute.sym_int(), aligned=False)
    return [table, fake(Int32, cute.sym_int(), BLOCK), fake(Int32, cute.sym_int(), BLOCK, 4)]


def fake_lists(heads: Any) -> BlockSparseTensors:
    """Lists of unknown lengths."""
    blocks = cute.sym_int()
    counts = (fake(Int32, 1, heads, blocks, aligned=False) for _ in range(2))
    numbers = (fake(Int32, 1, heads, blocks, cute.sym_int(), aligned=False) for _ in range(2))
    return BlockSparseTensors(*(x for pair in zip(counts, numbers, strict=True) for x in pair))


def lists_of(lists: Lists, heads: int) -> tuple[Tensor | None, ...]:
    """The lists to call a kernel with: those of one head for all."""
    given = (lists.partial_count, lists.partial, lists.full_count, lists.full)
    return *(x.expand(1, heads, *x.shape) for x in given), *[None] * 4
