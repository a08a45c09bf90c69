"""The attention backward pass on Hopper: gradients of listed tiles, added to float32 buffers.

One unit of work is a key block and a key/value head. Its thread block walks every query head that reads this key/value
head and every query tile that the key block lists, so dK and dV stay in registers and have one writer. dQ leaves tile
by tile as a reduction in the memory system, because key blocks share query rows. Thread blocks are persistent: they
take units from a static schedule, and load the next unit while the last one is being written.

    load warp      K, V, and per tile Q, dO and the words of its predicate, by TMA
    row warp       log-sum-exp and delta of the tile's query rows, rescaled, through registers
    dQ warp        reduces finished dQ tiles from shared into global memory
    math groups    two warpgroups, 64 key rows each: S' = K Q', dP' = V dO', dV += P' dO, dK += dS' Q, dQ = dS K

Barriers (who arrives; who waits; what is then safe):
    Q full         load warp with its bytes, row warp; math. Q, log-sum-exp, delta and predicate of a tile are there;
                   for a unit's first tile K too.
    Q empty        one lane of each math warp, after the tile's dK product; load warp and row warp. All of that may be
                   overwritten.
    dO full        load warp with its bytes; math. dO is there, for a unit's first tile V too.
    dO empty       one lane of each math warp, after the tile's dV product; load warp. dO may be overwritten.
    KV empty       one lane of each math warp, after a unit's last product; load warp. K and V may be overwritten.
    dS             both math groups; both. All of dS is in shared memory. dS has two stages: a group writes a stage only
                   after the barrier that follows the other group's wait for the product that read it.
    dQ empty[g]    dQ warp, when its reduction has read group g's stage; group g. The group may overwrite it.
    dQ full[g]     group g, after its stores and a proxy fence; dQ warp. The stage may be reduced.
"""

from functools import lru_cache, partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.pipeline import Agent, CooperativeGroup
from cutlass.utils import LayoutEnum
from flash_attn.cute import pipeline, utils
from flash_attn.cute.copy_utils import cpasync_bulk_g2s
from quack import copy_utils, layout_utils, sm90_utils
from quack.compile_utils import make_fake_stream, make_fake_tensor
from torch import Tensor

from marble.kernels.cute.backward_config import (
    CONFIGS,
    Atoms,
    BackwardConfig,
    Item,
    Lists,
    Operands,
    Pipes,
    Products,
    Shared,
    Tile,
)
from marble.kernels.cute.worklist import WorkList

LOG2_E = 1.4426950408889634

BARRIER_DS, BARRIER_DQ_FULL, BARRIER_DQ_EMPTY = 1, 2, 4
"""Named barriers; the last two have one for each math group. 0 is `__syncthreads`."""

GROUP = 128
"""Threads of a warpgroup."""


