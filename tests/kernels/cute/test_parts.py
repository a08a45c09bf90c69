"""Lists cut into parts: together, the heads' units compute the pairs of the list that they were cut from."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import bounds_of, predicate
from torch import Tensor

from marble import Layout, Span
from marble.kernels.contract import Band, Touch, Varlen
from marble.kernels.cute.parts import PART, PartList, parts_of
from marble.kernels.cute.predicates import BLOCK, EVERY, NONE
from marble.kernels.cute.worklist import NOWHERE, WorkList, lower
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.testing.layouts import whole_call
from marble.workloads import WORKLOADS, build


def pairs(work: WorkList, rows: int, keys: int) -> Tensor:
    """How often a list of whole tiles computes each pair, int32 [rows, keys]."""
    count = torch.zeros(rows + BLOCK, keys + BLOCK, dtype=torch.int32)
    for row, _, part, parts, run, runs, _, _ in work.items.tolist():
        for first, slot, _, _ in work.parts[part : part + parts].tolist():
            if first != NOWHERE:
                count[row : row + BLOCK, first : first + BLOCK] += predicate(work.predicates, slot)
        for first, blocks in work.runs[run : run + runs].tolist():
            count[row : row + BLOCK, first : first + BLOCK * blocks] += 1
    return count[:rows, :keys]


GROUPS = (1, 2, 3)
"""Query heads of a key/value head: blocks, strips, both."""


def check(work: WorkList, rows: int, keys: int) -> None:
    """Strips, and blocks, of parts compute what the list does; each begins with a whole tile and has the right touch.
    Rows that neither see nor are touched may be left out."""
    expected, touches = pairs(work, rows, keys), {}
    for row, length, *_, touch in work.items.tolist():
        touches |= dict.fromkeys(range(row, row + length), touch)
    for group, together in product(GROUPS, (1, 2)):
        cut = parts_of(work, group=group, together=together)
        assert parts_of(work, group=group + 2 * (group > 1), together=together) is cut
        assert (len(cut.items) > cut.strips) <= (group != 2)
        assert (cut.strips > 0) <= (group > 1)
        kinds = [(PART, 0, cut.strips)] * (group > 1) + [(BLOCK, cut.strips, len(cut.items))] * (group != 2)
        for height, start, stop in kinds:
            count = torch.zeros(rows + BLOCK, keys + BLOCK, dtype=torch.int32)
            found = {}
            for item in cut.items[start:stop].tolist():
                row, length, *_, touch = item
                assert 0 < length <= height
                found |= dict.fromkeys(range(row, row + length), touch)
                check_item(cut, item, height, together, count)
            assert torch.equal(count[:rows, :keys], expected)
            assert found.items() <= touches.items()
            assert not any(touches[row] or expected[row].any() for row in touches.keys() - found.keys())
            assert (cut.sections[start:stop].sum(1) <= stop - start).all()


def check_item(cut: PartList, item: Sequence[int], height: int, together: int, count: Tensor) -> None:
    """Adds the pairs of a strip or block to ``count``."""
    row, length, part, partial, run, runs, full, _ = item
    every, none = (len(cut.predicates) + slot for slot in (EVERY, NONE))
    assert partial >= together or full > 0, "a whole tile comes first"
    own = cut.parts[part : part + partial].tolist()
    kinds = [start // (2 * BLOCK) for _, start in own]
    assert kinds.count(every) < together, "full parts make full tiles"
    assert kinds.count(none) == 0 or (full == 0 and partial == together), "nothing is only there to fill the first tile"
    for (first, start), slot in zip(own, kinds, strict=True):
        left, top = PART * (start // BLOCK % 2), start % BLOCK
        assert top in (0, PART)
        pairs_of_part = predicate(cut.predicates, slot)[top : top + height, left : left + PART]
        assert pairs_of_part.any() == (slot != none), "what has no pairs is left out"
        assert pairs_of_part.all() == (slot == every), "what has all pairs has no predicate"
        assert (first == NOWHERE) == (slot == none)
        if first != NOWHERE:
            count[row : row + height, first : first + PART] += pairs_of_part
    of = cut.runs[run : run + runs].tolist()
    assert sum(tiles for _, tiles, _ in of) == full
    for a, tiles, b in of:
        assert length == height
        for i in range(tiles):
            for first in (a, b)[:together]:
                first += i * PART * together
                count[row : row + height, first : first + PART] += 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads(name: str) -> None:
    layout, window = build(name, 3000, scale=WORKLOADS[name].demo_scale), 300 if name == "gemma_docs" else None
    check(lower(whole_call(layout, window)).by_query, layout.tokens, layout.tokens)


TOUCHES = [Touch.CARRY, Touch.FIRST, Touch.LAST, Touch.FIRST | Touch.LAST]

lengths = st.lists(st.integers(0, 500), min_size=1, max_size=4)


@given(st.sampled_from(list(Band)), lengths, lengths, st.integers(0, 5), st.sampled_from(TOUCHES))
@settings(deadline=None)
def test_dense_sequences(band: Band, queries: list[int], keys: list[int], gap: int, each: Touch) -> None:
    """Unaligned and empty ones, and rows that see nothing but are touched."""
    keys = (keys * 4)[: len(queries)]
    bounds = [bounds_of(lengths, gap) for lengths in (queries, keys)]
    touch = torch.full((len(queries),), int(each), dtype=torch.uint8)
    work = lower(Varlen(*bounds, band, touch)).by_query
    check(work, *(int(b.max()) + gap for b in bounds))


def test_masks_without_structure() -> None:
    """Predicates by bits; whole quarters among them, and a strip that sees nothing while its block does."""
    tokens = 900
    user = {"a": torch.randint(0, 3, (tokens,)), "b": torch.randint(0, 3, (tokens,))}
    user["a"][2 * BLOCK : 2 * BLOCK + PART] = 9
    user["a"][4 * BLOCK : 4 * BLOCK + PART] = 1
    user["b"][3 * BLOCK + PART : 5 * BLOCK] = 1
    stored = StoredMask(Storage.natural(Layout.from_cu_seqlens([0, tokens])), lambda q, k: q.a == k.b, user=user)
    tiles = stored.tiles(torch.arange(700), torch.arange(tokens), BLOCK)
    work = lower(tiles).by_query
    check(work, 700, tokens)
    for together in (1, 2):
        cut = parts_of(work, group=2, together=together)
        (blind,) = [item for item in cut.items.tolist() if item[0] == 2 * BLOCK]
        assert blind[3:7] == [together, blind[4], 0, 0]
        untouched = lower(replace(tiles, touch=torch.zeros_like(tiles.touch))).by_query
        check(untouched, 700, tokens)
        assert 2 * BLOCK not in parts_of(untouched, group=2, together=together).items[:, 0]
    assert len(cut.runs) > len(work.runs)


def test_a_window_has_two_partial_parts() -> None:
    """The diagonal's and the edge's, of 17 that see 64 rows: the rest of the four quarters is full or left out. In
    tiles of two, the parts with predicates are one of them, and the full part that is left over is half of another."""
    layout = Layout([[Span("causal", 4096)]])
    work = lower(whole_call(layout, 1024)).by_query
    for together, partial, full in ((1, 2, 15), (2, 3, 7)):
        cut = parts_of(work, group=2, together=together)
        inside = cut.items[cut.items[:, 0] >= 1024]
        assert (inside[:, 3] == partial).all()
        assert (inside[:, 6] == full).all()


def test_nothing_visible() -> None:
    nothing = torch.tensor([[0, 0]], dtype=torch.int32)
    work = lower(Varlen(nothing, nothing, Band.FULL, torch.zeros(1, dtype=torch.uint8))).by_query
    for group, together in product(GROUPS, (1, 2)):
        assert not len(parts_of(work, group=group, together=together).items)
