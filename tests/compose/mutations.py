"""Ways to break a schedule, one at a time.

A mutation takes a random generator and the schedules of all ranks, and gives broken ones, or None where a schedule
offers nothing to break. Buffers keep their sizes, so that what is left to find is in the steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from marble.compose.schedule import Kind, Pass, Rows, Schedule, Step, Transfer
from marble.kernels.contract import TileList, Tiles, Touch

Schedules = list[Schedule]


@dataclass(frozen=True)
class Site:
    """One entry of one step: the calls, transfers, clears or adds of a rank's pass."""

    rank: int
    step: int
    field: str
    index: int


def steps_of(schedules: Schedules, which: str, rank: int) -> tuple[Step, ...]:
    return getattr(schedules[rank], which).steps


def with_steps(schedules: Schedules, which: str, rank: int, steps: list[Step]) -> Schedules:
    old: Pass = getattr(schedules[rank], which)
    new = replace(schedules[rank], **{which: replace(old, steps=tuple(steps))})
    return [*schedules[:rank], new, *schedules[rank + 1 :]]


def with_entries(schedules: Schedules, which: str, site: Site, change: Callable[[list], None]) -> Schedules:
    """The schedules with ``change`` applied to the list of entries that a site lies in."""
    steps = list(steps_of(schedules, which, site.rank))
    entries = list(getattr(steps[site.step], site.field))
    change(entries)
    steps[site.step] = replace(steps[site.step], **{site.field: tuple(entries)})
    return with_steps(schedules, which, site.rank, steps)


def sites(schedules: Schedules, which: str, field: str) -> Iterator[tuple[Site, Any]]:
    for rank in range(len(schedules)):
        for step, current in enumerate(steps_of(schedules, which, rank)):
            for index, entry in enumerate(getattr(current, field)):
                yield Site(rank, step, field, index), entry


def pick(rng: Random, schedules: Schedules, which: str, field: str, fits: Callable[[Any], bool] = bool) -> Any:
    found = [(site, entry) for site, entry in sites(schedules, which, field) if fits(entry)]
    return rng.choice(found) if found else (None, None)


def anything(_: Any) -> bool:
    return True


def drop(field: str, fits: Callable[[Any], bool] = anything):
    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        site, _ = pick(rng, schedules, which, field, fits)
        return site and with_entries(schedules, which, site, lambda entries: entries.pop(site.index))

    return mutate


def double(field: str, fits: Callable[[Any], bool] = anything):
    """Once more, in the same step or a later one."""

    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        site, entry = pick(rng, schedules, which, field, fits)
        if site is None:
            return None
        step = rng.randrange(site.step, len(steps_of(schedules, which, site.rank)))
        return with_entries(schedules, which, replace(site, step=step), lambda entries: entries.append(entry))

    return mutate


def delay(field: str):
    """In another step."""

    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        site, entry = pick(rng, schedules, which, field)
        count = len(steps_of(schedules, which, site.rank)) if site else 0
        if count < 2:
            return None
        other = rng.choice([step for step in range(count) if step != site.step])
        schedules = with_entries(schedules, which, site, lambda entries: entries.pop(site.index))
        return with_entries(schedules, which, replace(site, step=other), lambda entries: entries.append(entry))

    return mutate


def elsewhere(rng: Random, schedules: Schedules, which: str, rank: int, rows: Rows) -> Rows | None:
    """As many rows of the same buffer, but others: one further, or anywhere."""
    size = getattr(schedules[rank], which).buffers_by_name[rows.buffer].rows
    starts = [start for start in range(size - len(rows) + 1) if start != rows.start]
    if not starts:
        return None
    near = [start for start in starts if abs(start - rows.start) == 1]
    # What another entry of the pass uses is the likeliest mistake: the other inbox.
    used = {r.start for s in steps_of(schedules, which, rank) for t in s.transfers for r in (t.src, t.dst)}
    likely = [start for start in starts if start in used]
    start = rng.choice(rng.choice([options for options in (starts, near, likely) if options]))
    return replace(rows, start=start, stop=start + len(rows))


