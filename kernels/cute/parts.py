"""Lists of parts, 64 keys each: what the forward kernel reads, cut from a `WorkList` by query block.

Two warpgroups share the keys and values of a tile, 64 query rows each. If a key/value head has two query heads left,
they take the same rows, a *strip*, with one head each: both see the same keys, so that what these rows do not see is
not even loaded, and what they see all of needs no predicate, also where it is a quarter of a partial tile. A head that
is left alone takes a block of 128 rows. A tile of the kernel is one part or two, from anywhere: parts that have
predicates make tiles together, and so do full ones. A part that is left over comes last, as half a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marble.kernels.cute.predicates import BLOCK, EVERY, NONE, quarters
from marble.kernels.cute.worklist import NOWHERE, WorkList, arranged, members

PART = 64
"""Keys of a part, and query rows of a strip."""


Index = TypeVar("Index", int, Tensor)


@dataclass(frozen=True, eq=False)
class PartList(WorkList):
    """A `WorkList` by query block, cut into parts. What differs:

    Attributes:
        items: strips, for two heads of a key/value head each, then blocks, for a head that is left alone. The first two
            columns are the rows of a strip or block; the third and fourth its first partial part and how many there
            are. Full tiles are the kernel's, of one part or two.
        sections: the first item of a section is counted from the first one of its kind.
        parts: int32 [partial parts, 2], (first key row, first row of its predicate among all rows of both halves of all
            predicates). The parts of a tile follow one another; if tiles have two and the last has no other, it is
            computed last.
        runs: int32 [runs, 3], (first key row of the first part, tiles, first key row of the second part): those of tile
            i are so many rows behind these as i tiles have keys.
        tiles: of the list that was cut.
        strips: how many items are strips.
    """

    strips: int


_cut: WeakKeyDictionary[WorkList, dict[tuple[bool, bool, int], PartList]] = WeakKeyDictionary()


def parts_of(work: WorkList, *, group: int, together: int) -> PartList:
    """A list by query block, cut into parts. Cut once per list, on its device.

    Args:
        work: the list.
        group: query heads of a key/value head.
        together: parts of a tile, 1 or 2.
    """
    known, kinds = _cut.setdefault(work, {}), (group > 1, group % 2 == 1, together)
    if kinds not in known:
        known[kinds] = _joined([_parts_of(work, halves, together) for halves in (2, 1) if kinds[2 - halves]])
    return known[kinds]


def _joined(kinds: Sequence[PartList]) -> PartList:
    """One list for strips and blocks that were cut from the same list."""
    if len(kinds) == 1:
        return kinds[0]
    strips, blocks = kinds
    behind = blocks.items.new_tensor([0, 0, len(strips.parts), 0, len(strips.runs), 0, 0, 0])
    return replace(
        strips,
        items=torch.cat([strips.items, blocks.items + behind]),
        sections=torch.cat([strips.sections, blocks.sections]),
        parts=torch.cat([strips.parts, blocks.parts]),
        runs=torch.cat([strips.runs, blocks.runs]),
    )


def _parts_of(work: WorkList, halves: int, together: int) -> PartList:
    """``halves``: strips of a query block, 2, or 1 for the block as it is."""
    items, device = work.items.long(), work.items.device
    outer, height = len(items) * halves, BLOCK // halves
    owner, partial, single_owner, single = _quarters(work, halves)
    pair_owner, pairs, left = _paired(single_owner, single, outer, together)
    run_item, run = members(items[:, 4], items[:, 5])
    row, blocks = work.runs[run].long().unbind(1)
    each = torch.arange(halves, device=device)
    run_owner = torch.cat([(run_item[:, None] * halves + each).flatten(), pair_owner])
    runs = torch.stack([row, BLOCK // PART // together * blocks, row + PART], 1).repeat_interleave(halves, 0)
    runs = torch.cat([runs, pairs])
    run_count = torch.bincount(run_owner, minlength=outer)

    # Parts of nothing are what rows have that see nothing of what their block sees, but are touched. They also make a
    # whole tile of a part that would be alone, because no half tile comes first.
    touch = items[:, 7].repeat_interleave(halves)
    count = torch.bincount(torch.cat([owner, single_owner[left]]), minlength=outer)
    wanted = torch.where((run_count == 0) & ((count > 0) | (touch > 0)), count.clamp(min=together), count)
    filled, _ = members(torch.zeros_like(wanted), wanted - count)

    def uniform(rows: Tensor, slot: int) -> Tensor:
        return torch.stack([rows, torch.full_like(rows, _first_row(len(work.predicates) + slot, 0, 0))], 1)

    parts = [partial, uniform(single[left], EVERY), uniform(torch.full_like(filled, NOWHERE), NONE)]
    by_owner = torch.argsort(torch.cat([owner, single_owner[left], filled]), stable=True)
    runs_by_owner = torch.argsort(run_owner, stable=True)
    columns = (
        (items[:, :1] + height * each).flatten(),
        (items[:, 1:2] - height * each).clamp(max=height).flatten(),
        *(wanted.cumsum(0) - wanted, wanted),
        run_count.cumsum(0) - run_count,
        run_count,
        torch.zeros_like(run_count).index_add_(0, run_owner, runs[:, 1]),
        touch,
    )
    there = (columns[1] > 0) & ((wanted > 0) | (run_count > 0))
    section = work.sections[:, 0].long().repeat_interleave(halves)
    ((items, sections, _),) = arranged(tuple(x[there] for x in columns), section[there], [int(there.sum())], together)
    return PartList(
        items,
        sections,
        torch.cat(parts)[by_owner].int(),
        runs[runs_by_owner].int(),
        *(work.predicates, work.ranges, work.bits),
        tiles=work.tiles,
        strips=len(items) if halves == 2 else 0,
    )


def _quarters(work: WorkList, halves: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a list's partial tiles are cut into: the owner of each partial part, and its row of `PartList.parts`; the
    owner of each full part, and its first key row. An owner is a strip or block, numbered as the items are."""
    owner, tile = members(work.items[:, 2].long(), work.items[:, 3].long())
    tiles = work.parts[tile].long()
    whole = 15 & ~quarters(work.predicates != -1)
    some, every = (
        (each[:, None] >> torch.arange(4, device=tiles.device) & 1).view(-1, 2, 2)
        for each in (tiles[:, 3], whole[tiles[:, 1]])
    )
    if halves == 1:
        some, every = some.amax(1, keepdim=True), every.amin(1, keepdim=True)
    found: list[Tensor] = []
    for which in (some > every, every):
        tile, row_half, key_half = which.nonzero(as_tuple=True)
        fields = (tiles[tile, 0] + PART * key_half, _first_row(tiles[tile, 1], key_half, row_half))
        found += [owner[tile] * halves + row_half, torch.stack(fields, 1)]
    return found[0], found[1], found[2], found[3][:, 0]


def _first_row(slot: Index, key_half: Index, row_half: Index) -> Index:
    """Where a quarter of a predicate begins among the rows of a table."""
    return (2 * slot + key_half) * BLOCK + PART * row_half


def _paired(owner: Tensor, row: Tensor, owners: int, together: int) -> tuple[Tensor, Tensor, Tensor]:
    """Full parts as tiles: the owner of each tile and its row of `PartList.runs`; and the parts that are left over."""
    by_owner = torch.argsort(owner, stable=True)
    count = torch.bincount(owner, minlength=owners)
    place = torch.empty_like(by_owner)
    place[by_owner] = torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner[by_owner]]
    left = place >= (count // together * together)[owner]
    begins = by_owner[~left[by_owner]][::together]
    ends = by_owner[~left[by_owner]][together - 1 :: together]
    return owner[begins], torch.stack([row[begins], torch.ones_like(begins), row[ends]], 1), left
