"""The schedule language: what one rank does, forward and backward, as data.

A schedule is a sequence of steps over named buffers. In a step the transfers start, buffers are cleared, the calls
run, the transfers are waited on, and received sums are added, in this order. Every sequence-parallel scheme is a
builder that emits this language, one executor runs it, and `marble.compose.check` proves it right without running it.

Buffers by name: a pass is handed its inputs in ``q`` and ``kv`` (backward: also ``dout``, ``lse`` and ``delta``) and
leaves its results in ``out`` and ``lse`` (backward: ``dq`` and ``dkv``), in their first rows. All others are the
builder's own. A scheme that regroups heads (Ulysses) moves ``heads`` slices between buffers of different widths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from marble.kernels.contract import Work


class Kind(StrEnum):
    """What a row of a buffer is, for ``h`` heads of size ``d``."""

    TOKENS = "tokens"
    """[h, d] in the type of the inputs: queries, outputs, output gradients."""
    PAIRS = "pairs"
    """[2, h, d] in the type of the inputs: a key and its value."""
    TOKEN_SUMS = "token sums"
    """[h, d] in the accumulation type: query gradients."""
    PAIR_SUMS = "pair sums"
    """[2, h, d] in the accumulation type: key and value gradients."""
    STATISTICS = "statistics"
    """[h] in the accumulation type: log-sum-exp and delta. Cleared, it is −inf, the log-sum-exp of no keys."""

    @property
    def accumulates(self) -> bool:
        """Whether its values are in the accumulation type."""
        return self in (Kind.TOKEN_SUMS, Kind.PAIR_SUMS, Kind.STATISTICS)

    def values(self, head_dim: int) -> int:
        """How many values a row has for each head."""
        if self is Kind.STATISTICS:
            return 1
        return head_dim * (2 if self in (Kind.PAIRS, Kind.PAIR_SUMS) else 1)


@dataclass(frozen=True)
class Buffer:
    """A named buffer of ``rows`` rows for ``heads`` heads.

    Where rows move between ranks, all ranks of a layer declare the same such buffers in the same order, with the same
    room for them, so that each knows where they lie in the memory of the others.

    Attributes:
        name: its name.
        kind: what a row is.
        rows: how many this rank has.
        heads: heads of a row.
        whole: room for rows that move with all their heads: ``rows`` of the rank that has most; 0 if none do.
        split: the same for rows of which some heads move, or the statistics.
    """

    name: str
    kind: Kind
    rows: int
    heads: int
    whole: int = 0
    split: int = 0


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``stop`` of a buffer, of all heads or of the heads ``heads[0]`` to ``heads[1]``."""

    buffer: str
    start: int
    stop: int
    heads: tuple[int, int] | None = None

    def __str__(self) -> str:
        heads = "" if self.heads is None else f", heads {self.heads[0]}:{self.heads[1]}"
        return f"{self.buffer}[{self.start}:{self.stop}{heads}]"

    def __len__(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Rows) -> bool:
        """Whether two row ranges share an element."""
        if self.buffer != other.buffer or self.start >= other.stop or other.start >= self.stop:
            return False
        if self.heads is None or other.heads is None:
            return True
        return self.heads[0] < other.heads[1] and other.heads[0] < self.heads[1]


