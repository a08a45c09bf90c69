"""What a warpgroup has of a gradient in registers, on its way to global memory: added to float32, or rounded."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from flash_attn.cute import utils

from marble.kernels.cute.binding import GROUP
from marble.kernels.cute.intrinsics import math_thread, reduce_pair, reduce_quad, store_words


class RegisterSums:
    """What the backward kernels have in common of it. Accumulators are those of products with 64 rows."""

    @cute.jit
    def _add(self, acc: cute.Tensor, target: cute.Tensor, place: Any, factor: Float32 | float) -> None:
        """Add this thread's two rows of an accumulator to a gradient, as far as they belong to the block.

        ``place`` tells head, first row of the group, and rows from there to the end of the block.
        """
        thread = math_thread() & (GROUP - 1)
        lane = thread % 32
        for r in cutlass.range_constexpr(2):
            row = thread // 32 * 16 + lane // 4 + 8 * r
            head, first, rows = place()
            if row < rows:
                offset = Int64(head) * target.stride[0] + Int64(first + row) * target.stride[1]
                pointer = target.iterator + offset + lane % 4 * 2
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
            head, first, rows = place()
            row = (thread >> 5) * 16 + (lane >> 2) + 8 * r
            offset = Int64(head) * target.stride[0] + Int64(first + row) * target.stride[1]
            pointer = target.iterator + offset + (odd * 8 + (lane >> 1 & 1) * 4)
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

    @cute.jit
    def _write(self, acc: cute.Tensor, target: cute.Tensor, place: Any, factor: Float32 | float) -> None:
        """Round this thread's two rows of an accumulator, and write them to a gradient where `_add_quads` would add.

        Of a row, lane t of a quad holds columns 8j + 2t + {0, 1}, a word each. The quad's lanes exchange words of four
        successive j, first with their neighbour, then with the other pair: then lane t has all columns of the t-th.
        """
        thread = math_thread() & (GROUP - 1)
        lane, own = thread & 31, thread & 3
        odd, high = own & 1 != 0, own & 2 != 0
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
        words = cute.recast_tensor(utils.cvt_f16(acc, target.element_type), Int32)
        for r in cutlass.range_constexpr(2):
            head, first, rows = place()
            row = (thread >> 5) * 16 + (lane >> 2) + 8 * r
            offset = Int64(head) * target.stride[0] + Int64(first + row) * target.stride[1]
            pointer = target.iterator + offset + 8 * own
            for start in cutlass.range_constexpr(0, cute.size(acc) // 4, 4):
                w = [words[r + 2 * (start + j)] for j in range(4)]
                taken = [cute.arch.shuffle_sync_bfly(w[j] if odd else w[j + 1], 1) for j in (0, 2)]
                low, up = ([taken[i] if odd else w[2 * i], w[2 * i + 1] if odd else taken[i]] for i in range(2))
                others = [cute.arch.shuffle_sync_bfly(x if high else y, 2) for x, y in zip(low, up, strict=True)]
                eight = [y if high else x for x, y in zip(low + others, others + up, strict=True)]
                if row < rows:
                    store_words(pointer + 8 * start, eight)
