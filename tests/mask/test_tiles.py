"""Tiles: two paths to one answer, which is the mask."""

from dataclasses import fields
from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from marble.kernels.contract import TileList, Tiles, Touch
from marble.kernels.predicates import covered, tile_mask
from marble.layout import Layout, Span
from marble.mask.domains import dense
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.order.set_apart import set_apart
from marble.testing.layouts import (
    planned_storage,
    random_block,
    random_expression,
    random_layout,
    random_order,
    random_storage,
    random_window,
    stored_mask,
)

rngs = st.builds(Random, st.integers(0, 2**32 - 1))
NAMES = ("sample", "seg", "noise", "pos", "shot")


def random_shards(rng: Random, mask: StoredMask, block: int) -> tuple[Tensor, Tensor]:
    """Query and key positions: two ranks of a token order, or any tokens at all, now and then none."""
    tokens = len(mask.tracks)
    if rng.random() < 0.5:
        world = rng.randint(1, 4)
        order = random_order(rng, mask, world, block)
        return order.shard(rng.randrange(world)), order.shard(rng.randrange(world))
    density = rng.choice([0, 0.3, 0.7, 1])
    return tuple(torch.tensor([at for at in range(tokens) if rng.random() < density]).long() for _ in range(2))


def check_list(tiles: TileList, legal: Tensor, block: int) -> None:
    """One orientation: it covers the mask once, in runs of whole blocks and deduplicated predicates."""
    outer, inner = legal.shape
    assert torch.equal(covered(tiles, outer, inner, block), legal.int())
    assert tiles.outer == -(-outer // block)
    for part in (tiles.run_ptr, tiles.runs, tiles.part_ptr, tiles.parts, tiles.ranges, tiles.bits):
        assert part.dtype == torch.int32
    assert tiles.ranges.shape[1:] == (block,)
    assert tiles.bits.shape[1:] == (block, -(-block // 32))
    owner = torch.repeat_interleave(torch.arange(tiles.outer), tiles.run_ptr.diff().long())
    first, length = tiles.runs.T
    assert ((owner + 1) * block <= outer).all(), "a run of a ragged outer block"
    assert ((first + length) * block <= inner).all(), "a run with a ragged inner block"
    assert (length > 0).all()
    same = owner[1:] == owner[:-1]
    assert ((first + length)[:-1] < first[1:])[same].all(), "neighbouring runs are not joined, or out of order"
    outer_of_part = torch.repeat_interleave(torch.arange(tiles.outer), tiles.part_ptr.diff().long())
    assert (
        outer_of_part[1:] * (inner + 1) + tiles.parts[1:, 0] > outer_of_part[:-1] * (inner + 1) + tiles.parts[:-1, 0]
    ).all()
    for row, (column, slot) in zip(outer_of_part.tolist(), tiles.parts.tolist(), strict=True):
        part = tile_mask(tiles, slot, block)
        whole = (row + 1) * block <= outer and (column + 1) * block <= inner
        assert part.any(), "an empty tile is listed"
        assert not (whole and part.all()), "a full tile is not in a run"
        assert not part[outer - row * block :].any()
        assert not part[:, inner - column * block :].any()
        if slot < 0:
            edges = torch.nn.functional.pad(part.to(torch.int8), (1, 1)).diff(dim=1) == 1
            assert (edges.sum(1) > 2).any(), "bits where two ranges would do"
    slots = tiles.parts[:, 1].long()
    for table, used in ((tiles.ranges, slots[slots >= 0]), (tiles.bits, ~slots[slots < 0])):
        assert len(torch.unique(table, dim=0)) == len(table), "equal predicates have two slots"
        assert torch.equal(used.unique(), torch.arange(len(table))), "a slot is out of range or unused"


def check_tiles(mask: StoredMask, rows: Tensor, cols: Tensor, block: int) -> Tiles:
    tiles = mask.tiles(rows, cols, block)
    legal = dense(mask.mask, mask.tracks.take(rows), mask.tracks.take(cols))
    check_list(tiles.by_query, legal, block)
    check_list(tiles.by_key, legal.T, block)
    assert (tiles.block, tiles.query_rows) == (block, len(rows))
    starts = list(range(0, len(cols), block))
    assert tiles.key_row.tolist() == starts
    assert tiles.key_len.tolist() == [min(block, len(cols) - start) for start in starts]
    assert tiles.touch.tolist() == [Touch.FIRST | Touch.LAST] * -(-len(rows) // block)
    assert tiles.visited == int(tiles.by_key.counts().sum()) == int(tiles.by_query.counts().sum())
    return tiles


def assert_identical(one: Tiles, other: Tiles) -> None:
    def compare(left: object, right: object, name: str) -> None:
        if isinstance(left, Tensor):
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), f"{name}: {left.tolist()} and {right.tolist()}"
        elif isinstance(left, TileList | Tiles):
            for field in fields(left):
                compare(getattr(left, field.name), getattr(right, field.name), f"{name}.{field.name}")
        else:
            assert left == right, name

    compare(one, other, "tiles")


@settings(max_examples=250)
@given(rng=rngs)
def test_ranges_and_summaries_give_the_same_tiles(rng):
    layout, window, block = random_layout(rng), random_window(rng), random_block(rng)
    storage = random_storage(rng, layout) if rng.random() < 0.3 else planned_storage(layout, window)
    fast, slow = (stored_mask(storage, window, ranges=ranges) for ranges in (True, False))
    rows, cols = random_shards(rng, fast, block)
    note(f"{layout.to_json()}, window {window}, block {block}, stored {storage.span_order.tolist()}")
    note(f"rows {rows.tolist()}, cols {cols.tolist()}")
    assert_identical(check_tiles(fast, rows, cols, block), slow.tiles(rows, cols, block))


@settings(max_examples=100)
@given(rng=rngs)
def test_tiles_of_all_shards_are_those_of_each(rng):
    """One pass over the keys of all ranks: the same tiles as shard by shard, from ranges and in general."""
    layout, window, block, world = random_layout(rng), random_window(rng), random_block(rng), rng.randint(1, 5)
    storage = random_storage(rng, layout) if rng.random() < 0.3 else planned_storage(layout, window)
    fast, slow = (stored_mask(storage, window, ranges=ranges) for ranges in (True, False))
    order = random_order(rng, fast, world, block)
    note(f"{layout.to_json()}, window {window}, block {block}, {order.name}, pieces {order.pieces.tolist()}")
    rows = order.shards[rng.randrange(world)]
    joint, general = (mask.tiles_of(rows, order.shards, block) for mask in (fast, slow))
    for one, other, shard in zip(joint, general, order.shards, strict=True):
        assert_identical(one, other)
        alone = fast.tiles_of(rows, [shard], block)[0]
        for name in ("by_query", "by_key"):
            mine, theirs = getattr(one, name), getattr(alone, name)
            for field in ("run_ptr", "runs", "part_ptr"):
                assert torch.equal(getattr(mine, field), getattr(theirs, field))
            assert torch.equal(mine.parts[:, 0], theirs.parts[:, 0])
            slots = zip(mine.parts[:, 1].tolist(), theirs.parts[:, 1].tolist(), strict=True)
            assert all(torch.equal(tile_mask(mine, a, block), tile_mask(theirs, b, block)) for a, b in slots)
    for name in ("by_query", "by_key"):
        assert len({id(getattr(tiles, name).ranges) for tiles in joint}) == 1, "the shards share one table"
        table = getattr(joint[0], name).ranges
        used = torch.cat([getattr(tiles, name).parts[:, 1] for tiles in joint]).long()
        assert torch.equal(used[used >= 0].unique(), torch.arange(len(table))), "a slot is unused"
        assert len(table.unique(dim=0)) == len(table)


@settings(max_examples=120)
@given(rng=rngs)
def test_tiles_of_users_masks(rng):
    layout, block, expression = random_layout(rng, samples=3), random_block(rng), random_expression(rng, NAMES)
    mask = stored_mask(Storage.natural(layout), user=expression)
    rows, cols = random_shards(rng, mask, block)
    note(f"{layout.to_json()}, block {block}, {expression}")
    note(f"rows {rows.tolist()}, cols {cols.tolist()}")
    check_tiles(mask, rows, cols, block)


@settings(max_examples=80)
@given(rng=rngs)
def test_work_is_the_number_of_visited_tiles(rng):
    layout, window, block = random_layout(rng), random_window(rng), random_block(rng)
    user = random_expression(rng, NAMES) if rng.random() < 0.3 else None
    mask = stored_mask(planned_storage(layout, window), window if user is None else None, user=user)
    note(f"{layout.to_json()}, window {window}, block {block}, {user}")
    everything = torch.arange(layout.tokens)
    assert torch.equal(mask.work(block), mask.tiles(everything, everything, block).by_query.counts())


PACK = Layout(
    [
        [Span("causal", 150), Span("group", 70), Span("causal", 33), Span("group", 90)],
        [Span("causal", 20), Span("noise", 140), Span("full", 140), Span("causal", 9)],
        [Span("pad", 40)],
    ]
)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_tiles_of_a_pack(block, window):
    """Blocks of the size that kernels use: full runs, ragged ends, two ranges per row, high bytes in use."""
    storage = planned_storage(PACK, window)
    everything = torch.arange(PACK.tokens)
    tiles = check_tiles(stored_mask(storage, window), everything, everything, block)
    assert_identical(tiles, stored_mask(storage, window, ranges=False).tiles(everything, everything, block))
    assert tiles.by_query.partial > 0
    if block < 128:
        assert tiles.by_query.full > 0


def test_planned_packs_need_no_bits():
    everything = torch.arange(PACK.tokens)
    tiles = stored_mask(set_apart(PACK)).tiles(everything, everything, 64)
    assert not len(tiles.by_query.bits)
    assert not len(tiles.by_key.bits)


@pytest.mark.parametrize(("block", "bits"), [(4, False), (9, True), (33, True), (128, True)])
def test_more_than_two_ranges_become_bits(block, bits):
    layout = Layout([[Span("causal", 300)]])
    mask = stored_mask(Storage.natural(layout), user="(q.pos - k.pos) % 3 == 0")
    everything = torch.arange(300)
    tiles = check_tiles(mask, everything, everything, block)
    assert bool(len(tiles.by_query.bits)) is bool(len(tiles.by_key.bits)) is bits
    # (i - j) % 3 repeats itself: three distinct tiles, and those at the ragged ends.
    assert len(tiles.by_query.bits) + len(tiles.by_query.ranges) <= 12


def test_block_1_has_runs_only():
    layout = Layout([[Span("causal", 4), Span("group", 3), Span("causal", 2), Span("group", 2)]])
    everything = torch.arange(layout.tokens)
    tiles = check_tiles(stored_mask(set_apart(layout)), everything, everything, 1)
    assert tiles.by_query.partial == 0


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(("rows", "cols"), [(0, 0), (0, 7), (7, 0)])
def test_empty_shards(rows, cols, ranges):
    layout = Layout([[Span("causal", 7)]])
    mask = stored_mask(Storage.natural(layout), ranges=ranges)
    tiles = check_tiles(mask, torch.arange(rows), torch.arange(cols), 4)
    assert tiles.visited == 0


def test_shards_without_a_legal_pair():
    layout = Layout.from_cu_seqlens([0, 8, 16])
    for ranges in (True, False):
        tiles = check_tiles(
            stored_mask(Storage.natural(layout), ranges=ranges), torch.arange(8), torch.arange(8, 16), 4
        )
        assert tiles.visited == 0


@pytest.mark.parametrize("block", [0, 129, -1])
def test_blocks_that_do_not_fit_are_refused(block):
    mask = stored_mask(Storage.natural(Layout([[Span("causal", 7)]])))
    with pytest.raises(ValueError, match="block"):
        mask.tiles(torch.arange(7), torch.arange(7), block)
