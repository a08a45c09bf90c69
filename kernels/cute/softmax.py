"""The online softmax of a computing thread's two rows of scores, 32 columns each.

Written for what bounds it on Hopper: a warp computes its softmax alone on its quarter of the multiprocessor, so
latency counts. Both rows advance together in independent chains, and the accumulator is rescaled only when it must be:
the reference m that exponents are taken against may lag behind the largest score by up to 2⁸ in the weights, which
keeps their relative precision (the conditional rescaling of FlashAttention-4; Zadouri et al., 2026).
"""

import math
import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from flash_attn.cute import utils as fa_utils
from quack import layout_utils
from quack.cute_dsl_utils import ParamsBase

STYLE = "always"
LAG = 0.0
"""Largest exponent of 2 that a weight may reach before the reference follows the scores."""


@dataclass
class OnlineSoftmax(ParamsBase):
    """State of two rows.

    Attributes:
        scale: softmax scale times log₂ e.
        m: reference score of each row; −inf before the first key.
        l: sum of each row's weights over this thread's columns; complete after `reduce`.
        decay: what the accumulator's rows were last asked to be multiplied by.
    """

    scale: Float32
    m: cute.Tensor
    l: cute.Tensor  # noqa: E741
    decay: cute.Tensor

    @staticmethod
    def create(scale: Float32) -> "OnlineSoftmax":
        """For a softmax scale, uninitialised."""
        return OnlineSoftmax(scale * Float32(math.log2(math.e)), *(cute.make_rmem_tensor(2, Float32) for _ in range(3)))

    def reset(self) -> None:
        """Rows that have seen nothing."""
        self.m.fill(-Float32.inf)
        self.l.fill(0.0)
        self.decay.fill(1.0)

    @cute.jit
    def advance(self, scores: cute.Tensor, chains: cutlass.Constexpr[int] = 4) -> Boolean:
        """Fold in a tile of scores and turn them into weights.

        Args:
            scores: the tile's scores, −inf where nothing is computed.
            chains: independent chains of maxima and sums in each row; fewer take fewer registers.

        Returns:
            Whether the accumulator must be rescaled (`rescale`); one answer for the warp.
        """
        scale, m, l, decay = self.scale, self.m, self.l, self.decay  # noqa: E741
        grid = layout_utils.reshape_acc_to_mn(scores)
        columns = const_expr(cute.size(grid, mode=[1]))
        best = cute.make_rmem_tensor((2, chains), Float32)
        for c in cutlass.range_constexpr(columns):
            for r in cutlass.range_constexpr(2):
                if const_expr(c < chains):
                    best[r, c] = grid[r, c]
                else:
                    best[r, c % chains] = fa_utils.fmax(best[r, c % chains], grid[r, c])
        top = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            top[r] = best[r, 0]
            for c in cutlass.range_constexpr(1, chains):
                top[r] = fa_utils.fmax(top[r], best[r, c])
        for distance in cutlass.range_constexpr(1, 3):
            for r in cutlass.range_constexpr(2):
                top[r] = fa_utils.fmax(top[r], cute.arch.shuffle_sync_bfly(top[r], distance))
        if const_expr(STYLE == "branch"):
            leads = Boolean(False)
            for r in cutlass.range_constexpr(2):
                # False for −inf over −inf; true for the first finite score.
                leads |= (top[r] - m[r]) * scale > LAG
            rescale = cute.arch.vote_any_sync(leads)
            if rescale:
                for r in cutlass.range_constexpr(2):
                    lead = fa_utils.fmax(m[r], top[r])
                    decay[r] = cute.math.exp2((m[r] - finite(lead)) * scale, fastmath=True)
                    l[r] *= decay[r]
                    m[r] = lead
        else:
            leads = Boolean(False)
            for r in cutlass.range_constexpr(2):
                lead = fa_utils.fmax(m[r], top[r])
                leads |= lead > m[r]
                decay[r] = cute.math.exp2((m[r] - finite(lead)) * scale, fastmath=True)
                l[r] *= decay[r]
                m[r] = lead
            rescale = cute.arch.vote_any_sync(leads) if const_expr(STYLE == "hybrid") else Boolean(True)
        reference = [finite(m[r]) * scale for r in range(2)]
        sums = cute.make_rmem_tensor((2, chains), Float32)
        for c in cutlass.range_constexpr(columns):
            for r in cutlass.range_constexpr(2):
                grid[r, c] = cute.math.exp2(grid[r, c] * scale - reference[r], fastmath=True)
                if const_expr(c < chains):
                    sums[r, c] = grid[r, c]
                else:
                    sums[r, c % chains] += grid[r, c]
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(1, chains):
                sums[r, 0] += sums[r, c]
            l[r] += sums[r, 0]
        return rescale

    @cute.jit
    def rescale(self, accumulator: cute.Tensor, needed: Boolean) -> None:
        """Multiply the accumulator's rows by their decay, if ``needed``."""
        if const_expr(STYLE == "always"):
            scale_rows(accumulator, self.decay)
        else:
            if needed:
                scale_rows(accumulator, self.decay)

    @cute.jit
    def reduce(self) -> None:
        """Sum ``l`` over the four threads of a row."""
        self.l.store(fa_utils.warp_reduce(self.l.load(), operator.add, width=4))

    @cute.jit
    def finish(self, norm: cute.Tensor) -> None:
        """After `reduce`: put what normalises the accumulator's rows into ``norm`` and the natural log-sum-exp into
        ``l``; anything finite and −inf for rows without keys, whose accumulator is 0."""
        for r in cutlass.range_constexpr(2):
            seen = self.l[r] > 0.0
            total = self.l[r] if seen else Float32(1.0)
            norm[r] = cute.arch.rcp_approx(total)
            log2_sum = self.m[r] * self.scale + cute.math.log2(total, fastmath=True)
            self.l[r] = log2_sum * Float32(math.log(2)) if seen else -Float32.inf


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
