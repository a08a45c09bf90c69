"""Ulysses and USP: heads split over neighbouring ranks, around any schedule over the groups that they form.

An all-to-all before attention turns a shard of tokens with all heads into the tokens of a whole group of ranks with a
part of the heads, and another one after it turns outputs and gradients back. Inside, the schedule of a world of groups
runs as it is: with one group it is Ulysses, with several it is USP, groups × ranks of a group.

Sources: S. A. Jacobs et al., "DeepSpeed Ulysses", 2023; J. Fang and S. Zhao, "USP: A Unified Sequence Parallelism
Approach for Long Context Generative AI", 2024. Replicated key/value heads: MARBLE, section 04 (Luma AI, October 2026).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from marble.compose.schedule import Add, Buffer, Call, Kind, Pass, Rows, Schedule, Step, Transfer

_INNER = "inner "
"""Buffers of the schedule inside are called as it calls them, with this in front."""


Stretch = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank of a group computes.

    Every rank takes ``heads / degree`` neighbouring query heads, and as many key/value heads as divide them evenly: a
    key/value head that serves the query heads of several ranks is copied to each, and one whose query heads do not
    begin at a multiple of their number is copied inside a rank too, so that inner query head h always reads inner
    key/value head h // group.

    Attributes:
        heads: query heads of the layer.
        kv_heads: its key/value heads.
        degree: ranks of a group.

    Raises:
        ValueError: unless ``degree`` divides ``heads``.
    """

    heads: int
    kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        if self.heads % self.degree:
            raise ValueError(f"ulysses: {self.degree} ranks do not divide {self.heads} query heads")

    @cached_property
    def inner_heads(self) -> int:
        """Query heads of a rank."""
        return self.heads // self.degree

    @cached_property
    def group(self) -> int:
        """Query heads of a rank that read one of its key/value heads."""
        return gcd(self.heads // self.kv_heads, self.inner_heads)

    @property
    def inner_kv_heads(self) -> int:
        """Key/value heads of a rank, copies included."""
        return self.inner_heads // self.group

    @property
    def copies(self) -> int:
        """Key/value heads over all ranks of a group beyond one of each."""
        return self.inner_kv_heads * self.degree - self.kv_heads

    def queries(self, part: int) -> tuple[int, int]:
        """First query head of a rank of the group, and one past its last."""
        return part * self.inner_heads, (part + 1) * self.inner_heads

    def source(self, part: int, head: int) -> int:
        """The layer's key/value head that a rank's key/value head ``head`` is a copy of."""
        return (part * self.inner_heads + head * self.group) // (self.heads // self.kv_heads)

    @cached_property
    def keys(self) -> list[list[Stretch]]:
        """Per rank the stretches (inner heads, heads of the layer) of its key/value heads."""
        return [_stretches([(head, at) for head, at, _ in heads]) for heads in self.gradients]

    @cached_property
    def gradients(self) -> list[list[tuple[int, int, int | None]]]:
        """Per rank for each of its key/value heads (inner head, head of the layer, place among the copies).

        The first copy of a head, over the ranks in order, has no place: it lands in the sum itself.
        """
        seen: set[int] = set()
        found: list[list[tuple[int, int, int | None]]] = [[] for _ in range(self.degree)]
        place = 0
        for part, head in itertools.product(range(self.degree), range(self.inner_kv_heads)):
            at = self.source(part, head)
            found[part].append((head, at, place if at in seen else None))
            place += at in seen
            seen.add(at)
        return found


def ulysses(inner: Schedule, rank: int, tokens: tuple[int, ...], split: HeadSplit) -> Schedule:
    """One rank's schedule: all-to-all, the schedule of its group, all-to-all back; the same backward.

    Gradients of copied key/value heads travel home in fp32 and are summed there.

    Args:
        inner: the schedule of the rank's group in a world of groups, for the inner heads of ``split``.
        rank: whose schedule to build; its group holds the ranks ``degree · inner.rank`` and following.
        tokens: tokens of every rank. The group's tokens are those of its ranks, rank after rank.
        split: the heads.

    Raises:
        ValueError: if the tokens of the ranks are not those of the groups.
    """
    degree = split.degree
    if tuple(sum(part) for part in _parts(tokens, degree)) != inner.tokens or rank // degree != inner.rank:
        raise ValueError(f"ulysses: the schedule inside is not that of rank {rank}'s group")
    moves = _Moves(rank, tokens, split)
    mine = tokens[rank]

    def moving(name: str, kind: Kind, heads: int) -> Buffer:
        return Buffer(name, kind, mine, heads, split=max(tokens))

    before = (moving("q", Kind.TOKENS, split.heads), moving("kv", Kind.PAIRS, split.kv_heads))
    statistics = moving("lse", Kind.STATISTICS, split.heads)
    forward = _around(
        inner.forward,
        moves,
        (*before, moving("out", Kind.TOKENS, split.heads), statistics),
        Step((*moves.spread("q"), *moves.spread_keys())),
        Step((*moves.collect("out"), *moves.collect("lse"))),
    )
    backward = _around(
        inner.backward,
        moves,
        (
            *before,
            moving("dout", Kind.TOKENS, split.heads),
            statistics,
            moving("delta", Kind.STATISTICS, split.heads),
            moving("dq", Kind.TOKEN_SUMS, split.heads),
            moving("dkv", Kind.PAIR_SUMS, split.kv_heads),
            *((moving("copies", Kind.PAIR_SUMS, split.copies),) if split.copies else ()),
        ),
        Step((*(move for name in ("q", "dout", "lse", "delta") for move in moves.spread(name)), *moves.spread_keys())),
        Step((*moves.collect("dq"), *moves.collect_keys()), adds=moves.adds()),
    )
    return Schedule(rank, tokens, forward, backward)


@dataclass(frozen=True)
class _Moves:
    """The transfers inside a group that a rank takes part in; all ranks list them in one order."""

    rank: int
    tokens: tuple[int, ...]
    split: HeadSplit

    @cached_property
    def members(self) -> range:
        """The ranks of the group."""
        first = self.rank // self.split.degree * self.split.degree
        return range(first, first + self.split.degree)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int, int, Rows], ...]:
        """(home, worker, the worker's part of the heads, the home's rows among the group's)."""
        found, start = [], 0
        for home in self.members:
            stop = start + self.tokens[home]
            for part, worker in enumerate(self.members):
                if start < stop and self.rank in (home, worker):
                    found.append((home, worker, part, Rows("", start, stop)))
            start = stop
        return tuple(found)

    def spread(self, name: str) -> Iterator[Transfer]:
        """Each rank's tokens to every rank of the group, as the heads that it computes."""
        for home, worker, part, rows in self.pairs:
            src = Rows(name, 0, len(rows), self.split.queries(part))
            yield Transfer(home, src, worker, Rows(_INNER + name, rows.start, rows.stop))

    def spread_keys(self) -> Iterator[Transfer]:
        """The same for keys and values."""
        for home, worker, part, rows in self.pairs:
            for inner, heads in self.split.keys[part]:
                dst = Rows(f"{_INNER}kv", rows.start, rows.stop, inner)
                yield Transfer(home, Rows("kv", 0, len(rows), heads), worker, dst)

    def collect(self, name: str) -> Iterator[Transfer]:
        """What a rank computed for its heads, back to the ranks of the tokens."""
        for home, worker, part, rows in self.pairs:
            dst = Rows(name, 0, len(rows), self.split.queries(part))
            yield Transfer(worker, Rows(_INNER + name, rows.start, rows.stop), home, dst)

    def collect_keys(self) -> Iterator[Transfer]:
        """The same for the gradients of keys and values; copies land beside the first of their head."""
        for home, worker, part, rows in self.pairs:
            found = self.split.gradients[part]
            first = _stretches([(head, at) for head, at, copy in found if copy is None])
            copies = _stretches([(head, copy) for head, _, copy in found if copy is not None])
            for name, stretches in (("dkv", first), ("copies", copies)):
                for inner, heads in stretches:
                    src = Rows(f"{_INNER}dkv", rows.start, rows.stop, inner)
                    yield Transfer(worker, src, home, Rows(name, 0, len(rows), heads))

    def adds(self) -> tuple[Add, ...]:
        """The copies added to the first of their head."""
        rows = self.tokens[self.rank]
        return tuple(
            Add(Rows("copies", 0, rows, (copy, copy + 1)), Rows("dkv", 0, rows, (at, at + 1)))
            for part in range(self.split.degree if rows else 0)
            for _, at, copy in self.split.gradients[part]
            if copy is not None
        )


