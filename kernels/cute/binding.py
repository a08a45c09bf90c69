"""What the kernels are compiled for and called with: element types, lists of work, tensors of unknown size, and the
shared memory that there is."""

from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float16, Int16, Int32, cute
from quack.compile_utils import make_fake_stream, make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple
from torch import Tensor

from marble.kernels.cute.predicates import THREADS
from marble.kernels.cute.worklist import WorkList

ELEMENTS = {torch.float16: Float16, torch.bfloat16: BFloat16}
DTYPES = tuple(ELEMENTS)

GROUP = 128
"""Threads of a warpgroup."""

SHARED_BYTES = 227 * 1024
"""Shared memory of a thread block on SM90."""


@mlir_namedtuple
class Tickets(NamedTuple):
    """The order of deterministic sums on the device (`marble.kernels.cute.tickets.Ordered`)."""

    tickets: cute.Tensor
    units: cute.Tensor
    served: cute.Tensor
    """Counters of dQ [heads, blocks and halves of them], at 0 when a launch begins."""
    keys_served: cute.Tensor
    """Counters of dK and dV [kv_heads, counters], at 0 when a launch begins."""


@mlir_namedtuple
class Lists(NamedTuple):
    """`WorkList` on the device."""

    items: cute.Tensor
    sections: cute.Tensor
    parts: cute.Tensor
    runs: cute.Tensor
    predicates: cute.Tensor
    """[rows of both halves of all predicates, threads of a row]"""
    order: Tickets | None = None
    """If sums have an order."""


def lists_of(work: WorkList, order: Tickets | None = None) -> Any:
    """The lists to call a kernel with."""
    return Lists(work.items, work.sections, work.parts, work.runs, work.predicates.flatten(0, 2), order)


def fake_lists(deterministic: bool = False, parts: bool = False) -> Any:
    """Lists of unknown lengths, with an order of sums if there is one; or those of a `PartList`."""
    columns = (8, 2, 2, 3) if parts else (8, 2, 4, 2)
    tables = [fake(Int32, cute.sym_int(), width, aligned=width % 4 == 0) for width in columns]
    predicates = make_fake_tensor(Int16, (cute.sym_int(), THREADS), divisibility=THREADS)
    lists = Lists(*tables, predicates)
    if deterministic:
        shapes = (2, 3, cute.sym_int(), cute.sym_int())
        order = Tickets(*(fake(Int32, cute.sym_int(), columns, aligned=False) for columns in shapes))
        return lists._replace(order=order)
    return lists


def fake(dtype: type[cutlass.Numeric], *shape: Any, aligned: bool = True) -> cute.Tensor:
    """A tensor of unknown sizes and outer strides for compilation, aligned to 16 bytes with all its rows or not."""
    return make_fake_tensor(dtype, shape, divisibility=128 // dtype.width if aligned else 1)


def compiled(kernel: Any, *arguments: Any) -> Any:
    """A kernel for arguments like these and any stream, by TVM's calling convention, which costs a call the least."""
    return cute.compile(kernel, *arguments, make_fake_stream(), options="--enable-tvm-ffi")


def fitting(storage: Any) -> Any:
    """``storage``, the struct of a kernel's shared memory; what does not fit is refused here and not by a launch."""
    if storage.size_in_bytes() > SHARED_BYTES:
        raise ValueError(f"shared memory: a thread block has {SHARED_BYTES} bytes, got {storage.size_in_bytes()}")
    return storage


def expect(backend: str, q: Tensor, scale: float, head_dims: tuple[int, ...], device: str = "cuda") -> None:
    """Raise a ValueError unless a backend computes queries like these, with this scale, on this type of device."""
    if q.dtype not in DTYPES or q.shape[2] not in head_dims:
        *fewer, largest = head_dims
        raise ValueError(
            f"backend: {backend!r} computes bfloat16 and float16 with head dimension "
            f"{', '.join(map(str, fewer))} or {largest}, got {q.dtype} with {q.shape[2]}; 'reference' computes all"
        )
    if not scale > 0:
        raise ValueError(f"scale: must be > 0, got {scale}")
    if q.device.type != device:
        raise ValueError(
            f"backend: {backend!r} computes on GPUs, got tensors on {q.device}; 'reference' runs everywhere"
        )


def readable(x: Tensor) -> Tensor:
    """``x``, or a copy of it that the copy engine can read."""
    granule = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride % granule == 0 for stride in x.stride()[:-1])
    return x if aligned and x.stride(-1) == 1 else x.contiguous()
