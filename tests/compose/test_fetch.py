"""The sparse all-to-all: what a rank receives, and that joined calls are the calls that they join."""

from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

import marble
from marble import AttentionShape, Layout, Span
from marble.compose.check import check
from marble.compose.cost import summarise
from marble.kernels.predicates import covered
from marble.mask.domains import dense
from marble.mask.join import Part, join_keys
from marble.testing.layouts import planned_storage, random_case, random_layout, random_window, stored_mask

rngs = st.builds(Random, st.integers(0, 2**32 - 1))
SHAPE = AttentionShape(2, 1, 16)


def received(plan, layer=0):
    """Key/value rows that each rank receives in a forward pass."""
    rows = []
    for rank, schedule in plan.schedules[layer].items():
        transfers = [transfer for step in schedule.forward.steps for transfer in step.transfers]
        rows.append(sum(len(transfer.dst) for transfer in transfers if transfer.target == rank))
    return rows


@settings(max_examples=100)
@given(rng=rngs)
def test_seen_blocks_are_those_with_a_legal_pair(rng):
    case = random_case(rng)
    note(repr(case))
    tracks, shards = case.mask.tracks, [case.order.shard(rank) for rank in range(case.world)]
    for shard in shards:
        seen = case.mask.seen(shards, shard, case.block)
        assert seen.shape == (case.world, -(-len(shard) // case.block))
        for rank, rows in enumerate(shards):
            legal = dense(case.mask.mask, tracks.take(rows), tracks.take(shard)).any(0)
            expected = [bool(part.any()) for part in legal.split(case.block)] if len(shard) else []
            assert seen[rank].tolist() == expected


@settings(max_examples=100)
@given(rng=rngs)
def test_joined_calls_cover_what_their_parts_cover(rng):
    layout, window, block = random_layout(rng), random_window(rng), rng.choice([1, 2, 3, 5, 8])
    mask = stored_mask(planned_storage(layout, window), window)
    owner = torch.tensor([rng.randrange(3) for _ in range(layout.tokens)])
    shards = [(owner == rank).nonzero().flatten() for rank in range(3)]
    note(f"{layout.to_json()}, window {window}, block {block}, {owner.tolist()}")
    parts, columns, row = [], [], 0
    for cols in shards:
        tiles = mask.tiles(shards[0], cols, block)
        resident = tiles.by_key.counts() > 0
        parts.append(Part(tiles, resident, row))
        kept = resident.repeat_interleave(block)[: len(cols)]
        columns.append((row, cols[kept]))
        row += -(-int(kept.sum()) // block) * block + rng.randrange(3)
    joined = join_keys(parts)
    assert joined.visited == sum(part.tiles.visited for part in parts)
    width = len(joined.key_row) * block
    found = covered(joined.by_query, len(shards[0]), width, block)
    assert torch.equal(found, covered(joined.by_key, width, len(shards[0]), block).T)
    place = joined.key_row.long()[:, None] + torch.arange(block)
    real = torch.arange(block) < joined.key_len[:, None]
    for first, tokens in columns:
        expected = dense(mask.mask, mask.tracks.take(shards[0]), mask.tracks.take(tokens)).int()
        here = torch.zeros(len(shards[0]), row + block, dtype=torch.int32)
        here.index_add_(1, place[real], found[:, real.flatten()])
        assert torch.equal(here[:, first : first + len(tokens)], expected)
    for tiles in (joined.by_query, joined.by_key):
        assert len(tiles.ranges.unique(dim=0)) == len(tiles.ranges)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("window", [1, 24, 100])
def test_a_window_layer_receives_the_window_whatever_the_ring_degree(ranks, window):
    """At most W − 1 keys before the shard and the rest of a span that its end cuts, in whole blocks."""
    layout, block = Layout([[Span("causal", 700), Span("full", 40), Span("causal", 300)] * 4]), 8
    plan = marble.plan(
        layout, AttentionShape(2, 1, 16, window), ranks=ranks, schedule="sparse_a2a", order="contiguous", block=block
    )
    for rank, rows in enumerate(received(plan)):
        mine = plan.order.shard(rank)
        first, last = int(mine[0]), int(mine[-1]) + 1
        table = layout.table
        cut = (table.start < last) & (table.stop > last) & (table.seg >= 0)
        behind = int((table.stop[cut] - last).sum())
        opened = (table.start < first) & (table.stop > first) & (table.seg >= 0)
        before = max(window - 1, int((first - table.start[opened]).sum()))
        assert rows <= -(-before // block) * block + -(-behind // block) * block
    assert max(received(plan)) < layout.tokens / 2


def test_documents_on_their_own_ranks_receive_nothing():
    layout = Layout([[Span("causal", 64)] for _ in range(8)])
    plan = marble.plan(layout, SHAPE, ranks=4, schedule="sparse_a2a", block=16)
    assert plan.order.name == "balanced_samples"
    assert received(plan) == [0] * 4
    report = check([plan.schedules[0][rank] for rank in range(4)], plan.order, plan.masks[0])
    assert (report.received_rows, report.unused_rows) == (0, 0)


def test_the_bytes_of_the_three_schedules():
    layout = Layout.from_cu_seqlens([0, 300, 512])
    bytes_in = {}
    for name in ("ring", "sparse_a2a", "all_gather"):
        plan = marble.plan(layout, SHAPE, ranks=4, schedule=name, order="contiguous", block=16)
        summary = summarise([plan.schedules[0][rank] for rank in range(4)], SHAPE.head_dim)
        bytes_in[name] = int(summary.forward_bytes.sum()), int(summary.backward_bytes.sum())
        assert int(summary.visited.sum()) == int(plan.masks[0].work(16).sum())
    row = 2 * SHAPE.kv_heads * SHAPE.head_dim * 2
    assert bytes_in["ring"][0] == bytes_in["all_gather"][0] == 3 * 512 * row
    # A document of 300 tokens: ranks 1 and 2 read what lies before them of it; 300 to 512 is read by rank 3.
    assert bytes_in["sparse_a2a"][0] == (128 + 256 + (384 - 288)) * row
    assert bytes_in["sparse_a2a"][1] == bytes_in["sparse_a2a"][0] * 3  # the keys again, and float32 gradients back


def test_each_layer_has_its_own_schedule_under_one_order():
    layout = Layout([[Span("causal", 90), Span("full", 30), Span("causal", 60)], [Span("causal", 77)]])
    layers = [AttentionShape(2, 1, 16), AttentionShape(2, 1, 16, window=20)]
    plan = marble.plan(layout, layers, ranks=3, schedule=["ring", "sparse_a2a"], block=16)
    single = marble.plan(layout, layers, ranks=1)
    assert plan.order.name == "ptrr"
    x = [torch.randn(layout.tokens, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    for layer in range(2):
        results = []
        for made in (plan, single):
            out = made.unshard(marble.attention(*map(made.shard, x), made, layer=layer))
            results.append([out, *torch.autograd.grad(out.square().sum(), x)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