def move_rows(field: str, name: str):
    """An entry that uses other rows of its buffer."""

    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        site, entry = pick(rng, schedules, which, field, lambda entry: getattr(entry, name) is not None)
        rows = site and elsewhere(rng, schedules, which, site.rank, getattr(entry, name))
        if rows is None:
            return None
        return with_entries(
            schedules,
            which,
            site,
            lambda entries: entries.__setitem__(site.index, replace(entry, **{name: rows})),
        )

    return mutate


def on_both_sides(change: Callable[[Random, Schedules, str, Any], Any]):
    """A transfer changed alike where it is sent and where it is received; None drops it."""

    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        site, transfer = pick(rng, schedules, which, "transfers")
        if site is None:
            return None
        new = change(rng, schedules, which, transfer)
        if new is False:
            return None

        def swap(entries: list) -> None:
            at = entries.index(transfer)
            entries[at : at + 1] = [] if new is None else [new]

        for rank in {transfer.source, transfer.target}:
            schedules = with_entries(schedules, which, replace(site, rank=rank), swap)
        return schedules

    return mutate


def lands_elsewhere(rng: Random, schedules: Schedules, which: str, transfer: Any) -> Any:
    rows = elsewhere(rng, schedules, which, transfer.target, transfer.dst)
    return rows is not None and replace(transfer, dst=rows)


def leaves_elsewhere(rng: Random, schedules: Schedules, which: str, transfer: Any) -> Any:
    rows = elsewhere(rng, schedules, which, transfer.source, transfer.src)
    return rows is not None and replace(transfer, src=rows)


def is_shorter(_: Random, __: Schedules, ___: str, transfer: Any) -> Any:
    short = [replace(rows, stop=rows.stop - 1) for rows in (transfer.src, transfer.dst)]
    return replace(transfer, src=short[0], dst=short[1])


def leaves_its_buffer(_: Random, schedules: Schedules, which: str, transfer: Any) -> Any:
    size = getattr(schedules[transfer.source], which).buffers_by_name[transfer.src.buffer].rows
    return replace(transfer, src=replace(transfer.src, start=size - len(transfer.src) + 1, stop=size + 1))


def moves_some_heads(_: Random, schedules: Schedules, which: str, transfer: Any) -> Any:
    if getattr(schedules[0], which).buffers_by_name[transfer.src.buffer].heads == 1:
        return False
    return replace(transfer, src=replace(transfer.src, heads=(0, 1)), dst=replace(transfer.dst, heads=(0, 1)))