class BackwardSm90:
    """The backward kernel of one input type and head dimension."""

    def __init__(self, dtype: type[cutlass.Numeric], config: BackwardConfig):
        if dtype not in (Float16, BFloat16):
            raise ValueError(f"dtype: {dtype} is not float16 or bfloat16")
        self.dtype, self.config = dtype, config
        self.tile_m, self.tile_n, self.head_dim = config.tile_m, config.tile_n, config.head_dim
        self.math_threads = config.groups * GROUP
        size = self.head_dim * dtype.width // 8
        self.query_bytes, self.key_bytes = self.tile_m * size, self.tile_n * size

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
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        lists: Lists,
        scale: Float32,
        section: Int32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        """Launch on ``grid`` thread blocks. ``section`` key/value heads, a divisor of their number, run at a time."""
        layouts = self._layouts()
        rows_first = [layout_utils.select(t, [0, 2, 1]) for t in (mQ, mK, mV, mdO)]
        rows_first.append(layout_utils.select(mdQ, [1, 2, 0]))
        tiles = [(self.tile_m, self.head_dim), (self.tile_n, self.head_dim)]
        load, reduce = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyReduceBulkTensorTileS2GOp()
        made = [
            cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), tile)
            for op, tensor, layout, tile in zip(
                (load, load, load, load, reduce),
                rows_first,
                (layouts["q"], layouts["k"], layouts["k"], layouts["dout"], layouts["dq"]),
                (tiles[0], tiles[1], tiles[1], tiles[0], (64, self.config.dq_columns)),
                strict=True,
            )
        ]
        self.kernel(
            Operands(*(tensor for _, tensor in made)),
            *(atom for atom, _ in made),
            mLSE,
            mDelta,
            mdK,
            mdV,
            lists,
            scale,
            section,
        ).launch(grid=[grid, 1, 1], block=[self.math_threads + GROUP, 1, 1], stream=stream, min_blocks_per_mp=1)

    def _layouts(self) -> dict[str, Any]:
        """Shared-memory layouts. Every operand is read both ways, rows and transposed, from 128-byte swizzled atoms."""
        config, row_major = self.config, LayoutEnum.ROW_MAJOR
        make = partial(sm90_utils.make_smem_layout, self.dtype, row_major)
        return {
            "q": make((self.tile_m, self.head_dim), config.q_stages, major_mode_size=64),
            "dout": make((self.tile_m, self.head_dim), config.do_stages, major_mode_size=64),
            "k": make((self.tile_n, self.head_dim), None, major_mode_size=64),
            "ds": make((self.tile_m, self.tile_n), config.ds_stages, major_mode_size=64),
            "dq": sm90_utils.make_smem_layout(Float32, row_major, (64, self.config.dq_columns), config.groups),
        }

    def _tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """S' and dP' (keys are rows); dK and dV (the first operand in registers); dQ, split by rows or by columns."""
        rows, both = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        groups = self.config.groups
        make = partial(hopper.make_trivial_tiled_mma, self.dtype, self.dtype)
        s = make(rows, rows, Float32, atom_layout_mnk=(groups, 1, 1), tiler_mn=(64, self.tile_m))
        dkv = make(
            rows,
            both,
            Float32,
            atom_layout_mnk=(groups, 1, 1),
            tiler_mn=(64, self.head_dim),
            a_source=warpgroup.OperandSource.RMEM,
        )
        split = (groups, 1, 1) if self.tile_m == 64 * groups else (1, groups, 1)
        dq = make(rows, both, Float32, atom_layout_mnk=split, tiler_mn=(64, self.config.dq_columns))
        return s, dkv, dq

    def _storage(self, layouts: dict[str, Any]) -> type:
        config = self.config

        def buffer(dtype: type, count: int, align: int = 1024) -> Any:
            return cute.struct.Align[cute.struct.MemRange[dtype, count], align]

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[Int64, config.q_stages * 2]
            do_barriers: cute.struct.MemRange[Int64, config.do_stages * 2]
            kv_barrier: cute.struct.MemRange[Int64, 1]
            slot: cute.struct.MemRange[Int32, config.q_stages]
            lse: buffer(Float32, 4 * config.row_pitch * config.q_stages, 128)
            delta: buffer(Float32, 4 * config.row_pitch * config.q_stages, 128)
            mask: buffer(Int32, 512 * config.q_stages, 128)
            q: buffer(self.dtype, cute.cosize(layouts["q"]))
            k: buffer(self.dtype, cute.cosize(layouts["k"]))
            v: buffer(self.dtype, cute.cosize(layouts["k"]))
            dout: buffer(self.dtype, cute.cosize(layouts["dout"]))
            ds: buffer(self.dtype, cute.cosize(layouts["ds"]))
            dq: buffer(Float32, cute.cosize(layouts["dq"]))

        return Storage

    # Device ----------------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        atom_q: cute.CopyAtom,
        atom_k: cute.CopyAtom,
        atom_v: cute.CopyAtom,
        atom_dout: cute.CopyAtom,
        atom_dq: cute.CopyAtom,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lists: Lists,
        scale: Float32,
        section: Int32,
    ):
        """Set up shared memory and barriers, then take a role."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        atoms = Atoms(atom_q, atom_k, atom_v, atom_dout, atom_dq)
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

        layouts = self._layouts()
        storage = cutlass.utils.SmemAllocator().allocate(self._storage(layouts))
        math_warps = CooperativeGroup(Agent.Thread, self.math_threads // 32)
        kv_empty = storage.kv_barrier.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(kv_empty, self.math_threads // 32)
        pipe_q = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.q_barriers.data_ptr(),
            num_stages=config.q_stages,
            producer_group=CooperativeGroup(Agent.Thread, 2),  # load warp and row warp
            consumer_group=math_warps,
            tx_count=self.query_bytes,
            defer_sync=True,
        )
        pipe_dout = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.do_barriers.data_ptr(),
            num_stages=config.do_stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=math_warps,
            tx_count=self.query_bytes,
            defer_sync=False,
        )
        pipes = Pipes(pipe_q, pipe_dout, kv_empty)

        swizzled = {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in [*layouts.items(), ("v", layouts["k"])]
        }
        vector = cute.make_layout(
            (4, config.columns // 4, 4, config.q_stages), stride=(1, 4, config.row_pitch, 4 * config.row_pitch)
        )
        shared = Shared(
            **swizzled,
            dq_flat=storage.dq.get_tensor(cute.make_layout(64 * self.config.dq_columns * config.groups)),
            lse=storage.lse.get_tensor(vector),
            delta=storage.delta.get_tensor(vector),
            mask=storage.mask.get_tensor(cute.make_layout((512, config.q_stages))),
            slot=storage.slot.get_tensor(cute.make_layout(config.q_stages)),
        )

        if warp < 4:
            cute.arch.setmaxregister_decrease(config.load_registers)
            walk = partial(self._walk, operands, lists, section)
            if warp == 0:
                walk(partial(self.load, operands, atoms, shared, pipes, lists))
            if warp == 1:
                walk(partial(self.reduce_dq, operands, atoms, shared))
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            if warp == 2:
                walk(partial(self.load_rows, lse, delta, shared, pipes))
        else:
            cute.arch.setmaxregister_increase(config.math_registers)
            self.math(operands, shared, pipes, dk, dv, lists, scale, section)

    # The walk: every role sees the same tiles in the same order ------------------------------------------------------

    @cute.jit
    def _unit(self, turn: Int32) -> Int32:
        """The unit of this thread block's ``turn``: longest first, back and forth over the thread blocks."""
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        place = block if turn % 2 == 0 else grid - 1 - block
        return turn * grid + place

    @cute.jit
    def _item(self, unit: Int32, lists: Lists, section: Int32) -> Item:
        """A unit's entry. Units of ``section`` key/value heads come together, so that their Q and dO stay in L2."""
        per_section = lists.items.shape[0] * section
        which = unit // per_section
        rest = unit - which * per_section
        index = rest // section
        kv_head = which * section + rest - index * section
        return Item(kv_head, *(lists.items[index, field] for field in range(7)))

    @cute.jit
    def _walk(self, operands: Operands, lists: Lists, section: Int32, visit: Any) -> None:
        """Call ``visit(tile, masked=...)`` for every tile of this thread block, ``masked`` for partial ones."""
        halves = const_expr(self.config.halves)
        group = operands.q.shape[2] // operands.k.shape[2]
        units = lists.items.shape[0] * operands.k.shape[2]
        turn, number = Int32(0), Int32(0)
        unit = self._unit(turn)
        while unit < units:
            item = self._item(unit, lists, section)
            start = number
            for member in cutlass.range(group, unroll=1):
                head = item.kv_head * group + member
                for index in cutlass.range(item.parts * halves, unroll=1):
                    part, skip = item.part + index // halves, index % halves * self.tile_m
                    block, slot = lists.parts[part, 0], lists.parts[part, 1]
                    row, rows = lists.inner[block, 0] + skip, lists.inner[block, 1] - skip
                    visit(Tile(item, turn, number, number == start, head, row, rows, slot), masked=True)
                    number += 1
                for run in cutlass.range(item.runs, unroll=1):
                    first, blocks = lists.runs[item.run + run, 0], lists.runs[item.run + run, 1]
                    for index in cutlass.range(blocks * halves, unroll=1):
                        row = lists.inner[first + index // halves, 0] + index % halves * self.tile_m
                        whole = Tile(item, turn, number, number == start, head, row, Int32(self.tile_m), Int32(0))
                        visit(whole, masked=False)
                        number += 1
            turn += 1
            unit = self._unit(turn)

    @staticmethod
    def _stage(tile: Int32, stages: int) -> tuple[Int32, Int32]:
        """Stage of a tile and the phase of its full barrier; its empty barrier has the other one."""
        count = Uint32(tile)
        return Int32(count % stages), Int32(count // stages & 1)

    # Load warp -------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        operands: Operands,
        atoms: Atoms,
        shared: Shared,
        pipes: Pipes,
        lists: Lists,
        tile: Tile,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """Fill a tile's stages, once they are free. A unit's first tile brings K and V, once those are free."""
        config, item = self.config, tile.item
        stage, phase = self._stage(tile.number, config.q_stages)
        extra = Int32(self.key_bytes) if tile.starts else Int32(0)
        words = Int32(0)
        if const_expr(masked):
            words = Int32(4 * 128) if tile.slot >= 0 else Int32(4 * 512)
        pipes.q.sync_object_empty.wait(stage, phase ^ 1)
        barrier = pipes.q.sync_object_full.get_barrier(stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.query_bytes + extra + words)
        self._tma_load(atoms.q, operands.q, tile.head, tile.row, shared.q[None, None, stage], barrier)
        if const_expr(masked):
            target = shared.mask[None, stage].iterator
            with cute.arch.elect_one():
                if tile.slot >= 0:
                    cpasync_bulk_g2s(lists.ranges[tile.slot, None].iterator, target, barrier, 4 * 128)
                else:
                    cpasync_bulk_g2s(lists.bits[~tile.slot, None, None].iterator, target, barrier, 4 * 512)
        if tile.starts:
            cute.arch.mbarrier_wait(pipes.kv_empty, tile.turn + 1 & 1)
            self._tma_load(atoms.k, operands.k, item.kv_head, item.key_row, shared.k, barrier)

        stage, phase = self._stage(tile.number, config.do_stages)
        pipes.dout.sync_object_empty.wait(stage, phase ^ 1)
        barrier = pipes.dout.sync_object_full.get_barrier(stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.query_bytes + extra)
        if tile.starts:
            self._tma_load(atoms.v, operands.v, item.kv_head, item.key_row, shared.v, barrier)
        self._tma_load(atoms.dout, operands.dout, tile.head, tile.row, shared.dout[None, None, stage], barrier)

    @cute.jit
    def _tma_load(
        self, atom: cute.CopyAtom, source: cute.Tensor, head: Int32, row: Int32, target: cute.Tensor, barrier: Any
    ) -> None:
        """Rows of one head from ``row`` on, into shared memory; rows behind the last one arrive as 0."""
        rows = cute.domain_offset((row, 0), source[None, None, head])
        rows = cute.local_tile(rows, (cute.size(target, mode=[0]), self.head_dim), (0, 0))
        copy, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), rows, target, single_stage=True)
        copy(tma_bar_ptr=barrier)

    # Row warp --------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_rows(
        self,
        lse: cute.Tensor,
        delta: cute.Tensor,
        shared: Shared,
        pipes: Pipes,
        tile: Tile,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """A tile's log-sum-exp, in powers of 2, and delta, in the order that math threads read them.

        Rows that saw no key, and rows behind the end of their block, get +inf: exp2(s - inf) is exactly 0.
        """
        lane = cute.arch.lane_idx()
        stage, phase = self._stage(tile.number, self.config.q_stages)
        pipes.q.sync_object_empty.wait(stage, phase ^ 1)
        for part in cutlass.range(self.tile_m // 32, unroll=2):
            place = lane + 32 * part
            row_lse, row_delta = -Float32.inf, Float32(0.0)
            if place < tile.rows:
                row_lse, row_delta = lse[tile.head, tile.row + place], delta[tile.head, tile.row + place]
            # Column 8j + 2t + c is number 2j + c of lane class t.
            number = (lane // 8 + 4 * part) * 2 + lane % 2
            where = (number % 4, number // 4, lane % 8 // 2, stage)
            shared.lse[where] = row_lse * LOG2_E if row_lse > -Float32.inf else Float32.inf
            shared.delta[where] = row_delta
        if const_expr(masked):
            shared.slot[stage] = tile.slot
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.q.sync_object_full.get_barrier(stage))

    # dQ warp ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def reduce_dq(
        self, operands: Operands, atoms: Atoms, shared: Shared, tile: Tile, masked: cutlass.Constexpr[bool]
    ) -> None:
        """Hand each group its stage back, then reduce what it has stored. Rows behind the last one are left out."""
        del masked
        groups, threads, columns = self.config.groups, GROUP + 32, self.config.dq_columns
        for group in cutlass.range_constexpr(groups):
            cute.arch.cp_async_bulk_wait_group(groups - 1 - group, read=True)
            cute.arch.barrier_arrive(barrier_id=BARRIER_DQ_EMPTY + group, number_of_threads=threads)
        for group in cutlass.range_constexpr(groups):
            cute.arch.barrier(barrier_id=BARRIER_DQ_FULL + group, number_of_threads=threads)
            down, right = (64 * group, 0) if const_expr(self.tile_m == 128) else (0, group)
            target = cute.domain_offset((tile.row + down, 0), operands.dq[None, None, tile.head])
            target = cute.local_tile(target, (64, columns), (0, right))
            copy, _, _ = copy_utils.tma_get_copy_fn(
                atoms.dq, 0, cute.make_layout(1), shared.dq[None, None, group], target, single_stage=True
            )
            copy()
            cute.arch.cp_async_bulk_commit_group()

    # Math groups -----------------------------------------------------------------------------------------------------

    @cute.jit
    def math(
        self,
        operands: Operands,
        shared: Shared,
        pipes: Pipes,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lists: Lists,
        scale: Float32,
        section: Int32,
    ) -> None:
        """All matrix products, and the epilogue of dK and dV.

        A unit is a softmax step, then (gradient step, softmax step) for every tile but the last, then a gradient step.
        A gradient step issues the next tile's S and dP behind its own products, so that the tensor cores have work
        while dQ moves to shared memory and while the softmax step runs. Between two rounds of the loop nothing is in
        flight, and P' and dP' of a tile are in registers: if an accumulator crossed over, ptxas would serialise.
        """
        config = self.config
        products = self._products(shared)
        softmax = partial(self.softmax_step, shared, scale)
        gradient = partial(self.gradient_step, shared, pipes, products, scale)
        issue_s, issue_dp, acc_dk, acc_dv = products.s, products.dp, products.acc_dk, products.acc_dv
        pipe_q, pipe_dout, kv_empty = pipes.q, pipes.dout, pipes.kv_empty

        units = lists.items.shape[0] * operands.k.shape[2]
        turn, tile = Int32(0), Int32(0)
        unit = self._unit(turn)
        while unit < units:
            item = self._item(unit, lists, section)
            masked = item.parts * config.halves
            each = masked + item.full * config.halves
            index, first = Int32(0), tile
            stage, phase = self._stage(tile, config.q_stages)
            pipe_q.consumer_wait_w_index_phase(stage, phase)
            acc_s = issue_s(B_idx=stage)
            stage, phase = self._stage(tile, config.do_stages)
            pipe_dout.consumer_wait_w_index_phase(stage, phase)
            acc_dp = issue_dp(B_idx=stage)
            p = cute.make_rmem_tensor(acc_s.shape, Float32)
            dp = cute.make_rmem_tensor(acc_dp.shape, Float32)
            softmax(acc_s, p, tile, index, masked)
            dp.store(acc_dp.load())
            for _ in cutlass.range(each * (operands.q.shape[2] // operands.k.shape[2]) - 1, unroll=1):
                next_s, next_dp = gradient(p, dp, tile, tile == first, ends=False)
                tile += 1
                index = index + 1 if index + 1 < each else Int32(0)
                softmax(next_s, p, tile, index, masked)
                dp.store(next_dp.load())
            gradient(p, dp, tile, tile == first, ends=True)
            tile += 1
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(kv_empty)
            self._add(acc_dv, dv, unit, lists, section, Float32(1.0))
            self._add(acc_dk, dk, unit, lists, section, scale)
            turn += 1
            unit = self._unit(turn)

    def _products(self, shared: Shared) -> Products:
        """Partition the operands for this math group."""
        thread = cute.arch.thread_idx()[0] - GROUP
        mma_s, mma_dkv, mma_dq = self._tiled_mmas()
        group = cute.make_layout(self.config.groups, stride=GROUP)(cute.arch.make_warp_uniform(thread // GROUP))
        wg_s, wg_dkv, wg_dq = (mma.get_slice(group) for mma in (mma_s, mma_dkv, mma_dq))
        m, n, d = self.tile_m, self.tile_n, self.head_dim
        turned = {name: layout_utils.transpose_view(getattr(shared, name)) for name in ("q", "k", "dout", "ds")}
        split, fresh, add = sm90_utils.partition_fragment_ABC, sm90_utils.gemm_zero_init, sm90_utils.gemm_w_idx
        _, s_a, s_b = split(wg_s, (n, m, d), shared.k, shared.q)
        _, dp_a, dp_b = split(wg_s, (n, m, d), shared.v, shared.dout)
        _, dq_a, dq_b = split(wg_dq, (m, d, n), shared.ds, turned["k"])
        acc_dv, _, dv_b = split(wg_dkv, (n, d, m), None, turned["dout"])
        acc_dk, _, dk_b = split(wg_dkv, (n, d, m), None, turned["q"])
        store_ds, _, _ = copy_utils.get_smem_store_C(
            mma_s, turned["ds"], thread, transpose=True, position_independent=True, major_mode_size=64
        )
        return Products(
            acc_dk,
            acc_dv,
            s=partial(fresh, mma_s, (n, m), s_a, s_b),
            dp=partial(fresh, mma_s, (n, m), dp_a, dp_b),
            dq=partial(fresh, mma_dq, (m, d), dq_a, dq_b),
            dk=partial(add, mma_dkv, acc_dk, tCrB=dk_b),
            dv=partial(add, mma_dkv, acc_dv, tCrB=dv_b),
            store_ds=store_ds,
        )

    @cute.jit
    def softmax_step(
        self,
        shared: Shared,
        scale: Float32,
        acc_s: cute.Tensor,
        p: cute.Tensor,
        tile: Int32,
        index: Int32,
        masked: Int32,
    ) -> None:
        """P' of a tile from S', when S and dP are in flight, last of all; returns when both are there.

        ``index`` counts a head's tiles, the first ``masked`` of which have predicates.
        """
        thread = _math_thread()
        stage, _ = self._stage(tile, self.config.q_stages)
        warpgroup.wait_group(1)  # S is done
        s_mn, p_mn = layout_utils.reshape_acc_to_mn(acc_s), layout_utils.reshape_acc_to_mn(p)
        if index < masked:
            self._apply(s_mn, self._predicate(shared, stage, index % self.config.halves, thread))
        scale_log2 = scale * LOG2_E
        for quad in cutlass.range_constexpr(self.config.columns // 4):
            lse = copy_utils.load_s2r(shared.lse[None, quad, thread % 4, stage])
            for c in cutlass.range_constexpr(4):
                for r in cutlass.range_constexpr(2):
                    score = s_mn[r, 4 * quad + c] * scale_log2 - lse[c]
                    p_mn[r, 4 * quad + c] = cute.math.exp2(score, fastmath=True)
        warpgroup.wait_group(0)  # dP is done

    @cute.jit
    def gradient_step(
        self,
        shared: Shared,
        pipes: Pipes,
        products: Products,
        scale: Float32,
        p: cute.Tensor,
        dp: cute.Tensor,
        tile: Int32,
        starts: Boolean,
        ends: cutlass.Constexpr[bool],
    ) -> tuple[cute.Tensor | None, cute.Tensor | None]:
        """dV, dQ and dK of a tile from P' and dP'; unless it ``ends`` its unit, leaves the next tile's S, dP in flight.

        dP' is overwritten. The unit's first tile ``starts`` the sums of dK and dV.
        """
        config, thread = self.config, _math_thread()
        group = cute.arch.make_warp_uniform(thread // GROUP)
        q_stage, _ = self._stage(tile, config.q_stages)
        do_stage, _ = self._stage(tile, config.do_stages)
        ds_stage = tile % config.ds_stages
        p_rounded = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(p), self.dtype)
        products.dv(tCrA=p_rounded, B_idx=do_stage, zero_init=starts)
        p_mn, dp_mn = layout_utils.reshape_acc_to_mn(p), layout_utils.reshape_acc_to_mn(dp)
        for quad in cutlass.range_constexpr(config.columns // 4):
            delta = copy_utils.load_s2r(shared.delta[None, quad, thread % 4, q_stage])
            for c in cutlass.range_constexpr(4):
                for r in cutlass.range_constexpr(2):
                    dp_mn[r, 4 * quad + c] = p_mn[r, 4 * quad + c] * (dp_mn[r, 4 * quad + c] - delta[c])
        ds_rounded = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(dp), self.dtype)
        products.store_ds(ds_rounded, dst_idx=ds_stage)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_DS, number_of_threads=self.math_threads)

        acc_dq = products.dq(A_idx=ds_stage)
        products.dk(tCrA=ds_rounded, B_idx=q_stage, zero_init=starts)
        warpgroup.wait_group(2)  # dV is done, and P' leaves its registers to S
        pipes.dout.consumer_release_w_index(do_stage)
        acc_s, acc_dp = None, None
        if const_expr(not ends):
            next_stage, next_phase = self._stage(tile + 1, config.q_stages)
            pipes.q.consumer_wait_w_index_phase(next_stage, next_phase)
            acc_s = products.s(B_idx=next_stage)
        warpgroup.wait_group(1 if const_expr(ends) else 2)  # dQ is done
        threads = const_expr(GROUP + 32)
        cute.arch.barrier(barrier_id=BARRIER_DQ_EMPTY + group, number_of_threads=threads)
        self._store_dq(acc_dq, shared, scale)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=BARRIER_DQ_FULL + group, number_of_threads=threads)
        warpgroup.wait_group(0 if const_expr(ends) else 1)  # dK is done, and dS' leaves its registers to dP
        pipes.q.consumer_release_w_index(q_stage)
        if const_expr(not ends):
            next_stage, next_phase = self._stage(tile + 1, config.do_stages)
            pipes.dout.consumer_wait_w_index_phase(next_stage, next_phase)
            acc_dp = products.dp(B_idx=next_stage)
        return acc_s, acc_dp

    @cute.jit
    def _predicate(self, shared: Shared, stage: Int32, half: Int32, thread: Int32) -> cute.Tensor:
        """Which of this thread's pairs are computed, as bits: first its columns in its upper key row, then the lower.

        In 32-bit words: one for a tile of 64 query rows, two for 128.
        """
        row = thread // 32 * 16 + thread % 32 // 4
        shift = thread % 4 * 2
        keep = cute.make_rmem_tensor(2, Uint32)
        if shared.slot[stage] >= 0:
            for r in cutlass.range_constexpr(2):
                keep[r] = self._range_bits(shared.mask[row + 8 * r, stage], half, shift)
        else:
            for r in cutlass.range_constexpr(2):
                keep[r] = self._packed_bits(shared.mask, (row + 8 * r) * 4, stage, half, shift)
        return keep

    @cute.jit
    def _range_bits(self, word: Int32, half: Int32, shift: Int32) -> Uint32:
        """Bits of the columns 8j + shift + {0, 1} that lie in a range word's two ranges."""
        below = cute.make_rmem_tensor(4, Uint32)
        for k in cutlass.range_constexpr(4):
            limit = Int32(Uint32(word) >> (8 * k) & 255)
            if const_expr(self.config.halves > 1):
                limit = cutlass.min(cutlass.max(limit - half * self.tile_m, 0), self.tile_m)
            count = limit // 8 * 2 + cutlass.min(cutlass.max(limit % 8 - shift, 0), 2)
            below[k] = utils.shl_u32(Uint32(0xFFFFFFFF), Uint32(count))  # the bits that are not below
        return below[0] & ~below[1] | below[2] & ~below[3]

    @cute.jit
    def _packed_bits(self, mask: cute.Tensor, word: Int32, stage: Int32, half: Int32, shift: Int32) -> Uint32:
        """The same, of a row of bits that begins at ``word``."""
        packed = Uint32(0)
        words = const_expr(self.tile_m // 32)
        for k in cutlass.range_constexpr(words):
            pairs = Uint32(mask[word + half * words + k, stage]) >> Uint32(shift) & 0x03030303
            # Four pairs of bits, 8 apart, move next to each other in the highest byte; no two terms overlap.
            packed |= (pairs * Uint32(0x01041040) >> 24) << (8 * k)
        return packed

    @cute.jit
    def _apply(self, scores: cute.Tensor, keep: cute.Tensor) -> None:
        """Set the scores that are left out to -inf. Constant bit tests become one predicate move per seven bits."""
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.config.columns):
                kept = Boolean(keep[r] & Uint32(1 << c))
                scores[r, c] = scores[r, c] if kept else -Float32.inf

    @cute.jit
    def _store_dq(self, acc: cute.Tensor, shared: Shared, scale: Float32) -> None:
        """This group's part of scale · dQ, to shared memory as TMA expects it with a 128-byte swizzle.

        Lane 4g + t holds columns 8j + 2t + {0, 1} of rows g and g + 8 of its warp's 16. A pair's 16-byte chunk is
        (2j + t // 2) ^ g, so lanes whose t // 2 differ meet in the same banks: they store a pair in opposite order.
        """
        thread = _math_thread()
        lane = thread % 32
        group, warp, row, t = thread // GROUP, thread % GROUP // 32, lane // 4, lane % 4
        base = group * 64 * self.config.dq_columns + (warp * 16 + row) * 32 + t % 2 * 2
        swap = t // 2
        for k in cutlass.range_constexpr(4):
            place = base + ((2 * k) ^ (swap ^ row)) * 4
            first, second = place + swap, place + 1 - swap
            for box in cutlass.range_constexpr(self.config.dq_columns // 32):
                for r in cutlass.range_constexpr(2):
                    index = const_expr(2 * r + 4 * (4 * box + k))
                    offset = const_expr(box * 64 * 32 + r * 8 * 32)
                    x, y = acc[index] * scale, acc[index + 1] * scale
                    shared.dq_flat[first + offset] = y if swap == 1 else x
                    shared.dq_flat[second + offset] = x if swap == 1 else y

    @cute.jit
    def _add(
        self, acc: cute.Tensor, target: cute.Tensor, unit: Int32, lists: Lists, section: Int32, factor: Float32
    ) -> None:
        """Add this thread's part of dK or dV to its two key rows, as far as they belong to the block.

        Every row has one writer; the reduction only saves the round trip of reading the old sum.
        """
        thread = _math_thread()
        lane, item = thread % 32, self._item(unit, lists, section)
        for r in cutlass.range_constexpr(2):
            row = thread // 32 * 16 + lane // 4 + 8 * r
            if row < item.key_rows:
                offset = Int64(item.kv_head) * target.stride[0] + Int64(item.key_row + row) * target.stride[1]
                pointer = target.iterator + offset + lane % 4 * 2
                for j in cutlass.range_constexpr(self.head_dim // 8):
                    index = const_expr(4 * j + 2 * r)
                    _reduce_pair(pointer + 8 * j, acc[index] * factor, acc[index + 1] * factor)


@dsl_user_op
def _math_thread(*, loc: Any = None, ip: Any = None) -> Int32:
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


@dsl_user_op
def _reduce_pair(pointer: cute.Pointer, x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Add two neighbouring floats in global memory."""
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
    )


class DeltaSm90:
    """Σ out · dout over the head dimension, [heads, rows]; the inputs [rows, heads, head_dim] may be strided."""

    threads, rows_each, vector = 256, 4, 8

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int):
        self.dtype, self.head_dim = dtype, head_dim
        self.lanes = head_dim // self.vector
        """Lanes that share a row."""
        self.tile = self.threads // self.lanes * self.rows_each

    @cute.jit
    def __call__(self, mO: cute.Tensor, mdO: cute.Tensor, mDelta: cute.Tensor, stream: cuda.CUstream):
        """Launch one thread block for every `tile` rows of a head."""
        rows, heads = mO.shape[0], mO.shape[1]
        self.kernel(mO, mdO, mDelta).launch(
            grid=[cute.ceil_div(rows, self.tile), heads, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mO: cute.Tensor, mdO: cute.Tensor, mDelta: cute.Tensor):
        """Each lane multiplies 16 bytes of every row that it shares; shuffles add up the lanes."""
        thread = cute.arch.thread_idx()[0]
        block, head, _ = cute.arch.block_idx()
        lane = thread % self.lanes
        first = block * self.tile + thread // self.lanes
        stride = const_expr(self.threads // self.lanes)
        loaded = []
        for k in cutlass.range_constexpr(self.rows_each):
            row = cutlass.min(first + k * stride, mO.shape[0] - 1)
            loaded.append([self._piece(t, row, head, lane) for t in (mO, mdO)])
        for k in cutlass.range_constexpr(self.rows_each):
            out, dout = (piece.load().to(Float32) for piece in loaded[k])
            total = (out * dout).reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)
            row = first + k * stride
            if lane == 0 and row < mO.shape[0]:
                mDelta[head, row] = total

    def _piece(self, tensor: cute.Tensor, row: Int32, head: Int32, lane: Int32) -> cute.Tensor:
        offset = Int64(row) * tensor.stride[0] + Int64(head) * tensor.stride[1] + Int64(lane * self.vector)
        pointer = cute.make_ptr(
            self.dtype, (tensor.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16
        )
        piece = cute.make_rmem_tensor(self.vector, self.dtype)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(self.vector)), piece)
        return piece


# Compilation and launch ----------------------------------------------------------------------------------------------

_DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16}


def _fake(dtype: type[cutlass.Numeric], *shape: Any, aligned: bool = True) -> cute.Tensor:
    """A tensor of unknown sizes and outer strides for compilation, aligned to 16 bytes with all its rows or not."""
    return make_fake_tensor(dtype, shape, divisibility=128 // dtype.width if aligned else 1)


@lru_cache
def compile_backward(dtype: torch.dtype, head_dim: int, config: BackwardConfig | None = None) -> Any:
    """The backward kernel for every size, stride, scale and mask. Needs no GPU; compiled once per process."""
    kernel, kind = BackwardSm90(_DTYPES[dtype], config or CONFIGS[head_dim]), _DTYPES[dtype]
    sym = cute.sym_int
    queries, keys, heads, kv_heads, slots = sym(), sym(), sym(), sym(), sym()
    query, key = (queries, heads, head_dim), (keys, kv_heads, head_dim)
    lists = Lists(
        items=_fake(Int32, sym(), 8),
        parts=_fake(Int32, sym(), 2, aligned=False),
        runs=_fake(Int32, sym(), 2, aligned=False),
        inner=_fake(Int32, sym(), 2, aligned=False),
        ranges=_fake(Int32, slots, 128),
        bits=_fake(Int32, sym(), 128, 4),
    )
    return cute.compile(
        kernel,
        *(_fake(kind, *shape) for shape in (query, key, key, query)),
        *(_fake(Float32, heads, queries, aligned=False) for _ in range(2)),
        _fake(Float32, heads, queries, head_dim),
        *(_fake(Float32, kv_heads, keys, head_dim) for _ in range(2)),
        lists,
        Float32(1.0),
        Int32(1),
        Int32(1),
        make_fake_stream(),
        options="--enable-tvm-ffi",
    )


@lru_cache
def compile_delta(dtype: torch.dtype, head_dim: int) -> Any:
    """The delta kernel for every size and stride. Needs no GPU; compiled once per process."""
    kind, (rows, heads) = _DTYPES[dtype], (cute.sym_int(), cute.sym_int())
    return cute.compile(
        DeltaSm90(kind, head_dim),
        *(_fake(kind, rows, heads, head_dim) for _ in range(2)),
        _fake(Float32, heads, rows, aligned=False),
        make_fake_stream(),
        options="--enable-tvm-ffi",
    )


L2_SHARE = 24 << 20
"""Bytes of Q and dO that concurrent units should share in L2."""


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _section(queries: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Key/value heads to run at a time: the largest divisor of their number whose Q and dO fit their share of L2."""
    each = 2 * 2 * head_dim * queries * (heads // kv_heads)
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and (n == 1 or n * each <= L2_SHARE))


def run_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Σ out · dout over the head dimension in float32, [heads, query rows]; see `Backend.delta`."""
    rows, heads, head_dim = out.shape
    delta = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    if delta.numel():
        compile_delta(out.dtype, head_dim)(out, dout, delta)
    return delta


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    work: WorkList,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    """Add the gradients of the listed tiles (by key block) to dq, dk and dv; see `Backend.backward`."""
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    units = work.items.shape[0] * kv_heads
    if units == 0:
        return
    lists = Lists(work.items, work.parts, work.runs, work.inner, work.ranges, work.bits)
    section = _section(queries, heads, kv_heads, head_dim)
    grid = min(units, _processors(q.device))
    compile_backward(q.dtype, head_dim)(q, k, v, dout, lse, delta, dq, dk, dv, lists, scale, section, grid)
