"""The attention backward pass on Hopper for head dimension 256, one gradient at a time.

Each pass is built like the forward kernel: two math groups hold 64 rows of one gradient each, 64 x 256 in registers,
and stream past them what these rows meet. Together the passes compute eight products where the fused kernel computes
five, but none exchanges anything, and nothing leaves before a unit's end: every row of a gradient has one writer.

              outer rows stay      inner rows stream      scores            the other         added up
    dQ pass   Q, dO (128 queries)  K, V (64 keys)         S = Q K'          dP = dO V'        dQ += dS K
    dK pass   K, V (128 keys)      Q, dO (64 queries)     S' = K Q'         dP' = V dO'       dK += dS' Q
    dV pass   K (128 keys)         Q, dO (64 queries)     S' = K Q'         none              dV += P' dO

Below, the operands that stay are ``kept_x`` and ``kept_y``, those that stream x and y: scores are kept_x x', the other
product is kept_y y'. A unit is a block of outer rows with one query head (dQ), or with all query heads that read the
key/value head (dK, dV), one after the other.

    first load warp         fetches units and tells the others; kept_x, and x of every tile, by TMA
    second load warp        kept_y, and y of every tile, by TMA; log-sum-exp and delta of a tile's queries (dK, dV)
    mask warps              predicates of partial tiles, as bits, 64 outer rows each
    math groups             two warpgroups, 64 outer rows each; in the dQ pass they fetch their rows' statistics

The weights of a tile, dS or P in the input type, wait in registers for their product. In the passes of dQ and dK a step
issues that product and the next tile's scores; when it is done, the next tile's other product, beside which the
exponentials run. While dS is computed nothing of this group is in flight: the other group's products are. In the pass
of dV a step issues the next tile's scores and the product of this one, beside which the exponentials run.

In shared memory, with phases (who arrives; who waits; what is then safe):
    unit full, empty        as in `marble.kernels.cute.backward_sm90`.
    x full                  first load warp with its bytes, second load warp (dK, dV), both mask warps; math. x of a
                            tile, its queries' statistics (dK, dV), and its predicate are there; for a unit's first tile
                            kept_x too.
    x empty                 one lane of each math warp, after the tile's last product with x, which is that of its dS,
                            or in the pass of dV its scores; load and mask warps. All of that may be overwritten, but
                            for the predicate.
    y full                  second load warp with its bytes; math. A piece of y of a tile is there; for the first piece
                            of a unit's first tile all of kept_y too.
    y empty                 one lane of each math warp, after the product with that piece; second load warp. It may be
                            overwritten.
    mask empty              one lane of each math warp, when its lanes have read their bits of a tile, and whether they
                            count, at every tile; mask warps. There is one place for predicates: that of the next tile
                            may be written.
    kept x, kept y empty    one lane of each math warp, after a unit's last scores, and its last other product; load
                            warps. kept_x or kept_y may be overwritten.
"""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.utils import LayoutEnum
from flash_attn.cute import utils
from quack import copy_utils, layout_utils, sm90_utils

from marble.kernels.cute import masking
from marble.kernels.cute.backward_config import (
    UNIT_SLOTS,
    UNIT_WORDS,
    Atoms,
    BackwardConfig,
    Field,
    Operands,
    Schedule,
    Tile,
)
from marble.kernels.cute.backward_sm90 import LOG2_E, BackwardSm90
from marble.kernels.cute.binding import GROUP, Lists, fitting
from marble.kernels.cute.intrinsics import math_thread
from marble.kernels.cute.ordering import complete
from marble.kernels.cute.worklist import FULL_TILE

PASSES = ("dq", "dk", "dv")
"""The gradients, in the order in which they are computed."""

STRIP = 64
"""Outer rows of a math group."""


