"""The executor: one loop over a schedule's steps, forward and backward.

It knows buffers, transfers and calls, and nothing of what the schedule is for. Transfers are asked for, not made
(`marble.comm.transport`), and calls go to the kernel backend that it is handed (`marble.kernels.contract`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marble.comm.transport import Arrive, Program, Start
from marble.compose.schedule import Buffer, Call, Kind, Pass, Rows, Schedule
from marble.kernels.contract import Backend, State, accumulation_dtype

_ROW_DIM = {Kind.STATISTICS: 1}
_HEAD_DIM = {Kind.TOKENS: 1, Kind.PAIRS: 2, Kind.TOKEN_SUMS: 1, Kind.PAIR_SUMS: 2, Kind.STATISTICS: 0}


class Memory:
    """The buffers of one pass as tensors.

    Rows come first, then heads, except for statistics, which are [heads, rows]; the kernel contract's head-first
    views are permutations. Sums and statistics are in the accumulation type.
    """

    def __init__(self, declared: Pass, like: Tensor, kv: tuple[Tensor, Tensor], given: dict[str, Tensor]) -> None:
        self.kinds = {buffer.name: buffer.kind for buffer in declared.buffers}
        self.tensors: dict[str, Tensor] = {}
        for buffer in declared.buffers:
            tensor = given.get(buffer.name)
            self.tensors[buffer.name] = _allocate(buffer, like) if tensor is None else tensor
        for home, part in zip(self.pair(Rows("kv", 0, kv[0].shape[0])), kv, strict=True):
            home.copy_(part)

    def view(self, rows: Rows) -> Tensor:
        """The rows as a tensor that aliases the buffer."""
        kind = self.kinds[rows.buffer]
        part = self.tensors[rows.buffer].narrow(_ROW_DIM.get(kind, 0), rows.start, len(rows))
        if rows.heads is None:
            return part
        return part.narrow(_HEAD_DIM[kind], rows.heads[0], rows.heads[1] - rows.heads[0])

    def pair(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values (or their gradients) of some rows, [rows, heads, head_dim] each."""
        part = self.view(rows)
        return part[:, 0], part[:, 1]

    def clear(self, rows: Rows) -> None:
        """Set rows to what they are before any key has been seen."""
        self.view(rows).fill_(float("-inf") if self.kinds[rows.buffer] is Kind.STATISTICS else 0)


def forward(
    schedule: Schedule, backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, scale: float
) -> Program[tuple[Tensor, Tensor]]:
    """The forward pass of one rank.

    Args:
        schedule: the rank's schedule.
        backend: runs the calls.
        q: [tokens, heads, head_dim], the rank's queries.
        k: [tokens, kv_heads, head_dim].
        v: [tokens, kv_heads, head_dim].
        scale: softmax scale.

    Returns:
        The output, like ``q``, and the log-sum-exp [heads, tokens] in the accumulation type.
    """
    memory = Memory(schedule.forward, q, (k, v), {"q": q})
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
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """The backward pass of one rank, against the output and log-sum-exp of the forward pass.

    Shapes as in `forward`; ``dout`` is like ``out``.

    Returns:
        dq, dk and dv, shaped like q, k and v, in the accumulation type.
    """
    given = {"q": q, "dout": dout, "lse": lse, "delta": backend.delta(out, dout)}
    memory = Memory(schedule.backward, q, (k, v), given)

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
    for step in which.steps:
        yield Start(step.transfers, memory.view)
        for rows in step.clears:
            memory.clear(rows)
        for call in step.calls:
            perform(call)
        yield Arrive()
        for add in step.adds:
            memory.view(add.dst).add_(memory.view(add.src))


def _allocate(buffer: Buffer, like: Tensor) -> Tensor:
    sums = buffer.kind in (Kind.TOKEN_SUMS, Kind.PAIR_SUMS, Kind.STATISTICS)
    dtype = accumulation_dtype(like.dtype) if sums else like.dtype
    head_dim = like.shape[-1]
    shape: tuple[int, ...] = (buffer.rows, buffer.heads, head_dim)
    if buffer.kind in (Kind.PAIRS, Kind.PAIR_SUMS):
        shape = (buffer.rows, 2, buffer.heads, head_dim)
    elif buffer.kind is Kind.STATISTICS:
        shape = (buffer.heads, buffer.rows)
    if buffer.kind is Kind.PAIRS:
        # Rows behind a ragged key block are read by whole-block loads and must be finite.
        return torch.zeros(shape, dtype=dtype, device=like.device)
    return torch.empty(shape, dtype=dtype, device=like.device)
