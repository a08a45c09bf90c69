"""The order of deterministic sums: every tile is added in one order, which is that of the units of work, and no number
of thread blocks can end up waiting for one another."""

import copy
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import bounds_of

import marble
from marble import AttentionShape, Layout, Span
from marble.kernels.contract import Band, Touch, Varlen
from marble.kernels.cute.backward_config import Units
from marble.kernels.cute.predicates import BLOCK
from marble.kernels.cute.tickets import Ordered, ordered
from marble.kernels.cute.worklist import FULL_TILE, WorkList, lower
from marble.testing.layouts import whole_call
from marble.workloads import WORKLOADS, build

HALVES = {64: 1, 128: 2}
"""Tiles of a query block, by head dimension."""

each_halves = pytest.mark.parametrize("halves", HALVES.values(), ids=map(str, HALVES))


def visited(work: WorkList) -> Counter[tuple[int, ...]]:
    """(key row, key rows, query row, slot, rows, quarters) of all tiles."""
    found: Counter[tuple[int, ...]] = Counter()
    for row, rows, part, parts, run, runs, _, _ in work.items.tolist():
        for first, slot, inner, quarters in work.parts[part : part + parts].tolist():
            found[row, rows, first, slot, inner, quarters] += 1
        for first, blocks in work.runs[run : run + runs].tolist():
            for block in range(blocks):
                found[row, rows, first + BLOCK * block, FULL_TILE, BLOCK, 15] += 1
    return found


EACH = Units(0, 1)
"""Units of single heads."""


class Unit(NamedTuple):
    """What a unit adds, in its order: the counter and ticket of each of its turns, then of its keys (or None)."""

    turns: list[tuple[tuple[int, int], int]]
    keys: tuple[tuple[int, int], int] | None
    rows: range
    heads: int


def units(order: Ordered, halves: int, heads: int, kv_heads: int, plan: Units) -> Iterator[Unit]:
    """The units of a launch in the order in which they are fetched, as the kernel reads them."""
    group, lists = heads // kv_heads, order.lists
    at, items, done = 0, lists.items.tolist(), 0
    tickets, table = order.tickets.tolist(), order.units.tolist()
    while at < len(items):
        first, size = lists.sections[at].tolist()
        assert first == at
        for kv_head in range(kv_heads):
            pieces = [(member, plan.few, item) for member in range(0, group, plan.few) for item in range(at, at + size)]
            if not plan.apart:
                sizes = [group if done + i < plan.whole * kv_heads else plan.few for i in range(size)]
                pieces = [(m, each, at + i) for i, each in enumerate(sizes) for m in range(0, group, each)]
                done += size
            for member, each, item in pieces:
                row, rows, _, count, _, runs, full, _ = items[item]
                assert runs == full == 0
                counter, ticket, place = table[item]
                own = tickets[place : place + count * halves]
                for start in range(0, len(own), halves):
                    (number, _), *others = own[start : start + halves]
                    assert number % halves == 0
                    assert others in (
                        [[number, -1]] * (halves - 1),
                        [[number + i, own[start + i][1]] for i in range(1, halves)],
                    )
                own = [tile for tile in own if tile[1] >= 0]
                turn = None
                if ticket >= 0 or each < group:
                    turn = (kv_head, counter), max(ticket, 0) * group + member
                begin = kv_head * group + member
                turns = [((head, number), mine) for head in range(begin, begin + each) for number, mine in own]
                yield Unit(turns, turn, range(row, row + rows), each)
        at += size


def check(work: WorkList, halves: int, heads: int = 2, kv_heads: int = 1, plan: Units = EACH) -> Ordered:
    """A list's order adds the same tiles, one by one in the order of units, and never two units to the same keys."""
    order = ordered(work, halves)
    assert visited(order.lists) == visited(work)
    assert ordered(work, halves) is order
    rows = order.lists.parts[:, 0]
    for _, _, part, count, *_ in order.lists.items.tolist():
        assert (rows[part : part + count].diff() > 0).all(), "query blocks in their order"
    counted: dict[tuple[int, int], int] = defaultdict(int)
    keys: dict[tuple[int, int], int] = defaultdict(int)
    adders: dict[tuple[int, int], set[object]] = defaultdict(set)
    for number, unit in enumerate(units(order, halves, heads, kv_heads, plan)):
        for counter, ticket in unit.turns:
            assert ticket == counted[counter]
            counted[counter] += 1
        head = unit.turns[0][0][0] // (heads // kv_heads)
        for row in unit.rows:
            adders[head, row].add(unit.keys[0] if unit.keys else number)
        if unit.keys:
            counter, ticket = unit.keys
            assert ticket == keys[counter]
            keys[counter] += unit.heads
    assert all(len(each) == 1 for each in adders.values()), "rows that two units add to have one counter"
    served, keys_served = order.served(heads, kv_heads)
    assert served.shape == (heads, order.numbers)
    assert keys_served.shape == (kv_heads, order.counters)
    assert not served.any()
    assert all(number < order.numbers for _, number in counted)
    assert all(counter < order.counters for _, counter in keys)
    return order


