"""Adding what a warpgroup has in registers to float32 gradients in global memory."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from marble.kernels.cute.backward_config import GROUP
from marble.kernels.cute.intrinsics import math_thread, reduce_pair, reduce_quad


class RegisterSums:
    """What the backward kernels have in common of it. Accumulators are those of products with 64 rows."""

    @cute.jit
    def _add(self, acc: cute.Tensor, target: cute.Tensor, thread: Int32, place: Any, factor: Float32 | float) -> None:
        """Add this thread's two rows of an accumulator to a gradient, as far as they belong to the block.

        ``place`` tells head, first row, rows from there to the end of the block, and first column.
        """
        lane = thread % 32
        for r in cutlass.range_constexpr(2):
            row = thread // 32 * 16 + lane // 4 + 8 * r
            head, first, rows, column = place()
            if row < rows:
                offset = Int64(head) * target.stride[0] + Int64(first + row) * target.stride[1]
                pointer = target.iterator + offset + (lane % 4 * 2 + column)
                for j in cutlass.range_constexpr(cute.size(acc) // 4):
                    index = const_expr(4 * j + 2 * r)
                    reduce_pair(pointer + 8 * j, acc[index] * factor, acc[index + 1] * factor)

    @cute.jit
    def _add_quads(self, acc: cute.Tensor, target: cute.Tensor, place: Any, factor: Float32 | float) -> None:
        """As `_add`, but four columns at a time, because the way to memory is what bounds dQ.

        Of a row, lane t of a quad holds columns 8j + 2t + {0, 1}. Lanes 2s and 2s + 1 exchange pairs: then the former
        has 8j + 4s + {0, 1, 2, 3}, the latter the same of j + 1, for even j, and a quad adds 64 bytes at once.
        """
        thread = math_thread() & (GROUP - 1)
        odd, lane, at_once = thread & 1, thread & 31, 4
        for r in cutlass.range_constexpr(2):
            head, first, rows, column = place()
            row = (thread >> 5) * 16 + (lane >> 2) + 8 * r
            offset = Int64(head) * target.stride[0] + Int64(first + row) * target.stride[1]
            pointer = target.iterator + offset + (column + odd * 8 + (lane >> 1 & 1) * 4)
            for start in cutlass.range_constexpr(0, cute.size(acc) // 4, 2 * at_once):
                quads = []
                for j in cutlass.range_constexpr(start, start + 2 * at_once, 2):
                    low, high = ([acc[4 * (j + i) + 2 * r + c] * factor for c in range(2)] for i in range(2))
                    given = [x if odd != 0 else y for x, y in zip(low, high, strict=True)]
                    taken = [cute.arch.shuffle_sync_bfly(x, 1) for x in given]
                    quads.append([x if odd != 0 else y for x, y in zip(taken + high, low + taken, strict=True)])
                if row < rows:
                    for i in cutlass.range_constexpr(at_once):
                        reduce_quad(pointer + 8 * start + 16 * i, quads[i])
