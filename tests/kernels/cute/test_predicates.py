"""Predicates packed for the kernels: the pairs of the tile lists that they were packed from."""

from types import SimpleNamespace

import torch
from sequences import predicate

from marble import Layout
from marble.kernels.cute.predicates import BLOCK, EVERY, NONE, packed, quarters
from marble.kernels.cute.worklist import lower, lower_all
from marble.kernels.predicates import tile_mask
from marble.mask.shards import Shard
from marble.mask.storage import Storage
from marble.testing.layouts import stored_mask


def test_bits_and_ranges() -> None:
    """Random ones, and all and nothing."""
    limits = torch.randint(0, BLOCK + 1, (7, BLOCK, 4), dtype=torch.int32)
    limits[0], limits[1], limits[2, :, 1::2] = 0, BLOCK, BLOCK
    ranges = (limits << torch.tensor([0, 8, 16, 24], dtype=torch.int32)).sum(2, dtype=torch.int32)
    bits = torch.randint(-(2**31), 2**31, (5, BLOCK, 4), dtype=torch.int64).int()
    bits[0], bits[1] = 0, -1
    table = packed(ranges, bits)
    assert table.shape == (7 + 5 + 2, 2, BLOCK, 4)
    assert table.is_contiguous()
    tiles = SimpleNamespace(ranges=ranges, bits=bits)
    for slot in range(12):
        assert torch.equal(predicate(table, slot), tile_mask(tiles, slot if slot < 7 else ~(slot - 7), BLOCK)), slot
    assert predicate(table, EVERY).all()
    assert not predicate(table, NONE).any()
    for slot, found in enumerate(quarters(table != 0).tolist()):
        some = predicate(table, slot).unflatten(0, (2, -1)).unflatten(2, (2, -1)).any(3).any(1)
        assert [found >> i & 1 for i in range(4)] == some.flatten().tolist()


def test_lists_that_share_predicates_share_the_table() -> None:
    """As the steps of a ring do."""
    shards = [Shard.of(rows) for rows in torch.arange(2000).split(512)]
    mask = stored_mask(Storage.natural(Layout.from_cu_seqlens([0, 300, 2000])))
    lists = [lower(call) for call in mask.tiles_of(shards[1], shards, BLOCK)]
    lower_all(calls := mask.tiles_of(shards[1], shards, BLOCK))
    for side in ("by_query", "by_key"):
        tables = [getattr(lower(call), side).predicates for call in calls]
        assert all(table is tables[0] for table in tables)
        for alone, table in zip(lists, tables, strict=True):
            assert torch.equal(getattr(alone, side).predicates, table)