def _around(inner: Pass, moves: _Moves, buffers: tuple[Buffer, ...], first: Step, last: Step) -> Pass:
    """The inner pass between two steps, on buffers of its own and between ranks of the same part of their groups."""
    room = max(sum(part) for part in _parts(moves.tokens, moves.split.degree))
    renamed = tuple(replace(buffer, name=_INNER + buffer.name, split=room) for buffer in inner.buffers)
    part, degree = moves.rank - moves.members[0], moves.split.degree
    steps = (_renamed(step, lambda group: group * degree + part) for step in inner.steps)
    return Pass((*buffers, *renamed), (first, *steps, last))


def _renamed(step: Step, rank_of: Callable[[int], int]) -> Step:
    def rows(old: Rows) -> Rows:
        return Rows(_INNER + old.buffer, old.start, old.stop, old.heads)

    def call(old: Call) -> Call:
        names = {name: _INNER + getattr(old, name) for name in ("q", "out", "lse", "dout", "dq", "delta")}
        return replace(old, kv=rows(old.kv), dkv=None if old.dkv is None else rows(old.dkv), **names)

    return Step(
        tuple(Transfer(rank_of(t.source), rows(t.src), rank_of(t.target), rows(t.dst)) for t in step.transfers),
        tuple(map(rows, step.clears)),
        tuple(map(call, step.calls)),
        tuple(Add(rows(add.src), rows(add.dst)) for add in step.adds),
    )


def _stretches(pairs: Sequence[tuple[int, int]]) -> list[Stretch]:
    """Pairs of heads that both go up by one, as pairs of (first, one past the last)."""
    found: list[Stretch] = []
    for one, other in pairs:
        if found and (found[-1][0][1], found[-1][1][1]) == (one, other):
            found[-1] = (found[-1][0][0], one + 1), (found[-1][1][0], other + 1)
        else:
            found.append(((one, one + 1), (other, other + 1)))
    return found


def _parts(tokens: Sequence[int], degree: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(tokens), degree):
        yield tokens[first : first + degree]
