"""The order in which a deterministic backward pass adds to every tile of dQ, and to the same rows of dK and dV.

Floating-point sums depend on their order, and units of work that add to the same rows run side by side. So every one
draws a ticket for each of its tiles, here and once per list: the number of units that add to the tile before it. A
counter in device memory says whose turn it is (`marble.kernels.cute.serving`).

Tickets follow the order in which thread blocks fetch units, so that a unit waits for units that were fetched before it
and for no others: of the unfinished ones, the first to have been fetched waits for nobody, and no thread block can wait
for one that is not running. Which order that is decides how long units wait. All of a section begin at about the same
time, so they should meet each query block in this order by themselves: query blocks are walked from the first to the
last, and a unit whose walk begins further down comes first, because it meets a block that both walk early in its walk.
Behind that come those with fewer tiles, which are sooner with the next query head.

A turn costs a handover, and a query block has one for each of its tiles, so that the next unit can follow at once. But
units whose walks begin with the same block, as in full attention, queue up there and stay a queue, which advances by
handovers. Where they are most of those that add to a block, its tiles share a turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marble.kernels.cute.predicates import BLOCK
from marble.kernels.cute.worklist import FULL_TILE, PARTIAL_COST, WorkList, members


@dataclass(frozen=True, eq=False)
class Ordered:
    """A `WorkList` by key block in the order of deterministic sums, with its tickets.

    Attributes:
        lists: the list. Every tile is an entry of ``parts``, full ones too (with slot `FULL_TILE`), by inner row in
            each item; ``runs`` is empty.
        tickets: int32 [tiles, 2], item by item, and for each the tiles in the order of its walk with one head: the
            number of the query tile, and how many units add to it before this one. −1 if the tile belongs to the turn
            of the tile before it, whose number it has.
        units: int32 [items, 3]: the number of the counter of the item's key rows; its ticket there, −1 if no other item
            adds to any of these rows; and where its tickets begin.
        numbers: how many numbers query tiles have.
        counters: how many counters key rows have.
        shared: whether several items add to the same key rows. Then tickets follow units of which those of an item come
            together.
    """

    lists: WorkList
    tickets: Tensor
    units: Tensor
    numbers: int
    counters: int
    shared: bool

    def served(self, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
        """The counters of a launch, at 0: of dQ [heads, numbers], and of dK and dV [kv_heads, counters]."""
        sizes = heads * self.numbers, kv_heads * self.counters
        queries, keys = torch.zeros(sum(sizes), dtype=torch.int32, device=self.tickets.device).split(sizes)
        return queries.view(heads, self.numbers), keys.view(kv_heads, self.counters)


_ordered: WeakKeyDictionary[WorkList, dict[int, Ordered]] = WeakKeyDictionary()


def ordered(work: WorkList, halves: int) -> Ordered:
    """A list by key block in the order of deterministic sums, on its device. Ordered once per list.

    Args:
        work: the list.
        halves: tiles of a block of query rows.

    Raises:
        ValueError: if two tiles share some of their query rows, but do not begin with the same: there is no order of
            sums for tiles, then.
    """
    known = _ordered.setdefault(work, {})
    if halves not in known:
        known[halves] = _order(work, halves)
    return known[halves]


def _order(work: WorkList, halves: int) -> Ordered:
    owner, entries = _entries(work)
    items, device = len(work.items), work.items.device
    place = _places(work, owner, entries[:, 0])
    by_place = torch.empty_like(place)
    by_place[place] = torch.arange(items, device=device)
    order = torch.argsort(place[owner] << 32 | entries[:, 0])
    owner, entries = place[owner][order], entries[order]
    count = torch.bincount(owner, minlength=items)
    fields = work.items[by_place].clone()
    fields[:, 2], fields[:, 3], fields[:, 4:7] = count.cumsum(0) - count, count, 0
    lists = replace(work, items=fields, parts=entries.int(), runs=work.runs[:0].clone())
    first, block = _query_blocks(entries)
    half, queued = torch.arange(halves, device=device), _queued(owner, block)
    number = torch.where(queued[block, None], block[:, None] * halves, block[:, None] * halves + half).flatten()
    leads = (~queued[block, None] | (half == 0)).flatten()
    ticket = torch.full_like(number, -1)
    ticket[leads] = _counted(number[leads])
    tickets = torch.stack([number, ticket], 1)
    keys, counters = _key_tickets(fields)
    units = torch.cat([keys, (halves * (count.cumsum(0) - count)).unsqueeze(1)], 1)
    shared = bool((keys[:, 1] >= 0).any())
    return Ordered(lists, tickets.int(), units.int(), len(first) * halves, counters, shared)


def _counted(numbers: Tensor) -> Tensor:
    """How often each number comes before, in an int64 [n]."""
    order = torch.argsort(numbers, stable=True)
    counted = torch.empty_like(order)
    starts = torch.searchsorted(numbers[order], numbers[order])
    counted[order] = torch.arange(len(order), device=order.device) - starts
    return counted


def _entries(work: WorkList) -> tuple[Tensor, Tensor]:
    """All tiles of a list: the item of each, and its row of `WorkList.parts` without a number, int64 [tiles, 4]."""
    items, device = work.items.long(), work.items.device
    part_owner, part = members(items[:, 2], items[:, 3])
    run_owner, run = members(items[:, 4], items[:, 5])
    rows, blocks = work.runs[run].long().unbind(1)
    of, number = members(torch.zeros_like(blocks), blocks)
    full = torch.tensor([0, FULL_TILE, BLOCK, 15], device=device).repeat(len(of), 1)
    full[:, 0] = rows[of] + BLOCK * number
    return torch.cat([part_owner, run_owner[of]]), torch.cat([work.parts[part].long(), full])


def _places(work: WorkList, owner: Tensor, row: Tensor) -> Tensor:
    """The new place of each item: inside its section by the first query row from the last, then by fewest tiles, then
    by the key row from the last."""
    items = work.items
    first = torch.zeros(len(items), dtype=torch.int64, device=items.device)
    first.scatter_reduce_(0, owner, row, "amin", include_self=False)
    cost = items[:, 6] + PARTIAL_COST * items[:, 3]
    order = torch.argsort(items[:, 0], descending=True, stable=True)
    for key in (cost, -first, work.sections[:, 0]):
        order = order[torch.argsort(key[order], stable=True)]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _query_blocks(entries: Tensor) -> tuple[Tensor, Tensor]:
    """First rows of the query blocks that entries have, and the number of each entry's."""
    first, block = torch.unique(entries[:, 0], return_inverse=True)
    rows = torch.zeros_like(first).scatter_reduce_(0, block, entries[:, 2], "amax")
    overlap = (first + rows)[:-1] > first[1:]
    if bool(overlap.any()):
        (at,) = overlap.nonzero(as_tuple=True)
        a, b = first[at[0]], first[at[0] + 1]
        raise ValueError(
            f"deterministic: two tiles of a call share query rows, but begin with row {int(a)} and row {int(b)}: sums "
            f"over tiles have no order"
        )
    return first, block


