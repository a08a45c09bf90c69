"""The attention backward pass on Hopper for head dimension 256, where one warpgroup cannot hold dK and dV of its keys.

A unit is half a key block, 64 keys, whose dK and dV take half of all registers: each of two math groups holds 128
columns of both. Tiles are 64 × 64. For S' and dP' the math groups divide the queries; they exchange P' and dS' through
shared memory, which a third group reads as well: it multiplies dQ and adds it to global memory from its registers.

    load, row, mask warps   as in `marble.kernels.cute.backward_sm90`; two mask warps, 32 keys each
    math groups             32 queries each: S' = K Q', dP' = V dO'; 128 columns each: dV += P' dO, dK += dS' Q
    dQ group                128 columns after the other 128: dQ += dS K

The math groups run one tile ahead of themselves: behind dK of a tile they issue S' and dP' of the next and dV of this
one, and while those run they compute P' and dS' of the next. The dQ group follows at its own pace.

In shared memory, beside the barriers of `marble.kernels.cute.backward_sm90` (who arrives; who waits; what is then
safe):
    unit full, empty        the dQ group's four warps follow too.
    Q empty                 one lane of each math warp, after the tile's dK product.
    dO empty                one lane of each math warp, after the tile's dV product.
    K empty                 one lane of each math warp, after a unit's last S product, and of each dQ warp, after its
                            last dQ product; load warp. K may be overwritten.
    dS full                 one lane of each math warp, after its stores and a proxy fence; math groups and dQ group. A
                            tile's P' and dS' may be multiplied.
    dS empty                one lane of each dQ warp, after the tile's dQ product; math groups. The stage of dS' may be
                            overwritten, as far as the dQ group goes.

Nothing else says when P' and dS' may be overwritten: P' has as many stages as dO and dS' as many as Q. A group writes
them behind its products S' and dP', for which Q and dO had arrived in the stages of these numbers: so all math warps
had handed these back, behind their products dK and dV with what is now overwritten.
"""

from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from flash_attn.cute import utils
from quack import copy_utils, layout_utils, sm90_utils

from marble.kernels.cute import serving
from marble.kernels.cute.backward_config import (
    GROUP,
    TILE_SLOTS,
    Atoms,
    Field,
    Gradients,
    Operands,
    Pipes,
    Products,
    Schedule,
    Shared,
    Tile,
    WideConfig,
    shared_layouts,
    shared_storage,
    shared_tensors,
)
from marble.kernels.cute.backward_sm90 import BARRIER_KEYS, LOG2_E, BackwardSm90
from marble.kernels.cute.binding import Lists, fitting
from marble.kernels.cute.intrinsics import load_counter, math_thread
from marble.kernels.cute.ordering import complete
from marble.kernels.cute.worklist import FULL_TILE

BARRIER_DQ_TURN = 8
"""The hardware barrier of the dQ group, if sums have an order: when it is a tile's turn, and when the tile is added."""


