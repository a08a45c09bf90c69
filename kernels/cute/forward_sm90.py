"""Attention forward for Hopper (SM90): masks as data, softmax state carried between calls.

One thread block stays on each multiprocessor and takes one unit of work after the other: half a query block with two
heads, or a query block with one (`marble.kernels.cute.parts`). Of the first warpgroup one warp deals, asking for units
and loading their query tiles ahead of time, one loads keys and values, and one the predicates of partial tiles; two
warpgroups compute 64 query rows each and never look anything up.

Sources: FlashAttention-3 (Shah et al., 2024) for the overlap of softmax and matrix products inside and between
warpgroups; MARBLE, section 03 (Luma AI, October 2026) for the online kernel. Built on the helpers of flash-attn-4 and
quack.
"""

from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.utils import LayoutEnum
from flash_attn.cute import copy_utils as fa_copy_utils
from flash_attn.cute import pipeline as fa_pipeline
from flash_attn.cute import utils as fa_utils
from quack import copy_utils, layout_utils, sm90_utils

from marble.kernels.contract import Touch
from marble.kernels.cute import masking
from marble.kernels.cute.binding import GROUP, Lists, fitting
from marble.kernels.cute.forward_config import (
    APART,
    BEHIND,
    FIELDS,
    FIRST_PART,
    FIRST_RUN,
    FULL,
    HEAD,
    KV_HEAD,
    LONG,
    OUT_COLUMNS,
    OUT_ROWS,
    PAIRED,
    PARTS,
    PLACES,
    REST_STAGES,
    ROW,
    ROWS,
    RUNS,
    STRIP,
    SWIZZLED,
    TOUCH,
    Carried,
    ForwardConfig,
    Pipes,
    Shared,
)
from marble.kernels.cute.ordering import afresh, arrive_behind, complete, prefetch, store_if
from marble.kernels.cute.parts import PART
from marble.kernels.cute.predicates import BLOCK, THREADS
from marble.kernels.cute.softmax import OnlineSoftmax, scale_rows
from marble.kernels.cute.units import fetch, unit_at
from marble.kernels.cute.worklist import NOWHERE


