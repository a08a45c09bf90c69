"""A call's tiles as the kernels read them: one row of integers per outer block, in the order of the work.

The kernels know blocks by the rows that they hold, and walk an outer block's partial tiles, then its runs of full
tiles. Block tiles and dense varlen sequences lower to the same lists, so one kernel computes both.

The order keeps the L2 cache warm and the end of a launch short: successive outer blocks that read much the same inner
rows, as those of one sample do, make a section and are computed together, first the sections with the longest outer
blocks and in each section the longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marble.kernels.contract import Band, TileList, Tiles, Varlen, Work
from marble.kernels.cute.predicates import BLOCK, packed, quarters

PARTIAL_COST = 1.1
"""A partial tile's time over a full one's, for the order of the work."""

FULL_TILE = 2**31 - 1
"""The slot of a full tile, where full tiles are among the partial ones."""

NOWHERE = 2**30
"""A row past the end of every tensor, where the copy engine reads zeros."""


@dataclass(frozen=True, eq=False)
class WorkList:
    """The tiles of a call by outer block.

    Attributes:
        items: int32 [items, 8], an outer block with tiles each: first outer row, outer rows, first partial tile,
            partial tiles, first run, runs, full tiles (of all its runs), touch. Section by section, and in each the
            most tiles first.
        sections: int32 [items, 2], the first item and the number of items of the section that each item is in.
        parts: int32 [partial tiles, 4], (first inner row, slot, inner rows, quarters that have pairs: bit 2 · outer
            half + inner half).
        runs: int32 [runs, 2], (first inner row, full tiles): tile i begins at inner row first + 128 i.
        predicates: int16 [slots, 2, 128, 4], see `marble.kernels.cute.predicates.packed`; lists that were lowered
            together may share it.
        ranges, bits: as in `TileList`, what was packed: the first slots, and those behind them.
        tiles: how many tiles all items have.
    """

    items: Tensor
    sections: Tensor
    parts: Tensor
    runs: Tensor
    predicates: Tensor
    ranges: Tensor
    bits: Tensor
    tiles: int


@dataclass(frozen=True, eq=False)
class WorkLists:
    """Both orientations of a call: outer blocks are query blocks in ``by_query`` and key blocks in ``by_key``."""

    by_query: WorkList
    by_key: WorkList


_lowered: WeakKeyDictionary[Work, WorkLists] = WeakKeyDictionary()


def lower(work: Work) -> WorkLists:
    """The lists of a call, on the device that its tensors are on. Lowered once per call object.

    Raises:
        ValueError: if its blocks are not of 128 rows.
    """
    lower_all([work])
    return _lowered[work]


def lower_all(works: Sequence[Work]) -> None:
    """Lower calls on one device, those of block tiles together: that takes about as long as one of them.

    Raises:
        ValueError: if the blocks of one are not of 128 rows.
    """
    left = [work for work in dict.fromkeys(works) if work not in _lowered]
    tiled = [work for work in left if isinstance(work, Tiles)]
    for tiles in tiled:
        if tiles.block != BLOCK:
            raise ValueError(
                f"block: the cute kernels compute blocks of {BLOCK} tokens, got {tiles.block}; plan with it"
            )
    if tiled:
        lists = _work_lists([side for tiles in tiled for side in _sides(tiles)])
        _lowered.update({tiles: WorkLists(*lists[2 * i : 2 * i + 2]) for i, tiles in enumerate(tiled)})
    _lowered.update({work: _lower_varlen(work) for work in left if isinstance(work, Varlen)})


class _Side(NamedTuple):
    """One orientation of a call of block tiles.

    Attributes:
        tiles: its tile list.
        outer: [blocks, 2], first row and rows of the outer blocks.
        inner: the same of the inner blocks.
        touch: of the outer blocks.
    """

    tiles: TileList
    outer: Tensor
    inner: Tensor
    touch: Tensor


def _sides(tiles: Tiles) -> tuple[_Side, _Side]:
    first = torch.arange(len(tiles.touch), device=tiles.touch.device, dtype=torch.int32) * BLOCK
    queries = torch.stack([first, (tiles.query_rows - first).clamp(max=BLOCK)], 1)
    keys = torch.stack([tiles.key_row, tiles.key_len], 1)
    return (
        _Side(tiles.by_query, queries, keys, tiles.touch),
        _Side(tiles.by_key, keys, queries, torch.zeros_like(tiles.key_row)),
    )


def _work_lists(sides: list[_Side]) -> list[WorkList]:
    """Tile lists with their blocks looked up. They share one table of parts and one of runs."""
    device = sides[0].outer.device

    def spread(values: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A value for each side, repeated for the entries that the side has."""
        repeats = torch.tensor(lengths, device=device)
        return torch.repeat_interleave(torch.tensor(values, device=device), repeats, output_size=sum(lengths))

    def owners(counts: list[Tensor], total: int) -> Tensor:
        """The outer block of each entry, for the number of entries of each outer block."""
        every = torch.cat(counts).long()
        return torch.repeat_interleave(torch.arange(len(every), device=device), every, output_size=total)

    lists = [side.tiles for side in sides]
    outer, inner = torch.cat([side.outer for side in sides]), torch.cat([side.inner for side in sides])
    before = [0, *accumulate(len(side.inner) for side in sides)]
    runs, parts = torch.cat([x.runs for x in lists]).long(), torch.cat([x.parts for x in lists]).long()
    part_counts = [x.part_ptr.diff() for x in lists]
    run_owner = owners([x.run_ptr.diff() for x in lists], len(runs))
    part_owner = owners(part_counts, len(parts))
    first = runs[:, 0] + spread(before[:-1], [len(x.runs) for x in lists])
    run_owner, row, blocks = _contiguous_runs(run_owner, first, runs[:, 1], inner)
    full = torch.zeros(len(outer), dtype=torch.int64, device=device).index_add_(0, run_owner, blocks)
    run_ptr = torch.searchsorted(run_owner, torch.arange(len(outer) + 1, device=device))
    counts = torch.cat(part_counts).long()
    chosen = inner[parts[:, 0] + spread(before[:-1], [len(x.parts) for x in lists])].long()
    section = _sections(
        torch.cat([run_owner, part_owner]),
        torch.cat([row, chosen[:, 0]]),
        torch.cat([row + BLOCK * blocks, chosen[:, 0] + BLOCK]),
        len(outer),
    )
    columns = (
        *(outer[:, 0], outer[:, 1]),
        *(counts.cumsum(0) - counts, counts),
        *(run_ptr[:-1], run_ptr.diff(), full),
        torch.cat([side.touch for side in sides]),
    )
    in_order = arranged(columns, section, [x.outer for x in lists])
    numbers, tables = [len(x.parts) for x in lists], _tables(lists)
    distinct = list(dict.fromkeys(tables))
    slots_before = dict(zip(distinct, accumulate(map(len, distinct), initial=0), strict=False))
    slot = parts[:, 1]
    slot = torch.where(slot >= 0, slot, spread([len(x.ranges) for x in lists], numbers) + ~slot)
    some = torch.cat([quarters(table != 0) for table in distinct])
    quarters_of = some[slot + spread([slots_before[table] for table in tables], numbers)]
    resolved = torch.stack([chosen[:, 0], slot, chosen[:, 1], quarters_of], 1).int()
    ran = torch.stack([row, blocks], 1).int()
    return [
        WorkList(items, sections, resolved, ran, table, x.ranges, x.bits, tiles)
        for (items, sections, tiles), table, x in zip(in_order, tables, lists, strict=True)
    ]