def swap_steps(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
    """Two steps of all ranks in each other's place."""
    count = len(steps_of(schedules, which, 0))
    if count < 2:
        return None
    one, other = rng.sample(range(count), 2)
    for rank in range(len(schedules)):
        steps = list(steps_of(schedules, which, rank))
        steps[one], steps[other] = steps[other], steps[one]
        schedules = with_steps(schedules, which, rank, steps)
    return schedules


def change_call(change: Callable[[Random, Any], Any], kind: type = object):
    """A call whose work is of a kind, changed; ``change`` answers None for one that offers nothing."""

    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        found = list(sites(schedules, which, "calls"))
        rng.shuffle(found)
        for site, call in found:
            new = change(rng, call) if isinstance(call.work, kind) else None
            if new is not None:
                return with_entries(
                    schedules, which, site, lambda entries, at=site.index, new=new: entries.__setitem__(at, new)
                )
        return None

    return mutate


def flip_touch(flag: Touch):
    def change(rng: Random, call: Any) -> Any:
        work = call.work
        counts = work.by_query.counts() if isinstance(work, Tiles) else work.queries[:, 1] - work.queries[:, 0]
        busy = (counts > 0).nonzero().flatten().tolist()
        touch = work.touch.clone()
        touch[rng.choice(busy)] ^= int(flag)
        return replace(call, work=replace(work, touch=touch))

    return change_call(change)


def edit_list(side: str, edit: Callable[[Random, TileList, int], TileList | None]):
    def change(rng: Random, call: Any) -> Any:
        tiles = edit(rng, getattr(call.work, side), call.work.block)
        return None if tiles is None else replace(call, work=replace(call.work, **{side: tiles}))

    return change_call(change, Tiles)


def partial_word(rng: Random, tiles: TileList, block: int) -> TileList | None:
    """One row of one partial tile computes something else."""
    ranges, bits = tiles.ranges.clone(), tiles.bits.clone()
    if not tiles.partial:
        return None
    owner = torch.repeat_interleave(torch.arange(tiles.outer), tiles.part_ptr.diff().long())
    at = rng.randrange(tiles.partial)
    slot = int(tiles.parts[at, 1])
    if slot < 0:
        word = bits[~slot]
        row = rng.choice((word != 0).any(1).nonzero().flatten().tolist())
        word[row] = 0
    else:
        word = ranges[slot]
        row = rng.choice((word != 0).nonzero().flatten().tolist())
        low, high = int(word[row]) & 255, int(word[row]) >> 8 & 255
        # Less is always wrong; the empty range is (0, 0).
        low, high = (0, 0) if high - low == 1 else (low, high - 1)
        word[row] = int(word[row]) & ~0xFFFF | low | high << 8
    assert owner[at] < tiles.outer
    assert block == tiles.ranges.shape[1]
    return replace(tiles, ranges=ranges, bits=bits)


def _with_runs(tiles: TileList, runs: Tensor, owner: Tensor) -> TileList:
    ptr = torch.searchsorted(owner, torch.arange(tiles.outer + 1)).int()
    return replace(tiles, runs=runs, run_ptr=ptr)


def _owner(ptr: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff().long())


def shorten_run(rng: Random, tiles: TileList, _: int) -> TileList | None:
    if not len(tiles.runs):
        return None
    runs, owner, at = tiles.runs.clone(), _owner(tiles.run_ptr), rng.randrange(len(tiles.runs))
    runs[at, 1] -= 1
    keep = runs[:, 1] > 0
    return _with_runs(tiles, runs[keep], owner[keep])


def shift_run(rng: Random, tiles: TileList, _: int) -> TileList | None:
    found = (tiles.runs[:, 0] > 0).nonzero().flatten().tolist()
    if not found:
        return None
    runs = tiles.runs.clone()
    runs[rng.choice(found), 0] -= 1
    return replace(tiles, runs=runs)


def double_run(rng: Random, tiles: TileList, _: int) -> TileList | None:
    if not len(tiles.runs):
        return None
    at = rng.randrange(len(tiles.runs))
    index = torch.tensor([*range(at + 1), *range(at, len(tiles.runs))])
    return _with_runs(tiles, tiles.runs[index], _owner(tiles.run_ptr)[index])


def drop_part(rng: Random, tiles: TileList, _: int) -> TileList | None:
    if not tiles.partial:
        return None
    keep = torch.ones(tiles.partial, dtype=torch.bool)
    keep[rng.randrange(tiles.partial)] = False
    owner = _owner(tiles.part_ptr)[keep]
    return replace(
        tiles, parts=tiles.parts[keep], part_ptr=torch.searchsorted(owner, torch.arange(tiles.outer + 1)).int()
    )


def query_rows(_: Random, call: Any) -> Any:
    busy = call.work.by_query.counts() > 0
    last = call.work.query_rows - 1
    short = bool(busy[-1]) and last > (len(busy) - 1) * call.work.block
    return replace(call, work=replace(call.work, query_rows=last)) if short else None


def key_row(rng: Random, call: Any) -> Any:
    """A key block with the rows of its neighbour."""
    row = call.work.key_row.clone()
    found = [at for at in range(len(row) - 1) if call.work.key_len[at] == call.work.key_len[at + 1]]
    if not found:
        return None
    at = rng.choice(found)
    row[at] = row[at + 1]
    return replace(call, work=replace(call.work, key_row=row))


def key_len(_: Random, call: Any) -> Any:
    """The last key block one row short."""
    length = call.work.key_len.clone()
    length[-1] -= 1
    return replace(call, work=replace(call.work, key_len=length)) if length[-1] > 0 else None


def listed_twice(rng: Random, call: Any) -> Any:
    """A key block that is listed again under another number, with the same tiles."""
    work = call.work
    blocks, at = len(work.key_row), rng.randrange(len(work.key_row))
    if not int(work.by_key.counts()[at]):
        return None
    again = torch.tensor([*range(blocks), at])
    by_key = work.by_key
    for name in ("run", "part"):
        ptr, entries = getattr(by_key, f"{name}_ptr"), getattr(by_key, f"{name}s")
        more = entries[int(ptr[at]) : int(ptr[at + 1])]
        changed = torch.cat([ptr, ptr[-1:] + len(more)]).int()
        by_key = replace(by_key, **{f"{name}_ptr": changed, f"{name}s": torch.cat([entries, more])})
    by_query = work.by_query
    for name in ("run", "part"):
        ptr, entries, owner = getattr(by_query, f"{name}_ptr"), getattr(by_query, f"{name}s"), None
        owner = _owner(ptr)
        if name == "run":
            hit = (entries[:, 0] <= at) & (at < entries.sum(1))
            more = torch.tensor([[blocks, 1]]).expand(int(hit.sum()), 2)
        else:
            hit = entries[:, 0] == at
            more = torch.stack([torch.full_like(entries[hit, 1], blocks), entries[hit, 1]], 1)
        owner, joined = torch.cat([owner, owner[hit]]), torch.cat([entries, more]).int()
        order = torch.argsort(owner, stable=True)
        changed = torch.searchsorted(owner[order], torch.arange(by_query.outer + 1)).int()
        by_query = replace(by_query, **{f"{name}_ptr": changed, f"{name}s": joined[order]})
    rows, lengths = work.key_row[again], work.key_len[again]
    return replace(call, work=replace(work, key_row=rows, key_len=lengths, by_key=by_key, by_query=by_query))


def other_buffers(rng: Random, call: Any) -> Any:
    names = {"q": "dout", "out": "q"} if rng.random() < 0.5 else {"lse": "delta", "delta": "lse"}
    return replace(call, **names)


def clear_of(*buffers: str) -> Callable[[Rows], bool]:
    return lambda rows: len(rows) > 0 and rows.buffer in buffers


def input_is_cleared(*names: str):
    """Before or while calls read it."""

    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        ranks = [rank for rank, schedule in enumerate(schedules) if schedule.tokens[rank]]
        rank = rng.choice(ranks)
        rows = Rows(rng.choice(names), 0, schedules[rank].tokens[rank])
        site = Site(rank, rng.randrange(len(steps_of(schedules, which, rank))), "clears", 0)
        return with_entries(schedules, which, site, lambda entries: entries.append(rows))

    return mutate


def result_is_overwritten(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
    """A row of a result, with another row of it, in the last step."""
    ranks = [rank for rank, schedule in enumerate(schedules) if schedule.tokens[rank] > 1]
    if not ranks:
        return None
    rank = rng.choice(ranks)
    name = rng.choice(["out", "lse"] if which == "forward" else ["dq", "dkv"])
    one, other = rng.sample(range(schedules[rank].tokens[rank]), 2)
    move = Transfer(rank, Rows(name, one, one + 1), rank, Rows(name, other, other + 1))
    site = Site(rank, len(steps_of(schedules, which, rank)) - 1, "transfers", 0)
    return with_entries(schedules, which, site, lambda entries: entries.append(move))


def rounded_sums(rng: Random, schedules: Schedules, which: str) -> Schedules:
    """Gradients that are summed in the type of the inputs."""
    old = rng.choice([Kind.TOKEN_SUMS, Kind.PAIR_SUMS])
    kinds = {old: Kind.TOKENS if old is Kind.TOKEN_SUMS else Kind.PAIRS}

    def change(declared: Pass) -> Pass:
        return replace(declared, buffers=tuple(replace(b, kind=kinds.get(b.kind, b.kind)) for b in declared.buffers))

    return [replace(s, **{which: change(getattr(s, which))}) for s in schedules]


FORWARD, BACKWARD, BOTH = ("forward",), ("backward",), ("forward", "backward")

MUTATIONS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "a call is dropped": (BOTH, drop("calls")),
    "a call is made twice": (BOTH, double("calls")),
    "a call comes in another step": (BOTH, delay("calls")),
    "a call reads other keys": (BOTH, move_rows("calls", "kv")),
    "a call adds to other rows": (BACKWARD, move_rows("calls", "dkv")),
    "a call reads other buffers": (BACKWARD, change_call(other_buffers)),
    "a transfer lands elsewhere": (BOTH, on_both_sides(lands_elsewhere)),
    "a transfer leaves from elsewhere": (BOTH, on_both_sides(leaves_elsewhere)),
    "a transfer is dropped": (BOTH, on_both_sides(lambda *_: None)),
    "a transfer is dropped on one side": (BOTH, drop("transfers")),
    "a transfer is a row short": (BOTH, on_both_sides(is_shorter)),
    "a transfer moves some heads only": (BOTH, on_both_sides(moves_some_heads)),
    "a transfer leaves its buffer": (BOTH, on_both_sides(leaves_its_buffer)),
    "steps are swapped": (BOTH, swap_steps),
    "an add is dropped": (BACKWARD, drop("adds")),
    "an add is made twice": (BACKWARD, double("adds")),
    "an add comes in another step": (BACKWARD, delay("adds")),
    "an add reads other rows": (BACKWARD, move_rows("adds", "src")),
    "an add goes to other rows": (BACKWARD, move_rows("adds", "dst")),
    "a clear of out is dropped": (FORWARD, drop("clears", clear_of("out"))),
    "a clear of lse is dropped": (FORWARD, drop("clears", clear_of("lse"))),
    "a clear of dq is dropped": (BACKWARD, drop("clears", clear_of("dq"))),
    "a clear of dkv is dropped": (BACKWARD, drop("clears", clear_of("dkv"))),
    "out is cleared again": (FORWARD, double("clears", clear_of("out"))),
    "dq is cleared again": (BACKWARD, double("clears", clear_of("dq"))),
    "dkv is cleared again": (BACKWARD, double("clears", clear_of("dkv"))),
    "queries are cleared": (BOTH, input_is_cleared("q")),
    "keys are cleared": (BOTH, input_is_cleared("kv")),
    "an input of the backward pass is cleared": (BACKWARD, input_is_cleared("dout", "lse", "delta")),
    "a result is overwritten": (BOTH, result_is_overwritten),
    "a first touch is wrong": (FORWARD, flip_touch(Touch.FIRST)),
    "a last touch is wrong": (FORWARD, flip_touch(Touch.LAST)),
    "a partial word is changed": (BOTH, edit_list("by_query", partial_word)),
    "a partial word by key is changed": (BACKWARD, edit_list("by_key", partial_word)),
    "a run is shortened": (BOTH, edit_list("by_query", shorten_run)),
    "a run by key is shortened": (BACKWARD, edit_list("by_key", shorten_run)),
    "a run begins elsewhere": (BOTH, edit_list("by_query", shift_run)),
    "a run by key begins elsewhere": (BACKWARD, edit_list("by_key", shift_run)),
    "a run is listed twice": (BOTH, edit_list("by_query", double_run)),
    "a run by key is listed twice": (BACKWARD, edit_list("by_key", double_run)),
    "a partial tile is dropped": (BOTH, edit_list("by_query", drop_part)),
    "a partial tile by key is dropped": (BACKWARD, edit_list("by_key", drop_part)),
    "a call is a query row short": (BOTH, change_call(query_rows, Tiles)),
    "a call is a key row short": (BOTH, change_call(key_len, Tiles)),
    "a key block has another's rows": (BOTH, change_call(key_row, Tiles)),
    "a key block is listed twice": (BOTH, change_call(listed_twice, Tiles)),
    "sums are rounded": (BACKWARD, rounded_sums),
}
"""What can go wrong, by name: the passes it can go wrong in, and how to make it."""

ALWAYS_HARMFUL = {name for name in MUTATIONS if "by key" in name} | {"sums are rounded"}
"""Wrong whatever the reference backend computes in float64: it walks query blocks only, and rounds nothing."""
