"""The attention backward pass on Hopper: gradients of listed tiles, added to float32 buffers.

One unit of work is a key block, a key/value head and some or all query heads that read it. Its thread block
walks these heads and every query tile that the key block lists, so dK and dV stay in registers. dQ leaves tile by tile
as a reduction in the memory system, because key blocks share query rows. Thread blocks are persistent: they fetch units
from a counter in device memory, in the order of the list, and load the next unit while the last one is being written.

    load warp      fetches units and tells the others; K, V, and per tile Q and dO, by TMA
    row warp       log-sum-exp and delta of the tile's query rows, rescaled, through registers
    mask warp      predicates of partial tiles, as bits in the order of the math threads
    dQ warp        reduces finished dQ tiles from shared into global memory; in their order, if sums have one
    math groups    two warpgroups, 64 key rows each: S' = K Q', dP' = V dO', dV += P' dO, dK += dS' Q, dQ = dS K

In shared memory, with phases (who arrives; who waits; what is then safe):
    unit full      load warp; the other eleven warps. A unit's entry is there.
    unit empty     each of the other warps, when it has read all that it needs of the unit; load warp. The entry may be
                   overwritten.
    Q full         load warp with its bytes, row warp, mask warp; math. Q, log-sum-exp, delta and predicate of a tile
                   are there; for a unit's first tile K too.
    Q empty        one lane of each math warp, after the tile's dK product; load, row and mask warp. All of that may be
                   overwritten.
    dO full        load warp with its bytes; math. dO is there; for a unit's first tile V too.
    dO empty       one lane of each math warp, after the tile's dV product; load warp. dO may be overwritten.
    V empty        one lane of each math warp, after a unit's last dP product; load warp. V may be overwritten.
    K empty        one lane of each math warp, after a unit's last dQ product; load warp. K may be overwritten.

In hardware, for a count of threads:
    all            every thread, once, after barriers are initialised; every thread. Barriers may be used.
    dS             both math groups, after their stores and a proxy fence; both. A tile's dS may be multiplied. It has
                   two stages, and nothing else says when one is free: a group has waited for its dQ product of the last
                   tile when it comes here, so behind the barrier both have, and that product's stage is the next
                   tile's.
    dQ empty[g]    dQ warp, when its reduction has read group g's stage; group g. The group may overwrite it.
    keys[g]        group g, if sums have an order and other units add to these keys: when it is this unit's turn, and
                   when all of the group's additions are made.
    dQ full[g]     group g, after its stores and a proxy fence, if tiles are interleaved behind most exponentials of the
                   next one; dQ warp. The stage may be reduced.

A math warp hands a stage back after a wait for a product, where its lanes meet: all of them have read it. What they
have read into registers must have been used, because an arrival overtakes loads (`marble.kernels.cute.ordering`).
"""

from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float16, Float32, Int16, Int32, Uint16, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import Agent, CooperativeGroup
from flash_attn.cute import pipeline, utils
from quack import copy_utils, layout_utils, sm90_utils

from marble.kernels.cute import serving
from marble.kernels.cute.backward_config import (
    LSE_AHEAD,
    UNIT_SLOTS,
    UNIT_WORDS,
    Atoms,
    BackwardConfig,
    Field,
    Gradients,
    Operands,
    Pipes,
    Products,
    Schedule,
    Shared,
    Tile,
    shared_layouts,
    shared_storage,
    shared_tensors,
)
from marble.kernels.cute.backward_sums import RegisterSums
from marble.kernels.cute.binding import GROUP, Lists, fitting
from marble.kernels.cute.intrinsics import load_counter, math_thread, store_pair
from marble.kernels.cute.ordering import arrive_behind, complete
from marble.kernels.cute.predicates import BLOCK, THREADS
from marble.kernels.cute.units import fetch, unit_at
from marble.kernels.cute.worklist import FULL_TILE

LOG2_E = 1.4426950408889634

BARRIER_DS, BARRIER_DQ_FULL, BARRIER_DQ_EMPTY, BARRIER_KEYS = 1, 2, 4, 6
"""Hardware barriers; the last three have one for each math group. 0 is that of all threads."""


