"""Predicates of partial tiles: from tables in device memory to −inf in the scores.

A table row describes one row of a tile (`marble.kernels.contract.TileList`). The loading warp brings a tile's 128
words of ranges, or its 128 × 4 words of bits, into shared memory beside the tile. Each computing thread turns the
words of its two rows into 32 bits, one for each of its columns, which it then tests one by one: with constant
positions these tests become R2P instructions, eight predicates at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import max as dsl_max
from cutlass.cutlass_dsl import min as dsl_min
from flash_attn.cute import utils as fa_utils
from quack import layout_utils

RANGES, BITS = 0, 1
"""Kinds of predicates."""

WORDS = 512
"""Words of shared memory for the predicate of a tile."""

RANGE_BYTES, BIT_BYTES = 128 * 4, 128 * 4 * 4


@cute.jit
def load_words(ranges: cute.Tensor, bits: cute.Tensor, slot: Int32, smem: cute.Tensor, barrier: cute.Pointer):
    """Start the load of a predicate into ``smem`` [512]; its bytes arrive at ``barrier``. By one whole warp."""
    if slot >= 0:
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
        target = cute.make_tensor(smem.iterator, cute.make_layout(128))
        with cute.arch.elect_one():
            cute.copy(atom, ranges[slot, None], target, mbar_ptr=barrier)
    else:
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
        with cute.arch.elect_one():
            source = bits[-1 - slot, None, None]
            flat = cute.make_tensor(source.iterator, cute.make_layout(WORDS))
            cute.copy(atom, flat, smem, mbar_ptr=barrier)


@cute.jit
def read_words(kinds: cute.Tensor, words: cute.Tensor, stage: Int32, thread: Int32) -> cute.Tensor:
    """The 32 predicate bits of each of a thread's two rows, in the order of its columns 8j + 2t, 8j + 2t + 1."""
    row, quad = row_of(thread), thread % 4
    answer = cute.make_rmem_tensor(2, Uint32)
    if kinds[stage] == RANGES:
        for r in cutlass.range_constexpr(2):
            word = Uint32(words[row + 8 * r, stage])
            first = between(word & 255, word >> 8 & 255, quad)
            second = between(word >> 16 & 255, word >> 24, quad)
            answer[r] = first | second
    else:
        for r in cutlass.range_constexpr(2):
            gathered = Uint32(0)
            for w in cutlass.range_constexpr(4):
                word = Uint32(words[(row + 8 * r) * 4 + w, stage]) >> Uint32(2 * quad) & Uint32(0x03030303)
                word = (word | word >> 6 | word >> 12 | word >> 18) & 255
                gathered = gathered | word << (8 * w)
            answer[r] = gathered
    return answer


def row_of(thread: Int32) -> Int32:
    """The first of a computing thread's two rows in a tile; the second is 8 below."""
    return thread // 128 * 64 + thread // 32 % 4 * 16 + thread % 32 // 4


@cute.jit
def between(low: Uint32, high: Uint32, quad: Int32) -> Uint32:
    """Bits of a thread's columns in [low, high)."""
    every = Uint32(0xFFFFFFFF)
    # PTX shifts by 32 and more give 0.
    below_high = fa_utils.shr_u32(every, Uint32(32 - columns_below(Int32(high), quad)))
    from_low = fa_utils.shl_u32(every, Uint32(columns_below(Int32(low), quad)))
    return below_high & from_low


@cute.jit
def columns_below(limit: Int32, quad: Int32) -> Int32:
    """How many of the columns 8j + 2·quad + {0, 1} are below ``limit``."""
    return limit // 8 * 2 + dsl_max(0, dsl_min(2, limit % 8 - 2 * quad))


@cute.jit
def apply(scores: cute.Tensor, words: cute.Tensor):
    """Set what the bits of a thread's two rows leave out to −inf."""
    grid = layout_utils.reshape_acc_to_mn(scores)
    for r in cutlass.range_constexpr(2):
        word = words[r]
        for c in cutlass.range_constexpr(32):
            grid[r, c] = grid[r, c] if cutlass.Boolean(word & (Uint32(1) << c)) else -Float32.inf
