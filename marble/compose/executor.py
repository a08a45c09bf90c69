"""The executor: one loop over a schedule's steps, forward and backward.

It knows buffers, transfers and calls, and nothing of what the schedule is for. Transfers are asked for, not made
(`marble.comm.transport`), and calls go to the kernel backend that it is handed (`marble.kernels.contract`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marble.comm.transport import Arrive, Program, Reserve, Start
from marble.compose.schedule import Buffer, Call, Kind, Pass, Rows, Schedule
from marble.kernels.contract import Backend, State, accumulation_dtype

_ROW_DIM = {Kind.STATISTICS: 1}
_HEAD_DIM = {Kind.TOKENS: 1, Kind.PAIRS: 2, Kind.TOKEN_SUMS: 1, Kind.PAIR_SUMS: 2, Kind.STATISTICS: 0}


_APART = 256
"""Bytes at whose multiples buffers begin in reserved memory."""


class Memory:
    """The buffers of one pass as tensors.

    Rows come first, then heads, except for statistics, which are [heads, rows]; the kernel contract's head-first
    views are permutations. Sums and statistics are in the accumulation type.

    With ``reserve``, rows that move between ranks lie in the memory that it gives, and this is their
    `marble.comm.transport.Room`. Without, every buffer is allocated. Gradients in ``written`` are in the type of the
    inputs, and are not cleared.
    """

    def __init__(
        self,
        declared: Pass,
        like: Tensor,
        kv: tuple[Tensor, Tensor],
        given: dict[str, Tensor],
        reserve: Reserve | None = None,
        written: frozenset[str] = frozenset(),
    ) -> None:
        self.written = written
        self.buffers = declared.buffers_by_name
        self.like = like
        self.places: dict[tuple[str, bool], int] = {}
        total = 0
        for buffer in declared.buffers:
            for whole, rows in ((True, buffer.whole), (False, buffer.split)):
                if rows:
                    self.places[buffer.name, whole] = total
                    total += -(-rows * buffer.heads * self.unit(buffer) // _APART) * _APART
        self.reserved = reserve(total) if reserve is not None and total else None
        self.tensors: dict[str, Tensor] = {}
        own = kv[0].shape[0]
        read = (call.kv for step in declared.steps for call in step.calls)
        joined = any(rows.buffer == "kv" and rows.stop > own for rows in read)
        # Keys and values that neither leave nor are joined by others stay where they are.
        self.kept = None if joined or "kv" in declared.handled else kv
        for buffer in declared.buffers:
            if buffer.name in given:
                self.tensors[buffer.name] = given[buffer.name]
            elif buffer.name != "kv" or self.kept is None:
                tensor = self.tensors[buffer.name] = self.allocate(buffer)
                if buffer.kind is Kind.PAIRS:
                    # Rows behind a ragged key block are read by whole-block loads and must be finite.
                    tensor[own if buffer.name == "kv" else 0 :].zero_()
        if self.kept is None:
            for home, part in zip(self.pair(Rows("kv", 0, own)), kv, strict=True):
                home.copy_(part)

    def unit(self, buffer: Buffer) -> int:
        """Bytes of one head of one row."""
        return buffer.kind.values(self.like.shape[-1]) * self.dtype(buffer).itemsize

    def dtype(self, buffer: Buffer) -> torch.dtype:
        """The type of a buffer's values."""
        sums = buffer.kind.accumulates and buffer.name not in self.written
        return accumulation_dtype(self.like.dtype) if sums else self.like.dtype

    def allocate(self, buffer: Buffer) -> Tensor:
        """A buffer's tensor: in reserved memory if whole rows of it move, of its own otherwise."""
        head_dim = self.like.shape[-1]
        shape: tuple[int, ...] = (buffer.rows, buffer.heads, head_dim)
        if buffer.kind in (Kind.PAIRS, Kind.PAIR_SUMS):
            shape = (buffer.rows, 2, buffer.heads, head_dim)
        elif buffer.kind is Kind.STATISTICS:
            shape = (buffer.heads, buffer.rows)
        if self.reserved is not None and buffer.whole:
            return self.memory(buffer, self.places[buffer.name, True], shape)
        if buffer.kind is Kind.PAIR_SUMS and not (buffer.whole or buffer.split):
            # Gradients that stay here are read as two tensors only, and each is dense.
            rows, pair, *rest = shape
            return torch.empty((pair, rows, *rest), dtype=self.dtype(buffer), device=self.like.device).transpose(0, 1)
        return torch.empty(shape, dtype=self.dtype(buffer), device=self.like.device)

    def memory(self, buffer: Buffer, place: int, shape: Sequence[int]) -> Tensor:
        """Reserved memory from a place on, as values of a buffer."""
        assert self.reserved is not None
        dtype = self.dtype(buffer)
        return self.reserved[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def place(self, rows: Rows, whole: bool) -> int:
        """See `marble.comm.transport.Room`; the rows may be another rank's."""
        buffer = self.buffers[rows.buffer]
        before = rows.start * buffer.heads + (0 if whole or rows.heads is None else rows.heads[0] * len(rows))
        return self.places[rows.buffer, whole] + before * self.unit(buffer)

    def nbytes(self, rows: Rows) -> int:
        """See `marble.comm.transport.Room`."""
        buffer = self.buffers[rows.buffer]
        low, high = rows.heads or (0, buffer.heads)
        return len(rows) * (high - low) * self.unit(buffer)

    def copy_of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The rows, heads first, and their packed copy."""
        buffer = self.buffers[rows.buffer]
        here = self.view(rows).movedim(_HEAD_DIM[buffer.kind], 0)
        return here, self.memory(buffer, self.place(rows, whole=False), here.shape)

    def pack(self, rows: Rows) -> None:
        """See `marble.comm.transport.Room`."""
        here, copy = self.copy_of(rows)
        copy.copy_(here)

    def unpack(self, rows: Rows) -> None:
        """See `marble.comm.transport.Room`."""
        here, copy = self.copy_of(rows)
        here.copy_(copy)

    def view(self, rows: Rows) -> Tensor:
        """The rows as a tensor that aliases the buffer."""
        kind = self.buffers[rows.buffer].kind
        part = self.tensors[rows.buffer].narrow(_ROW_DIM.get(kind, 0), rows.start, len(rows))
        if rows.heads is None:
            return part
        return part.narrow(_HEAD_DIM[kind], rows.heads[0], rows.heads[1] - rows.heads[0])

    def pair(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values (or their gradients) of some rows, [rows, heads, head_dim] each."""
        if rows.buffer == "kv" and self.kept is not None:
            k, v = self.kept
            return k[rows.start : rows.stop], v[rows.start : rows.stop]
        part = self.view(rows)
        return part[:, 0], part[:, 1]

    def clear(self, rows: Rows) -> None:
        """Set rows to what they are before any key has been seen, unless a call writes them all."""
        if rows.buffer not in self.written:
            self.view(rows).fill_(float("-inf") if self.buffers[rows.buffer].kind is Kind.STATISTICS else 0)


def forward(
    schedule: Schedule,
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    reserve: Reserve | None = None,
) -> Program[tuple[Tensor, Tensor]]:
    """The forward pass of one rank.

    Args:
        schedule: the rank's schedule.
        backend: runs the calls.
        q: [tokens, heads, head_dim], the rank's queries.
        k: [tokens, kv_heads, head_dim].
        v: [tokens, kv_heads, head_dim].
        scale: softmax scale.
        reserve: where rows that move between ranks shall lie; by default in buffers that are allocated for this pass.

    Returns:
        The output, like ``q``, and the log-sum-exp [heads, tokens] in the accumulation type.
    """
    memory = Memory(schedule.forward, q, (k, v), {"q": q}, reserve)
    states: dict[str, State] = {}

    def perform(call: Call) -> None:
        queries = memory.tensors[call.q]
        if call.carries and call.q not in states:
            rows, heads, head_dim = queries.shape
            states[call.q] = State.empty(heads, rows, head_dim, accumulation_dtype(q.dtype), q.device)
        keys, values = memory.pair(call.kv)
        out, lse = memory.tensors[call.out], memory.tensors[call.lse]
        backend.forward(queries, keys, values, call.work, states.get(call.q), out, lse, scale=scale)

    yield from _run(schedule.forward, memory, perform)
    return memory.tensors["out"], memory.tensors["lse"]


def backward(
    schedule: Schedule,
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    scale: float,
    reserve: Reserve | None = None,
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """The backward pass of one rank, against the output and log-sum-exp of the forward pass.

    Shapes as in `forward`; ``dout`` is like ``out``.

    Returns:
        dq, dk and dv, shaped like q, k and v, in the accumulation type; or rounded, where one call makes one and the
        backend writes it. With ``reserve``, those in the accumulation type may lie in the memory that it gave.
    """
    given = {"q": q, "dout": dout, "lse": lse, "delta": backend.delta(out, dout)}
    rounds = accumulation_dtype(q.dtype) != q.dtype and backend.writes_gradients
    written = schedule.backward.made_at_once if rounds else frozenset()
    memory = Memory(schedule.backward, q, (k, v), given, reserve, written)

    def perform(call: Call) -> None:
        assert call.dkv is not None
        keys, values = memory.pair(call.kv)
        dk, dv = (part.transpose(0, 1) for part in memory.pair(call.dkv))
        queries, douts = memory.tensors[call.q], memory.tensors[call.dout]
        lse, delta = memory.tensors[call.lse], memory.tensors[call.delta]
        dq = memory.tensors[call.dq].transpose(0, 1)
        backend.backward(queries, keys, values, douts, lse, delta, call.work, dq, dk, dv, scale=scale)

    yield from _run(schedule.backward, memory, perform)
    dk, dv = memory.pair(Rows("dkv", 0, k.shape[0]))
    return memory.tensors["dq"], dk, dv


def _run(which: Pass, memory: Memory, perform: Callable[[Call], None]) -> Program[None]:
    room = None if memory.reserved is None else memory
    for step in which.steps:
        yield Start(step.transfers, memory.view, room)
        for rows in step.clears:
            memory.clear(rows)
        for call in step.calls:
            perform(call)
        yield Arrive()
        for add in step.adds:
            memory.view(add.dst).add_(memory.view(add.src))