def waits(some: Sequence[Unit], blocks: int, seed: int) -> int:
    """Run units on thread blocks that go on in a random order; how often one had to wait. Fails if none can go on."""
    chance = random.Random(seed)
    fetched, held = 0, 0
    at: dict[int, tuple[Unit, int]] = {}
    served: dict[object, int] = defaultdict(int)
    while True:
        for block in chance.sample(range(blocks), blocks):
            if block not in at and fetched < len(some):
                at[block], fetched = (some[fetched], 0), fetched + 1
        if not at:
            return held
        moved = False
        for block in chance.sample(sorted(at), chance.randint(1, len(at))) if chance.random() < 0.9 else sorted(at):
            unit, step = at[block]
            adds = [("dq", *add) for add in unit.turns] + ([("keys", *unit.keys)] if unit.keys else [])
            kind, counter, ticket = adds[step]
            if served[kind, counter] < ticket:
                held += 1
                continue
            assert served[kind, counter] == ticket
            served[kind, counter], moved = ticket + (unit.heads if kind == "keys" else 1), True
            at[block] = unit, step + 1
            if step + 1 == len(adds):
                del at[block]
        if not moved:
            stuck = [
                unit
                for unit, step in at.values()
                if step < len(unit.turns) and served["dq", unit.turns[step][0]] < unit.turns[step][1]
            ]
            waiting_for_keys = [
                unit
                for unit, step in at.values()
                if step == len(unit.turns) and unit.keys and served["keys", unit.keys[0]] < unit.keys[1]
            ]
            assert len(stuck) + len(waiting_for_keys) < len(at), "all thread blocks wait"


def workload(name: str, tokens: int = 3000) -> WorkList:
    window = 300 if name == "gemma_docs" else None
    return lower(whole_call(build(name, tokens, scale=WORKLOADS[name].demo_scale), window)).by_key


lengths = st.lists(st.integers(0, 500), min_size=1, max_size=4)


@given(st.sampled_from(list(Band)), lengths, lengths, st.integers(0, 5), st.sampled_from(list(HALVES.values())))
@settings(deadline=None)
def test_dense_sequences(band: Band, queries: list[int], keys: list[int], gap: int, halves: int) -> None:
    """Unaligned and empty ones, whose query blocks lie on a grid of their own."""
    keys = (keys * 4)[: len(queries)]
    bounds = [bounds_of(lengths, gap) for lengths in (queries, keys)]
    touch = torch.full((len(queries),), int(Touch.FIRST | Touch.LAST), dtype=torch.uint8)
    order = check(lower(Varlen(*bounds, band, touch)).by_key, halves)
    assert (order.units[:, 1] == -1).all(), "no other unit adds to these keys"


shared_keys = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=5)


