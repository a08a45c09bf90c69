"""What the backward kernel says to the GPU in PTX, because CuTe has no words for it."""

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cutlass_dsl import T, dsl_user_op

from marble.kernels.cute.binding import GROUP
from marble.kernels.cute.ordering import ptx


@dsl_user_op
def math_thread(*, loc: Any = None, ip: Any = None) -> Int32:
    """This thread's number among the math threads, read afresh: what follows from it does not stay in registers."""
    return Int32(ptx("mov.u32 $0, %tid.x;", "=r", [], result=T.i32(), loc=loc, ip=ip)) - GROUP


@dsl_user_op
def load_counter(pointer: cute.Pointer, *, loc: Any = None, ip: Any = None) -> Int32:
    """What a counter in global memory that other thread blocks raise has reached; says nothing of other memory."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value()]
    return Int32(ptx("ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", operands, result=T.i32(), loc=loc, ip=ip))


@dsl_user_op
def raise_counter(pointer: cute.Pointer, by: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Add to a counter in global memory; says nothing of other memory."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(), Int32(by).ir_value(loc=loc, ip=ip)]
    ptx("red.relaxed.gpu.global.add.s32 [$0], $1;", "l,r", operands, loc=loc, ip=ip)


@dsl_user_op
def store_pair(address: Int32, x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Store two neighbouring floats in shared memory, at an address that 8 divides."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (Int32(address), Float32(x), Float32(y))]
    ptx("st.shared.v2.f32 [$0], {$1, $2};", "r,f,f", operands, loc=loc, ip=ip)


@dsl_user_op
def store_words(pointer: cute.Pointer, words: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """Store four neighbouring words in global memory, at an address that 16 divides."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(), *(Int32(x).ir_value(loc=loc, ip=ip) for x in words)]
    ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", operands, loc=loc, ip=ip)


@dsl_user_op
def reduce_pair(pointer: cute.Pointer, x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Add two neighbouring floats to global memory, at an address that 8 divides."""
    values = [value.ir_value(loc=loc, ip=ip) for value in (Float32(x), Float32(y))]
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(), *values]
    ptx("red.global.add.v2.f32 [$0], {$1, $2};", "l,f,f", operands, loc=loc, ip=ip)


@dsl_user_op
def reduce_quad(pointer: cute.Pointer, values: list[Float32], *, loc: Any = None, ip: Any = None) -> None:
    """Add four neighbouring floats to global memory, at an address that 16 divides."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)]
    ptx("red.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f", operands, loc=loc, ip=ip)