@dataclass(frozen=True)
class Transfer:
    """Rows of the rank ``source`` copied into rows of the rank ``target`` (the same rank: a local copy).

    Both ranks list it in the same step, and the transfers between two ranks in the same order.
    """

    source: int
    src: Rows
    target: int
    dst: Rows

    def __post_init__(self) -> None:
        if len(self.src) != len(self.dst):
            raise ValueError(f"transfer: {len(self.src)} rows cannot fill {len(self.dst)}: {self}")
        if not len(self.src):
            raise ValueError(f"transfer: leave out transfers of no rows: {self}")

    @property
    def whole(self) -> bool:
        """Whether the rows move with all their heads."""
        return self.src.heads is None and self.dst.heads is None


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call.

    Attributes:
        work: the pairs it computes, over the rows of ``q`` and of ``kv``.
        kv: resident keys and values.
        q: the buffer of the queries.
        out: forward only, the buffer that last touches write.
        lse: the buffer of the log-sum-exp, written forward and read backward.
        carries: forward only, whether some touch is not the first and the last, so that state is needed.
        dout: backward only, the buffer of output gradients.
        dkv: backward only, rows that key and value gradients are added to, as many as ``kv``.
        dq: backward only, the buffer that query gradients are added to.
        delta: backward only, the buffer of Σ out · dout.
    """

    work: Work
    kv: Rows
    q: str = "q"
    out: str = "out"
    lse: str = "lse"
    carries: bool = False
    dout: str = "dout"
    dkv: Rows | None = None
    dq: str = "dq"
    delta: str = "delta"


@dataclass(frozen=True)
class Add:
    """Add rows of a sum buffer to rows of another."""

    src: Rows
    dst: Rows

    def __post_init__(self) -> None:
        if len(self.src) != len(self.dst):
            raise ValueError(f"add: {len(self.src)} rows cannot be added to {len(self.dst)}: {self}")


@dataclass(frozen=True, eq=False)
class Step:
    """What happens between two synchronisations: start transfers, clear, call, wait for the transfers, add."""

    transfers: tuple[Transfer, ...] = ()
    clears: tuple[Rows, ...] = ()
    calls: tuple[Call, ...] = ()
    adds: tuple[Add, ...] = ()


@dataclass(frozen=True, eq=False)
class Pass:
    """The forward or the backward pass of a schedule."""

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        sizes = self.buffers_by_name
        if len(sizes) != len(self.buffers):
            raise ValueError("schedule: two buffers have one name")
        self.hold(rows for step in self.steps for rows in _local_rows(step))
        for step in self.steps:
            for call in step.calls:
                names = (call.out, call.lse) if call.dkv is None else (call.dout, call.lse, call.delta, call.dq)
                for name in (call.q, *names):
                    if name not in sizes:
                        raise ValueError(f"schedule: buffer {name!r} is not declared")

    @cached_property
    def buffers_by_name(self) -> dict[str, Buffer]:
        """The declarations by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def handled(self) -> frozenset[str]:
        """The buffers that something else than calls reads or writes: transfers, clearing or adding."""
        return self._passed_on | {rows.buffer for step in self.steps for rows in step.clears}

    @cached_property
    def _passed_on(self) -> frozenset[str]:
        """The buffers that transfers move or additions concern."""
        moved = (rows for step in self.steps for move in step.transfers for rows in (move.src, move.dst))
        added = (rows for step in self.steps for add in step.adds for rows in (add.src, add.dst))
        return frozenset(rows.buffer for rows in (*moved, *added))

    @cached_property
    def made_at_once(self) -> frozenset[str]:
        """The gradients that one call alone makes: all rows that are to hold one, none of which move or are summed.

        Not those with room for rows that move, though on this rank none do: that room is alike on all ranks.
        """
        written: dict[str, list[Rows]] = defaultdict(list)
        for call in (call for step in self.steps for call in step.calls):
            if call.dkv is not None:
                for rows in (Rows(call.dq, 0, self.buffers_by_name[call.dq].rows), call.dkv):
                    written[rows.buffer].append(rows)
        cleared = [rows for step in self.steps for rows in step.clears]
        moving = self._passed_on | {buffer.name for buffer in self.buffers if buffer.whole or buffer.split}
        alone = {name: rows[0] for name, rows in written.items() if len(rows) == 1 and name not in moving}
        return frozenset(
            name
            for name, rows in alone.items()
            if all(rows.start <= each.start and each.stop <= rows.stop for each in cleared if each.buffer == name)
        )

    def hold(self, several: Iterable[Rows]) -> None:
        """Raise a ValueError unless all these rows, and their heads, lie in a declared buffer."""
        buffers = self.buffers_by_name
        for rows in several:
            buffer = buffers.get(rows.buffer)
            if buffer is None:
                raise ValueError(f"schedule: buffer {rows.buffer!r} is not declared")
            low, high = rows.heads or (0, buffer.heads)
            if not (0 <= rows.start <= rows.stop <= buffer.rows and 0 <= low < high <= buffer.heads):
                raise ValueError(f"schedule: {rows} leaves its buffer of {buffer.rows} rows and {buffer.heads} heads")

    def hold_moves(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Raise a ValueError unless a step's transfers are this rank's, lie in declared buffers and have room to move.

        Rows of which some heads move are packed at places that their range of rows gives, so ranges that move to or
        from one buffer in one step are equal or disjoint.
        """
        split: dict[tuple[bool, str], set[tuple[int, int]]] = defaultdict(set)
        for transfer in transfers:
            ends = [
                (leaves, rows)
                for leaves, at, rows in ((True, transfer.source, transfer.src), (False, transfer.target, transfer.dst))
                if at == rank
            ]
            if not ends:
                raise ValueError(f"schedule: rank {rank} has no part in {transfer}")
            self.hold(rows for _, rows in ends)
            for leaves, rows in ends if transfer.source != transfer.target else ():
                buffer = self.buffers_by_name[rows.buffer]
                statistics = transfer.whole and buffer.kind is Kind.STATISTICS
                if statistics or rows.stop > (buffer.whole if transfer.whole else buffer.split):
                    raise ValueError(f"schedule: {rows.buffer!r} declares no room for {transfer}")
                if not transfer.whole:
                    split[leaves, rows.buffer].add((rows.start, rows.stop))
        for (_, name), ranges in split.items():
            if any(low < stop for (_, stop), (low, _) in pairwise(sorted(ranges))):
                raise ValueError(f"schedule: ranges of rows of {name!r} that move together overlap: {sorted(ranges)}")


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything one rank does for one attention layer. Frozen and picklable: no tensors on a GPU, no process group.

    Attributes:
        rank: whose schedule it is.
        tokens: number of tokens of every rank's shard.
        forward: the forward pass.
        backward: the backward pass.
    """

    rank: int
    tokens: tuple[int, ...]
    forward: Pass
    backward: Pass

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"schedule: rank {self.rank} is not one of {self.world}")
        for which in (self.forward, self.backward):
            for step in which.steps:
                which.hold_moves(self.rank, step.transfers)

    @property
    def works(self) -> list[Work]:
        """What the calls of both passes compute."""
        steps = (*self.forward.steps, *self.backward.steps)
        return [call.work for step in steps for call in step.calls]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.tokens)


def _local_rows(step: Step) -> list[Rows]:
    """Rows that must exist here. A transfer's far side lies in another rank's buffers, which may differ in size."""
    rows = list(step.clears)
    for call in step.calls:
        rows += [call.kv] + ([call.dkv] if call.dkv is not None else [])
    for add in step.adds:
        rows += [add.src, add.dst]
    return rows
