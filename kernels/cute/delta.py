"""Delta, the row sums of out · dout that the backward pass subtracts from dP. For every GPU that CuTe compiles for."""

from functools import lru_cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Float32, Int32, Int64, const_expr, cute
from torch import Tensor

from marble.kernels.cute.binding import ELEMENTS, compiled, fake


class Delta:
    """Σ out · dout over the head dimension, [heads, rows]; the inputs [rows, heads, head_dim] may be strided."""

    threads, rows_each, vector = 256, 4, 8

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int):
        self.dtype, self.head_dim = dtype, head_dim
        self.lanes = head_dim // self.vector
        """Lanes that share a row."""
        self.tile = self.threads // self.lanes * self.rows_each
        """Rows of a thread block."""

    @cute.jit
    def __call__(self, mO: cute.Tensor, mdO: cute.Tensor, mDelta: cute.Tensor, stream: cuda.CUstream):
        """Launch one thread block for every `tile` rows of a head."""
        rows, heads = mO.shape[0], mO.shape[1]
        self.kernel(mO, mdO, mDelta).launch(
            grid=[cute.ceil_div(rows, self.tile), heads, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mO: cute.Tensor, mdO: cute.Tensor, mDelta: cute.Tensor):
        """Each lane multiplies 16 bytes of every row that it shares; shuffles add up the lanes.

        All loads are issued before the first is used. Behind the last row they repeat it, and nothing is stored.
        """
        thread = cute.arch.thread_idx()[0]
        block, head, _ = cute.arch.block_idx()
        lane = thread % self.lanes
        first = block * self.tile + thread // self.lanes
        stride = const_expr(self.threads // self.lanes)
        loaded = []
        for k in cutlass.range_constexpr(self.rows_each):
            row = cutlass.min(first + k * stride, mO.shape[0] - 1)
            loaded.append([self._piece(t, row, head, lane) for t in (mO, mdO)])
        for k in cutlass.range_constexpr(self.rows_each):
            out, dout = (piece.load().to(Float32) for piece in loaded[k])
            total = (out * dout).reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)
            row = first + k * stride
            if lane == 0 and row < mO.shape[0]:
                mDelta[head, row] = total

    def _piece(self, tensor: cute.Tensor, row: Int32, head: Int32, lane: Int32) -> cute.Tensor:
        """This lane's 16 bytes of a row. Offsets have 64 bits: a tensor may have more than 2^31 elements."""
        offset = Int64(row) * tensor.stride[0] + Int64(head) * tensor.stride[1] + Int64(lane * self.vector)
        pointer = cute.make_ptr(
            self.dtype, (tensor.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16
        )
        piece = cute.make_rmem_tensor(self.vector, self.dtype)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(self.vector)), piece)
        return piece


@lru_cache
def compile_delta(dtype: torch.dtype, head_dim: int) -> Any:
    """The delta kernel for every size and stride. Needs no GPU; compiled once per process."""
    kind, rows, heads = ELEMENTS[dtype], cute.sym_int(), cute.sym_int()
    return compiled(
        Delta(kind, head_dim),
        *(fake(kind, rows, heads, head_dim) for _ in range(2)),
        fake(Float32, heads, rows, aligned=False),
    )


def run_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Σ out · dout over the head dimension in float32, [heads, query rows]; see `Backend.delta`."""
    rows, heads, head_dim = out.shape
    delta = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    if delta.numel():
        compile_delta(out.dtype, head_dim)(out, dout, delta)
    return delta