@given(shared_keys, st.sampled_from(list(HALVES.values())))
@settings(deadline=None)
def test_sequences_that_share_keys(each: list[tuple[int, int, int]], halves: int) -> None:
    """As pieces of a sample do, which see keys of their own and common ones; on grids that do not match."""
    rows = torch.tensor([0, *(queries for _, _, queries in each)]).cumsum(0)
    queries = torch.stack([rows[:-1], rows[1:]], 1).int()
    keys = torch.tensor([[start, start + length] for start, length, _ in each], dtype=torch.int32)
    touch = torch.zeros(len(each), dtype=torch.uint8)
    work = lower(Varlen(queries, keys, Band.FULL, touch)).by_key
    order = check(work, halves, 4, 2, Units(0, 2))
    check(work, halves, 4, 2, Units(len(each) // 2, 1))
    waits(list(units(order, halves, 4, 2, Units(len(each) // 2, 1))), 3, len(each))
    starts, stops = work.items[:, 0], work.items[:, :2].sum(1)
    overlap = (starts[:, None] < stops) & (starts < stops[:, None])
    assert order.shared == (int(overlap.sum()) > len(starts))


@each_halves
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads(name: str, halves: int) -> None:
    work = workload(name)
    order = ordered(work, halves)
    assert not order.shared
    assert (order.units[:, 1] == -1).all()
    for plan in (Units(0, 1), Units(0, 2), Units(len(work.items) // 2, 1), Units(0, 1, apart=True)):
        check(work, halves, 4, 2, plan)
        launch = list(units(order, halves, 4, 2, plan))
        for blocks in (1, 2, 5, 132):
            held = waits(launch, blocks, seed=blocks)
            assert held == 0 or blocks > 1
            assert held > 0 or blocks < 132


@pytest.mark.parametrize("schedule", ["ring", "sparse_a2a", "chunked", "all_gather"])
@pytest.mark.parametrize("name", ["bagel_mix", "molmo_video", "gemma_docs"])
def test_every_call_of_a_plan_has_an_order(name: str, schedule: str) -> None:
    """Also dense calls whose sequences share keys."""
    layout = build(name, 3001, scale=WORKLOADS[name].demo_scale)
    plan = marble.plan(layout, AttentionShape(4, 2, 128), ranks=3, schedule=schedule)
    shared = 0
    for each in plan.schedules[0].values():
        for work in dict.fromkeys(each.works):
            lists = lower(work).by_key
            for halves in set(HALVES.values()):
                order = check(lists, halves, 4, 2, Units(0, 2))
                shared += int((order.units[:, 1] >= 0).sum())
            waits(list(units(order, halves, 4, 2, Units(0, 1))), 5, seed=each.rank)
    assert (shared > 0) == (schedule == "chunked"), "elsewhere one unit adds to a key block"


@given(lengths, st.integers(50, 400), st.sampled_from(list(HALVES.values())), st.sampled_from([1, 2, 5, 132]))
@settings(deadline=None, max_examples=30)
def test_windows_of_documents_never_stop(sizes: list[int], window: int, halves: int, blocks: int) -> None:
    layout = Layout.from_cu_seqlens([0, *torch.tensor([1 + size for size in sizes]).cumsum(0).tolist()])
    order = check(lower(whole_call(layout, window)).by_key, halves)
    waits(list(units(order, halves, 2, 1, Units(0, 1))), blocks, seed=window)


def test_a_unit_begins_with_the_query_block_that_no_other_is_at() -> None:
    """A causal document: the diagonal first; of a section, the last key block is fetched first."""
    order = ordered(lower(whole_call(Layout.from_cu_seqlens([0, 1024]))).by_key, 1)
    items, parts = order.lists.items, order.lists.parts
    assert items[:, 0].tolist() == list(range(7 * BLOCK, -1, -BLOCK))
    assert torch.equal(parts[items[:, 2].long(), 0], items[:, 0])
    first = order.tickets[order.units[:, 2].long(), 1]
    assert not first.any(), "so nobody waits to begin"


def test_tiles_of_a_block_share_a_turn_where_units_queue_up() -> None:
    """Three key blocks of an image begin with the same query block; those of a causal document do not."""
    layout = Layout([[Span("full", 3 * BLOCK)], [Span("causal", 3 * BLOCK)]])
    halves = HALVES[128]
    order = check(lower(whole_call(layout)).by_key, halves)
    numbers, tickets = order.tickets.unbind(1)
    image = numbers < 3 * halves
    assert int(image.sum()) == 3 * 3 * halves
    assert (tickets[image].view(-1, halves)[:, 1:] == -1).all()
    assert (tickets[~image] >= 0).all()


def test_nothing_visible() -> None:
    nothing = torch.tensor([[0, 0]], dtype=torch.int32)
    work = lower(Varlen(nothing, nothing, Band.FULL, torch.zeros(1, dtype=torch.uint8))).by_key
    order = ordered(work, 2)
    assert not len(order.lists.items)
    assert [x.shape[1] for x in order.served(4, 2)] == [0, 1]


def test_query_tiles_that_share_some_rows_are_refused() -> None:
    overlapping = torch.tensor([[0, 200], [100, 300]], dtype=torch.int32)
    keys = torch.tensor([[0, 128], [128, 256]], dtype=torch.int32)
    work = lower(Varlen(overlapping, keys, Band.FULL, torch.zeros(2, dtype=torch.uint8))).by_key
    with pytest.raises(ValueError, match=r"deterministic: two tiles .* begin with row 0 and row 100"):
        ordered(work, 2)


def test_lists_stay_what_they_were() -> None:
    work = workload("molmo_docs")
    before = copy.deepcopy(work)
    ordered(work, 2)
    for field in dataclasses.fields(work):
        one, other = getattr(work, field.name), getattr(before, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
