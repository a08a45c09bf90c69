"""Lists of work for the Hopper kernels: they compute the pairs of the calls that they were lowered from."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import bounds_of, predicate
from torch import Tensor

from marble import Layout
from marble.kernels.contract import Band, TileList, Tiles, Touch, Varlen
from marble.kernels.cute.predicates import BLOCK
from marble.kernels.cute.worklist import NOWHERE, WorkList, lower, lower_all
from marble.kernels.predicates import covered
from marble.testing.layouts import planned_storage, stored_mask, whole_call


def pairs(work: WorkList, outer_rows: int, inner_rows: int) -> Tensor:
    """How often a work list computes each pair of rows, int32 [outer rows, inner rows]."""
    count = torch.zeros(outer_rows + BLOCK, inner_rows + BLOCK, dtype=torch.int32)
    for row, rows, part, parts, run, runs, full, _ in work.items.tolist():
        assert 0 < rows <= BLOCK
        for first, slot, _, quarters in work.parts[part : part + parts].tolist():
            mask = predicate(work.predicates, slot)
            some = mask.unflatten(0, (2, -1)).unflatten(2, (2, -1)).any(3).any(1)
            assert [quarters >> i & 1 for i in range(4)] == some.flatten().tolist()
            if first == NOWHERE:
                assert not mask.any()
                assert parts == 1
                assert not runs
            else:
                count[row : row + BLOCK, first : first + BLOCK] += mask
        total = 0
        for first, blocks in work.runs[run : run + runs].tolist():
            assert rows == BLOCK
            count[row : row + BLOCK, first : first + BLOCK * blocks] += 1
            total += blocks
        assert total == full
    assert work.tiles == int(work.items[:, 3].sum() + work.items[:, 6].sum())
    assert not count[outer_rows:].any()
    assert not count[:, inner_rows:].any()
    return count[:outer_rows, :inner_rows]


def in_order(work: WorkList) -> None:
    """Sections lie together, those with the longest items first, and each begins with its longest item."""
    cost = ((work.items[:, 3] + work.items[:, 6]).float() + 0.1 * work.items[:, 3]).tolist()
    at, longest = 0, float("inf")
    while at < len(cost):
        first, items = work.sections[at].tolist()
        assert first == at
        assert (work.sections[at : at + items] == work.sections[at]).all()
        section = cost[at : at + items]
        assert section == sorted(section, reverse=True)
        assert longest >= section[0] > 0
        at, longest = at + items, section[0]
    assert at == len(work.sections) == len(cost)


lengths = st.lists(st.integers(0, 700), min_size=1, max_size=4)


@given(st.sampled_from(list(Band)), lengths, lengths, st.integers(0, 5))
def test_varlen_computes_its_band(band: Band, queries: list[int], keys: list[int], gap: int) -> None:
    keys = (keys * 4)[: len(queries)]
    bounds = [bounds_of(lengths, gap) for lengths in (queries, keys)]
    touch = torch.full((len(queries),), int(Touch.LAST), dtype=torch.uint8)
    work = lower(Varlen(*bounds, band, touch))
    q_rows, k_rows = (int(b.max()) + gap for b in bounds)
    expected = torch.zeros(q_rows, k_rows, dtype=torch.int32)
    for (q0, q1), (k0, k1) in zip(bounds[0].tolist(), bounds[1].tolist(), strict=True):
        inside = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        causal = inside.tril(k1 - k0 - (q1 - q0))
        expected[q0:q1, k0:k1] += {Band.FULL: inside, Band.CAUSAL: causal, Band.REVERSE_CAUSAL: ~causal}[band]
    assert torch.equal(pairs(work.by_query, q_rows, k_rows), expected)
    assert torch.equal(pairs(work.by_key, k_rows, q_rows), expected.T)
    for side in (work.by_query, work.by_key):
        in_order(side)
    assert (work.by_query.items[:, 7] == int(Touch.LAST)).all()
    ends = {row + rows for row, rows, *_ in work.by_query.items.tolist()}
    assert {q1 for q0, q1 in bounds[0].tolist() if q0 < q1} <= ends, "rows are touched even if they see nothing"
    assert (lower(Varlen(*bounds, band, touch * 0)).by_query.parts[:, 0] < NOWHERE).all()


def tile_list(run_ptr: list[int], runs: list[list[int]], part_ptr: list[int], parts: list[list[int]]) -> TileList:
    """A list whose partial tiles all compute columns 0 to 99."""
    tables = [torch.tensor(table, dtype=torch.int32) for table in (run_ptr, runs, part_ptr, parts)]
    tables[1], tables[3] = tables[1].reshape(-1, 2), tables[3].reshape(-1, 2)
    words = torch.full((1, BLOCK), 100 << 8, dtype=torch.int32)
    return TileList(*tables, words, torch.zeros(0, BLOCK, 4, dtype=torch.int32))


def tiles(runs: list[list[int]], key_row: list[int]) -> Tiles:
    """Two query blocks with one run each, and a partial tile against the last key block of 100 rows in the first. The
    lists by key are left empty."""
    by_query = tile_list([0, 1, 2], runs, [0, 1, 1], [[len(key_row) - 1, 0]])
    by_key = tile_list([0] * (len(key_row) + 1), [], [0] * (len(key_row) + 1), [])
    rows = torch.tensor(key_row, dtype=torch.int32)
    lengths = torch.full_like(rows, BLOCK)
    lengths[-1] = 100
    return Tiles(BLOCK, 2 * BLOCK, rows, lengths, by_query, by_key, torch.full((2,), 3, dtype=torch.uint8))


def test_runs_are_cut_where_key_blocks_do_not_follow_one_another() -> None:
    work = lower(tiles([[0, 4], [1, 2]], [0, 128, 300, 428, 1000])).by_query
    in_order(work)
    by_row = {row: (run, runs) for row, _, _, _, run, runs, _, _ in work.items.tolist()}
    found = {row: work.runs[run : run + runs].tolist() for row, (run, runs) in by_row.items()}
    assert found == {0: [[0, 2], [300, 2]], 128: [[128, 1], [300, 1]]}
    assert work.parts.tolist() == [[1000, 0, 100, 15]]


def test_tiles_keep_their_pairs() -> None:
    call = tiles([[0, 2], [1, 3]], [0, 128, 256, 384, 512])
    work = lower(call)
    assert torch.equal(pairs(work.by_query, 256, 612), covered(call.by_query, 256, 612, BLOCK))
    assert not len(work.by_key.items)
    assert lower(call) is work


def test_other_blocks_are_refused() -> None:
    call = dataclasses.replace(tiles([[0, 1], [0, 1]], [0, 64]), block=64)
    with pytest.raises(ValueError, match="blocks of 128"):
        lower(call)


@pytest.mark.parametrize("window", [None, 300])
def test_a_section_is_what_reads_the_same_keys(window: int | None) -> None:
    """Causal documents: queries of one with its keys, and keys with its queries, though a window may move along."""
    layout = Layout.from_cu_seqlens([0, 900, 1000, 2500])
    work = lower(whole_call(layout, window))
    if window is None:
        # Blocks of 128 from row 0: document 2 begins in block 7, which the third shares with both.
        assert work.by_query.items[:, 0].div(BLOCK).tolist() == [*range(19, 7, -1), 7, *range(6, -1, -1)]
    assert sorted(work.by_query.sections[:, 1].tolist()) == [8] * 8 + [12] * 12
    assert sorted(work.by_key.sections[:, 1].tolist()) == [7] * 7 + [13] * 13
    for side in (work.by_query, work.by_key):
        in_order(side)
        assert side.items[:, 0].unique().numel() == 20


def test_calls_lowered_together_are_those_lowered_alone() -> None:
    """A document's calls over shards of the keys, one of them empty, with a dense call among them."""
    layout = Layout.from_cu_seqlens([0, 700, 2100])
    stored = stored_mask(planned_storage(layout, None), None)
    tokens = torch.arange(2100)
    shards = [tokens[:900], tokens[:0], tokens[900:1200], tokens[1200:]]
    together, alone = ([stored.tiles(tokens, keys, BLOCK) for keys in shards] for _ in range(2))
    dense = Varlen.from_cu_seqlens(torch.tensor([0, 300]), torch.tensor([0, 500]), Band.FULL, Touch.FIRST)
    lower_all([together[0], dense, *together[1:], together[0]])
    for one, other, keys in zip(together, alone, shards, strict=True):
        for rows, cols, side, expected in (
            (2100, len(keys), lower(one).by_query, lower(other).by_query),
            (len(keys), 2100, lower(one).by_key, lower(other).by_key),
        ):
            assert torch.equal(pairs(side, rows, cols), pairs(expected, rows, cols))
            assert torch.equal(side.sections, expected.sections)
            kept = [0, 1, 3, 5, 6, 7]  # the tables that the others count in are shared
            assert torch.equal(side.items[:, kept], expected.items[:, kept])
