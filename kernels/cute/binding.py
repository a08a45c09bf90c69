"""What the kernels are compiled for and called with: element types, lists of work, tensors of unknown size."""

from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float16, Int32, cute
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple
from torch import Tensor

from marble.kernels.cute.worklist import WorkList

ELEMENTS = {torch.float16: Float16, torch.bfloat16: BFloat16}


@mlir_namedtuple
class Lists(NamedTuple):
    """`WorkList` on the device."""

    items: cute.Tensor
    sections: cute.Tensor
    parts: cute.Tensor
    runs: cute.Tensor
    ranges: cute.Tensor
    bits: cute.Tensor


def lists_of(work: WorkList) -> Any:
    """The lists to call a kernel with."""
    return Lists(work.items, work.sections, work.parts, work.runs, work.ranges, work.bits)


def fake_lists() -> Any:
    """Lists of unknown lengths."""
    tables = ((8,), (2,), (4,), (2,), (128,), (128, 4))
    return Lists(*(fake(Int32, cute.sym_int(), *shape, aligned=shape != (2,)) for shape in tables))


def fake(dtype: type[cutlass.Numeric], *shape: Any, aligned: bool = True) -> cute.Tensor:
    """A tensor of unknown sizes and outer strides for compilation, aligned to 16 bytes with all its rows or not."""
    return make_fake_tensor(dtype, shape, divisibility=128 // dtype.width if aligned else 1)


DTYPES = tuple(ELEMENTS)


def expect(backend: str, q: Tensor, scale: float, head_dims: tuple[int, ...], device: str = "cuda") -> None:
    """Raise a ValueError unless a backend computes queries like these, with this scale, on this type of device."""
    if q.dtype not in DTYPES or q.shape[2] not in head_dims:
        raise ValueError(
            f"backend: {backend!r} computes bfloat16 and float16 with head dimension "
            f"{' or '.join(map(str, head_dims))}, got {q.dtype} with {q.shape[2]}; 'reference' computes all"
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