def _queued(owner: Tensor, block: Tensor) -> Tensor:
    """For each query block whether most items that add to it begin with a block that others begin with, bool [blocks].

    Args:
        owner: the item of each entry, in ascending order.
        block: the query block of each entry, in the order of the item's walk.
    """
    begins = torch.ones_like(owner, dtype=torch.bool)
    begins[1:] = owner.diff() > 0
    _, which, together = torch.unique(block[begins], return_inverse=True, return_counts=True)
    in_queue = (together[which] > 1)[begins.cumsum(0) - 1]
    adders = torch.bincount(block)
    return 2 * torch.bincount(block[in_queue], minlength=len(adders)) > adders


def _key_tickets(items: Tensor) -> tuple[Tensor, int]:
    """For each of the items a counter and a ticket (`Ordered.units`), and the number of counters.

    Items whose key rows overlap share a counter, and so do those that overlap with one of them, and so on.
    """
    if not len(items):
        return items.new_zeros(0, 2).long(), 1
    first, last = items[:, 0].long(), items[:, :2].long().sum(1)
    order = torch.argsort(first, stable=True)
    apart = first[order][1:] >= last[order].cummax(0).values[:-1]
    counter = torch.empty_like(order)
    counter[order] = torch.nn.functional.pad(apart.long().cumsum(0), (1, 0))
    sizes = torch.bincount(counter)
    return torch.stack([counter, torch.where(sizes[counter] > 1, _counted(counter), -1)], 1), len(sizes)
