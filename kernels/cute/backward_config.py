"""Tile, stage and register choices of the backward kernel, and the structs that its roles share."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cutlass import Boolean, Int32, cute
from flash_attn.cute import pipeline
from quack.cute_dsl_utils import mlir_namedtuple

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one thread block of an SM90 GPU can have."""

REGISTERS = 504
"""What a launch of three warpgroups is given, in registers per thread added over the warpgroups."""


@dataclass(frozen=True)
class BackwardConfig:
    """The choices for one head dimension on SM90.

    Attributes:
        head_dim: 64 or 128.
        tile_m: query rows of a tile, 64 or 128; a block of 128 rows is one or two tiles.
        q_stages: tiles of Q (with log-sum-exp, delta and predicate) in shared memory.
        do_stages: tiles of dO in shared memory.
        math_registers: registers of a math thread.
        load_registers: registers of a thread of the load, row and dQ warps.
        tile_n: key rows of a tile, a whole block.
        groups: math warpgroups.
        ds_stages: tiles of dS in shared memory; with two, one barrier per tile orders its writers and readers.
    """

    head_dim: int
    tile_m: int
    q_stages: int
    do_stages: int
    math_registers: int = 240
    load_registers: int = 24

    tile_n: ClassVar[int] = 128
    groups: ClassVar[int] = 2
    ds_stages: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.head_dim not in (64, 128) or self.tile_m not in (64, 128) or self.head_dim * self.tile_m > 128 * 64:
            raise ValueError(f"head_dim {self.head_dim}, tile_m {self.tile_m}: accumulators do not fit in registers")
        if self.groups * self.math_registers + self.load_registers > REGISTERS:
            raise ValueError(f"math_registers, load_registers: more than {REGISTERS} over three warpgroups")
        if min(self.q_stages, self.do_stages) < 2:
            raise ValueError("q_stages, do_stages: the next tile is loaded while one is computed, so two at least")
        if self.shared_bytes > SHARED_MEMORY:
            raise ValueError(f"stages: need {self.shared_bytes} bytes of shared memory, there are {SHARED_MEMORY}")

    @property
    def halves(self) -> int:
        """Tiles of a block."""
        return 128 // self.tile_m

    @property
    def columns(self) -> int:
        """Query columns of a tile that one thread holds, in each of its two key rows."""
        return self.tile_m // 4

    @property
    def dq_columns(self) -> int:
        """Columns of one math group's part of dQ, which has 64 rows."""
        return self.tile_m * self.head_dim // (64 * self.groups)

    @property
    def row_pitch(self) -> int:
        """Floats between lane classes of a log-sum-exp or delta stage, such that reads have no bank conflicts."""
        return self.columns + 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all buffers and barriers; an upper bound."""
        operands = 2 * self.head_dim * (self.tile_m * (self.q_stages + self.do_stages) + 2 * self.tile_n)
        scores = 2 * self.tile_m * self.tile_n * self.ds_stages
        rows = 4 * self.q_stages * (2 * 4 * self.row_pitch + 4 * 128 + 1)
        return operands + scores + 4 * self.tile_m * self.head_dim + rows + 2048


CONFIGS = {
    64: BackwardConfig(head_dim=64, tile_m=64, q_stages=4, do_stages=3),
    128: BackwardConfig(head_dim=128, tile_m=64, q_stages=3, do_stages=2),
}
"""The configuration of each head dimension."""


@mlir_namedtuple
class Lists(NamedTuple):
    """`WorkList` on the device."""

    items: cute.Tensor
    parts: cute.Tensor
    runs: cute.Tensor
    inner: cute.Tensor
    ranges: cute.Tensor
    bits: cute.Tensor


@mlir_namedtuple
class Operands(NamedTuple):
    """Tensors that move by TMA: the inputs [rows, head_dim, heads], and dQ likewise."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    dq: cute.Tensor


class Atoms(NamedTuple):
    """The TMA instructions of `Operands`."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    dout: cute.CopyAtom
    dq: cute.CopyAtom


class Shared(NamedTuple):
    """Shared memory. Operands are swizzled, with stages last."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    """[64, columns, group], as TMA reads it."""
    dq_flat: cute.Tensor
    """The same memory in address order."""
    lse: cute.Tensor
    """[4, columns / 4, lane class, stage]: lane class t holds columns 8j + 2t and 8j + 2t + 1."""
    delta: cute.Tensor
    mask: cute.Tensor
    """[512, stage]: the words of a tile's predicate, 128 range words or 512 bit words."""
    slot: cute.Tensor
    """[stage]: slot of a tile's predicate; its sign says which kind the words are."""


class Pipes(NamedTuple):
    """Barriers in shared memory."""

    q: pipeline.PipelineTmaAsync
    dout: pipeline.PipelineTmaAsync
    kv_empty: cute.Pointer


class Item(NamedTuple):
    """One unit of work: a key/value head and an entry of `WorkList.items`."""

    kv_head: Int32
    key_row: Int32
    key_rows: Int32
    part: Int32
    parts: Int32
    run: Int32
    runs: Int32
    full: Int32


class Tile(NamedTuple):
    """One tile, as the load, row and dQ warps meet it."""

    item: Item
    turn: Int32
    """Units that this thread block has done before."""
    number: Int32
    """Tiles that it has done before."""
    starts: Boolean
    """Whether it is the unit's first."""
    head: Int32
    row: Int32
    rows: Int32
    """Rows from ``row`` to the end of the block; more than a tile's, or less than 1."""
    slot: Int32
    """Where the predicate is, of a partial tile."""


class Products(NamedTuple):
    """Accumulators, and the matrix products of one math group."""

    acc_dk: cute.Tensor
    acc_dv: cute.Tensor
    s: Any
    dp: Any
    dq: Any
    dk: Any
    dv: Any
    store_ds: Any