@dataclass(frozen=True)
class SplitConfig(BackwardConfig):
    """The choices of one pass.

    Attributes:
        gradient: which of `PASSES`.
        rounds: whether the gradient is written in the type of the inputs, instead of added to in float32.
        skips: as in `BackwardConfig`.
    """

    gradient: str = field(kw_only=True)

    head_dims: ClassVar[tuple[int, ...]] = (256,)
    q_stages: ClassVar[int] = 2  # of x, be they queries or keys
    math_registers: ClassVar[int] = 232
    load_registers: ClassVar[int] = 40
    skips: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient not in PASSES:
            raise ValueError(f"gradient: {self.gradient!r} is not one of {PASSES}")

    @property
    def by_query(self) -> bool:
        """Whether outer rows are queries, and inner rows keys."""
        return self.gradient == "dq"

    @property
    def weighs_scores(self) -> bool:
        """Whether the weights are P, and not dS."""
        return self.gradient == "dv"

    @property
    def y_pieces(self) -> int:
        """Pieces of the columns of y that arrive and leave one by one. Where there is one tile of y in shared memory,
        the first half of the next one is on its way while the second half of this one is multiplied."""
        return 1 if self.weighs_scores else 2

    @property
    def y_stages(self) -> int:
        """Such pieces in shared memory."""
        return 2

    @property
    def register_columns(self) -> int:
        """Columns of kept_x that live in registers: as many as there is room for."""
        return 112 if self.weighs_scores else 48


class Shared(NamedTuple):
    """Shared memory. Operands are swizzled, with stages last; the others are as in `backward_config.Shared`."""

    x: cute.Tensor
    y: cute.Tensor
    """[inner rows, columns of a piece, stage]."""
    kept_x: cute.Tensor
    kept_y: cute.Tensor | None
    lse: cute.Tensor | None
    delta: cute.Tensor | None
    mask: cute.Tensor
    mask_rows: cute.Tensor
    partial: cute.Tensor
    units: cute.Tensor


class Pipes(NamedTuple):
    """Barriers in shared memory, see the head of this file; the first four have one for each stage."""

    x_full: cute.Pointer
    x_empty: cute.Pointer
    y_full: cute.Pointer
    y_empty: cute.Pointer
    kept_x_empty: cute.Pointer
    kept_y_empty: cute.Pointer
    mask_empty: cute.Pointer
    unit_full: cute.Pointer
    unit_empty: cute.Pointer


