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
            answer[r] = range_bits(Uint32(words[row + 8 * r, stage]), quad)
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
def range_bits(word: Uint32, quad: Int32) -> Uint32:
    """Bits of a thread's columns in the two ranges of a word."""
    count = columns_below(word, Uint32(quad))
    # PTX shifts by 32 and more give 0.
    beyond = [fa_utils.shl_u32(Uint32(0xFFFFFFFF), count >> 8 * i & 255) for i in range(4)]
    return (beyond[0] & ~beyond[1]) | (beyond[2] & ~beyond[3])


@cute.jit
def columns_below(limits: Uint32, quad: Uint32) -> Uint32:
    """How many of the columns 8j + 2·quad + {0, 1} are below each of four limits of at most 128, one in each byte.

    With x = limit − 2·quad that is 2·⌊x / 8⌋ + min(x mod 8, 2), and 0 if x < 0; 8 more make all bytes positive.
    """
    one = Uint32(0x01010101)
    x = limits + (8 * one - 2 * quad * one)
    both = (x >> 1 | x >> 2) & one
    either = x & ~both & one
    return (x >> 2 & 0x3E * one) + either + 2 * both - 2 * one


@cute.jit
def apply(scores: cute.Tensor, words: cute.Tensor):
    """Set what the bits of a thread's two rows leave out to −inf."""
    grid = layout_utils.reshape_acc_to_mn(scores)
    for r in cutlass.range_constexpr(2):
        word = words[r]
        for c in cutlass.range_constexpr(32):
            grid[r, c] = grid[r, c] if cutlass.Boolean(word & (Uint32(1) << c)) else -Float32.inf