class BackwardWideSm90(BackwardSm90):
    """The backward kernel of one input type for a head dimension whose columns two groups divide."""

    def __init__(self, dtype: type[cutlass.Numeric], config: WideConfig):
        super().__init__(dtype, config)
        self.mask_warps, self.dq_warps = 2, GROUP // 32
        self.part = self.head_dim // config.groups
        """Columns of dK, dV and dQ that a group holds at a time."""

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
        gradients: Gradients,
        lists: Lists,
        whole: Int32,
        few: Int32,
        counter: cute.Tensor,
        scale: Float32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        """Launch on ``grid`` thread blocks, no more than there are units (see `Schedule`)."""
        made = self._loaded(mQ, mK, mV, mdO, shared_layouts(self.config, self.dtype))
        self.kernel(
            Operands(*(tensor for _, tensor in made)),
            *(atom for atom, _ in made),
            mLSE,
            mDelta,
            gradients,
            lists,
            Schedule(whole, few, counter),
            scale,
        ).launch(grid=[grid, 1, 1], block=[self.config.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    def _tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """S' and dP' (keys are rows, groups divide the queries); dK and dV (groups divide the columns); a part of dQ.

        All operands are in shared memory. P' and dS' lie there query by query: keys are rows of dK, so they are turned.
        """
        rows, columns = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        make = partial(hopper.make_trivial_tiled_mma, self.dtype, self.dtype)
        right = (1, self.config.groups, 1)
        s = make(rows, rows, Float32, right, (64, self.tile_m // self.config.groups))
        dkv = make(columns, columns, Float32, right, (64, self.part))
        dq = make(rows, columns, Float32, (1, 1, 1), (64, self.part))
        return s, dkv, dq

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
        gradients: Gradients,
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
        atoms = Atoms(atom_q, atom_k, atom_v, atom_dout)
        layouts = shared_layouts(config, self.dtype)
        storage = cutlass.utils.SmemAllocator().allocate(fitting(shared_storage(config, self.dtype, layouts)))
        pipes = self._barriers(storage, warp)
        shared = shared_tensors(config, storage, layouts)
        if warp < 4:
            cute.arch.setmaxregister_decrease(config.load_registers)
            follow = partial(self._follow, lists, shared, pipes)
            if warp == 0:
                visit = partial(self.load, operands, atoms, shared, pipes)
                self._lead(operands, lists, schedule, shared, pipes, visit)
            if warp == 1:
                follow(partial(self.load_rows, lse, delta, self._early(scale), shared, pipes))
            if warp >= 2:
                follow(partial(self.write_half_mask, lists, shared, pipes, 32 * (warp - 2)))
        elif warp < 4 + self.math_threads // 32:
            cute.arch.setmaxregister_increase(config.math_registers)
            self.math(lists, shared, pipes, gradients.dk, gradients.dv, scale)
        else:
            cute.arch.setmaxregister_decrease(config.dq_registers)
            self.multiply_dq(lists, shared, pipes, gradients.dq, self._last(scale))

    # Mask warps ------------------------------------------------------------------------------------------------------

    @cute.jit
    def write_half_mask(self, lists: Lists, shared: Shared, pipes: Pipes, first: Int32, tile: Tile) -> None:
        """As `write_mask`, for 32 keys from the ``first``."""
        stage, phase = self._stage(tile.number, self.config.q_stages)
        pipes.q.sync_object_empty.wait(stage, phase ^ 1)
        shared.partial[stage] = Int32(tile.slot != FULL_TILE)
        if tile.slot != FULL_TILE:
            row = cute.arch.lane_idx() + first
            table_row = row + self._field(shared, tile.turn, Field.SKIPPED)
            self._write_row(lists, shared, tile, stage, row, table_row)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.q.sync_object_full.get_barrier(stage))

    # dQ group --------------------------------------------------------------------------------------------------------

    @cute.jit
    def _note(self, shared: Shared, tile: Tile) -> None:
        """Where dQ of a tile goes. By the row warp, when Q's stage is free.

        That overwrites the note of four tiles ago, which has been read: dK of two tiles ago is done, so its dS was
        stored, in a stage that dQ of four tiles ago had left.
        """
        if cute.arch.lane_idx() == 0:
            slot = tile.number % TILE_SLOTS
            shared.notes[0, slot], shared.notes[1, slot], shared.notes[2, slot] = tile.head, tile.row, tile.rows

    @cute.jit
    def multiply_dq(self, lists: Lists, shared: Shared, pipes: Pipes, dq: cute.Tensor, factor: Float32 | float) -> None:
        """dQ of all tiles, one part of its columns after the other, added as far as the rows belong to the block; in
        their order, if sums have one."""
        add_tile = partial(self._add_dq, shared, pipes, self._dq_products(shared), dq, factor)
        turn, tile = Int32(0), Int32(0)
        heads = self._await_unit(shared, pipes, turn)
        while heads > 0:
            tiles = self._field(shared, turn, Field.TILES) * heads
            if const_expr(self.config.deterministic):
                left = tiles  # one register less than a loop over them
                while left > 0:
                    self._await_dq_turn(lists, shared, turn, tile, left)  # before dS is there: the counter is far
                    add_tile(tile, left == 1)
                    self._end_dq_turn(lists, shared, tile)
                    tile += 1
                    left -= 1
            else:
                for done in cutlass.range(tiles, unroll=1):
                    add_tile(tile, done == tiles - 1)
                    tile += 1
            self._leave_unit(pipes, turn)
            turn += 1
            heads = self._await_unit(shared, pipes, turn)

    @cute.jit
    def _add_dq(
        self,
        shared: Shared,
        pipes: Pipes,
        products: list[Any],
        dq: cute.Tensor,
        factor: Float32 | float,
        tile: Int32,
        ends: Boolean,
    ) -> None:
        """dQ of a tile; behind the one that ends a unit, K is handed back."""
        stage, phase = self._stage(tile, self.config.ds_stages)
        cute.arch.mbarrier_wait(pipes.ds_full + stage, phase)
        note = [shared.notes[i, tile % TILE_SLOTS] for i in range(3)]
        for i in cutlass.range_constexpr(len(products)):
            acc = products[i](A_idx=stage, wg_wait=0)
            if const_expr(i + 1 == len(products)):
                self._hand_back(pipes.ds_empty + stage)  # the note has been read as well
                if ends:
                    self._hand_back(pipes.k_empty)
            self._add_quads(acc, dq, partial(tuple, (*note, self.part * i)), factor)

    @cute.jit
    def _await_dq_turn(self, lists: Lists, shared: Shared, turn: Int32, tile: Int32, left: Int32) -> None:
        """Wait for a tile's turn; nothing of that stays in registers. ``left``: the unit's tiles from this one on."""
        if serving.leads():
            tiles = self._field(shared, turn, Field.TILES)
            done = tiles * self._field(shared, turn, Field.HEADS) - left
            head, place = self._field(shared, turn, Field.HEAD) + done // tiles, done % tiles
            number, ticket = serving.tile_ticket(lists, head, self._field(shared, turn, Field.TICKET) + place)
            shared.notes[3, tile % TILE_SLOTS] = number
            counter = lists.order.served.iterator + number
            serving.await_turn(counter, ticket, load_counter(counter))
        cute.arch.barrier(barrier_id=BARRIER_DQ_TURN, number_of_threads=GROUP)

    @cute.jit
    def _end_dq_turn(self, lists: Lists, shared: Shared, tile: Int32) -> None:
        """All threads of the group have added dQ of a tile."""
        cute.arch.barrier(barrier_id=BARRIER_DQ_TURN, number_of_threads=GROUP)
        if serving.leads():
            serving.end_turn(lists.order.served.iterator + shared.notes[3, tile % TILE_SLOTS], 1)

    def _dq_products(self, shared: Shared) -> list[Any]:
        """Each of one part of the columns."""
        _, _, mma = self._tiled_mmas()
        m, n, part = self.tile_m, self.tile_n, self.part
        turned, products = layout_utils.transpose_view(shared.k), []
        for i in range(self.head_dim // part):
            columns = cute.local_tile(turned, (part, n), (i, 0))
            _, a, b = sm90_utils.partition_fragment_ABC(mma.get_slice(0), (m, part, n), shared.ds, columns)
            products.append(partial(sm90_utils.gemm_zero_init, mma, (m, part), a, b))
        return products

    # Math groups -----------------------------------------------------------------------------------------------------

    @cute.jit
    def math(
        self, lists: Lists, shared: Shared, pipes: Pipes, dk: cute.Tensor, dv: cute.Tensor, scale: Float32
    ) -> None:
        """P' and dS' of a unit's first tile; for every other one a step, which ends with its own; the last products.

        Between two rounds of the loop nothing is in flight, or ptxas would serialise.
        """
        products = self._products(shared)
        rows = cute.make_rmem_tensor(self.config.own_columns, Float32)
        weigh = partial(self.weigh, shared, pipes, products, scale, rows)
        look_ahead = partial(self.look_ahead, shared, pipes, rows)
        turn, tile = Int32(0), Int32(0)
        heads = self._await_unit(shared, pipes, turn)
        while heads > 0:
            tiles = self._field(shared, turn, Field.TILES) * heads
            bits = look_ahead(tile)
            self.first_step(pipes, products, weigh, bits, tile)
            if tiles > 1:
                bits = look_ahead(tile + 1)
            for done in cutlass.range(tiles - 1, unroll=1):
                self.step(pipes, products, weigh, bits, tile, done == 0)
                if done < tiles - 2:
                    bits = look_ahead(tile + 2)
                warpgroup.wait_group(0)  # dV is done
                pipes.dout.consumer_release_w_index(self._stage(tile, self.config.do_stages)[0])
                tile += 1
            self.last_step(pipes, products, tile, tiles == 1)
            tile += 1
            place = partial(self._keys, shared, turn, self.part * (math_thread() >> 7))
            if const_expr(self.config.deterministic):
                serving.await_key_turn(lists, shared, turn, BARRIER_KEYS)
            self._add_quads(products.acc_dv, dv, place, 1.0)
            self._add_quads(products.acc_dk, dk, place, self._last(scale))
            if const_expr(self.config.deterministic):
                serving.end_key_turn(lists, shared, turn, BARRIER_KEYS)
            self._leave_unit(pipes, turn)
            turn += 1
            heads = self._await_unit(shared, pipes, turn)

    def _products(self, shared: Shared) -> Products:
        """Partition the operands for this math group."""
        thread = cute.arch.thread_idx()[0] - GROUP
        mma_s, mma_dkv, _ = self._tiled_mmas()
        group = cute.make_layout(self.config.groups, stride=GROUP)(cute.arch.make_warp_uniform(thread // GROUP))
        wg_s, wg_dkv = (mma.get_slice(group) for mma in (mma_s, mma_dkv))
        m, n, d = self.tile_m, self.tile_n, self.head_dim
        turned = {name: layout_utils.transpose_view(getattr(shared, name)) for name in ("q", "dout", "ds")}
        split, fresh, add = sm90_utils.partition_fragment_ABC, sm90_utils.gemm_zero_init, sm90_utils.gemm_w_idx
        _, s_a, s_b = split(wg_s, (n, m, d), shared.k, shared.q)
        _, dp_a, dp_b = split(wg_s, (n, m, d), shared.v, shared.dout)
        acc_dv, ds_a, dv_b = split(wg_dkv, (n, d, m), turned["ds"], turned["dout"])
        acc_dk, _, dk_b = split(wg_dkv, (n, d, m), turned["ds"], turned["q"])
        store_ds, _, _ = copy_utils.get_smem_store_C(
            mma_s, turned["ds"], thread, transpose=True, position_independent=True, major_mode_size=64
        )
        return Products(
            acc_dk,
            acc_dv,
            s=partial(fresh, mma_s, (n, m), s_a, s_b),
            dp=partial(fresh, mma_s, (n, m), dp_a, dp_b),
            dq=None,
            dk=partial(add, mma_dkv, acc_dk, ds_a, dk_b),
            dv=partial(add, mma_dkv, acc_dv, ds_a, dv_b),
            store_ds=store_ds,
        )

    @cute.jit
    def look_ahead(self, shared: Shared, pipes: Pipes, rows: cute.Tensor, tile: Int32) -> Uint32:
        """Wait for a tile's Q; its log-sum-exp to ``rows``; and the bits of this thread's pairs."""
        stage, phase = self._stage(tile, self.config.q_stages)
        pipes.q.consumer_wait_w_index_phase(stage, phase)
        self._take(shared.lse, rows, stage)
        thread = math_thread()
        bits = Uint32(shared.mask[0, thread & (GROUP - 1), stage]) >> (thread >> 7) * self.config.own_columns
        return bits if shared.partial[stage] != 0 else Uint32(0xFFFFFFFF)

    @cute.jit
    def _take(self, table: cute.Tensor, rows: cute.Tensor, stage: Int32) -> None:
        """Log-sum-exp or delta of this thread's columns of a tile."""
        thread, quads = math_thread(), const_expr(self.config.own_columns // 4)
        for i in cutlass.range_constexpr(quads):
            four = copy_utils.load_s2r(table[None, (thread >> 7) * quads + i, thread & 3, stage])
            for c in cutlass.range_constexpr(4):
                rows[4 * i + c] = four[c]

    @cute.jit
    def first_step(self, pipes: Pipes, products: Products, weigh: Any, bits: Uint32, tile: Int32) -> None:
        """P' and dS' of a tile behind which nothing is in flight."""
        do_stage, do_phase = self._stage(tile, self.config.do_stages)
        pipes.dout.consumer_wait_w_index_phase(do_stage, do_phase)
        acc_s, acc_dp = products.s(B_idx=self._stage(tile, self.config.q_stages)[0]), products.dp(B_idx=do_stage)
        weigh(acc_s, acc_dp, bits, tile, behind=0)

    @cute.jit
    def step(self, pipes: Pipes, products: Products, weigh: Any, bits: Uint32, tile: Int32, starts: Boolean) -> None:
        """dK and dV of a tile from P' and dS', and P' and dS' of the next one. dV is left in flight.

        The next tile's Q has arrived. Its dO was asked for at the end of the last step, so it is waited for behind two
        products.
        """
        q_stage, ds_stage = (self._stage(tile, n)[0] for n in (self.config.q_stages, self.config.ds_stages))
        do_stage, _ = self._stage(tile, self.config.do_stages)
        products.dk(A_idx=ds_stage, B_idx=q_stage, zero_init=starts)
        acc_s = products.s(B_idx=self._stage(tile + 1, self.config.q_stages)[0])
        stage, phase = self._stage(tile + 1, self.config.do_stages)
        pipes.dout.consumer_wait_w_index_phase(stage, phase)
        acc_dp = products.dp(B_idx=stage)
        products.dv(A_idx=self._p_stage(tile), B_idx=do_stage, zero_init=starts)
        warpgroup.wait_group(3)  # dK is done
        pipes.q.consumer_release_w_index(q_stage)
        weigh(acc_s, acc_dp, bits, tile + 1, behind=1)

    @cute.jit
    def last_step(self, pipes: Pipes, products: Products, tile: Int32, starts: Boolean) -> None:
        """dK and dV of a unit's last tile. Its S' and dP' were these groups' last products that read K and V."""
        self._hand_back(pipes.v_empty)
        self._hand_back(pipes.k_empty)
        q_stage, ds_stage = (self._stage(tile, n)[0] for n in (self.config.q_stages, self.config.ds_stages))
        do_stage, _ = self._stage(tile, self.config.do_stages)
        products.dk(A_idx=ds_stage, B_idx=q_stage, zero_init=starts)
        products.dv(A_idx=self._p_stage(tile), B_idx=do_stage, zero_init=starts)
        warpgroup.wait_group(1)  # dK is done
        pipes.q.consumer_release_w_index(q_stage)
        warpgroup.wait_group(0)  # dV is done
        pipes.dout.consumer_release_w_index(do_stage)

    def _p_stage(self, tile: Int32) -> Int32:
        """Where P' of a tile is in `Shared.ds`: behind the stages of dS', and counted as those of dO."""
        return self.config.ds_stages + self._stage(tile, self.config.p_stages)[0]

    @cute.jit
    def weigh(
        self,
        shared: Shared,
        pipes: Pipes,
        products: Products,
        scale: Float32,
        rows: cute.Tensor,
        acc_s: cute.Tensor,
        acc_dp: cute.Tensor,
        bits: Uint32,
        tile: Int32,
        behind: cutlass.Constexpr[int],
    ) -> None:
        """P' and dS' of a tile, to shared memory, from S' and dP'. These are in flight, with ``behind`` more products
        behind them. Returns when the other group's part is there, too."""
        warpgroup.wait_group(behind + 1)  # S is done
        s_mn, dp_mn = layout_utils.reshape_acc_to_mn(acc_s), layout_utils.reshape_acc_to_mn(acc_dp)
        if bits != 0xFFFFFFFF:
            self._apply(s_mn, [bits])
        scale_log2 = scale * LOG2_E
        for c in cutlass.range_constexpr(self.config.own_columns):
            for r in cutlass.range_constexpr(2):
                s_mn[r, c] = cute.math.exp2(s_mn[r, c] * scale_log2 - rows[c], fastmath=True)
        words = cute.recast_tensor(acc_s, Int32)
        complete([words[i] for i in range(cute.size(words))])
        products.store_ds(utils.cvt_f16(acc_s, self.dtype), dst_idx=self._p_stage(tile))
        self._take(shared.delta, rows, self._stage(tile, self.config.q_stages)[0])
        stage, phase = self._stage(tile, self.config.ds_stages)
        cute.arch.mbarrier_wait(pipes.ds_empty + stage, phase ^ 1)
        warpgroup.wait_group(behind)  # dP is done
        for c in cutlass.range_constexpr(self.config.own_columns):
            for r in cutlass.range_constexpr(2):
                dp_mn[r, c] = s_mn[r, c] * (dp_mn[r, c] * self._early(scale) - rows[c])
        products.store_ds(utils.cvt_f16(acc_dp, self.dtype), dst_idx=stage)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self._hand_back(pipes.ds_full + stage)
        cute.arch.mbarrier_wait(pipes.ds_full + stage, phase)