class BackwardSm90(RegisterSums):
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
        gradients: Gradients,
        lists: Lists,
        whole: Int32,
        few: Int32,
        apart: Int32,
        counter: cute.Tensor,
        scale: Float32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        """Launch on ``grid`` thread blocks, no more than there are units (see `Schedule`)."""
        layouts = shared_layouts(self.config, self.dtype)
        reduced = cpasync.make_tiled_tma_atom(
            cpasync.CopyReduceBulkTensorTileS2GOp(),
            layout_utils.select(gradients.dq, [1, 2, 0]),
            cute.select(layouts["dq"], mode=[0, 1]),
            (64, self.config.dq_columns),
        )
        load, query, key = cpasync.CopyBulkTensorTileG2SOp(), (self.tile_m, self.head_dim), (self.tile_n, self.head_dim)
        made = [
            cpasync.make_tiled_tma_atom(
                load, layout_utils.select(tensor, [0, 2, 1]), cute.select(layouts[name], mode=[0, 1]), tile
            )
            for tensor, name, tile in ((mQ, "q", query), (mK, "k", key), (mV, "k", key), (mdO, "dout", query))
        ]
        made.append(reduced)
        self.kernel(
            Operands(*(tensor for _, tensor in made)),
            *(atom for atom, _ in made),
            mLSE,
            mDelta,
            gradients.dk,
            gradients.dv,
            lists,
            Schedule(whole, few, apart, counter),
            scale,
        ).launch(grid=[grid, 1, 1], block=[self.config.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    def _tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """S' and dP' (keys are rows); dK and dV (the first operand in registers); dQ, split by rows or by columns."""
        rows, both = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        groups = self.config.groups
        make = partial(hopper.make_trivial_tiled_mma, self.dtype, self.dtype)
        down, right = (groups, 1, 1), (1, groups, 1)
        s = make(rows, rows, Float32, down, (64, self.tile_m), a_source=warpgroup.OperandSource.SMEM)
        dkv = make(rows, both, Float32, down, (64, self.head_dim), a_source=warpgroup.OperandSource.RMEM)
        dq = make(rows, both, Float32, down if self.tile_m == 64 * groups else right, (64, self.config.dq_columns))
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
        atom_dq: cute.CopyAtom,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lists: Lists,
        schedule: Schedule,
        scale: Float32,
    ):
        """Set up shared memory and barriers, then take a role. Of dK and dV, the math groups need only addresses."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        atoms = Atoms(atom_q, atom_k, atom_v, atom_dout, atom_dq)
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

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
                if const_expr(config.deterministic):
                    follow(partial(self.reduce_dq_in_turn, operands, atoms, shared, lists), serving.end_copies)
                else:
                    follow(partial(self.reduce_dq, operands, atoms, shared))
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory outlives its readers
            if warp == 2:
                follow(partial(self.load_rows, lse, delta, self._early(scale), shared, pipes))
            if warp == 3:
                follow(partial(self.write_mask, lists, shared, pipes))
        else:
            cute.arch.setmaxregister_increase(config.math_registers)
            self.math(lists, shared, pipes, dk, dv, scale)

    @cute.jit
    def _barriers(self, storage: Any, warp: Int32) -> Pipes:
        """Initialise them all; behind this every thread may use them."""
        config, warps = self.config, self.math_threads // 32
        math_warps = CooperativeGroup(Agent.Thread, warps)
        k_empty, unit_full = storage.kv_barriers.data_ptr(), storage.unit_barriers.data_ptr()
        v_empty, unit_empty = k_empty + 1, unit_full + UNIT_SLOTS
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(k_empty, warps)
                cute.arch.mbarrier_init(v_empty, warps)
                for slot in range(UNIT_SLOTS):
                    cute.arch.mbarrier_init(unit_full + slot, 1)
                    cute.arch.mbarrier_init(unit_empty + slot, warps + 3)  # row, mask and dQ warps
        pipe_q = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.q_barriers.data_ptr(),
            num_stages=config.q_stages,
            producer_group=CooperativeGroup(Agent.Thread, 3),  # load, row and mask warp
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
            defer_sync=False,  # all threads meet here: every barrier is initialised
        )
        return Pipes(pipe_q, pipe_dout, k_empty, v_empty, unit_full, unit_empty)

    # The walk: every role sees the same tiles in the same order ------------------------------------------------------

    @cute.jit
    def _lead(
        self, operands: Operands, lists: Lists, schedule: Schedule, shared: Shared, pipes: Pipes, visit: Any
    ) -> None:
        """Fetch units, tell the other warps, and call ``visit`` for their tiles. By the load warp.

        A thread block begins with the unit of its own number, or fetches the first one too if sums have an order. It
        fetches the next one when everything of the last has been asked for; then two tiles are still to be computed,
        which is longer than the fetch takes.
        """
        ordered = const_expr(self.config.deterministic)
        lane = cute.arch.lane_idx()
        items, kv_heads = lists.items.shape[0], operands.k.shape[2]
        group = operands.q.shape[2] // kv_heads
        pieces = group // schedule.few
        whole = schedule.whole * kv_heads
        units = whole + (items - schedule.whole) * kv_heads * pieces
        turn, number, unit = Int32(0), Int32(0), Int32(cute.arch.block_idx()[0])
        if const_expr(ordered):
            unit = fetch(schedule.counter, units, dealt=False)
        while unit < units:
            place, head, heads = unit, Int32(0), group
            if unit >= whole:
                place = whole + (unit - whole) // pieces
                head, heads = (unit - whole) % pieces * schedule.few, schedule.few
            heads_apart = kv_heads
            if schedule.apart != 0:
                place, heads_apart = unit, kv_heads * pieces
            index, kv_head, _ = unit_at(lists, place, heads_apart, Int32(1))
            if schedule.apart != 0:
                kv_head, head = kv_head // pieces, kv_head % pieces * heads
            order = [Int32(0)] * 3
            if const_expr(ordered):
                order = serving.unit_tickets(lists, index, kv_head, head, heads, group, self.config.groups)
            head += kv_head * group
            field = Int32(0)
            if lane < Field.KV_HEAD:
                field = lists.items[index, lane]
            field = kv_head if lane == Field.KV_HEAD else field
            field = head if lane == Field.HEAD else field
            field = heads if lane == Field.HEADS else field
            if const_expr(ordered):
                for i in cutlass.range_constexpr(3):
                    field = order[i] if lane == Field.KEY_COUNTER + i else field
            present = True
            if const_expr(self.config.skips):
                tiles = self._count_tiles(lists, field)
                field = tiles if lane == Field.TILES else field
                present = tiles > 0
            if present:
                self._tell(shared, pipes, turn, field)
                number = self._visit_unit(lists, shared, turn, number, visit)
                turn += 1
            unit = fetch(schedule.counter, units, dealt=not ordered)
        self._tell(shared, pipes, turn, Int32(0))

    @cute.jit
    def _count_tiles(self, lists: Lists, field: Int32) -> Int32:
        """Tiles of a unit with one query head; of partial tiles, those that have pairs."""
        first, parts, full = (cute.arch.shuffle_sync(field, which) for which in (Field.PART, Field.PARTS, Field.FULL))
        found, lane = Int32(0), cute.arch.lane_idx()
        for start in cutlass.range(0, parts, 32, unroll=1):
            if start + lane < parts:
                halves = self._halves_with_pairs(lists.parts[first + start + lane, 3])
                found += (halves & 1) + (halves >> 1)
        return cute.arch.warp_reduction_sum(found) + full * self.config.halves

    @staticmethod
    def _halves_with_pairs(quarters: Int32) -> Int32:
        """Two bits: which inner halves of a partial tile have pairs, given the bits of all quarters."""
        return (quarters | quarters >> 2) & 3

    @cute.jit
    def _tell(self, shared: Shared, pipes: Pipes, turn: Int32, field: Int32) -> None:
        """Publish a unit, of which every lane holds one field."""
        slot, phase = self._stage(turn, UNIT_SLOTS)
        cute.arch.mbarrier_wait(pipes.unit_empty + slot, phase ^ 1)
        lane = cute.arch.lane_idx()
        if lane < UNIT_WORDS:
            shared.units[lane, slot] = field
        self._arrive(pipes.unit_full + slot)

    @cute.jit
    def _await_unit(self, shared: Shared, pipes: Pipes, turn: Int32) -> Int32:
        """Wait for the unit of this thread block's ``turn``: its query heads, or 0 if there are no more units."""
        slot, phase = self._stage(turn, UNIT_SLOTS)
        cute.arch.mbarrier_wait(pipes.unit_full + slot, phase)
        return shared.units[Field.HEADS, slot]

    @cute.jit
    def _leave_unit(self, pipes: Pipes, turn: Int32) -> None:
        """This warp has read all that it needs of a unit."""
        slot, _ = self._stage(turn, UNIT_SLOTS)
        self._arrive(pipes.unit_empty + slot)

    @cute.jit
    def _arrive(self, barrier: cute.Pointer) -> None:
        """All lanes of this warp are here, so one speaks for them."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _field(self, shared: Shared, turn: Int32, field: cutlass.Constexpr[Field]) -> Int32:
        """A field of the unit of ``turn``. It is cheap to read, so it should not be kept in a register for long."""
        return shared.units[field, turn % UNIT_SLOTS]

    @cute.jit
    def _follow(
        self, lists: Lists, shared: Shared, pipes: Pipes, visit: Any, end: cutlass.Constexpr[Any] = None
    ) -> None:
        """Call ``visit`` for every tile of this thread block. By another warp.

        With an ``end``, what a visit leaves open is handed to the next one, and at the end of a unit to ``end``.
        """
        turn, number = Int32(0), Int32(0)
        heads = self._await_unit(shared, pipes, turn)
        while heads > 0:
            if const_expr(end is None):
                number = self._visit_unit(lists, shared, turn, number, visit)
            else:
                number = self._visit_unit(lists, shared, turn, number, visit, end)
            self._leave_unit(pipes, turn)
            turn += 1
            heads = self._await_unit(shared, pipes, turn)

    @cute.jit
    def _visit_unit(
        self,
        lists: Lists,
        shared: Shared,
        turn: Int32,
        number: Int32,
        visit: Any,
        end: cutlass.Constexpr[Any] = None,
    ) -> Int32:
        """Call ``visit`` for the tiles of a unit, and count them. Lists are read 32 entries at a time."""
        halves, lane = const_expr(self.config.halves), cute.arch.lane_idx()
        get = partial(self._field, shared, turn)
        start, open_turn = number, Int32(-1)
        own_row, own_rows, own_slot = Int32(0), Int32(0), Int32(0)
        own_number, own_ticket = Int32(0), Int32(0)
        for member in cutlass.range(get(field=Field.HEADS), unroll=1):
            entries = get(field=Field.PARTS) + get(field=Field.RUNS)
            for entry in cutlass.range(entries, unroll=1):
                if entry % 32 == 0 and (member == 0 or entries > 32):
                    own, parts = entry + lane, get(field=Field.PARTS)
                    if own < parts:
                        place = get(field=Field.PART) + own
                        own_row, own_slot = lists.parts[place, 0], lists.parts[place, 1]
                        own_rows = lists.parts[place, 2]
                        if const_expr(self.config.skips):
                            own_rows |= self._halves_with_pairs(lists.parts[place, 3]) << 30
                    elif own < entries:
                        place = get(field=Field.RUN) + own - parts
                        own_row, own_slot = lists.runs[place, 0], Int32(FULL_TILE)
                        own_rows = lists.runs[place, 1] * BLOCK
                row, rows, slot = (cute.arch.shuffle_sync(own, entry % 32) for own in (own_row, own_rows, own_slot))
                first, last = Int32(0), Int32(halves)
                if const_expr(self.config.skips):
                    # Of a partial tile, the two highest bits say which query halves have pairs.
                    quarters = rows >> 30 & 3
                    rows &= (1 << 30) - 1
                    first, last = Int32(quarters == 2), cutlass.min(quarters, 2)
                    row += first * self.tile_m
                    rows -= first * self.tile_m
                last = last if slot != FULL_TILE else rows // self.tile_m
                for half in cutlass.range(first, last, unroll=1):
                    head = get(field=Field.HEAD) + member
                    tile = Tile(turn, number, number == start, head, row, rows, slot, half)
                    if const_expr(end is None):
                        visit(tile)
                    else:
                        walked = entry * halves + half
                        if walked % 32 == 0 and (member == 0 or halves * entries > 32):
                            own_number, own_ticket = serving.tickets_from(lists, get(field=Field.TICKET) + walked)
                        query, ticket = (cute.arch.shuffle_sync(x, walked % 32) for x in (own_number, own_ticket))
                        counter = head * lists.order.served.shape[1] + query
                        open_turn = visit(tile._replace(counter=counter, ticket=ticket), open_turn)
                    row += self.tile_m
                    rows -= self.tile_m
                    number += 1
        if const_expr(end is not None):
            end(lists, open_turn)
        return number

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
        tile: Tile,
    ) -> None:
        """Fill a tile's stages, once they are free. A unit's first tile brings V and K, once those are free.

        V and K arrive with the first dO and Q: their bytes are announced before they are asked for.
        """
        config = self.config
        stage, phase = self._stage(tile.number, config.q_stages)
        extra = Int32(self.key_bytes) if tile.starts else Int32(0)
        pipes.q.sync_object_empty.wait(stage, phase ^ 1)
        barrier = pipes.q.sync_object_full.get_barrier(stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.query_bytes + extra)
        self._tma_load(atoms.q, operands.q, tile.head, tile.row, shared.q[None, None, stage], barrier)

        do_stage, phase = self._stage(tile.number, config.do_stages)
        pipes.dout.sync_object_empty.wait(do_stage, phase ^ 1)
        do_barrier = pipes.dout.sync_object_full.get_barrier(do_stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(do_barrier, self.query_bytes + extra)
        self._tma_load(atoms.dout, operands.dout, tile.head, tile.row, shared.dout[None, None, do_stage], do_barrier)
        if tile.starts:
            place = [self._field(shared, tile.turn, field) for field in (Field.KV_HEAD, Field.KEY_ROW)]
            cute.arch.mbarrier_wait(pipes.v_empty, tile.turn + 1 & 1)
            self._tma_load(atoms.v, operands.v, *place, shared.v, do_barrier)
            cute.arch.mbarrier_wait(pipes.k_empty, tile.turn + 1 & 1)
            self._tma_load(atoms.k, operands.k, *place, shared.k, barrier)

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
        factor: Float32 | float,
        shared: Shared,
        pipes: Pipes,
        tile: Tile,
    ) -> None:
        """A tile's log-sum-exp, in powers of 2, and delta, in the order that math threads read them.

        Rows that saw no key, and rows behind the end of their block, get +inf: exp2(s - inf) is exactly 0.
        """
        stage, phase = self._stage(tile.number, self.config.q_stages)
        pipes.q.sync_object_empty.wait(stage, phase ^ 1)
        self._write_rows(lse, delta, factor, shared, tile, stage)
        self._arrive(pipes.q.sync_object_full.get_barrier(stage))

    @cute.jit
    def _write_rows(
        self, lse: cute.Tensor, delta: cute.Tensor, factor: Float32 | float, shared: Shared, tile: Tile, stage: Int32
    ) -> None:
        """As `load_rows`, when the stage is free."""
        lane = cute.arch.lane_idx()
        for part in cutlass.range(self.tile_m // 32, unroll=1):
            place = lane + 32 * part
            row_lse, row_delta = -Float32.inf, Float32(0.0)
            if place < tile.rows:
                row_lse, row_delta = lse[tile.head, tile.row + place], delta[tile.head, tile.row + place]
            # Column 8j + 2t + c is number 2j + c of lane class t.
            number = (lane // 8 + 4 * part) * 2 + lane % 2
            where = (number % 4, number // 4, lane % 8 // 2, stage)
            shared.lse[where] = Float32.inf if row_lse == -Float32.inf else row_lse * LOG2_E
            shared.delta[where] = row_delta * factor

    # Mask warp -------------------------------------------------------------------------------------------------------

    @cute.jit
    def write_mask(self, lists: Lists, shared: Shared, pipes: Pipes, tile: Tile) -> None:
        """The predicate of a partial tile, as bits in the order of the math threads' columns; none for a full tile."""
        stage, phase = self._stage(tile.number, self.config.q_stages)
        pipes.q.sync_object_empty.wait(stage, phase ^ 1)
        shared.partial[stage] = Int32(tile.slot != FULL_TILE)
        if tile.slot != FULL_TILE:
            # Unrolled, so that all loads are under way together; in a loop the deterministic kernel spills at d64.
            for part in cutlass.range_constexpr(self.tile_n // 32):
                row = cute.arch.lane_idx() + 32 * part
                self._write_row(lists, shared, tile, stage, row)
        self._arrive(pipes.q.sync_object_full.get_barrier(stage))

    @cute.jit
    def _write_row(self, lists: Lists, shared: Shared, tile: Tile, stage: Int32, row: Int32) -> None:
        """The bits of a row of the unit's block: of half of the columns, or both halves in one word."""
        target, bits = shared.mask_rows, cute.make_rmem_tensor((THREADS, 2), Int16)
        thread, halves = row // 16 * 32 + row % 8 * 4, const_expr(3 - self.config.halves)
        for half in cutlass.range_constexpr(halves):
            own_half = tile.half if const_expr(halves == 1) else half
            cute.autovec_copy(lists.predicates[(2 * tile.slot + own_half) * BLOCK + row, None], bits[None, half])
        for t in cutlass.range_constexpr(THREADS):
            own = Uint32(Uint16(bits[t, 0]))
            if const_expr(halves == 2):
                own |= Uint32(Uint16(bits[t, 1])) << 16
            target[row // 8 % 2, thread + t, stage] = target.element_type(own)

    # dQ warp ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def reduce_dq(self, operands: Operands, atoms: Atoms, shared: Shared, tile: Tile) -> None:
        """Hand each group its stage back, then reduce what it has stored. Rows behind the last one are left out."""
        self._hand_back_dq()
        self._copy_dq(operands, atoms, shared, tile)

    @cute.jit
    def reduce_dq_in_turn(
        self, operands: Operands, atoms: Atoms, shared: Shared, lists: Lists, tile: Tile, open_turn: Int32
    ) -> Int32:
        """As `reduce_dq`, when it is the tile's turn; that is left open. The last tile's turn, if open, is ended here,
        unless it is this one's too (ticket −1).

        So the way to the counter and back is covered by the end of the last tile's reductions, and one fence is behind
        both, for both turns.
        """
        counter, own = lists.order.served.iterator + tile.counter, tile.ticket >= 0
        reached = Int32(0)
        if own:
            reached = load_counter(counter)
        self._hand_back_dq()
        if own:
            serving.end_copies(lists, open_turn)
            if reached < tile.ticket:
                serving.await_turn(counter, tile.ticket, reached)
            serving.before_copies()
        self._copy_dq(operands, atoms, shared, tile)
        return tile.counter

    @cute.jit
    def _hand_back_dq(self) -> None:
        """Hand each group its stage back, when the last tile's reductions have read it."""
        groups = self.config.groups
        for group in cutlass.range_constexpr(groups):
            # Reductions end in order, so those of the last tile that may still read are of the groups behind this one.
            cute.arch.cp_async_bulk_wait_group(groups - 1 - group, read=True)
            cute.arch.barrier_arrive(barrier_id=BARRIER_DQ_EMPTY + group, number_of_threads=GROUP + 32)

    @cute.jit
    def _copy_dq(self, operands: Operands, atoms: Atoms, shared: Shared, tile: Tile) -> None:
        """Reduce what each group stores of a tile, as soon as it is there."""
        threads, columns = GROUP + 32, self.config.dq_columns
        for group in cutlass.range_constexpr(self.config.groups):
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
        self, lists: Lists, shared: Shared, pipes: Pipes, dk: cute.Tensor, dv: cute.Tensor, scale: Float32
    ) -> None:
        """All matrix products, and the epilogue of dK and dV.

        A tile is a first step or softmax step, then a gradient step. If tiles are interleaved, all gradient steps of a
        unit but the last issue the next tile's S and dP behind their own products, so that the tensor cores have work
        while dQ moves to shared memory and while the softmax step runs. Between two rounds of the loop nothing is in
        flight, and P' and dP' of a tile are in registers: if an accumulator crossed over, ptxas would serialise.
        """
        products = self._products(shared)
        softmax = partial(self.softmax_step, shared, pipes, scale)
        first = partial(self.first_step, shared, pipes, products, softmax)
        gradient = partial(self.gradient_step, shared, pipes, products, scale)
        acc_dk, acc_dv = products.acc_dk, products.acc_dv

        turn, tile = Int32(0), Int32(0)
        heads = self._await_unit(shared, pipes, turn)
        while heads > 0:
            get = partial(self._field, shared, turn)
            tiles = (get(field=Field.PARTS) + get(field=Field.FULL)) * heads * self.config.halves
            if const_expr(self.config.interleaved):
                p, dp = first(tile)
                for done in cutlass.range(tiles - 1, unroll=1):
                    acc_s, acc_dp, rows = gradient(p, dp, tile, done == 0, last=False)
                    tile += 1
                    softmax(acc_s, p, tile, rows, held=True)
                    dp.store(acc_dp.load())
                gradient(p, dp, tile, tiles == 1, last=True)
            else:
                for done in cutlass.range(tiles - 1, unroll=1):
                    gradient(*first(tile), tile, done == 0, last=False)
                    tile += 1
                gradient(*first(tile), tile, tiles == 1, last=True)
            tile += 1
            place = partial(self._own_rows, shared, turn)
            if const_expr(self.config.deterministic):
                serving.await_key_turn(lists, shared, turn, BARRIER_KEYS)
            leave = self._write if const_expr(self.config.rounds) else self._add
            leave(acc_dv, dv, place, 1.0)
            leave(acc_dk, dk, place, self._last(scale))
            if const_expr(self.config.deterministic):
                serving.end_key_turn(lists, shared, turn, BARRIER_KEYS)
            self._leave_unit(pipes, turn)
            turn += 1
            heads = self._await_unit(shared, pipes, turn)

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
    def _hand_back(self, barrier: cute.Pointer, words: Any = ()) -> None:
        """This warp is done with what it has read: its lanes have met at a wait for a product, so one may speak for
        all. If they have asked for ``words`` of it since, these must be in registers first."""
        if const_expr(len(words) > 0):
            cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            if const_expr(len(words) > 0):
                arrive_behind(barrier, words)
            else:
                cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def first_step(
        self, shared: Shared, pipes: Pipes, products: Products, softmax: Any, tile: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """P' and dP' of a tile behind which nothing is in flight.

        dO is waited for before S is issued, because S and dP take all of shared memory's bandwidth.
        """
        stage, phase = self._stage(tile, self.config.q_stages)
        do_stage, do_phase = self._stage(tile, self.config.do_stages)
        pipes.q.consumer_wait_w_index_phase(stage, phase)
        ahead = const_expr(0 if self.config.interleaved else LSE_AHEAD)  # once a unit, which is not worth the spills
        rows = self._rows_ahead(shared, stage, ahead)
        pipes.dout.consumer_wait_w_index_phase(do_stage, do_phase)
        acc_s, acc_dp = products.s(B_idx=stage), products.dp(B_idx=do_stage)
        p = cute.make_rmem_tensor(acc_s.shape, Float32)
        softmax(acc_s, p, tile, rows, held=False)
        if const_expr(not self.config.interleaved):
            return p, acc_dp
        dp = cute.make_rmem_tensor(acc_dp.shape, Float32)
        dp.store(acc_dp.load())
        return p, dp

    @cute.jit
    def softmax_step(
        self,
        shared: Shared,
        pipes: Pipes,
        scale: Float32,
        acc_s: cute.Tensor,
        p: cute.Tensor,
        tile: Int32,
        rows: tuple[Any, Boolean],
        held: cutlass.Constexpr[bool],
    ) -> None:
        """P' of a tile from S, which is in flight with dP behind it. Returns when both are done.

        If the last tile is ``held``, its dK is in flight between them, and its Q and dQ are not handed on yet: that is
        done behind most exponentials, because a fence for dQ's stores takes long behind dP's reads of shared memory.
        """
        thread = math_thread()
        stage, _ = self._stage(tile, self.config.q_stages)
        first_rows, partial_tile = rows
        warpgroup.wait_group(2 if const_expr(held) else 1)  # S is done
        s_mn, p_mn = layout_utils.reshape_acc_to_mn(acc_s), layout_utils.reshape_acc_to_mn(p)
        if partial_tile:
            self._apply(s_mn, copy_utils.load_s2r(shared.mask[None, thread, stage]))
        scale_log2, quads = scale * LOG2_E, const_expr(self.config.columns // 4)
        pause, settled = const_expr(quads * 3 // 4), 0
        for quad in cutlass.range_constexpr(quads):
            if const_expr(quad < len(first_rows)):
                row = first_rows[quad]
            else:
                row = copy_utils.load_s2r(shared.lse[None, quad, thread & 3, stage])
            for c in cutlass.range_constexpr(4):
                for r in cutlass.range_constexpr(2):
                    score = s_mn[r, 4 * quad + c] * scale_log2 - row[c]
                    p_mn[r, 4 * quad + c] = cute.math.exp2(score, fastmath=True)
            if const_expr(quad + 1 in (pause, quads)):
                words = cute.recast_tensor(p, Int32)
                complete([words[i] for i in range(settled, 8 * (quad + 1))])
                settled = 8 * (quad + 1)
            if const_expr(held and quad + 1 == pause):
                self._hand_over_dq()
                warpgroup.wait_group(1)  # dK of the last tile is done, and dS' leaves its registers
                pipes.q.consumer_release_w_index(self._stage(tile - 1, self.config.q_stages)[0])
        warpgroup.wait_group(0)  # dP is done

    @cute.jit
    def _rows_ahead(
        self, shared: Shared, stage: Int32, quads: cutlass.Constexpr[int]
    ) -> tuple[list[cute.Tensor], Boolean]:
        """Log-sum-exp of a tile's first quads of columns, and whether it is partial."""
        lane_class, partial_tile = math_thread() & 3, shared.partial[stage] != 0
        return [copy_utils.load_s2r(shared.lse[None, i, lane_class, stage]) for i in range(quads)], partial_tile

    @cute.jit
    def _hand_over_dq(self) -> None:
        """Tell the dQ warp that this group's part of a tile's dQ is in shared memory."""
        group = math_thread() >> 7
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=BARRIER_DQ_FULL + group, number_of_threads=GROUP + 32)

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
        last: cutlass.Constexpr[bool],
    ) -> tuple[cute.Tensor | None, cute.Tensor | None, Any]:
        """dV, dQ and dK of a tile from P' and dP'. If another tile follows that is interleaved, products are left in
        flight: its S, dK of this one, and its dP, in this order; and this one's dQ is not handed over yet.

        dP' is overwritten. The unit's first tile ``starts`` the sums of dK and dV, its ``last`` one hands K and V back.
        """
        config, thread = self.config, math_thread()
        group, follows = thread >> 7, const_expr(config.interleaved and not last)
        q_stage, _ = self._stage(tile, config.q_stages)
        do_stage, _ = self._stage(tile, config.do_stages)
        ds_stage = self._stage(tile, config.ds_stages)[0]
        if const_expr(last):
            self._hand_back(pipes.v_empty)  # the last product that reads V was dP of this tile
        rounded = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(p), self.dtype)
        products.dv(tCrA=rounded, B_idx=do_stage, zero_init=starts)
        warpgroup.wait_group(1)  # dV may go on, but ptxas does not put what follows between its instructions
        p_mn, dp_mn = layout_utils.reshape_acc_to_mn(p), layout_utils.reshape_acc_to_mn(dp)
        for quad in cutlass.range_constexpr(config.columns // 4):
            delta = copy_utils.load_s2r(shared.delta[None, quad, thread & 3, q_stage])
            for c in cutlass.range_constexpr(4):
                for r in cutlass.range_constexpr(2):
                    difference = dp_mn[r, 4 * quad + c] * self._early(scale) - delta[c]
                    dp_mn[r, 4 * quad + c] = p_mn[r, 4 * quad + c] * difference
        ds_rounded = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(dp), self.dtype)
        products.store_ds(ds_rounded, dst_idx=ds_stage)
        if const_expr(follows):
            stage, phase = self._stage(tile + 1, config.q_stages)
            pipes.q.consumer_wait_w_index_phase(stage, phase)  # here, because behind dQ the answer is late
        cute.arch.fence_view_async_shared()
        # Behind the barrier all of this dS is there, and nobody reads the last one any more: its stage is the next's.
        cute.arch.barrier(barrier_id=BARRIER_DS, number_of_threads=self.math_threads)

        acc_s, acc_dp, rows = None, None, None
        acc_dq = products.dq(A_idx=ds_stage)
        if const_expr(follows):
            warpgroup.wait_group(1)  # dV is done, and P' leaves its registers to S
            acc_s = products.s(B_idx=self._stage(tile + 1, config.q_stages)[0])
        products.dk(tCrA=ds_rounded, B_idx=q_stage, zero_init=starts)
        if const_expr(not follows):
            warpgroup.wait_group(2)  # dV is done
            pipes.dout.consumer_release_w_index(do_stage)
        warpgroup.wait_group(2 if const_expr(follows) else 1)  # dQ is done
        if const_expr(last):
            self._hand_back(pipes.k_empty)  # the last product that reads K was this one
        if const_expr(follows):
            pipes.dout.consumer_release_w_index(do_stage)
        cute.arch.barrier(barrier_id=BARRIER_DQ_EMPTY + group, number_of_threads=GROUP + 32)
        self._store_dq(acc_dq, shared, self._last(scale))
        if const_expr(follows):
            rows = self._rows_ahead(shared, self._stage(tile + 1, config.q_stages)[0], LSE_AHEAD)
            stage, phase = self._stage(tile + 1, config.do_stages)
            pipes.dout.consumer_wait_w_index_phase(stage, phase)
            acc_dp = products.dp(B_idx=stage)
        else:
            self._hand_over_dq()
            warpgroup.wait_group(0)  # dK is done
            pipes.q.consumer_release_w_index(q_stage)
        return acc_s, acc_dp, rows

    def _early(self, scale: Float32) -> Float32 | float:
        """What dS is multiplied by before it is rounded, which is free. float16 would lose small gradients."""
        return scale if self.dtype is BFloat16 else 1.0

    def _last(self, scale: Float32) -> Float32 | float:
        """What dQ and dK are multiplied by in the end."""
        return 1.0 if self.dtype is BFloat16 else scale

    @cute.jit
    def _apply(self, scores: cute.Tensor, keep: cute.Tensor) -> None:
        """Set the scores that are left out to -inf. Constant bit tests become one predicate move per seven bits."""
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                bit = const_expr(r * self.config.columns + c)
                kept = Boolean(keep[bit // 32] & Uint32(1 << bit % 32))
                scores[r, c] = scores[r, c] if kept else -Float32.inf

    @cute.jit
    def _store_dq(self, acc: cute.Tensor, shared: Shared, scale: Float32 | float) -> None:
        """This group's part of scale · dQ, to shared memory as TMA expects it with a 128-byte swizzle.

        Lane 4g + t holds columns 8j + 2t + {0, 1} of rows g and g + 8 of its warp's 16. A pair is half of the 16-byte
        chunk (2j + t // 2) ^ g. Sixteen lanes store at a time, those of four rows g: if all stored the same j, two rows
        would meet in every chunk. So odd rows store j ^ 2 when even ones store j.
        """
        thread = math_thread()
        # Shifts, because division would round negative numbers, and takes several instructions.
        group, warp, row, t = thread >> 7, thread >> 5 & 3, thread >> 2 & 7, thread & 3
        odd = row & 1 == 1
        chunk = (t >> 1) ^ row ^ ((row & 1) << 2)
        base = shared.dq_flat.iterator.toint()
        base += (group * 64 * self.config.dq_columns + (warp * 16 + row) * 32 + chunk * 4 + (t & 1) * 2) * 4
        for k in cutlass.range_constexpr(4):
            place = base ^ (32 * k)
            for box in cutlass.range_constexpr(self.config.dq_columns // 32):
                for r in cutlass.range_constexpr(2):
                    even_index, odd_index = (const_expr(2 * r + 4 * (4 * box + (k ^ flip))) for flip in (0, 2))
                    x, y = (acc[odd_index + c] if odd else acc[even_index + c] for c in (0, 1))
                    store_pair(place + 4 * 32 * (box * 64 + r * 8), x * scale, y * scale)

    def _own_rows(
        self, shared: Shared, turn: Int32, head: cutlass.Constexpr[Field] = Field.KV_HEAD
    ) -> tuple[Int32, Int32, Int32]:
        """The place of this group's outer rows of a unit, for `RegisterSums`; ``head``: whose they are."""
        head, row, rows = (self._field(shared, turn, field) for field in (head, Field.KEY_ROW, Field.KEY_ROWS))
        down = 64 * (math_thread() >> 7)
        return head, row + down, rows - down