def _tables(lists: Sequence[TileList]) -> list[Tensor]:
    """The packed predicates of each list; those that share theirs share the table."""
    known: dict[tuple[int, int], Tensor] = {}
    for x in lists:
        if (id(x.ranges), id(x.bits)) not in known:
            known[id(x.ranges), id(x.bits)] = packed(x.ranges, x.bits)
    return [known[id(x.ranges), id(x.bits)] for x in lists]


def members(first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """For each group its members, ``count`` successive numbers from ``first``: the group of each, and it."""
    group = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    inside = torch.arange(len(group), device=count.device) - (count.cumsum(0) - count)[group]
    return group, first[group] + inside


def _sections(owner: Tensor, first: Tensor, last: Tensor, blocks: int) -> Tensor:
    """A number for each outer block, the same for successive ones whose inner rows, from the first to the last, have at
    least half of the longer stretch in common.

    Args:
        owner: the outer block of each run or partial tile.
        first: its first inner row.
        last: one past its last inner row, whole blocks.
        blocks: outer blocks, some of which may have no tiles.
    """
    low, high, section = (torch.zeros(blocks, dtype=torch.int64, device=owner.device) for _ in range(3))
    low.scatter_reduce_(0, owner, first, "amin", include_self=False)
    high.scatter_reduce_(0, owner, last, "amax", include_self=False)
    (some,) = (low < high).nonzero(as_tuple=True)
    low, high = low[some], high[some]
    common = high[1:].minimum(high[:-1]) - low[1:].maximum(low[:-1])
    longer = (high - low)[1:].maximum((high - low)[:-1])
    section[some[1:]] = (2 * common < longer).cumsum(0)
    return section


def arranged(
    columns: tuple[Tensor, ...], section: Tensor, lengths: Sequence[int], together: int = 1
) -> list[tuple[Tensor, Tensor, int]]:
    """`WorkList.items` and `WorkList.sections` of the outer blocks that have tiles, and how many, for each of several
    lists.

    Args:
        columns: the fields of the items, one tensor each, of all lists one after the other.
        section: int64 [outer blocks], what the blocks of a section have in common; less than 2³⁸ from 0.
        lengths: outer blocks of each list.
        together: how many partial ones make a tile.
    """
    items = torch.stack([column.int() for column in columns], 1)
    cost = items[:, 6] + PARTIAL_COST / together * items[:, 3]
    device = items.device
    sizes_of = torch.tensor(lengths, device=device)
    lists = torch.arange(len(lengths), device=device)
    which = torch.repeat_interleave(lists, sizes_of, output_size=len(items))
    (chosen,) = (cost > 0).nonzero(as_tuple=True)
    items, cost, which = items[chosen], cost[chosen], which[chosen]
    _, member, sizes = torch.unique((which << 40) + section[chosen], return_inverse=True, return_counts=True)
    longest = torch.zeros_like(sizes, dtype=cost.dtype).scatter_reduce_(0, member, cost, "amax")
    # Sections in their order: list by list, then the longest first.
    owner = torch.zeros_like(sizes).scatter_(0, member, which)
    place = torch.argsort(longest, descending=True, stable=True)
    place = place[torch.argsort(owner[place], stable=True)]
    rank, first = torch.empty_like(place), torch.empty_like(sizes)
    rank[place] = torch.arange(len(place), device=device)
    first[place] = sizes[place].cumsum(0) - sizes[place]
    order = torch.argsort(cost, descending=True, stable=True)
    order = order[torch.argsort(rank[member[order]], stable=True)]
    starts = torch.searchsorted(which, torch.arange(len(lengths) + 1, device=device))
    sections = torch.stack([first - starts[owner], sizes], 1)[member[order]].int()
    items = items[order]
    tiles = torch.nn.functional.pad((items[:, 3] + items[:, 6]).long().cumsum(0), (1, 0))[starts]
    cuts = torch.stack([starts, tiles], 1).tolist()
    return [(items[a:b], sections[a:b], after - before) for (a, before), (b, after) in pairwise(cuts)]


def _contiguous_runs(owner: Tensor, first: Tensor, blocks: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs (outer block, first inner block, blocks) as (outer block, first inner row, blocks), cut where an inner block
    does not follow its predecessor."""
    # breaks[j]: how many blocks up to and including j do not follow their predecessor.
    breaks = torch.nn.functional.pad((inner[:, 0].diff() != BLOCK).long().cumsum(0), (1, 0))
    if not len(first) or not bool((breaks[first] != breaks[first + blocks - 1]).any()):
        return owner, inner[first, 0].long(), blocks
    pieces = breaks[first + blocks - 1] - breaks[first] + 1
    which = torch.repeat_interleave(torch.arange(len(first), device=first.device), pieces)
    number = torch.arange(len(which), device=first.device) - (pieces.cumsum(0) - pieces)[which]
    # A later piece begins at the block with the break of that number.
    level = breaks[first][which] + number
    start = torch.where(number == 0, first[which], torch.searchsorted(breaks, level))
    stop = torch.where(number + 1 == pieces[which], (first + blocks)[which], torch.searchsorted(breaks, level + 1))
    return owner[which], inner[start, 0].long(), stop - start


def _lower_varlen(work: Varlen) -> WorkLists:
    """Every sequence cut into blocks from its first row. The diagonal of a band crosses a tile in one of few ways, so
    that predicates are shared by nearly all tiles of a sequence."""
    queries, keys = _Blocks(work.queries), _Blocks(work.keys)
    shift = (work.keys.diff(dim=1) - work.queries.diff(dim=1)).long().flatten()
    return WorkLists(
        _band_list(queries, keys, work.band, shift, work.touch[queries.sequence], transposed=False),
        _band_list(keys, queries, work.band, -shift, torch.zeros_like(keys.row), transposed=True),
    )


class _Blocks:
    """Blocks of 128 rows of sequences [n, 2] (first, one past the last row): the sequence, first row, rows and number
    inside the sequence of each, and the first block of each sequence."""

    def __init__(self, bounds: Tensor) -> None:
        start, stop = bounds.long().unbind(1)
        count = (stop - start).clamp(min=0).add(BLOCK - 1).div(BLOCK, rounding_mode="floor")
        self.first = count.cumsum(0) - count
        self.count, self.length = count, stop - start
        self.sequence = torch.repeat_interleave(torch.arange(len(count), device=bounds.device), count)
        self.number = torch.arange(len(self.sequence), device=bounds.device) - self.first[self.sequence]
        self.row = start[self.sequence] + BLOCK * self.number
        self.rows = (stop[self.sequence] - self.row).clamp(max=BLOCK)


def _band_list(
    outer: _Blocks, inner: _Blocks, band: Band, shift: Tensor, touch: Tensor, *, transposed: bool
) -> WorkList:
    """The tiles of each outer block: inner row x is computed for outer row y of a sequence if

    * FULL: always;
    * CAUSAL, queries outside: x ≤ y + shift; keys outside: x ≥ y + shift;
    * REVERSE_CAUSAL: the rest.
    """
    device = outer.row.device
    low_side = (band == Band.CAUSAL) != transposed  # what is computed lies below the diagonal
    strict = int(band == Band.REVERSE_CAUSAL)  # and the diagonal itself does not belong to it
    sequence = outer.sequence
    blocks, length = inner.count[sequence], inner.length[sequence]
    base = outer.number * BLOCK + shift[sequence]
    y_last = outer.rows - 1
    whole_blocks = length // BLOCK
    if band == Band.FULL:
        begin, end = torch.zeros_like(base), length
        full_begin, full_end = torch.zeros_like(base), whole_blocks
    elif low_side:
        # Row y sees x < limit(y) = y + shift + 1 − strict: the fewest in the first row, the most in the last.
        begin, end = torch.zeros_like(base), (base + y_last + 1 - strict).clamp(min=0).minimum(length)
        full_begin = torch.zeros_like(base)
        full_end = ((base + 1 - strict).clamp(min=0) // BLOCK).minimum(whole_blocks)
    else:
        # Row y sees x ≥ limit(y) = y + shift + strict: the most in the first row, the fewest in the last.
        begin, end = (base + strict).clamp(min=0).minimum(length), length
        full_begin = -(-(base + y_last + strict).clamp(min=0) // BLOCK)
        full_end = whole_blocks
    first, last = begin // BLOCK, -(-end // BLOCK)
    last = torch.where(begin < end, last.minimum(blocks), first)
    ragged = outer.rows < BLOCK
    full_begin = full_begin.clamp(min=first).minimum(last)
    full_end = torch.where(ragged, full_begin, full_end.maximum(full_begin).minimum(last))
    full = full_end - full_begin
    before, behind = full_begin - first, last - full_end
    # Query rows that see nothing but are touched get a tile of nothing, so that their state begins and ends.
    idle = (touch > 0) & (full + before + behind == 0)
    behind += idle
    owner = torch.repeat_interleave(torch.arange(len(base), device=device), before + behind)
    number = torch.arange(len(owner), device=device) - ((before + behind).cumsum(0) - before - behind)[owner]
    block = torch.where(number < before[owner], first[owner] + number, full_end[owner] + number - before[owner])
    inner_row = torch.nn.functional.pad(inner.row, (0, 1), value=NOWHERE)
    inner_rows = torch.nn.functional.pad(inner.rows, (0, 1))
    chosen = torch.where(idle[owner], len(inner.row), inner.first[sequence[owner]] + block)
    # Limit of the tile's row 0 in the tile's own columns; rows count up from there.
    corner = base[owner] - BLOCK * block + (1 - strict if low_side else strict)
    shape = torch.stack([corner.clamp(-BLOCK, BLOCK), outer.rows[owner], inner_rows[chosen]], 1)
    shapes, slot = torch.unique(shape, dim=0, return_inverse=True) if len(shape) else (shape, owner)
    limit = shapes[:, :1] + torch.arange(BLOCK, device=device)
    columns = shapes[:, 2:]
    if band == Band.FULL:
        low, high = torch.zeros_like(limit), columns.expand_as(limit)
    elif low_side:
        low, high = torch.zeros_like(limit), limit.clamp(min=0).minimum(columns)
    else:
        low, high = limit.clamp(min=0).minimum(columns), columns.expand_as(limit)
    seen = (torch.arange(BLOCK, device=device) < shapes[:, 1:2]) & (low < high)
    words = torch.where(seen, low | high << 8, 0).int()
    some = full > 0
    runs = torch.stack([inner.row[(inner.first[sequence] + full_begin)[some]], full[some]], 1).int()
    part_ptr = torch.nn.functional.pad((before + behind).cumsum(0), (1, 0))
    run_ptr = torch.nn.functional.pad(some.long().cumsum(0), (1, 0))
    columns = (outer.row, outer.rows, part_ptr[:-1], part_ptr.diff(), run_ptr[:-1], run_ptr.diff(), full, touch)
    nothing = torch.zeros(0, BLOCK, 4, dtype=torch.int32, device=device)
    predicates = packed(words, nothing)
    parts = torch.stack([inner_row[chosen], slot, inner_rows[chosen], quarters(predicates != 0)[slot]], 1).int()
    ((items, sections, tiles),) = arranged(columns, sequence, [len(sequence)])
    return WorkList(items, sections, parts, runs, predicates, words, nothing, tiles)
