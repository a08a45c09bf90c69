"""Keeping the compilers from moving work to where it costs more."""

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def complete(value: Float32, *, loc=None, ip=None) -> None:
    """Everything that ``value`` ≥ 0 depends on is issued before what follows.

    The assembler likes to move a wait for a matrix product up, in front of independent arithmetic, which then no longer
    runs beside the product. An arrival that is never made but depends on the arithmetic keeps it in place.
    """
    llvm.inline_asm(
        None,
        [Float32(value).ir_value(loc=loc, ip=ip)],
        "{.reg .pred p; .reg .b64 t; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $0, 0f00000000; "
        "@p mbarrier.arrive.shared.b64 t, [a];}",
        "f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def afresh(value: Int32, *, loc=None, ip=None) -> Int32:
    """``value``, in such a way that what is computed from it is not kept in registers across a loop."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(value).ir_value(loc=loc, ip=ip)],
            "mov.b32 $0, $1;",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )
