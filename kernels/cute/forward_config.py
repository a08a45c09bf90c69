"""Choices of the forward kernel: tiles, stages, registers; what its roles share, and who of them waits for what."""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import cute, pipeline
from flash_attn.cute import pipeline as fa_pipeline

STRIP = 64
"""Query rows that a computing warpgroup computes: half a query block."""

OUT_ROWS = 16
"""Rows that a computing warp writes."""

OUT_COLUMNS = 128
"""Columns of them that it writes at a time, at most."""

SWIZZLED = 64
"""Columns of a swizzled row of shared memory, 128 bytes."""

REST_STAGES = 2
"""Query tiles whose columns that do not live in registers are in shared memory."""

PLACES = 3
"""Units in shared memory: one that is written out or computed, one that is loaded, and one that is asked for."""

ROW, ROWS, FIRST_PART, PARTS, FIRST_RUN, RUNS, FULL, TOUCH, HEAD, KV_HEAD, PAIRED, APART = range(12)
"""What shared memory holds of a unit: the columns of `PartList.items`, the first query head and the key/value head; 1
if it is a strip with two successive heads, one for each computing warpgroup, and 0 if it is a block with one, and the
second warpgroup computes the 64 rows behind the first one's; and whether the second waits for the first (`BEHIND`)."""

FIELDS = 16
"""Room for that."""

BEHIND = 1
"""The named barrier at which the second computing warpgroup waits until the first one has weighed a tile."""

LONG = 8
"""Full tiles of a unit that is worth that; more than those by which a warpgroup can be ahead."""


@dataclass(frozen=True)
class ForwardConfig:
    """Tile and register choices.

    Attributes:
        head_dim: 64, 128 or 256.
        keys: of a tile, 128 or 64: two parts of the lists or one (`marble.kernels.cute.parts`).
        q_columns: columns of the query tile that live in registers; the rest stays in shared memory.
        k_stages: key tiles in flight.
        v_stages: value tiles in flight.
        pieces: the scores of a key tile are computed in so many pieces, 1 or 2: the maxima of one are taken while the
            next is computed.
        bits_stages: predicates in flight.
        late: whether a tile's exponentials run beside the product before it, and the accumulator is rescaled behind.
        load_registers: of each thread of the loading warpgroup.
        math_registers: of each thread of the computing warpgroups.
    """

    head_dim: int
    keys: int
    q_columns: int
    k_stages: int
    v_stages: int
    pieces: int
    bits_stages: int = 2
    late: bool = False
    load_registers: int = 24
    math_registers: int = 240

    def __post_init__(self) -> None:
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"head_dim: the Hopper kernels compute 64, 128 and 256, got {self.head_dim}")
        if self.keys not in (64, 128):
            raise ValueError(f"keys: a tile of the lists has 128 or 2 × 64, got {self.keys}")
        if self.q_columns <= 0 or self.head_dim - self.q_columns not in (0, OUT_COLUMNS):
            raise ValueError(f"q_columns: all, or all but {OUT_COLUMNS} of {self.head_dim}, got {self.q_columns}")
        if self.q_columns < self.head_dim and (self.keys, self.pieces) != (64, 1):
            raise ValueError(
                f"q_columns: query tiles that are not all in registers go with tiles of 64 keys in one piece, got "
                f"{self.keys} in {self.pieces}"
            )
        if min(self.k_stages, self.v_stages) >= LONG:
            raise ValueError(f"stages: fewer than {LONG} of keys or of values, got {self.k_stages} and {self.v_stages}")
        if self.load_registers + 2 * self.math_registers > 504:
            raise ValueError(
                "registers: the kernel begins with 168 for each thread, 504 for three threads of the warpgroups"
            )


CONFIGS = {
    64: ForwardConfig(64, 128, 64, k_stages=4, v_stages=4, pieces=2, load_registers=40, math_registers=232),
    128: ForwardConfig(
        128, 128, 128, k_stages=3, v_stages=2, pieces=1, bits_stages=1, load_registers=40, math_registers=232
    ),
    256: ForwardConfig(256, 64, 128, k_stages=2, v_stages=2, pieces=1, late=True),
}


class Carried(NamedTuple):
    """`State` on the device; tensors without rows in a call whose touches are all first and last."""

    acc: cute.Tensor
    m: cute.Tensor
    l: cute.Tensor  # noqa: E741


class Shared(NamedTuple):
    """Views of shared memory. Outputs pass through ``out`` [rows, columns written at a time, stage], which is the place
    of the ``rest`` of their query tile, if it has one. ``bits`` holds predicates [threads of a row, rows of both
    warpgroups, parts, stage], ``unit`` the fields of the last units, in turn."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    rest: cute.Tensor | None
    out: cute.Tensor
    bits: cute.Tensor
    unit: cute.Tensor


class Pipes(NamedTuple):
    """Who waits for what.

    ``unit``: the dealing warp waits until the computing and the predicate warps have done with a unit, then puts
    another in its place; they and the loading warp wait for that. A unit without tiles says stop.
    ``q``, ``rest``, ``k``, ``v``: the dealing warp (of a query tile what will live in registers, and the rest) or the
    loading warp waits until all eight computing warps have released a stage, then fills it; they wait until its bytes
    have arrived. A key stage is released when its scores are complete, a query tile when it has been read into
    registers, and the rest of it when the unit's output, which passes through its place, has been read from there.
    Every unit comes with its query tile, except the one that says stop.
    ``bits``: the same between them and the predicate warp.
    """

    unit: pipeline.PipelineAsync
    bits: fa_pipeline.PipelineTmaAsync
    q: fa_pipeline.PipelineTmaAsync
    rest: fa_pipeline.PipelineTmaAsync | None
    k: fa_pipeline.PipelineTmaAsync
    v: fa_pipeline.PipelineTmaAsync
