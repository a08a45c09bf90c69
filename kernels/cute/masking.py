"""Predicates of partial tiles: from words in shared memory to −inf in the scores.

The words come in the order of the computing threads' columns (`marble.kernels.cute.predicates`). A computing thread
reads those of its two rows and tests the bits one by one: with constant positions these tests become R2P instructions,
eight predicates at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from quack import layout_utils


def row_of(thread: Int32) -> Int32:
    """The first of the two rows of a computing warpgroup's thread among its 64; the second is 8 below."""
    return thread // 32 * 16 + thread % 32 // 4


@cute.jit
def own_bits(words: cute.Tensor, row: Int32, thread: Int32, halves: cutlass.Constexpr) -> cute.Tensor:
    """The bits of a thread's rows ``row`` and ``row`` + 8, uint32 [2], of words [4 threads, 128 rows, halves]."""
    own = cute.make_rmem_tensor(2, Uint32)
    for r in cutlass.range_constexpr(2):
        own[r] = Uint32(words[thread % 4, row + 8 * r, 0])
        if cutlass.const_expr(halves == 2):
            own[r] |= Uint32(words[thread % 4, row + 8 * r, 1]) << 16
    return own


@cute.jit
def apply(scores: cute.Tensor, own: cute.Tensor, piece: cutlass.Constexpr = 0, pieces: cutlass.Constexpr = 1):
    """Set what the bits of a thread's two rows leave out to −inf, in one of the ``pieces`` of the columns."""
    grid = layout_utils.reshape_acc_to_mn(scores)
    columns = cutlass.const_expr(cute.size(grid, mode=[1]) // pieces)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(piece * columns, (piece + 1) * columns):
            grid[r, c] = grid[r, c] if cutlass.Boolean(own[r] & (Uint32(1) << c)) else -Float32.inf
