"""Choices of the backward kernel: tiles, stages, registers, units; its shared memory; the structs its roles share."""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, cute
from cutlass.utils import LayoutEnum
from flash_attn.cute import pipeline
from quack import sm90_utils
from quack.cute_dsl_utils import mlir_namedtuple

from marble.kernels.cute.binding import GROUP
from marble.kernels.cute.predicates import BLOCK

LSE_AHEAD = 4
"""Quads of columns whose log-sum-exp a math thread loads before it issues products: behind S, dP and dQ, which take all
of shared memory's bandwidth, the answer is late. All of a tile of 64 rows; at 128 rows 6 of 8 spill registers."""


@dataclass(frozen=True)
class BackwardConfig:
    """The choices on SM90, which follow from the head dimension; tests compile them all and find no spilled register.

    Attributes:
        head_dim: 64 or 128.
        deterministic: whether sums have an order (`marble.kernels.cute.tickets`).
        rounds: whether dK and dV are written in the type of the inputs, instead of added to in float32. All units must
            have all query heads then.
        tile_n: key rows of a tile and of a unit.
        groups: math warpgroups.
        threads: of a thread block.
        q_stages: tiles of Q (with log-sum-exp, delta and predicate) in shared memory.
        do_stages: tiles of dO in shared memory.
        ds_stages: tiles of dS in shared memory; with two, one barrier per tile orders its writers and readers.
        skips: whether the halves of a partial tile that have no pairs with a unit are left out.
        math_registers: registers of a math thread.
        load_registers: registers of a thread of the load, row, mask and dQ warps.
    """

    head_dim: int
    deterministic: bool = False
    rounds: bool = False

    head_dims: ClassVar[tuple[int, ...]] = (64, 128)
    tile_n: ClassVar[int] = BLOCK
    groups: ClassVar[int] = 2
    threads: ClassVar[int] = 3 * GROUP
    q_stages: ClassVar[int] = 3
    do_stages: ClassVar[int] = 2
    ds_stages: ClassVar[int] = 2
    skips: ClassVar[bool] = False
    math_registers: ClassVar[int] = 240
    load_registers: ClassVar[int] = 24

    def __post_init__(self) -> None:
        if self.head_dim not in self.head_dims:
            raise ValueError(f"head_dim: {self.head_dim} is not one of {self.head_dims}")
        if self.deterministic and self.rounds:
            raise ValueError("rounds: units add to the same keys by turns, so that sums are deterministic")

    @property
    def tile_m(self) -> int:
        """Query rows of a tile; a block of 128 rows is one or two tiles. More accumulators do not fit in registers."""
        return 128 if self.head_dim == 64 else 64

    @property
    def interleaved(self) -> bool:
        """Whether a tile's products are interleaved with the next tile's, marked ⁺: dV, dQ, S⁺, dK, dP⁺.

        dP⁺ is issued when dQ is stored, and dK runs until the exponentials of the next tile. Tiles of 128 rows leave
        no registers for that: they are computed one after the other, each S, dP, dV, dQ, dK.
        """
        return self.tile_m == 64

    @property
    def halves(self) -> int:
        """Tiles of a block of query rows."""
        return BLOCK // self.tile_m

    @property
    def columns(self) -> int:
        """Query columns of a tile that one lane class holds, in each key row."""
        return self.tile_m // 4

    @property
    def dq_columns(self) -> int:
        """Columns of one math group's part of dQ, which has 64 rows."""
        return self.tile_m * self.head_dim // (64 * self.groups)

    @property
    def row_pitch(self) -> int:
        """Floats between lane classes of a log-sum-exp or delta stage, such that reads have no bank conflicts."""
        return self.columns + 4


@mlir_namedtuple
class Gradients(NamedTuple):
    """What the kernel adds to: float32 [heads, rows, head_dim]; or writes, dK and dV in the type of the inputs."""

    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


@mlir_namedtuple
class Operands(NamedTuple):
    """Tensors that move by TMA: the inputs [rows, head_dim, heads], and dQ likewise where it does."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    dq: cute.Tensor | None = None


class Atoms(NamedTuple):
    """The TMA instructions of `Operands`."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    dout: cute.CopyAtom
    dq: cute.CopyAtom | None = None


