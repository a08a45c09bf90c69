"""What the backward kernel says to the GPU in PTX or in bits, because CuTe has no words for it."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from flash_attn.cute import utils

from marble.kernels.cute.backward_config import GROUP


@dsl_user_op
def math_thread(*, loc: Any = None, ip: Any = None) -> Int32:
    """This thread's number among the math threads, read afresh: what follows from it does not stay in registers."""
    read = llvm.inline_asm(
        T.i32(),
        [],
        "mov.u32 $0, %tid.x;",
        "=r",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(read) - GROUP


def complete_words(words: cute.Tensor, first: int, last: int) -> None:
    """Everything that words ``first`` to ``last`` - 1, all ≥ 0, depend on is issued before what follows.

    The assembler likes to move a wait for a matrix product up, in front of independent arithmetic, which then no longer
    runs beside the product. This is the idea of `marble.kernels.cute.ordering.complete` for many values at a time:
    floats ≥ 0 are integers ≥ 0, and an integer's sign tells whether any of several is negative.
    """
    every = words[first]
    for i in range(first + 1, last):
        every |= words[i]
    complete_word(every)


@dsl_user_op
def complete_word(value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Everything that ``value`` ≥ 0 depends on is issued before what follows: a branch that is never taken."""
    llvm.inline_asm(
        None,
        [Int32(value).ir_value(loc=loc, ip=ip)],
        "{.reg .pred p; .reg .b64 t; .reg .b32 a; mov.b32 a, 0; setp.lt.s32 p, $0, 0;"
        " @p mbarrier.arrive.shared.b64 t, [a];}",
        "r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_pair(address: Int32, x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Store two neighbouring floats in shared memory, at an address that 8 divides."""
    llvm.inline_asm(
        None,
        [
            Int32(address).ir_value(loc=loc, ip=ip),
            Float32(x).ir_value(loc=loc, ip=ip),
            Float32(y).ir_value(loc=loc, ip=ip),
        ],
        "st.shared.v2.f32 [$0], {$1, $2};",
        "r,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def reduce_pair(pointer: cute.Pointer, x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Add two neighbouring floats to global memory, at an address that 8 divides."""
    llvm.inline_asm(
        None,
        [
            pointer.toint(loc=loc, ip=ip).ir_value(),
            Float32(x).ir_value(loc=loc, ip=ip),
            Float32(y).ir_value(loc=loc, ip=ip),
        ],
        "red.global.add.v2.f32 [$0], {$1, $2};",
        "l,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def range_bits(low: Uint32, high: Uint32, column: Int32) -> Uint32:
    """Bits of the columns in [low, high), of the 32 from ``column`` on."""
    return bits_from(low, column) & ~bits_from(high, column)


def bits_from(limit: Uint32, column: Int32) -> Uint32:
    """Bits of the columns from ``limit`` on, of the 32 from ``column`` on."""
    count = cutlass.min(cutlass.max(Int32(limit) - column, 0), 32)
    return utils.shl_u32(Uint32(0xFFFFFFFF), Uint32(count))  # a shift by 32 gives 0