class ForwardSm90:
    """The kernel for one element type and head dimension; everything else is decided at run time."""

    def __init__(self, dtype: type[cutlass.Numeric], config: ForwardConfig) -> None:
        self.dtype, self.config, self.head_dim = dtype, config, config.head_dim
        self.threads = 3 * GROUP
        self.whole_q, self.together = config.q_columns == config.head_dim, config.keys // PART
        self.out_columns = min(config.head_dim, OUT_COLUMNS)
        self.out_stages = 1 if self.whole_q else REST_STAGES

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        carried: Carried,
        lists: Lists,
        strips: Int32,
        counter: cute.Tensor,
        scale_log2: Float32,
        ctas: Int32,
        stream=None,
    ):
        """Launch. Shapes as in `marble.kernels.contract.Backend.forward`.

        Args:
            lists: a `PartList`.
            strips: see there.
            counter: see `units.fetch`.
            scale_log2: softmax scale times log₂ e.
            ctas: thread blocks, at most one per multiprocessor.
        """
        k_stages, v_stages = self.config.k_stages, self.config.v_stages
        query_tile, out_tile = ((BLOCK, columns) for columns in (self.config.q_columns, self.out_columns))
        key_tile, loaded, written = (self.config.keys, self.head_dim), (STRIP, SWIZZLED), (OUT_ROWS, SWIZZLED)
        layout = partial(sm90_utils.make_smem_layout, self.dtype, LayoutEnum.ROW_MAJOR)
        layout_q, layout_k, layout_v = layout(query_tile, 1), layout(key_tile, k_stages), layout(key_tile, v_stages)
        layout_out = layout(out_tile, self.out_stages)
        # [rows, heads, d] → [rows, d, heads]
        mQ, mK, mV, mO = (layout_utils.select(x, [0, 2, 1]) for x in (mQ, mK, mV, mO))
        load = cpasync.CopyBulkTensorTileG2SOp()
        (atom_q, tma_q), (atom_k, tma_k), (atom_v, tma_v) = (
            cpasync.make_tiled_tma_atom(load, x, layout(loaded), loaded) for x in (mQ, mK, mV)
        )
        atom_o, tma_o = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mO, layout(written), written)
        # The second for the rest of the query tile, the third for half a tile of keys.
        mma_qk, mma_qk_shared, mma_part = (
            sm90_utils.make_tiled_mma(self.dtype, "K", "K", keys, source, atom_layout_mnk=(1, 1, 1))
            for keys, source in ((self.config.keys // self.config.pieces, "RS"), (PART, "SS"), (PART, "RS"))
        )
        # The second for the columns that are written at a time.
        mma_pv, mma_out = (
            sm90_utils.make_tiled_mma(self.dtype, "K", "MN", columns, "RS", atom_layout_mnk=(1, 1, 1))
            for columns in (self.head_dim, self.out_columns)
        )

        q_struct, k_struct, v_struct, out_struct = (
            cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x)], 1024]
            for x in (layout_q, layout_k, layout_v, layout_out)
        )

        @cute.struct
        class Storage:
            unit_bars: cute.struct.MemRange[Int64, 2 * PLACES]
            bits_bars: cute.struct.MemRange[Int64, 2 * self.config.bits_stages]
            q_bars: cute.struct.MemRange[Int64, 2]
            rest_bars: cute.struct.MemRange[Int64, 2 * self.out_stages]
            k_bars: cute.struct.MemRange[Int64, 2 * k_stages]
            v_bars: cute.struct.MemRange[Int64, 2 * v_stages]
            unit: cute.struct.MemRange[Int32, FIELDS * PLACES]
            bits: cute.struct.Align[cute.struct.MemRange[Uint16, cute.cosize(self.layout_bits())], 128]
            q: q_struct
            out: out_struct
            k: k_struct
            v: v_struct

        self.kernel(
            (tma_q, tma_k, tma_v, tma_o),
            (atom_q, atom_k, atom_v, atom_o),
            mO,
            mLSE,
            carried,
            lists,
            strips,
            counter,
            scale_log2,
            (layout_q, layout_k, layout_v, layout_out),
            (mma_qk, mma_qk_shared, mma_part, mma_pv, mma_out),
            fitting(Storage),
        ).launch(grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        tmas,
        atoms,
        mO,
        mLSE,
        carried,
        lists,
        strips,
        counter,
        scale_log2,
        layouts,
        mmas,
        Storage: cutlass.Constexpr,
    ):
        """One thread block: a dealing warp, a loading warp and two computing warpgroups."""
        layout_q, layout_k, layout_v, layout_out = layouts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        out = storage.out.get_tensor(layout_out.outer, swizzle=layout_out.inner)
        shared = Shared(
            storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner),
            storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner),
            storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner),
            None if self.whole_q else out,
            out,
            storage.bits.get_tensor(self.layout_bits()),
            storage.unit.get_tensor(cute.make_layout((FIELDS, PLACES))),
        )
        one, computing_warps, and_predicates = (pipeline.CooperativeGroup(pipeline.Agent.Thread, n) for n in (1, 8, 9))
        words = partial(pipeline.PipelineAsync.create, defer_sync=True)
        tiles = partial(
            fa_pipeline.PipelineTmaAsync.create,
            producer_group=one,
            consumer_group=computing_warps,
            defer_sync=True,
        )
        query_bytes, rest_bytes, keys_bytes = (
            cute.size_in_bytes(self.dtype, cute.select(x, mode=[0, 1])) for x in (layout_q, layout_out, layout_k)
        )
        bits_bytes = cute.size_in_bytes(Uint16, cute.select(self.layout_bits(), mode=[0, 1, 2]))
        pipe_rest = None
        if const_expr(not self.whole_q):
            pipe_rest = tiles(
                barrier_storage=storage.rest_bars.data_ptr(),
                num_stages=self.out_stages,
                tx_count=rest_bytes,
            )
        pipes = Pipes(
            words(
                barrier_storage=storage.unit_bars.data_ptr(),
                num_stages=PLACES,
                producer_group=one,
                consumer_group=and_predicates,
            ),
            tiles(
                barrier_storage=storage.bits_bars.data_ptr(),
                num_stages=self.config.bits_stages,
                tx_count=bits_bytes,
            ),
            tiles(barrier_storage=storage.q_bars.data_ptr(), num_stages=1, tx_count=query_bytes),
            pipe_rest,
            tiles(barrier_storage=storage.k_bars.data_ptr(), num_stages=self.config.k_stages, tx_count=keys_bytes),
            tiles(barrier_storage=storage.v_bars.data_ptr(), num_stages=self.config.v_stages, tx_count=keys_bytes),
        )
        pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline_init_wait(cluster_shape_mn=(1, 1))

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.load_registers)
            if warp == 0:
                self.load(tmas, atoms, shared, pipes, lists)
            if warp == 1:
                self.deal(tmas, atoms, shared, pipes, lists, strips, counter, carried.acc)
            if warp == 2:
                self.load_predicates(shared, pipes, lists)
        else:
            cute.arch.setmaxregister_increase(self.config.math_registers)
            self.compute(mmas, shared, pipes, (atoms[3], tmas[3], mO), mLSE, carried, scale_log2)

    def layout_bits(self):
        """Of predicates in shared memory: [threads of a row, rows of both warpgroups, parts, stage]."""
        return cute.make_layout((THREADS, BLOCK, self.together, self.config.bits_stages))

    # The dealing warp

    @cute.jit
    def deal(self, tmas, atoms, shared, pipes, lists, strips, counter, acc):
        """Fetch units, write them down, load their query tiles and call their accumulators into the L2 cache, until
        there are none left."""
        lane, heads, kv_heads = cute.arch.lane_idx(), tmas[0].shape[2], tmas[1].shape[2]
        group = heads // kv_heads
        paired_units = strips * kv_heads * (group // 2)
        units = paired_units + (lists.items.shape[0] - strips) * kv_heads
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, PLACES)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        rest_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.out_stages)
        touch_before = Int32(int(Touch.LAST))
        number = Int32(cute.arch.block_idx()[0])
        while number < units:
            place, members, begin, paired = number, group // 2, Int32(0), Int32(1)
            if number >= paired_units:
                place, members, begin, paired = number - paired_units, Int32(1), strips, Int32(0)
            item, kv_head, member = unit_at(lists, place, kv_heads, members, begin)
            field = Int32(0)
            if lane < HEAD:
                field = lists.items[item, lane]
            head = kv_head * group + (2 * member if paired != 0 else group - 1)
            field = head if lane == HEAD else field
            field = kv_head if lane == KV_HEAD else field
            field = paired if lane == PAIRED else field
            row, rows, full, touch = (cute.arch.shuffle_sync(field, which) for which in (ROW, ROWS, FULL, TOUCH))
            stateful = (touch & int(Touch.FIRST) == 0) | (touch_before & int(Touch.LAST) == 0)
            field = Int32(stateful & (full >= LONG)) if lane == APART else field
            touch_before = touch
            self.write_unit(shared, pipes, state, field)
            state.advance()
            pipes.q.producer_acquire(q_state)
            load_query = partial(self.load_query, atoms[0], tmas[0], paired, head, row)
            load_query(0, shared.q, pipes.q, q_state)
            q_state.advance()
            if touch & int(Touch.FIRST) == 0:
                for own in cutlass.range(head, head + paired + 1, unroll=1):
                    with cute.arch.elect_one():
                        prefetch(fa_utils.elem_pointer(acc, (own, row, 0)), rows * self.head_dim * 4)
            if const_expr(not self.whole_q):
                pipes.rest.producer_acquire(rest_state)
                load_query(self.config.q_columns, shared.rest, pipes.rest, rest_state)
                rest_state.advance()
            number = fetch(counter, units)
        self.write_unit(shared, pipes, state, Int32(0))
        pipes.q.sync_object_empty.wait(q_state.index, q_state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.q.producer_get_barrier(q_state))

    @cute.jit
    def write_unit(self, shared, pipes, state, field):
        """Every lane writes one field, when the place is free."""
        pipes.unit.producer_acquire(state)
        if cute.arch.lane_idx() < FIELDS:
            shared.unit[cute.arch.lane_idx(), state.index] = field
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            pipes.unit.producer_commit(state)

    @cute.jit
    def load_query(self, atom, tma, paired, head, row, column: cutlass.Constexpr, smem, pipe, state):
        """Start the loads of both computing warpgroups' query rows into a stage, from a ``column`` on."""
        for which in cutlass.range_constexpr(2):
            tile = cute.domain_offset(
                (row + STRIP * which * (1 - paired), column), tma[None, None, head + which * paired]
            )
            self.load_strip(atom, tile, smem[None, None, state.index], which, pipe, state)

    @cute.jit
    def load_strip(self, atom, source, stage, which: cutlass.Constexpr, pipe, state):
        """Start the load of the first 64 rows of ``source`` as rows 64 · ``which`` and following of a stage."""
        for box in cutlass.range_constexpr(cute.size(stage, mode=[1]) // SWIZZLED):
            target = cute.local_tile(stage, (STRIP, SWIZZLED), (which, box))
            tile = cute.local_tile(source, (STRIP, SWIZZLED), (0, box))
            s, g = as_box(atom, target, tile)
            cute.copy(atom, g, s, tma_bar_ptr=pipe.producer_get_barrier(state))

    # The loading warp

    @cute.jit
    def load(self, tmas, atoms, shared, pipes, lists):
        """For each key tile its keys, one tile ahead of its values."""
        unit_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, PLACES)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.k_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.v_stages)
        together = self.together
        next_unit = partial(self.await_unit, shared, pipes, (FIRST_PART, PARTS, FIRST_RUN, RUNS, KV_HEAD))
        first_part, parts, first_run, runs, kv_head = next_unit(unit_state)
        lane_row = self.parts_from(lists.parts, first_part, parts, 0)
        run_rows, run_tiles = self.run_from(lists.runs, first_run, runs)
        while parts + runs > 0:
            tma_k, tma_v = (t[None, None, kv_head] for t in tmas[1:3])
            load_k = partial(self.load_rows, atoms[1], tma_k, shared.k, pipes.k)
            load_v = partial(self.load_rows, atoms[2], tma_v, shared.v, pipes.v)
            previous = [Int32(-1)] * together
            alone = self.parts_from(lists.parts, first_part + parts - 1, parts % together, 0)
            for i in cutlass.range(parts // together, unroll=1):
                at = together * i
                if i > 0 and at % 32 == 0:
                    lane_row = self.parts_from(lists.parts, first_part + at, parts - at, 0)
                rows = [cute.arch.shuffle_sync(lane_row, (at + j) % 32) for j in range(together)]
                k_state, v_state, previous = self.load_keys(load_k, load_v, pipes, rows, previous, k_state, v_state)
            for r in cutlass.range(runs, unroll=1):
                next_rows, next_tiles = self.run_from(lists.runs, first_run + r + 1, runs - r - 1)
                for i in cutlass.range(run_tiles, unroll=1):
                    rows = [row + self.config.keys * i for row in run_rows]
                    k_state, v_state, previous = self.load_keys(load_k, load_v, pipes, rows, previous, k_state, v_state)
                run_rows, run_tiles = next_rows, next_tiles
            if parts % together != 0:
                rows = [cute.arch.shuffle_sync(alone, 0)] + [Int32(NOWHERE)] * (together - 1)
                k_state, v_state, previous = self.load_keys(load_k, load_v, pipes, rows, previous, k_state, v_state)
            unit_state.advance()
            first_part, parts, first_run, runs, kv_head = next_unit(unit_state)
            lane_row = self.parts_from(lists.parts, first_part, parts, 0)
            run_rows, run_tiles = self.run_from(lists.runs, first_run, runs)
            v_state = self.load_values(load_v, pipes.v, previous, v_state)
        # A thread block must not end before the last arrivals at its barriers.
        for _ in cutlass.range_constexpr(self.config.v_stages):
            pipes.v.sync_object_empty.wait(v_state.index, v_state.phase)
            v_state.advance()

    @cute.jit
    def await_unit(self, shared, pipes, fields: cutlass.Constexpr, state):
        """Some ``fields`` of the next unit."""
        pipes.unit.consumer_wait(state)
        return tuple(shared.unit[field, state.index] for field in fields)

    @cute.jit
    def parts_from(self, parts, first, count, column: cutlass.Constexpr):
        """A column of up to 32 parts, one per lane."""
        found, lane = Int32(0), cute.arch.lane_idx()
        if lane < count:
            found = parts[first + lane, column]
        return found

    @cute.jit
    def run_from(self, runs, index, count):
        """First rows of the parts of a run's tiles, and how many tiles it has, if one is left."""
        rows, tiles = [Int32(0)] * self.together, Int32(0)
        if count > 0:
            tiles = runs[index, 1]
            for j in cutlass.range_constexpr(self.together):
                rows[j] = runs[index, 2 * j]
        return rows, tiles

    @cute.jit
    def load_rows(self, atom, tma, smem, pipe, rows, state):
        """Start the load of keys or values into a stage, 64 from each of ``rows``."""
        for j in cutlass.range_constexpr(self.together):
            source = cute.domain_offset((rows[j], 0), tma)
            self.load_strip(atom, source, smem[None, None, state.index], j, pipe, state)

    @cute.jit
    def load_keys(self, load_k, load_v, pipes, rows, previous, k_state, v_state):
        """The keys of a tile, and the values of the keys before."""
        pipes.k.producer_acquire(k_state)
        load_k(rows, k_state)
        k_state.advance()
        v_state = self.load_values(load_v, pipes.v, previous, v_state)
        return k_state, v_state, rows

    @cute.jit
    def load_values(self, load_v, pipe, rows, state):
        """The values of the key tile before, if there is one."""
        if rows[0] >= 0:
            pipe.producer_acquire(state)
            load_v(rows, state)
            state.advance()
        return state

    # The predicate warp

    @cute.jit
    def load_predicates(self, shared, pipes, lists):
        """Start the loads of each partial tile's predicate, a tile ahead; of half a tile the other half is anything."""
        unit = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, PLACES)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.bits_stages)
        together, lane_first = self.together, Int32(0)
        next_unit = partial(self.await_unit, shared, pipes, (FIRST_PART, PARTS, FULL, PAIRED))
        part, parts, full, paired = next_unit(unit)
        while parts + full > 0:
            for at in cutlass.range(0, parts, together, unroll=1):
                if at % 32 == 0:
                    lane_first = self.parts_from(lists.parts, part + at, parts - at, 1)
                pipes.bits.producer_acquire(state)
                for j in cutlass.range_constexpr(together):
                    first = cute.arch.shuffle_sync(lane_first, at % 32 + j)
                    for which in cutlass.range_constexpr(2):
                        source = fa_utils.elem_pointer(lists.predicates, (first + STRIP * which * (1 - paired), 0))
                        target = fa_utils.elem_pointer(shared.bits, (0, STRIP * which, j, state.index))
                        barrier = pipes.bits.producer_get_barrier(state)
                        with cute.arch.elect_one():
                            fa_copy_utils.cpasync_bulk_g2s(source, target, barrier, STRIP * THREADS * 2)
                state.advance()
            release(pipes.unit, unit)
            unit.advance()
            part, parts, full, paired = next_unit(unit)

    # The computing warpgroups

    @cute.jit
    def compute(self, mmas, shared, pipes, output, mLSE, carried, scale_log2):
        """Scores and softmax run one tile ahead of the product with the values, across work items too: while the last
        values of an item are weighed, the first scores of the next are computed."""
        mma_qk, mma_qk_shared, mma_part, mma_pv, mma_out = mmas
        which = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP - 1)
        thread = cute.arch.thread_idx()[0] % GROUP
        wg_qk, wg_shared, wg_part, wg_pv = (mma.get_slice(0) for mma in mmas[:4])
        keys = self.config.keys
        _, fragment_q, fragment_k = sm90_utils.partition_fragment_ABC(
            wg_qk, (STRIP, keys, self.config.q_columns), None, shared.k
        )
        products = [(mma_qk, fragment_q, k) for k in range(self.config.q_columns // 16)]
        if const_expr(not self.whole_q):
            own_rest = cute.local_tile(shared.rest, (STRIP, self.out_columns, self.out_stages), (which, 0, 0))
            fragment_rest = wg_shared.make_fragment_A(wg_shared.partition_A(own_rest))
            products += [(mma_qk_shared, fragment_rest, k) for k in range(self.out_columns // 16)]
        acc_O, fragment_p, fragment_v = sm90_utils.partition_fragment_ABC(
            wg_pv, (STRIP, self.head_dim, keys), None, layout_utils.transpose_view(shared.v)
        )
        softmax = OnlineSoftmax.create(scale_log2)
        tools = SimpleNamespace(
            softmax=softmax,
            norm=cute.make_rmem_tensor(2, Float32),
            acc_O=acc_O,
            fragment_q=fragment_q,
            fragment_p=fragment_p,
            mma_qk=mma_qk,
            mma_pv=mma_pv,
            mma_out=mma_out,
            shared=shared,
            pipes=pipes,
            thread=thread,
            which=which,
        )
        acc_S = cute.make_rmem_tensor(wg_qk.partition_shape_C((STRIP, keys)), Float32)
        scores = partial(start_scores, acc_S, products, fragment_k)
        weigh = partial(add_product, mma_pv, acc_O, fragment_p, fragment_v)
        step = partial(self.step, scores, weigh, tools, acc_S, self.together)
        if const_expr(self.together > 1):
            half_S = cute.make_tensor(acc_S.iterator, wg_part.partition_shape_C((STRIP, PART)))
            own_k = cute.local_tile(shared.k, (PART, self.head_dim, self.config.k_stages), (0, 0, 0))
            half_k = wg_part.make_fragment_B(wg_part.partition_B(own_k))
            half_products = [(mma_part, fragment_q, k) for k in range(self.config.q_columns // 16)]
            half_scores = partial(start_scores, half_S, half_products, half_k)
            half_step = partial(self.step, half_scores, weigh, tools, half_S, 1)

        state_of = partial(pipeline.make_pipeline_state, pipeline.PipelineUserType.Consumer)
        unit, q_state, rest_state = state_of(PLACES), state_of(1), state_of(self.out_stages)
        bits = state_of(self.config.bits_stages)
        k_state, v_state = state_of(self.config.k_stages), state_of(self.config.v_stages)
        pipes.q.consumer_wait(q_state)
        self.take_query(tools)
        q_state = self.leave_query(tools, q_state)
        if const_expr(not self.whole_q):
            pipes.rest.consumer_wait(rest_state)
        pipes.k.consumer_wait(k_state)
        scores(k_state.index, rest_state.index)
        warpgroup.wait_group(0)
        begun = self.take_state(tools, carried, unit.index)
        written, written_rest = Boolean(False), rest_state.clone()
        parts, full = shared.unit[PARTS, unit.index], shared.unit[FULL, unit.index]
        while parts + full > 0:
            partials = parts // self.together
            release(pipes.k, k_state)
            k_state.advance()
            if shared.unit[APART, unit.index] & which != 0:
                cute.arch.barrier(barrier_id=BEHIND, number_of_threads=2 * GROUP)
            if partials > 0:
                own, bits = self.take_bits(tools, bits, self.together)
                masking.apply(acc_S, own)
            softmax.compare(acc_S)
            softmax.lead()
            softmax.weigh(acc_S, acc_O)
            fa_utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), fragment_p)
            if shared.unit[APART, unit.index] & ~which != 0:
                cute.arch.barrier_arrive(barrier_id=BEHIND, number_of_threads=2 * GROUP)
            if const_expr(not self.whole_q):  # noqa: SIM102 (known to the compiler, unlike the other)
                if written:
                    self.leave_rest(pipes, written_rest)
            for _ in cutlass.range(partials - 1, unroll=1):
                k_state, v_state, bits = step(k_state, v_state, rest_state, bits, begun, masked=True)
                begun = Boolean(True)
            steps = full - (1 if partials == 0 else 0)
            for _ in cutlass.range(steps, unroll=1):
                k_state, v_state, bits = step(k_state, v_state, rest_state, bits, begun, masked=False)
                begun = Boolean(True)
            if const_expr(self.together > 1):  # noqa: SIM102 (known to the compiler, unlike the other)
                if parts % self.together != 0:
                    k_state, v_state, bits = half_step(k_state, v_state, rest_state, bits, begun, masked=True)
                    begun = Boolean(True)

            pipes.q.consumer_wait(q_state)
            self.take_query(tools)
            pipes.v.consumer_wait(v_state)
            weigh(v_state.index, begun)
            q_state = self.leave_query(tools, q_state)
            written, written_rest = Boolean(True), rest_state.clone()
            rest_state.advance()
            self.leave_statistics(tools, carried, mLSE, unit.index)
            done = unit.clone()
            unit.advance()
            parts, full = shared.unit[PARTS, unit.index], shared.unit[FULL, unit.index]
            if parts + full > 0:
                if const_expr(not self.whole_q):
                    pipes.rest.consumer_wait(rest_state)
                pipes.k.consumer_wait(k_state)
                scores(k_state.index, rest_state.index)
                warpgroup.wait_group(self.config.pieces)
                release(pipes.v, v_state)
                self.leave_accumulator(tools, carried, output, done.index, written_rest.index)
                begun = self.take_state(tools, carried, unit.index)
                warpgroup.wait_group(0)
            else:
                warpgroup.wait_group(0)
                release(pipes.v, v_state)
                self.leave_accumulator(tools, carried, output, done.index, written_rest.index)
            v_state.advance()
            cute.arch.sync_warp()
            release(pipes.unit, done)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory outlives its readers

    @cute.jit
    def step(
        self,
        scores,
        weigh,
        tools,
        acc_S,
        parts: cutlass.Constexpr,
        k_state,
        v_state,
        rest_state,
        bits,
        begun,
        masked: cutlass.Constexpr,
    ):
        """Scores and softmax of the next tile while the values of this one are weighed, which overwrite the accumulator
        if it has not ``begun``. The next tile can be half a one: weights of the one before are left beside its own, for
        values that were loaded from nowhere and are 0."""
        pipes = tools.pipes
        pipes.k.consumer_wait(k_state, pipes.k.consumer_try_wait(k_state))
        scores(k_state.index, rest_state.index)
        pipes.v.consumer_wait(v_state, pipes.v.consumer_try_wait(v_state))
        weigh(v_state.index, begun)
        if const_expr(masked):
            own, bits = self.take_bits(tools, bits, parts)
        pieces = const_expr(cute.size(acc_S, mode=[2]))
        for piece in cutlass.range_constexpr(pieces):
            warpgroup.wait_group(pieces - piece)
            if const_expr(piece == pieces - 1):
                release(pipes.k, k_state)
                k_state.advance()
            if const_expr(masked):
                masking.apply(acc_S, own, piece, pieces)
            tools.softmax.compare(acc_S, piece, pieces)
            if const_expr(piece < pieces - 1):
                complete_all(tools.softmax.best)
        tools.softmax.lead()
        if const_expr(self.config.late):
            tools.softmax.weigh(acc_S, None)
            complete_all(acc_S)
        else:
            complete_all(tools.softmax.decay)
        # The product is done by now. Behind this wait the weights can be rounded into the registers that it has read,
        # one after the other as they are computed.
        warpgroup.wait_group(0)
        release(pipes.v, v_state)
        v_state.advance()
        if const_expr(self.config.late):
            tools.softmax.catch_up(tools.acc_O)
        else:
            tools.softmax.weigh(acc_S, tools.acc_O)
        weights = layout_utils.reshape_acc_to_frgA(acc_S)
        fa_utils.cvt_f16(weights, cute.make_tensor(tools.fragment_p.iterator, weights.layout))
        return k_state, v_state, bits

    @cute.jit
    def take_bits(self, tools, state, parts: cutlass.Constexpr):
        """The bits of this thread's two rows of a partial tile of so many parts."""
        tools.pipes.bits.consumer_wait(state)
        row = STRIP * tools.which + masking.row_of(tools.thread)
        own = masking.own_bits(tools.shared.bits[None, None, None, state.index], row, tools.thread, parts)
        release_read(tools.pipes.bits, state, own)
        state.advance()
        return own, state

    @cute.jit
    def take_query(self, tools):
        """What is kept of the query tile, from shared memory to registers."""
        copy = cute.make_tiled_copy_A(copy_utils.get_smem_load_atom(self.dtype), tools.mma_qk)
        own = cute.local_tile(tools.shared.q[None, None, 0], (STRIP, self.config.q_columns), (tools.which, 0))
        cute.copy(copy, copy.get_slice(afresh(tools.thread)).partition_S(own), copy.retile(tools.fragment_q))

    @cute.jit
    def leave_query(self, tools, state):
        """What is kept of the query tile is in registers, and its stage is free for the next unit's."""
        release_read(tools.pipes.q, state, tools.fragment_q)
        state.advance()
        return state

    @cute.jit
    def own_strip(self, tools, place):
        """Query head and first row of this warpgroup's strip of a unit, rows from there to the end of the block (more
        than a strip's, or less than 1), and touch."""
        fields = (HEAD, ROW, ROWS, TOUCH, PAIRED)
        head, row, rows, touch, paired = (tools.shared.unit[field, place] for field in fields)
        down = STRIP * tools.which * (1 - paired)
        return head + tools.which * paired, row + down, rows - down, touch

    @cute.jit
    def take_state(self, tools, carried, place):
        """Begin with the state of the rows, or as rows that have seen nothing; whether the accumulator has begun."""
        head, row, rows, touch = self.own_strip(tools, place)
        tools.softmax.reset()
        begun = touch & int(Touch.FIRST) == 0
        if begun:
            thread = afresh(tools.thread)
            m, l = tools.softmax.m, tools.softmax.l  # noqa: E741
            gmem = self.own_elements(carried.acc[head, None, None], row, tools.mma_pv, thread)
            pair = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=64)
            for r in cutlass.range_constexpr(2):
                local = masking.row_of(thread) + 8 * r
                if local < rows:
                    m[r] = carried.m[head, row + local]
                    # Every lane of a quad adds to the row sum until they are reduced: one of them resumes it.
                    if thread % 4 == 0:
                        l[r] = carried.l[head, row + local]
                    cute.copy(pair, gmem[(None, r, None), 0, 0], tools.acc_O[(None, r, None), 0, 0])
        return begun

    @cute.jit
    def leave_statistics(self, tools, carried, mLSE, place):
        """Write the log-sum-exp and keep what the output is to be multiplied by, or write m and ℓ. The last values
        may still be being weighed."""
        head, row, rows, touch = self.own_strip(tools, place)
        softmax, thread = tools.softmax, afresh(tools.thread)
        softmax.reduce()
        if touch & int(Touch.LAST) != 0:
            softmax.finish(tools.norm)
            self.write_statistic(mLSE, softmax.l, head, row, rows, thread)
        else:
            self.write_statistic(carried.m, softmax.m, head, row, rows, thread)
            self.write_statistic(carried.l, softmax.l, head, row, rows, thread)

    @cute.jit
    def write_statistic(self, target, values, head, row, rows, thread):
        """A value for each of this thread's rows to [heads, rows]; all four threads of a row hold it, one writes."""
        local = masking.row_of(thread)
        for r in cutlass.range_constexpr(2):
            wanted = thread % 4 == 0 and local + 8 * r < rows
            store_if(Int32(wanted), fa_utils.elem_pointer(target, (head, row + local + 8 * r)), values[r])

    @cute.jit
    def leave_accumulator(self, tools, carried, output, place, stage):
        """Write the output, or the accumulator as it is. A thread owns two rows of it, and in each of them pairs of
        neighbouring columns."""
        head, row, rows, touch = self.own_strip(tools, place)
        if touch & int(Touch.LAST) != 0:
            scale_rows(tools.acc_O, tools.norm)
            self.write_output(tools, output, stage, head, row, rows)
        else:
            thread = afresh(tools.thread)
            gmem = self.own_elements(carried.acc[head, None, None], row, tools.mma_pv, thread)
            pair = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=64)
            for r in cutlass.range_constexpr(2):
                if masking.row_of(thread) + 8 * r < rows:
                    cute.copy(pair, tools.acc_O[(None, r, None), 0, 0], gmem[(None, r, None), 0, 0])

    @cute.jit
    def write_output(self, tools, output, stage, head, row, rows):
        """Each warp passes its own rows through shared memory. What was there of a query tile mattered to the scores of
        these rows alone, which are complete. They leave by TMA, or row by row if some of them are not the block's."""
        atom, tma, mO = output
        thread = afresh(tools.thread)
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        own = cute.local_tile(tools.shared.out[None, None, stage], (STRIP, self.out_columns), (tools.which, 0))
        store = cute.make_tiled_copy_C(fa_utils.get_smem_store_atom(90, self.dtype), tools.mma_out).get_slice(thread)
        shape = (OUT_ROWS, self.out_columns)
        strip = cute.local_tile(own, shape, (warp, 0))
        rounded = cute.make_rmem_tensor(
            tools.mma_out.get_slice(thread).partition_shape_C((STRIP, self.out_columns)), self.dtype
        )
        for part in cutlass.range_constexpr(self.head_dim // self.out_columns):
            first = tools.acc_O.iterator + cute.size(rounded) * part
            fa_utils.cvt_f16(cute.make_tensor(first, rounded.layout), rounded)
            # What read the strip before must be over.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            cute.copy(store, store.retile(rounded), store.partition_D(own))
            top, column = row + OUT_ROWS * warp, self.out_columns * part
            if OUT_ROWS * (warp + 1) <= rows:
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                for box in cutlass.range_constexpr(self.out_columns // SWIZZLED):
                    source = cute.local_tile(strip, (OUT_ROWS, SWIZZLED), (0, box))
                    target = tile_at(tma[None, None, head], top, column + SWIZZLED * box, (OUT_ROWS, SWIZZLED))
                    s, g = as_box(atom, source, target)
                    with cute.arch.elect_one():
                        cute.copy(atom, s, g)
                cute.arch.cp_async_bulk_commit_group()
            else:
                cute.arch.sync_warp()
                copy = copy_utils.tiled_copy_2d(self.dtype, self.out_columns // 8, 32, 8).get_slice(lane)
                pieces = copy.partition_S(strip)
                where = copy.partition_S(cute.make_identity_tensor(shape))
                places = copy.partition_D(tile_at(mO[None, None, head], top, column, shape))
                held = cute.make_rmem_tensor_like(pieces)
                cute.autovec_copy(pieces, held)
                for i in cutlass.range_constexpr(cute.size(held, mode=[1])):
                    if OUT_ROWS * warp + where[0, i, 0][0] < rows:
                        cute.copy(copy, held[None, i, None], places[None, i, None])
                if const_expr(not self.whole_q):
                    cute.arch.fence_view_async_shared()  # the copy engine writes there next

    @cute.jit
    def leave_rest(self, pipes, state):
        """This warp's rows of an output have been read, so the rest of another query tile may come to their place."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        release(pipes.rest, state)

    def own_elements(self, tensor, row, mma_pv, thread):
        """This thread's elements of a strip of [rows, d]: ((pair, row, column group), 1, 1)."""
        return mma_pv.get_slice(thread).partition_C(tile_at(tensor, row, 0, (STRIP, self.head_dim)))


def tile_at(tensor, row, column, shape):
    """Part of a matrix, from ``row`` and ``column`` on."""
    return cute.local_tile(cute.domain_offset((row, column), tensor), shape, (0, 0))


def as_box(atom, smem, gmem):
    """A tile in shared memory and in a tensor, as the copy engine moves it in one go."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def complete_all(values):
    """`marble.kernels.cute.ordering.complete` for all of a thread's floats in a tensor."""
    words = cute.recast_tensor(values, Int32)
    complete([words[i] for i in range(cute.size(words))])


@cute.jit
def start_scores(acc, products, k, stage, rest):
    """Start q · k[stage]ᵀ, each piece of the keys as a group of its own.

    Each of ``products`` is of 16 columns: an instruction, a fragment of q, and the columns' place in it, for the
    ``rest`` in that stage.
    """
    for piece in cutlass.range_constexpr(cute.size(acc.shape[2])):
        warpgroup.fence()
        own = cute.append_ones(acc[None, None, piece], up_to_rank=3)
        for i in cutlass.range_constexpr(len(products)):
            mma, q, column = products[i]
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, i > 0)
            keys = cute.append_ones(k[None, piece, i, stage], up_to_rank=2)
            tile = q[None, None, column] if const_expr(cute.rank(q) == 3) else q[None, None, column, rest]
            cute.gemm(atom, own, tile, keys, own)
        warpgroup.commit_group()


@cute.jit
def add_product(mma, acc, a, b, stage, begun):
    """Start a · b[stage], added to ``acc`` or, if it has not ``begun``, in its place."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, begun)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k, stage], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def release(pipe, state):
    """One arrival for this warp, whose lanes have all read the stage."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(state.index))


@cute.jit
def release_read(pipe, state, values):
    """One arrival for this warp, whose lanes have asked for ``values`` of the stage, when these are in registers."""
    words = cute.recast_tensor(values, Int32)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        barrier = pipe.sync_object_empty.get_barrier(state.index)
        arrive_behind(barrier, [words[i] for i in range(cute.size(words))])