class Shared(NamedTuple):
    """Shared memory. Operands are swizzled, with stages last."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    lse: cute.Tensor
    """[4, columns / 4, lane class, stage]: lane class t holds columns 8j + 2t and 8j + 2t + 1."""
    delta: cute.Tensor
    mask: cute.Tensor
    """[tile_m / 64, thread, stage]: words of the bits of a math thread's two key rows and lane class."""
    mask_rows: cute.Tensor
    """The same memory, [2, thread, stage]: the bits of one of the two key rows, 16 or 32."""
    partial: cute.Tensor
    """[stage]: whether the tile has a predicate."""
    units: cute.Tensor
    """[UNIT_WORDS, slot]: units of work; see `Field`."""
    dq: cute.Tensor
    """[64, columns, group], as TMA reads it."""
    dq_flat: cute.Tensor
    """The same memory in address order."""


def shared_layouts(config: BackwardConfig, dtype: type[cutlass.Numeric]) -> dict[str, Any]:
    """Shared-memory layouts. Every operand is read both ways, rows and transposed, from 128-byte swizzled atoms."""
    m, n, head_dim = config.tile_m, config.tile_n, config.head_dim
    make = partial(sm90_utils.make_smem_layout, dtype, LayoutEnum.ROW_MAJOR)
    return {
        "q": make((m, head_dim), config.q_stages, major_mode_size=64),
        "dout": make((m, head_dim), config.do_stages, major_mode_size=64),
        "k": make((n, head_dim), None, major_mode_size=64),
        "ds": make((m, n), config.ds_stages, major_mode_size=64),
        "dq": sm90_utils.make_smem_layout(Float32, LayoutEnum.ROW_MAJOR, (64, config.dq_columns), config.groups),
    }


