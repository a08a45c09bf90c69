"""More ways to break a schedule, like `mutations`: dense calls, and transfers and adds of some heads."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from mutations import BACKWARD, BOTH, Schedules, change_call, pick, steps_of, with_entries

from marble.kernels.contract import Band, Varlen


def sequences(change: Callable[[Random, Varlen, int], Varlen | None]):
    """One sequence of a dense call, changed."""

    def change_one(rng: Random, call: Any) -> Any:
        work = change(rng, call.work, rng.randrange(len(call.work.queries)))
        return None if work is None else replace(call, work=work)

    return change_call(change_one, Varlen)


def sequence_dropped(_: Random, work: Varlen, at: int) -> Varlen | None:
    keep = torch.arange(len(work.queries)) != at
    return replace(work, queries=work.queries[keep], keys=work.keys[keep], touch=work.touch[keep])


def sequence_twice(_: Random, work: Varlen, at: int) -> Varlen | None:
    again = torch.cat([torch.arange(len(work.queries)), torch.tensor([at])])
    return replace(work, queries=work.queries[again], keys=work.keys[again], touch=work.touch[again])


def end_moved(name: str, side: int, by: tuple[int, ...]):
    """A sequence's queries or keys begin or end elsewhere."""

    def change(rng: Random, work: Varlen, at: int) -> Varlen | None:
        ranges = getattr(work, name).clone()
        ranges[at, side] += rng.choice(by)
        return replace(work, **{name: ranges}) if 0 <= int(ranges[at, 0]) <= int(ranges[at, 1]) else None

    return change


def other_band(rng: Random, work: Varlen, _: int) -> Varlen | None:
    return replace(work, band=rng.choice([band for band in Band if band is not work.band]))


def heads_moved(field: str, name: str):
    """An entry that uses the next heads of its buffer."""

    def mutate(rng: Random, schedules: Schedules, which: str) -> Schedules | None:
        site, entry = pick(rng, schedules, which, field, lambda entry: getattr(entry, name).heads is not None)
        if site is None:
            return None
        rows = getattr(entry, name)
        owner = {"src": getattr(entry, "source", site.rank), "dst": getattr(entry, "target", site.rank)}[name]
        size = getattr(schedules[owner], which).buffers_by_name[rows.buffer].heads
        low, high = rows.heads
        heads = (low + 1, high + 1) if high < size else (low - 1, high - 1)
        if not 0 <= heads[0] < heads[1] <= size:
            return None
        new = replace(entry, **{name: replace(rows, heads=heads)})
        for rank in {getattr(entry, "source", site.rank), getattr(entry, "target", site.rank)}:
            place = list(getattr(steps_of(schedules, which, rank)[site.step], field)).index(entry)
            at = replace(site, rank=rank)
            schedules = with_entries(schedules, which, at, lambda entries, place=place: entries.__setitem__(place, new))
        return schedules

    return mutate


DENSE_MUTATIONS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "a sequence is dropped": (BOTH, sequences(sequence_dropped)),
    "a sequence is listed twice": (BOTH, sequences(sequence_twice)),
    "a sequence has other keys": (BOTH, sequences(end_moved("keys", 0, (-1, 1)))),
    "a sequence ends at another key": (BOTH, sequences(end_moved("keys", 1, (-1, 1)))),
    "a sequence has other queries": (BOTH, sequences(end_moved("queries", 0, (-1, 1)))),
    "a sequence is a query short": (BOTH, sequences(end_moved("queries", 1, (-1,)))),
    "a dense call has another band": (BOTH, sequences(other_band)),
}
"""What can go wrong in the chunked ring."""

HEAD_MUTATIONS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "a transfer takes other heads": (BOTH, heads_moved("transfers", "src")),
    "a transfer fills other heads": (BOTH, heads_moved("transfers", "dst")),
    "an add takes other heads": (BACKWARD, heads_moved("adds", "src")),
    "an add goes to other heads": (BACKWARD, heads_moved("adds", "dst")),
}
"""What can go wrong where heads are split."""
