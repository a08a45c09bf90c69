"""The online softmax of a computing thread's two rows of scores, 32 columns each.

A warp computes its softmax alone on its quarter of the multiprocessor, so latency counts: both rows advance together,
in independent chains of maxima and sums.
"""

import math
import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from flash_attn.cute import utils as fa_utils
from quack import layout_utils
from quack.cute_dsl_utils import ParamsBase

_CHAINS = 4


@dataclass
class OnlineSoftmax(ParamsBase):
    """State of two rows.

    Attributes:
        scale: softmax scale times log₂ e.
        m: largest score of each row so far; −inf before the first key.
        l: sum of each row's weights over this thread's columns; complete after `reduce`.
        decay: what the last `lead` asks the accumulator's rows to be multiplied by.
        best: maxima of the columns of a tile, in chains.
    """

    scale: Float32
    m: cute.Tensor
    l: cute.Tensor  # noqa: E741
    decay: cute.Tensor
    best: cute.Tensor

    @staticmethod
    def create(scale: Float32) -> "OnlineSoftmax":
        """For a softmax scale times log₂ e, uninitialised."""
        return OnlineSoftmax(scale, *(cute.make_rmem_tensor(shape, Float32) for shape in (2, 2, 2, (2, _CHAINS))))

    def reset(self) -> None:
        """Rows that have seen nothing."""
        self.m.fill(-Float32.inf)
        self.l.fill(0.0)

    @cute.jit
    def compare(self, scores: cute.Tensor, piece: cutlass.Constexpr = 0, pieces: cutlass.Constexpr = 1) -> None:
        """Take the maxima of one of the ``pieces`` of the columns of a tile, whose scores are −inf where hidden."""
        grid, best = layout_utils.reshape_acc_to_mn(scores), self.best
        columns = const_expr(cute.size(grid, mode=[1]) // pieces)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(piece * columns, (piece + 1) * columns):
                if const_expr(c < _CHAINS):
                    best[r, c] = grid[r, c]
                else:
                    best[r, c % _CHAINS] = fa_utils.fmax(best[r, c % _CHAINS], grid[r, c])

    @cute.jit
    def lead(self) -> None:
        """Raise ``m`` to a tile that has been compared."""
        scale, m, decay, best = self.scale, self.m, self.decay, self.best
        top = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            top[r] = fa_utils.fmax(fa_utils.fmax(best[r, 0], best[r, 1]), fa_utils.fmax(best[r, 2], best[r, 3]))
        for distance in cutlass.range_constexpr(1, 3):
            for r in cutlass.range_constexpr(2):
                top[r] = fa_utils.fmax(top[r], cute.arch.shuffle_sync_bfly(top[r], distance))
        for r in cutlass.range_constexpr(2):
            lead = fa_utils.fmax(m[r], top[r])
            decay[r] = cute.math.exp2((m[r] - finite(lead)) * scale, fastmath=True)
            m[r] = lead

    @cute.jit
    def weigh(self, scores: cute.Tensor, accumulator: cutlass.Constexpr[cute.Tensor | None]) -> None:
        """Turn the tile of the last `lead` into weights, add them to ``l``, and multiply the rows of an accumulator, if
        it is there, by ``decay``: without a branch around that, ptxas computes one row's maxima among the other's
        exponentials."""
        scale, m, l, decay = self.scale, self.m, self.l, self.decay  # noqa: E741
        grid = layout_utils.reshape_acc_to_mn(scores)
        columns = const_expr(cute.size(grid, mode=[1]))
        values = None if const_expr(accumulator is None) else layout_utils.reshape_acc_to_mn(accumulator)
        wide = const_expr(0 if values is None else cute.size(values, mode=[1]))
        reference = [finite(m[r]) * scale for r in range(2)]
        sums = cute.make_rmem_tensor((2, _CHAINS), Float32)
        for c in cutlass.range_constexpr(columns):
            for r in cutlass.range_constexpr(2):
                grid[r, c] = cute.math.exp2(grid[r, c] * scale - reference[r], fastmath=True)
                if const_expr(c < _CHAINS):
                    sums[r, c] = grid[r, c]
                else:
                    sums[r, c % _CHAINS] += grid[r, c]
                for i in cutlass.range_constexpr(c * wide // columns, (c + 1) * wide // columns):
                    values[r, i] *= decay[r]
        for r in cutlass.range_constexpr(2):
            l[r] = l[r] * decay[r] + ((sums[r, 0] + sums[r, 1]) + (sums[r, 2] + sums[r, 3]))

    @cute.jit
    def catch_up(self, accumulator: cute.Tensor) -> None:
        """Multiply the rows of an accumulator by ``decay``, if that changes one of this warp's."""
        if cute.arch.vote_any_sync((self.decay[0] != 1.0) | (self.decay[1] != 1.0)):
            scale_rows(accumulator, self.decay)

    @cute.jit
    def reduce(self) -> None:
        """Sum ``l`` over the four threads of a row."""
        self.l.store(fa_utils.warp_reduce(self.l.load(), operator.add, width=4))

    @cute.jit
    def finish(self, norm: cute.Tensor) -> None:
        """After `reduce`: put what normalises the accumulator's rows into ``norm`` and the natural log-sum-exp into
        ``l``; 1 and −inf for rows without keys, whose accumulator is 0."""
        for r in cutlass.range_constexpr(2):
            # The largest weight is 1, so the sum of a row with keys is no less.
            norm[r] = cute.arch.rcp_approx(fa_utils.fmax(self.l[r], Float32(1.0)))
            log2_sum = self.m[r] * self.scale + cute.math.log2(self.l[r], fastmath=True)
            self.l[r] = log2_sum * Float32(math.log(2))


@cute.jit
def finite(m: Float32) -> Float32:
    """``m``, or 0 where nothing has been seen: exponents against −inf would be NaN."""
    return Float32(0.0) if m == -Float32.inf else m


@cute.jit
def scale_rows(accumulator: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiply the two rows of an accumulator."""
    grid = layout_utils.reshape_acc_to_mn(accumulator)
    for r in cutlass.range_constexpr(2):
        grid[r, None].store(grid[r, None].load() * factors[r])
