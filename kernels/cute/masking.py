"""Predicates of partial tiles: from tables in device memory to −inf in the scores.

A table row describes one row of a tile (`marble.kernels.contract.TileList`). A mask warp turns it into bits in the
order of the computing threads' columns: of the four threads of a row, thread t owns the columns 8j + 2t + {0, 1}. A
computing thread reads one word for each of its two rows and tests the bits one by one: with constant positions these
tests become R2P instructions, eight predicates at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from flash_attn.cute import utils as fa_utils
from quack import layout_utils


@cute.jit
def row_bits(ranges: cute.Tensor, bits: cute.Tensor, slot: Int32, row: Int32) -> cute.Tensor:
    """The bits of a row of a predicate for each of the row's four threads, uint32 [4]."""
    answer = cute.make_rmem_tensor(4, Uint32)
    if slot >= 0:
        word = Uint32(ranges[slot, row])
        for t in cutlass.range_constexpr(4):
            answer[t] = range_bits(word, Uint32(t))
    else:
        words = [Uint32(bits[-1 - slot, row, k]) for k in range(4)]
        for t in cutlass.range_constexpr(4):
            packed = Uint32(0)
            for k in cutlass.range_constexpr(4):
                # Four pairs of bits, 8 apart, move next to each other in the highest byte; no terms overlap.
                packed |= ((words[k] >> 2 * t & 0x03030303) * Uint32(0x01041040) >> 24) << 8 * k
            answer[t] = packed
    return answer


@cute.jit
def range_bits(word: Uint32, t: Uint32) -> Uint32:
    """Bits of the columns of thread ``t`` in the two ranges of a word."""
    count = columns_below(word, t)
    # PTX shifts by 32 and more give 0.
    beyond = [fa_utils.shl_u32(Uint32(0xFFFFFFFF), count >> 8 * i & 255) for i in range(4)]
    return (beyond[0] & ~beyond[1]) | (beyond[2] & ~beyond[3])


@cute.jit
def columns_below(limits: Uint32, t: Uint32) -> Uint32:
    """How many of the columns 8j + 2t + {0, 1} are below each of four limits of at most 128, one in each byte.

    With x = limit − 2t that is 2·⌊x / 8⌋ + min(x mod 8, 2), and 0 if x < 0; 8 more make all bytes positive.
    """
    one = Uint32(0x01010101)
    x = limits + (8 * one - 2 * t * one)
    both = (x >> 1 | x >> 2) & one
    either = x & ~both & one
    return (x >> 2 & 0x3E * one) + either + 2 * both - 2 * one


def row_of(thread: Int32) -> Int32:
    """The first of the two rows of a computing warpgroup's thread among its 64; the second is 8 below."""
    return thread // 32 * 16 + thread % 32 // 4


@cute.jit
def own_bits(bits: cute.Tensor, row: Int32, thread: Int32) -> cute.Tensor:
    """The bits of a thread's rows ``row`` and ``row`` + 8, of a stage [4, 128]."""
    own = cute.make_rmem_tensor(2, Uint32)
    for r in cutlass.range_constexpr(2):
        own[r] = bits[thread % 4, row + 8 * r]
    return own


@cute.jit
def apply(scores: cute.Tensor, own: cute.Tensor, piece: cutlass.Constexpr = 0, pieces: cutlass.Constexpr = 1):
    """Set what the bits of a thread's two rows leave out to −inf, in one of the ``pieces`` of the columns."""
    grid = layout_utils.reshape_acc_to_mn(scores)
    columns = cutlass.const_expr(cute.size(grid, mode=[1]) // pieces)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(piece * columns, (piece + 1) * columns):
            grid[r, c] = grid[r, c] if cutlass.Boolean(own[r] & (Uint32(1) << c)) else -Float32.inf
