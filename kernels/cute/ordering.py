"""PTX inside kernels, and keeping the compilers from moving work to where it costs more."""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def ptx(text: str, constraints: str, operands: list[Any], *, result: Any = None, loc: Any, ip: Any) -> Any:
    """A statement in PTX that stays where it is written, over IR values."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def complete(words: Sequence[Int32]) -> None:
    """What ``words`` depend on is issued before what follows; their bits must not all be set, as no result's are.

    The assembler likes to move a wait for a matrix product up, in front of independent arithmetic, which then no longer
    runs beside the product. An arrival that is never made but depends on the arithmetic keeps it in place.
    """
    _arrive_if_all_set(reduce(operator.and_, words))


@dsl_user_op
def _arrive_if_all_set(word: Int32, *, loc: Any = None, ip: Any = None) -> None:
    arrive = "setp.eq.s32 p, $0, -1; @p mbarrier.arrive.shared.b64 t, [a];"
    text = "{.reg .pred p; .reg .b64 t; .reg .b32 a; mov.b32 a, 0; " + arrive + "}"
    ptx(text, "r", [word.ir_value(loc=loc, ip=ip)], loc=loc, ip=ip)


def arrive_behind(barrier: Any, words: Sequence[Int32]) -> None:
    """Arrive at a barrier in shared memory when ``words``, which this warp has asked shared memory for, are here.

    An arrival does not wait for loads that were issued before it. Where it lets others overwrite what they read, it
    must not overtake them, and they can be late by a microsecond: behind another warp's loads of global memory. What
    is in registers has left shared memory, so the copy engine may write there; PTX would have a fence between proxies
    besides, which takes longer. The lanes must have met since they asked: it is this lane's words that are looked at.
    """
    _arrive_behind(barrier, reduce(operator.and_, words))


@dsl_user_op
def _arrive_behind(barrier: Any, word: Int32, *, loc: Any = None, ip: Any = None) -> None:
    # Addresses are not negative, which the assembler does not know: it must have the word to decide.
    text = (
        "{.reg .pred p, q; .reg .b64 t; setp.ge.s32 q, $0, 0; setp.ne.or.s32 p, $1, -1, q; "
        "@p mbarrier.arrive.shared.b64 t, [$0];}"
    )
    ptx(text, "r,r", [barrier.toint(loc=loc, ip=ip).ir_value(), word.ir_value(loc=loc, ip=ip)], loc=loc, ip=ip)


@dsl_user_op
def afresh(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``value``, in such a way that what is computed from it is not kept in registers across a loop."""
    operands = [Int32(value).ir_value(loc=loc, ip=ip)]
    return Int32(ptx("mov.b32 $0, $1;", "=r,r", operands, result=T.i32(), loc=loc, ip=ip))


@dsl_user_op
def store_if(wanted: Int32, pointer: Any, value: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Store a float in global memory if ``wanted`` is not 0, without the branch that compilers make of an `if`."""
    operands = [Int32(wanted).ir_value(loc=loc, ip=ip), pointer.toint(loc=loc, ip=ip).ir_value(), value.ir_value()]
    text = "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.global.f32 [$1], $2;}"
    ptx(text, "r,l,f", operands, loc=loc, ip=ip)


@dsl_user_op
def prefetch(pointer: Any, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Ask for ``size`` bytes of global memory in the L2 cache; 16 divides size and address."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(), Int32(size).ir_value(loc=loc, ip=ip)]
    ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", operands, loc=loc, ip=ip)