def shared_storage(config: BackwardConfig, dtype: type[cutlass.Numeric], layouts: dict[str, Any]) -> type:
    """Shared memory: barriers first, then what is small, then operands where a swizzle atom may begin."""

    def buffer(kind: type, count: int, align: int = 1024) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, count], align]

    size = {name: cute.cosize(layout) for name, layout in layouts.items()}

    @cute.struct
    class Storage:
        q_barriers: cute.struct.MemRange[Int64, config.q_stages * 2]
        do_barriers: cute.struct.MemRange[Int64, config.do_stages * 2]
        kv_barriers: cute.struct.MemRange[Int64, 2]
        unit_barriers: cute.struct.MemRange[Int64, 2 * UNIT_SLOTS]
        units: buffer(Int32, UNIT_WORDS * UNIT_SLOTS, 128)
        partial: cute.struct.MemRange[Int32, config.q_stages]
        lse: buffer(Float32, 4 * config.row_pitch * config.q_stages, 128)
        delta: buffer(Float32, 4 * config.row_pitch * config.q_stages, 128)
        mask: buffer(Uint32, config.tile_m * config.tile_n // 32 * config.q_stages, 128)
        q: buffer(dtype, size["q"])
        k: buffer(dtype, size["k"])
        v: buffer(dtype, size["k"])
        dout: buffer(dtype, size["dout"])
        ds: buffer(dtype, size["ds"])
        dq: buffer(Float32, size["dq"])

    return Storage


def shared_tensors(config: BackwardConfig, storage: Any, layouts: dict[str, Any]) -> Shared:
    """The tensors in a `shared_storage`."""
    swizzled = {
        name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
        for name, layout in [*layouts.items(), ("v", layouts["k"])]
    }
    vector = cute.make_layout(
        (4, config.columns // 4, 4, config.q_stages), stride=(1, 4, config.row_pitch, 4 * config.row_pitch)
    )
    threads, half_word = 2 * config.tile_n, Uint16 if config.tile_m == 64 else Uint32
    return Shared(
        **swizzled,
        lse=storage.lse.get_tensor(vector),
        delta=storage.delta.get_tensor(vector),
        mask=storage.mask.get_tensor(cute.make_layout((config.tile_m // 64, threads, config.q_stages))),
        mask_rows=cute.make_tensor(
            cute.recast_ptr(storage.mask.data_ptr(), dtype=half_word),
            cute.make_layout((2, threads, config.q_stages)),
        ),
        partial=storage.partial.get_tensor(cute.make_layout(config.q_stages)),
        units=storage.units.get_tensor(cute.make_layout((UNIT_WORDS, UNIT_SLOTS))),
        dq_flat=storage.dq.get_tensor(cute.make_layout(64 * config.dq_columns * config.groups)),
    )


class Pipes(NamedTuple):
    """Barriers in shared memory."""

    q: pipeline.PipelineTmaAsync
    dout: pipeline.PipelineTmaAsync
    k_empty: cute.Pointer
    v_empty: cute.Pointer
    unit_full: cute.Pointer
    unit_empty: cute.Pointer


class Units(NamedTuple):
    """How the items of a `WorkList` become units: all query heads of a key/value head, or ``few`` of them at a time.

    Attributes:
        whole: items' worth of units that have all query heads: the first ``whole`` times the number of key/value heads.
            Units come section by section (see `marble.kernels.cute.units`), so these may end inside a section.
        few: query heads of a unit of the others, a divisor of a key/value head's number of them.
        apart: whether units with the same heads come together in a section, and not those of the same item; then
            ``whole`` is 0.
    """

    whole: int
    few: int
    apart: bool = False


@mlir_namedtuple
class Schedule(NamedTuple):
    """`Units` in a kernel, and ``counter``: int32 [1], units that thread blocks have fetched; 0 between launches."""

    whole: Int32
    few: Int32
    apart: Int32
    counter: cute.Tensor


ENOUGH_UNITS = 6
"""Units for each multiprocessor that even out how long they are, if the last ones are split."""

MANY_UNITS = 24
"""Units for each multiprocessor that are even when none is split, and in any order."""

UNIT_TILES = 48
"""Tiles of a unit, on average, that make up for what it costs besides them: about one."""


@lru_cache
def plan_units(items: int, kv_heads: int, group: int, sms: int) -> Units:
    """The units of items that ``group`` query heads of each key/value head multiply.

    If there are enough units of all query heads, only about the last of each multiprocessor is split, so that all end
    at about the same time. Otherwise every unit is, as little as gives enough of them: each costs about one tile more.
    """
    if items * kv_heads >= ENOUGH_UNITS * sms:
        return Units(max(0, items - -(-sms // kv_heads)), 1)
    sizes = [few for few in range(1, group + 1) if group % few == 0]
    enough = [few for few in sizes if items * kv_heads * (group // few) >= ENOUGH_UNITS * sms]
    return Units(0, max(enough, default=1))


def plan_units_in_order(items: int, tiles: int, kv_heads: int, group: int, sms: int) -> Units:
    """The units of items with ``tiles`` in all, where sums have one order and no two items add to the same key rows.

    A unit waits for those that come to its query tiles first, with every head again. Of many units that run at the same
    time and have the same few heads, few are at the same tile. So units come apart where there are many that are long.
    """
    long = (few for few in range(1, group) if group % few == 0 and few * tiles >= UNIT_TILES * items)
    few = next(long, group)
    if few < group and items * kv_heads * (group // few) >= MANY_UNITS * sms:
        return Units(0, few, apart=True)
    return plan_units(items, kv_heads, group, sms)


def whole_units(items: int, kv_heads: int, sms: int) -> bool:
    """Whether there are so many units of all query heads that splitting the last ones gains less than 2 %: then each
    key row may have one writer."""
    return items * kv_heads >= MANY_UNITS * sms


class Field(IntEnum):
    """What shared memory holds of a unit of work: the fields of an entry of `WorkList.items`, and which heads."""

    KEY_ROW = 0
    KEY_ROWS = 1
    PART = 2
    PARTS = 3
    RUN = 4
    RUNS = 5
    FULL = 6
    KV_HEAD = 7
    HEAD = 8
    """First query head."""
    HEADS = 9
    """Number of query heads; 0 in the entry that ends a thread block's work."""
    TILES = 10
    """Tiles of a query head that have pairs, where others are left out."""
    KEY_COUNTER = 11
    """If sums have an order, the counter that says whose turn it is to add dK and dV."""
    KEY_TICKET = 12
    """What it must have reached before each math group adds; −1 if no other unit adds to these rows."""
    TICKET = 13
    """Where the tickets of the unit's tiles begin."""


UNIT_WORDS, UNIT_SLOTS = 16, 4
"""Room for the fields of a unit in shared memory, and for how many units."""


class Tile(NamedTuple):
    """One tile, as the load, row and dQ warps meet it."""

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
    """Where the predicate is; `FULL_TILE` if the tile has none."""
    half: Int32
    """Which tile of its block it is."""
    counter: Int32 | None = None
    """The number of its counter among those of dQ, and its ticket, for who needs them."""
    ticket: Int32 | None = None


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