class BackwardSplitSm90(BackwardSm90):
    """One pass, for one input type."""

    def __init__(self, dtype: type[cutlass.Numeric], config: SplitConfig):
        super().__init__(dtype, config)
        size = self.head_dim * dtype.width // 8
        self.streamed_bytes, self.kept_bytes = self.tile_m * size, self.tile_n * size
        self.piece = self.head_dim // config.y_pieces
        """Columns of a piece of y."""
        streamed, kept = ("q", "dout"), ("k", "v")
        self.streamed, self.kept = (kept, streamed) if config.by_query else (streamed, kept)
        """Which inputs x and y, kept_x and kept_y are."""

    # Host ------------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mDelta: cute.Tensor,
        target: cute.Tensor,
        lists: Lists,
        whole: Int32,
        few: Int32,
        apart: Int32,
        counter: cute.Tensor,
        scale: Float32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        """Launch on ``grid`` thread blocks, no more than there are units (see `Schedule`).

        Args:
            target: the gradient [heads, rows, head_dim]: float32 to add to, or of the inputs' type to write.
            lists: by query in the pass of dQ, else by key.
        """
        layouts, load = self._layouts(), cpasync.CopyBulkTensorTileG2SOp()
        inputs, made = {"q": mQ, "k": mK, "v": mV, "dout": mdO}, {}
        for name, what in zip(self.streamed + self.kept, ("x", "y", "kept", "kept"), strict=True):
            layout = layouts[what] if what == "kept" else cute.select(layouts[what], mode=[0, 1])
            tensor = layout_utils.select(inputs[name], [0, 2, 1])
            made[name] = cpasync.make_tiled_tma_atom(load, tensor, layout, cute.product_each(cute.shape(layout)))
        self.kernel(
            Operands(**{name: tensor for name, (_, tensor) in made.items()}),
            *(made[name][0] for name in ("q", "k", "v", "dout")),
            mLSE,
            mDelta,
            target,
            lists,
            Schedule(whole, few, apart, counter),
            scale,
        ).launch(grid=[grid, 1, 1], block=[self.config.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    def _layouts(self) -> dict[str, Any]:
        """Shared-memory layouts of operands, 128-byte swizzle atoms."""
        make, config = partial(sm90_utils.make_smem_layout, self.dtype, LayoutEnum.ROW_MAJOR), self.config
        return {
            "x": make((self.tile_m, self.head_dim), config.q_stages),
            "y": make((self.tile_m, self.piece), config.y_stages),
            "kept": make((self.tile_n, self.head_dim)),
        }

    def _storage(self, layouts: dict[str, Any]) -> type:
        """Shared memory: barriers first, then what is small, then operands where a swizzle atom may begin."""

        def buffer(kind: type, count: int, align: int = 1024) -> Any:
            return cute.struct.Align[cute.struct.MemRange[kind, count], align]

        config, size = self.config, {name: cute.cosize(layout) for name, layout in layouts.items()}
        rows = 4 * config.row_pitch * config.q_stages * (not config.by_query)

        @cute.struct
        class Storage:
            x_barriers: cute.struct.MemRange[Int64, 2 * config.q_stages]
            y_barriers: cute.struct.MemRange[Int64, 2 * config.y_stages]
            single_barriers: cute.struct.MemRange[Int64, 3]
            unit_barriers: cute.struct.MemRange[Int64, 2 * UNIT_SLOTS]
            units: buffer(Int32, UNIT_WORDS * UNIT_SLOTS, 128)
            partial: cute.struct.MemRange[Int32, config.q_stages]
            lse: buffer(Float32, rows, 128)
            delta: buffer(Float32, rows, 128)
            mask: buffer(Uint32, 2 * GROUP, 128)
            kept_x: buffer(self.dtype, size["kept"])
            kept_y: buffer(self.dtype, 0 if config.weighs_scores else size["kept"])
            x: buffer(self.dtype, size["x"])
            y: buffer(self.dtype, size["y"])

        return Storage

    def _tensors(self, storage: Any, layouts: dict[str, Any]) -> Shared:
        """The tensors in a `_storage`."""
        config, threads = self.config, 2 * GROUP
        vector = cute.make_layout(
            (4, config.columns // 4, 4, config.q_stages), stride=(1, 4, config.row_pitch, 4 * config.row_pitch)
        )
        half_words = cute.recast_ptr(storage.mask.data_ptr(), dtype=Uint16)

        def operand(name: str, what: str) -> Any:
            return getattr(storage, name).get_tensor(layouts[what].outer, swizzle=layouts[what].inner)

        return Shared(
            x=operand("x", "x"),
            y=operand("y", "y"),
            kept_x=operand("kept_x", "kept"),
            kept_y=None if config.weighs_scores else operand("kept_y", "kept"),
            lse=None if config.by_query else storage.lse.get_tensor(vector),
            delta=None if config.by_query else storage.delta.get_tensor(vector),
            mask=storage.mask.get_tensor(cute.make_layout(threads)),
            mask_rows=cute.make_tensor(half_words, cute.make_layout((2, threads, 1))),
            partial=storage.partial.get_tensor(cute.make_layout(config.q_stages)),
            units=storage.units.get_tensor(cute.make_layout((UNIT_WORDS, UNIT_SLOTS))),
        )

    # Device ----------------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        atom_q: cute.CopyAtom,
        atom_k: cute.CopyAtom,
        atom_v: cute.CopyAtom,
        atom_dout: cute.CopyAtom,
        lse: cute.Tensor,
        delta: cute.Tensor,
        target: cute.Tensor,
        lists: Lists,
        schedule: Schedule,
        scale: Float32,
    ):
        """Set up shared memory and barriers, then take a role."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (atom_q, atom_k, atom_v, atom_dout):
                cpasync.prefetch_descriptor(atom)
        atoms, layouts = Atoms(atom_q, atom_k, atom_v, atom_dout), self._layouts()
        storage = cutlass.utils.SmemAllocator().allocate(fitting(self._storage(layouts)))
        pipes = self._barriers(storage, warp)
        shared = self._tensors(storage, layouts)
        if warp < 4:
            cute.arch.setmaxregister_decrease(config.load_registers)
            follow = partial(self._follow, lists, shared, pipes)
            if warp == 0:
                visit = partial(self.load_x, operands, atoms, shared, pipes)
                self._lead(operands, lists, schedule, shared, pipes, visit)
            if warp == 1:
                follow(partial(self.load_y, operands, atoms, lse, delta, self._early(scale), shared, pipes))
            if warp >= 2:
                follow(partial(self.write_strip_mask, lists, shared, pipes, STRIP * (warp - 2)))
        else:
            cute.arch.setmaxregister_increase(config.math_registers)
            self.math(shared, pipes, lse, delta, target, scale)

    @cute.jit
    def _barriers(self, storage: Any, warp: Int32) -> Pipes:
        """Initialise them all; behind this every thread may use them."""
        config, math_warps = self.config, self.math_threads // 32
        x_full, y_full, single, unit_full = (
            barriers.data_ptr()
            for barriers in (
                storage.x_barriers,
                storage.y_barriers,
                storage.single_barriers,
                storage.unit_barriers,
            )
        )
        x_empty, y_empty, unit_empty = x_full + config.q_stages, y_full + config.y_stages, unit_full + UNIT_SLOTS
        if warp == 0:
            with cute.arch.elect_one():
                for stage in range(config.q_stages):
                    cute.arch.mbarrier_init(x_full + stage, 3 + (not config.by_query))
                    cute.arch.mbarrier_init(x_empty + stage, math_warps)
                for stage in range(config.y_stages):
                    cute.arch.mbarrier_init(y_full + stage, 1)
                    cute.arch.mbarrier_init(y_empty + stage, math_warps)
                for i in range(3):
                    cute.arch.mbarrier_init(single + i, math_warps)
                for slot in range(UNIT_SLOTS):
                    cute.arch.mbarrier_init(unit_full + slot, 1)
                    cute.arch.mbarrier_init(unit_empty + slot, math_warps + 3)
        pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline_init_wait(cluster_shape_mn=(1, 1))
        return Pipes(x_full, x_empty, y_full, y_empty, single, single + 1, single + 2, unit_full, unit_empty)

    # Load warps ------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_x(self, operands: Operands, atoms: Atoms, shared: Shared, pipes: Pipes, tile: Tile) -> None:
        """Fill a tile's stage of x, once it is free. A unit's first tile brings kept_x, once the last unit's may go.

        That arrives with x: its bytes are announced before they are asked for.
        """
        stage, phase = self._stage(tile.number, self.config.q_stages)
        barrier, extra = pipes.x_full + stage, Int32(self.kept_bytes) if tile.starts else Int32(0)
        cute.arch.mbarrier_wait(pipes.x_empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.streamed_bytes + extra)
        self._load_streamed(operands, atoms, shared, tile, 0, 0, shared.x[None, None, stage], barrier)
        if tile.starts:
            cute.arch.mbarrier_wait(pipes.kept_x_empty, tile.turn + 1 & 1)
            self._load_kept(operands, atoms, shared, tile, 0, shared.kept_x, barrier)

    @cute.jit
    def load_y(
        self,
        operands: Operands,
        atoms: Atoms,
        lse: cute.Tensor,
        delta: cute.Tensor,
        factor: Float32 | float,
        shared: Shared,
        pipes: Pipes,
        tile: Tile,
    ) -> None:
        """The statistics of a tile's queries, if these are inner rows; the pieces of its y, and kept_y, as `load_x`."""
        config = self.config
        if const_expr(not config.by_query):
            stage, phase = self._stage(tile.number, config.q_stages)
            cute.arch.mbarrier_wait(pipes.x_empty + stage, phase ^ 1)
            self._write_rows(lse, delta, factor, shared, tile, stage)
            self._arrive(pipes.x_full + stage)
        for piece in cutlass.range_constexpr(config.y_pieces):
            stage, phase = self._y_stage(tile.number, piece)
            barrier, extra = pipes.y_full + stage, Int32(0)
            if const_expr(piece == 0 and not config.weighs_scores):
                extra = Int32(self.kept_bytes) if tile.starts else Int32(0)
            cute.arch.mbarrier_wait(pipes.y_empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.streamed_bytes // config.y_pieces + extra)
            self._load_streamed(operands, atoms, shared, tile, 1, piece, shared.y[None, None, stage], barrier)
            if const_expr(piece == 0 and not config.weighs_scores):  # noqa: SIM102 (known to the compiler)
                if tile.starts:
                    cute.arch.mbarrier_wait(pipes.kept_y_empty, tile.turn + 1 & 1)
                    self._load_kept(operands, atoms, shared, tile, 1, shared.kept_y, barrier)

    def _y_stage(self, tile: Int32, piece: int) -> tuple[Int32, Int32]:
        """Stage and full phase of a piece of y."""
        return self._stage(tile * self.config.y_pieces + piece, self.config.y_stages)

    @cute.jit
    def _load_streamed(
        self,
        operands: Operands,
        atoms: Atoms,
        shared: Shared,
        tile: Tile,
        which: cutlass.Constexpr[int],
        piece: cutlass.Constexpr[int],
        target: cute.Tensor,
        barrier: cute.Pointer,
    ) -> None:
        """Start the load of x or y (0 or 1) of a tile, or of a piece of its columns."""
        head = tile.head
        if const_expr(self.config.by_query):
            head = self._field(shared, tile.turn, Field.KV_HEAD)
        name = self.streamed[which]
        self._load_tile(getattr(atoms, name), getattr(operands, name), head, tile.row, piece, target, barrier)

    @cute.jit
    def _load_kept(
        self,
        operands: Operands,
        atoms: Atoms,
        shared: Shared,
        tile: Tile,
        which: cutlass.Constexpr[int],
        target: cute.Tensor,
        barrier: cute.Pointer,
    ) -> None:
        """Start the load of kept_x or kept_y (0 or 1) of a unit."""
        head = tile.head
        if const_expr(not self.config.by_query):
            head = self._field(shared, tile.turn, Field.KV_HEAD)
        row = self._field(shared, tile.turn, Field.KEY_ROW)
        name = self.kept[which]
        self._load_tile(getattr(atoms, name), getattr(operands, name), head, row, 0, target, barrier)

    @cute.jit
    def _load_tile(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        head: Int32,
        row: Int32,
        piece: cutlass.Constexpr[int],
        target: cute.Tensor,
        barrier: cute.Pointer,
    ) -> None:
        """A piece of the columns of rows of one head from ``row`` on; rows behind the last one arrive as 0."""
        rows = cute.domain_offset((row, 0), source[None, None, head])
        shape = tuple(cute.size(target, mode=[i]) for i in range(2))
        tile = cute.local_tile(rows, shape, (0, piece))
        copy, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), tile, target, single_stage=True)
        copy(tma_bar_ptr=barrier)

    # Mask warps ------------------------------------------------------------------------------------------------------

    @cute.jit
    def write_strip_mask(self, lists: Lists, shared: Shared, pipes: Pipes, first: Int32, tile: Tile) -> None:
        """The predicate of a partial tile for a strip of outer rows from the ``first``; and whether there is one."""
        stage, phase = self._stage(tile.number, self.config.q_stages)
        cute.arch.mbarrier_wait(pipes.x_empty + stage, phase ^ 1)
        cute.arch.mbarrier_wait(pipes.mask_empty, tile.number + 1 & 1)
        shared.partial[stage] = Int32(tile.slot != FULL_TILE)
        if tile.slot != FULL_TILE:
            for part in cutlass.range(STRIP // 32, unroll=1):
                row = first + cute.arch.lane_idx() + 32 * part
                self._write_row(lists, shared, tile, Int32(0), row)
        self._arrive(pipes.x_full + stage)

    # Math groups -----------------------------------------------------------------------------------------------------

    @cute.jit
    def math(
        self, shared: Shared, pipes: Pipes, lse: cute.Tensor, delta: cute.Tensor, target: cute.Tensor, scale: Float32
    ) -> None:
        """The weights of a unit's first tile; for every other tile a step, which ends with its weights; the last
        product. Between two rounds of the loop nothing is in flight, or ptxas would serialise."""
        tools = self._tools(shared, pipes, scale)
        turn, tile = Int32(0), Int32(0)
        heads = self._await_unit(shared, pipes, turn)
        while heads > 0:
            tiles = self._field(shared, turn, Field.TILES) * heads
            if const_expr(self.config.by_query):
                self.take_statistics(tools, lse, delta, turn)
            bits = self.first_step(tools, tile, tiles == 1)
            for done in cutlass.range(tiles - 1, unroll=1):
                if const_expr(self.config.weighs_scores):
                    bits = self.step_p(tools, bits, tile, done > 0, done == tiles - 2)
                else:
                    self.step_ds(tools, tile, done > 0, done == tiles - 2)
                tile += 1
            self.last_step(tools, tile, tiles > 1)
            tile += 1
            factor = 1.0 if const_expr(self.config.weighs_scores) else self._last(scale)
            leave = self._write if const_expr(self.config.rounds) else self._add_quads
            head = Field.HEAD if const_expr(self.config.by_query) else Field.KV_HEAD
            leave(tools.acc, target, partial(self._own_rows, shared, turn, head), factor)
            self._leave_unit(pipes, turn)
            turn += 1
            heads = self._await_unit(shared, pipes, turn)

    def _tools(self, shared: Shared, pipes: Pipes, scale: Float32) -> SimpleNamespace:
        """Accumulators and partitioned operands of this math group.

        A product of scores is a list of instructions, which take 16 columns each: an instruction, its first operand,
        and the columns' place in that. ``acc_dp`` is None in the pass of dV.
        """
        config, d, m = self.config, self.head_dim, self.tile_m
        which = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP - 1)
        make = partial(sm90_utils.make_tiled_mma, self.dtype, "K", atom_layout_mnk=(1, 1, 1))
        mma_s, mma_s_registers, mma_acc = make("K", m, "SS"), make("K", m, "RS"), make("MN", d, "RS")
        wg_s, wg_s_registers, wg_acc = (mma.get_slice(0) for mma in (mma_s, mma_s_registers, mma_acc))
        own_x = cute.local_tile(shared.kept_x, (STRIP, d), (which, 0))
        a_x, b_x = (
            wg_s.make_fragment_A(wg_s.partition_A(own_x)),
            wg_s.make_fragment_B(wg_s.partition_B(shared.x)),
        )
        shape = wg_s_registers.partition_shape_A((STRIP, config.register_columns))
        held_x, held = wg_s_registers.make_fragment_A(shape), config.register_columns // 16
        scores = [(mma_s_registers, held_x, k) if k < held else (mma_s, a_x, k) for k in range(d // 16)]
        others, b_y, acc_dp = [], None, None
        if not config.weighs_scores:
            own_y = cute.local_tile(shared.kept_y, (STRIP, d), (which, 0))
            a_y, b_y = (
                wg_s.make_fragment_A(wg_s.partition_A(own_y)),
                wg_s.make_fragment_B(wg_s.partition_B(shared.y)),
            )
            others = [(mma_s, a_y, k) for k in range(d // 16)]
            acc_dp = cute.make_rmem_tensor(wg_s.partition_shape_C((STRIP, m)), Float32)
        weighed = shared.y if config.weighs_scores else shared.x
        acc, weights, b_acc = sm90_utils.partition_fragment_ABC(
            wg_acc, (STRIP, d, m), None, layout_utils.transpose_view(weighed)
        )
        return SimpleNamespace(
            shared=shared,
            pipes=pipes,
            scale=scale,
            acc=acc,
            weights=weights,
            weigh=partial(add_product, mma_acc, acc, weights, b_acc),
            acc_s=cute.make_rmem_tensor(wg_s.partition_shape_C((STRIP, m)), Float32),
            acc_dp=acc_dp,
            scores=scores,
            b_x=b_x,
            others=others,
            b_y=b_y,
            mma_kept=mma_s_registers,
            own_x=own_x,
            held_x=held_x,
            # Statistics of this thread's two outer rows; or log-sum-exp, then delta, of its inner rows.
            own_lse=cute.make_rmem_tensor(2, Float32) if config.by_query else None,
            own_delta=cute.make_rmem_tensor(2, Float32) if config.by_query else None,
            rows=None if config.by_query else cute.make_rmem_tensor(config.columns, Float32),
        )

    @cute.jit
    def take_statistics(self, tools: Any, lse: cute.Tensor, delta: cute.Tensor, turn: Int32) -> None:
        """Log-sum-exp, in powers of 2, and delta of this thread's queries, as `_write_rows` has them."""
        thread, get = math_thread(), partial(self._field, tools.shared, turn)
        first = STRIP * (thread >> 7) + masking.row_of(thread & GROUP - 1)
        head, row, rows = (get(field=field) for field in (Field.HEAD, Field.KEY_ROW, Field.KEY_ROWS))
        for r in cutlass.range_constexpr(2):
            own_lse, own_delta, place = -Float32.inf, Float32(0.0), first + 8 * r
            if place < rows:
                own_lse, own_delta = lse[head, row + place], delta[head, row + place]
            tools.own_lse[r] = Float32.inf if own_lse == -Float32.inf else own_lse * LOG2_E
            tools.own_delta[r] = own_delta * self._early(tools.scale)

    @cute.jit
    def take_kept(self, tools: Any) -> None:
        """The columns of kept_x that live in registers."""
        copy = cute.make_tiled_copy_A(copy_utils.get_smem_load_atom(self.dtype), tools.mma_kept)
        own, target = copy.get_slice(math_thread() & GROUP - 1), copy.retile(tools.held_x)
        for k in cutlass.range_constexpr(self.config.register_columns // 16):
            source = own.partition_S(cute.local_tile(tools.own_x, (STRIP, 16), (0, k)))
            cute.copy(copy, source[None, None, 0], target[None, None, k])

    @cute.jit
    def look_ahead(self, tools: Any, tile: Int32) -> Uint32:
        """Wait for a tile's x. Its log-sum-exp, if queries are inner rows, and the bits of this thread's pairs."""
        shared, thread = tools.shared, math_thread()
        stage, phase = self._stage(tile, self.config.q_stages)
        cute.arch.mbarrier_wait(tools.pipes.x_full + stage, phase)
        if const_expr(not self.config.by_query):
            self._take(shared.lse, tools.rows, stage)
        bits, partial_tile = shared.mask[thread], shared.partial[stage]
        self._hand_back(tools.pipes.mask_empty, [bits, partial_tile])
        return bits if partial_tile != 0 else Uint32(0xFFFFFFFF)

    @cute.jit
    def _take(self, table: cute.Tensor, rows: cute.Tensor, stage: Int32) -> None:
        """Log-sum-exp or delta of this thread's columns of a tile."""
        for quad in cutlass.range_constexpr(self.config.columns // 4):
            four = copy_utils.load_s2r(table[None, quad, math_thread() & 3, stage])
            for c in cutlass.range_constexpr(4):
                rows[4 * quad + c] = four[c]

    @cute.jit
    def first_step(self, tools: Any, tile: Int32, ends: Boolean) -> Uint32:
        """The weights of a unit's first tile, behind which nothing is in flight; in the pass of dV also the bits of the
        next one. The unit's last tile ``ends`` what it needs of kept_x and kept_y."""
        bits = self.look_ahead(tools, tile)
        self.take_kept(tools)
        self.start_scores(tools, tile)
        if const_expr(self.config.weighs_scores):
            warpgroup.wait_group(0)
            bits = self.finish_p(tools, bits, tile, ends)
            self.round(tools, tools.acc_s)
        else:
            self.await_y(tools, tile, 0)
            self.start_others(tools, tile)
            self.finish_ds(tools, bits, tile, ends)
        return bits

    @cute.jit
    def step_ds(self, tools: Any, tile: Int32, begun: Boolean, ends: Boolean) -> None:
        """Add what dS of a tile multiplies, and compute dS of the next one."""
        x_stage = self._stage(tile, self.config.q_stages)[0]
        tools.weigh(x_stage, begun)
        bits = self.look_ahead(tools, tile + 1)  # the answer may be late, but not later than the product
        self.start_scores(tools, tile + 1)
        self.await_y(tools, tile + 1, 0)
        warpgroup.wait_group(1)  # the sum is done: dS leaves its registers to dP
        self._hand_back(tools.pipes.x_empty + x_stage)
        self.start_others(tools, tile + 1)
        self.finish_ds(tools, bits, tile + 1, ends)

    @cute.jit
    def step_p(self, tools: Any, bits: Uint32, tile: Int32, begun: Boolean, ends: Boolean) -> Uint32:
        """Add what P of a tile multiplies, and compute P of the next one, whose x has arrived, with its ``bits``; the
        bits of the tile behind that."""
        y_stage = self._y_stage(tile, 0)[0]
        self.start_scores(tools, tile + 1)
        self.await_y(tools, tile, 0)
        tools.weigh(y_stage, begun)
        warpgroup.wait_group(1)  # the scores are complete
        bits = self.finish_p(tools, bits, tile + 1, ends)
        warpgroup.wait_group(0)
        self._hand_back(tools.pipes.y_empty + y_stage)
        self.round(tools, tools.acc_s)
        return bits

    @cute.jit
    def last_step(self, tools: Any, tile: Int32, begun: Boolean) -> None:
        """Add what the weights of a unit's last tile multiply."""
        pipes = tools.pipes
        if const_expr(self.config.weighs_scores):
            y_stage = self._y_stage(tile, 0)[0]
            self.await_y(tools, tile, 0)
            tools.weigh(y_stage, begun)
            warpgroup.wait_group(0)
            self._hand_back(pipes.y_empty + y_stage)
        else:
            x_stage = self._stage(tile, self.config.q_stages)[0]
            tools.weigh(x_stage, begun)
            warpgroup.wait_group(0)
            self._hand_back(pipes.x_empty + x_stage)

    @cute.jit
    def _hand_back_if(self, wanted: Boolean, barrier: cute.Pointer) -> None:
        """As `_hand_back`, or not at all."""
        if wanted:
            self._hand_back(barrier)

    @cute.jit
    def start_scores(self, tools: Any, tile: Int32) -> None:
        """Start a tile's scores."""
        start_product(tools.acc_s, tools.scores, tools.b_x, self._stage(tile, self.config.q_stages)[0], False)

    @cute.jit
    def await_y(self, tools: Any, tile: Int32, piece: cutlass.Constexpr[int]) -> None:
        """Wait for a piece of a tile's y."""
        stage, phase = self._y_stage(tile, piece)
        cute.arch.mbarrier_wait(tools.pipes.y_full + stage, phase)

    @cute.jit
    def start_others(self, tools: Any, tile: Int32) -> None:
        """Start a tile's dP, a group of instructions for each piece of y, of which the first has arrived."""
        each = const_expr(self.piece // 16)
        for piece in cutlass.range_constexpr(self.config.y_pieces):
            if const_expr(piece > 0):
                self.await_y(tools, tile, piece)
            instructions = tools.others[piece * each : (piece + 1) * each]
            start_product(tools.acc_dp, instructions, tools.b_y, self._y_stage(tile, piece)[0], piece > 0)

    @cute.jit
    def exponentials(self, tools: Any, bits: Uint32) -> None:
        """P of a tile from its scores, in their place."""
        grid = layout_utils.reshape_acc_to_mn(tools.acc_s)
        if bits != 0xFFFFFFFF:
            self._apply(grid, [bits])
        scale_log2 = tools.scale * LOG2_E
        for c in cutlass.range_constexpr(self.config.columns):
            for r in cutlass.range_constexpr(2):
                lse = tools.own_lse[r] if const_expr(self.config.by_query) else tools.rows[c]
                grid[r, c] = cute.math.exp2(grid[r, c] * scale_log2 - lse, fastmath=True)
        words = cute.recast_tensor(tools.acc_s, Int32)
        complete([words[i] for i in range(cute.size(words))])

    @cute.jit
    def finish_p(self, tools: Any, bits: Uint32, tile: Int32, ends: Boolean) -> Uint32:
        """P of a tile whose scores are complete. Unless it ``ends`` the unit, look ahead at the next tile: its bits."""
        words = cute.recast_tensor(tools.rows, Int32)
        rows = [words[i] for i in range(cute.size(words))]
        self._hand_back(tools.pipes.x_empty + self._stage(tile, self.config.q_stages)[0], rows)
        self._hand_back_if(ends, tools.pipes.kept_x_empty)
        self.exponentials(tools, bits)
        if not ends:
            bits = self.look_ahead(tools, tile + 1)
        return bits

    @cute.jit
    def finish_ds(self, tools: Any, bits: Uint32, tile: Int32, ends: Boolean) -> None:
        """The weights dS of a tile, whose scores and dP are in flight and nothing else; ``ends``: see `first_step`."""
        pieces = self.config.y_pieces
        warpgroup.wait_group(pieces)  # the scores are complete
        self._hand_back_if(ends, tools.pipes.kept_x_empty)
        self.exponentials(tools, bits)
        if const_expr(not self.config.by_query):
            self._take(tools.shared.delta, tools.rows, self._stage(tile, self.config.q_stages)[0])
        for piece in cutlass.range_constexpr(pieces):
            warpgroup.wait_group(pieces - 1 - piece)
            self._hand_back(tools.pipes.y_empty + self._y_stage(tile, piece)[0])
        self._hand_back_if(ends, tools.pipes.kept_y_empty)
        p, dp = layout_utils.reshape_acc_to_mn(tools.acc_s), layout_utils.reshape_acc_to_mn(tools.acc_dp)
        for c in cutlass.range_constexpr(self.config.columns):
            for r in cutlass.range_constexpr(2):
                delta = tools.own_delta[r] if const_expr(self.config.by_query) else tools.rows[c]
                dp[r, c] = p[r, c] * (dp[r, c] * self._early(tools.scale) - delta)
        self.round(tools, tools.acc_dp)

    @cute.jit
    def round(self, tools: Any, weights: cute.Tensor) -> None:
        """Weights, as the first operand of the product that adds up."""
        utils.cvt_f16(layout_utils.reshape_acc_to_frgA(weights), tools.weights)


@cute.jit
def start_product(acc: cute.Tensor, products: Any, b: cute.Tensor, stage: Int32, begun: cutlass.Constexpr[bool]):
    """Start a · b[stage]ᵀ, added to ``acc`` if it has ``begun``, else in its place. See `BackwardSplitSm90._tools`."""
    warpgroup.fence()
    for i in cutlass.range_constexpr(len(products)):
        mma, a, column = products[i]
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, begun or i > 0)
        cute.gemm(atom, acc, a[None, None, column], b[None, None, i, stage], acc)
    warpgroup.commit_group()


@cute.jit
def add_product(mma: Any, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage: Int32, begun: Boolean):
    """Start a · b[stage], added to ``acc`` or, if it has not ``begun``, in its place."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, begun)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k, stage], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
