"""What waiting for turns would cost a deterministic backward pass: a simulation, on a CPU.

``python -m bench.turns`` takes the real lists of every workload and an imagined GPU: multiprocessors that fetch units
in order; a block of 128 × 128 takes 1 (1.1 if it is partial), a unit half a block besides. Its dQ is added in its turn;
the next one may add ``--handover`` later (about 2 µs: 0.45 blocks at head size 128, 0.9 at 64). Products go on
meanwhile, one block ahead. Units with some heads of the same keys end in turns, too. It prints the time over that of
units which never wait, in their own order.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.baselines.calls import cases
from marble.kernels.cute.backward_config import Units, plan_units, plan_units_in_order
from marble.kernels.cute.tickets import Ordered, ordered
from marble.kernels.cute.worklist import FULL_TILE, PARTIAL_COST, WorkList, lower
from marble.workloads import WORKLOADS

UNIT_COST = 0.5
"""Of a unit, besides its blocks."""


class Walk(NamedTuple):
    """The blocks of an item: what each takes, and the number of its counter and its ticket if there are turns."""

    costs: list[float]
    turns: list[list[int]]


class Unit(NamedTuple):
    """Blocks with some query heads; and a counter and ticket of their keys, if units with other heads add to them."""

    walk: Walk
    heads: range
    keys: tuple[tuple[int, int], int] | None = None


def units(lists: WorkList, order: Ordered | None, heads: int, kv_heads: int, plan: Units) -> Iterator[Unit]:
    """The units of a launch in the order in which they are fetched."""
    group, at, items = heads // kv_heads, 0, lists.items.tolist()
    slots = lists.parts[:, 1].tolist()
    walks = []
    for i, (_, _, part, parts, _, _, full, _) in enumerate(items):
        costs = [1.0 if slot == FULL_TILE else PARTIAL_COST for slot in slots[part : part + parts]] + [1.0] * full
        first = int(order.units[i, 2]) if order else 0
        walks.append(Walk(costs, order.tickets[first : first + len(costs)].tolist() if order else []))
    number = 0
    while at < len(items):
        size = int(lists.sections[at, 1])
        members = [range(at, at + size)] if plan.apart else [range(item, item + 1) for item in range(at, at + size)]
        for kv_head in range(kv_heads):
            for some in members:
                each = group if number < plan.whole * kv_heads else plan.few
                for piece in range(group // each):
                    first = kv_head * group + piece * each
                    for item in some:
                        keys = ((-1 - kv_head, item), piece) if order and each < group else None
                        yield Unit(walks[item], range(first, first + each), keys)
                number += len(some)
        at += size


def makespan(some: Sequence[Unit], sms: int, handover: float) -> float:
    """When the last unit ends.

    Raises:
        RuntimeError: if units wait for one another.
    """
    reached: dict[tuple[int, int], int] = defaultdict(int)
    waiting: dict[tuple[tuple[int, int], int], tuple[int, int]] = {}
    events = [(0.0, 0, sm, (0, 0)) for sm in range(min(sms, len(some)))]  # time, what, where, counter
    held: list[Unit | None] = [None] * sms
    step, done, free, end, fetched, ended = [0] * sms, [0.0] * sms, [0.0] * sms, 0.0, 0, 0
    while events:
        now, what, sm, counter = heapq.heappop(events)
        if what == 1:  # a turn has ended
            reached[counter] += 1
            if (next_one := waiting.pop((counter, reached[counter]), None)) is not None:
                heapq.heappush(events, (now, *next_one, counter))
            continue
        unit = held[sm]
        if unit is None:  # what == 0: fetch
            if fetched == len(some):
                continue
            unit, held[sm], step[sm], fetched = some[fetched], some[fetched], 0, fetched + 1
            done[sm] = now + UNIT_COST + unit.walk.costs[0]
            heapq.heappush(events, (max(done[sm], free[sm]), 2, sm, counter))
            continue
        costs, turns = unit.walk
        if step[sm] == len(costs) * len(unit.heads):  # what == 3: all is added to dQ
            if unit.keys is not None:
                counter, ticket = unit.keys
                if reached[counter] < ticket:
                    waiting[counter, ticket] = 3, sm
                    continue
                now += handover
                heapq.heappush(events, (now, 1, sm, counter))
            end, held[sm], ended = max(end, now), None, ended + 1
            heapq.heappush(events, (now, 0, sm, counter))
            continue
        at = step[sm] % len(costs)
        if turns:  # what == 2: a block's dQ may be added
            counter = unit.heads[step[sm] // len(costs)], turns[at][0]
            if reached[counter] < turns[at][1]:
                waiting[counter, turns[at][1]] = 2, sm
                continue
            free[sm] = now + handover
            heapq.heappush(events, (free[sm], 1, sm, counter))
        step[sm] += 1
        if step[sm] == len(costs) * len(unit.heads):
            heapq.heappush(events, (now, 3, sm, counter))
        else:
            done[sm] = max(done[sm] + costs[step[sm] % len(costs)], now)
            heapq.heappush(events, (max(done[sm], free[sm]), 2, sm, counter))
    if ended < len(some):
        raise RuntimeError(f"units wait for one another: {ended} of {len(some)} ended")
    return end


def main(words: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="bench.turns", description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--handover", type=float, default=0.45, help="in blocks")
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--heads", type=lambda text: text.split(","), default=["own", "32:8", "32:16", "28:4"])
    given = parser.parse_args(words)
    table = Table("case", *given.heads, title=f"simulated time in turns over any order, handover {given.handover}")
    for case in cases(given.workloads, [128], given.tokens):
        lists = lower(case.whole().tiles).by_key
        order, ratios = ordered(lists, 1), []
        for text in given.heads:
            own = (case.shape.heads, case.shape.kv_heads)
            heads, kv_heads = own if text == "own" else map(int, text.split(":"))
            items, several = len(lists.items), (kv_heads, heads // kv_heads, given.sms)
            anyhow = list(units(lists, None, heads, kv_heads, plan_units(items, *several)))
            plan = plan_units_in_order(items, lists.tiles, *several)
            in_turn = list(units(order.lists, order, heads, kv_heads, plan))
            ratio = makespan(in_turn, given.sms, given.handover) / makespan(anyhow, given.sms, 0.0)
            ratios.append(f"{ratio:.3f}")
        table.add_row(case.title, *ratios)
        print(case.title, *ratios, flush=True)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
