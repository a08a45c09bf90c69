"""Compiles the Triton kernels around Blackwell's, for SM 10.0, with no GPU; says which."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from marble.kernels.triton import fold

TARGET = GPUTarget("cuda", 100, 32)


def compiled(kernel: triton.JITFunction, signature: dict[str, object], constants: dict[str, object]) -> None:
    every = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel, signature=every, constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()}
    )
    assert triton.compile(source, target=TARGET).asm["cubin"]
    print(kernel.fn.__name__)


ints, floats = "*i32", "*fp32"
for carried in (False, True):
    compiled(
        fold._fold,
        {
            "blocks": (ints, ints, ints),
            "partial": (floats, floats),
            "state": (floats, floats, floats),
            "results": ("*bf16", floats),
            "scale": "fp32",
            "strides": ("i32", "i32", "i32", "i32", "i32", "i32", "i32"),
        },
        {"CARRIED": carried, "ROWS": 32, "WIDTH": 128},
    )
compiled(
    fold._add,
    {"target": floats, "tiles": floats, "first": ints, "length": ints, "scale": "fp32"}
    | {"head_stride": "i32", "row_stride": "i32"},
    {"ROWS": 32, "WIDTH": 64},
)
