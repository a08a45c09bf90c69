"""Compiles kernels and calls them with tensors that claim to be on a GPU; names those that the driver is to launch."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

from marble.kernels.blackwell import backward_sm100, forward_sm100
from marble.kernels.blackwell.lists import BLOCK, lower
from marble.kernels.contract import Band, Touch, Varlen

CODES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32)}
"""DLPack's code and number of bits."""


class Described(ctypes.Structure):
    """DLPack's ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


CAPSULE = ctypes.pythonapi.PyCapsule_New
CAPSULE.restype, CAPSULE.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
CUDA = 2
KEPT: list[object] = []
"""What is pointed to."""


class OnGpu:
    """A CPU tensor that says it is on the first GPU."""

    def __init__(self, tensor: Tensor) -> None:
        sizes = [(ctypes.c_int64 * tensor.ndim)(*each) for each in (tensor.shape, tensor.stride())]
        kind = *CODES[tensor.dtype], 1
        self.described = Described(tensor.data_ptr(), CUDA, 0, tensor.ndim, *kind, *sizes, 0, None, None)
        KEPT.extend([tensor, self.described])

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: object) -> object:
        return CAPSULE(ctypes.addressof(self.described), b"dltensor", None)


def on_gpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tvm_ffi.from_dlpack(OnGpu(value))
    if isinstance(value, tuple | list):
        inner = map(on_gpu, value)
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return value


def claiming(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *config: lambda *args: compiled(*config)(*on_gpu(args))


forward_sm100.compile_forward = claiming(forward_sm100.compile_forward)
backward_sm100.compile_backward = claiming(backward_sm100.compile_backward)
dtype, head_dim = getattr(torch, sys.argv[1]), int(sys.argv[2])
ends = torch.tensor([0, 300])
call = lower(Varlen.from_cu_seqlens(ends, ends, Band.CAUSAL, Touch.FIRST | Touch.LAST))
q, dout = torch.zeros(2, 300, 4, head_dim, dtype=dtype)
k, v = torch.zeros(300, 2, 2, head_dim, dtype=dtype).unbind(1)
statistics = torch.zeros(4, len(call.queries) * BLOCK), torch.zeros(4, len(call.queries) * BLOCK)
calls = {
    "forward": lambda: forward_sm100.run_forward(q, k, v, call, 0.1),
    "backward": lambda: backward_sm100.run_backward((q, k, v, dout), statistics, call, 0.1),
}
for name, launch in calls.items():
    try:
        launch()
    except RuntimeError as error:
        if "CUDA driver" not in str(error) and "no CUDA-capable device" not in str(error):
            raise
        print(name)
