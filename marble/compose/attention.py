"""The public op: exact attention over a planned sequence, differentiable, on real or virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, overload

import torch
from torch import Tensor

from marble.comm import local
from marble.comm.choice import check_connections, choose, connect
from marble.comm.groups import Group
from marble.comm.transport import Connection, Operation, Program, Reserve, check_timeout
from marble.compose import executor
from marble.compose.inboxes import watched
from marble.compose.plan import Plan
from marble.compose.schedule import Schedule
from marble.compose.shape import AttentionShape
from marble.kernels import launch
from marble.kernels.contract import Backend, accumulation_dtype
from marble.layout import as_int

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    layer: int = 0,
    group: Group | None = None,
    backend: str | Backend = "reference",
    transport: str | None = None,
    timeout: timedelta | None = None,
    debug: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    layer: int = 0,
    group: Group | None = None,
    backend: str | Backend = "reference",
    transport: str | None = None,
    timeout: timedelta | None = None,
    debug: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    layer: int = 0,
    group: Group | None = None,
    backend: str | Backend = "reference",
    transport: str | None = None,
    timeout: timedelta | None = None,
    debug: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's tokens to all tokens, with the numbers of a single call over the whole sequence.

    On real ranks this is a collective: every rank of the group calls it, and runs its backward pass, the same number of
    times and in the same order, ranks without tokens included. (Give such ranks a sum as loss, not a mean of nothing.)
    Under autocast the call runs in the type of its inputs.

    Args:
        q: [local_tokens, heads, head_dim], bfloat16, float16, float32 or float64; see `Plan.shard`. Finite, in padding
            too, as are all inputs and their gradients: tiles hold rows that do not see each other, and 0 · NaN is NaN.
        k: [local_tokens, kv_heads, head_dim], same dtype and device.
        v: like ``k``.
        plan: the plan of this batch.
        layer: which of the plan's layers this is.
        group: the plan's ranks, as for `marble.plan`; by default the default group. Unused with virtual ranks.
        backend: a name that `marble.kernels.launch` knows, or a `marble.kernels.contract.Backend`.
        transport: ``local`` for virtual ranks; for process groups ``torch_dist``, or on GPUs ``nvshmem`` or
            ``nccl_rma``, which leave the multiprocessors to attention. By default ``local`` or ``torch_dist``, which
            is logged.
        timeout: how long a step, forward or backward, may wait for other ranks; by default the group's own timeout.
        debug: watch every inbox for being overwritten before it is read (`marble.compose.inboxes`); slow.
        return_lse: also return the log-sum-exp.

    Returns:
        The output, like ``q``; a token that sees no key gets 0. With ``return_lse`` also the natural log-sum-exp of
        the scaled scores, [local_tokens, heads] in float32 (float64 for float64 inputs), −inf for such a token; it is
        not differentiable.

    Raises:
        TypeError, ValueError: if a tensor is not what the plan expects, before anything runs; and on every rank, if
            the ranks planned differently or have inputs of different types.
        TransportError: here or in the backward pass, if another rank died, stalled, raised or runs something else. The
            group is then of no more use; the ranks that are left can go on in a new one (with ``nvshmem``, they
            restart). On GPUs, where the stream waits and not the host, what was returned is wrong, and the next call
            raises, or `Plan.synchronize`.
        InboxError: with ``debug``, if a received row was overwritten before it was read.
    """
    shape = _check(q, k, v, plan, layer)
    chosen = launch.backend(backend) if isinstance(backend, str) else backend
    calls = ("prepare", "forward", "delta", "backward")
    if isinstance(chosen, type) or not (
        all(callable(getattr(chosen, call, None)) for call in calls) and hasattr(chosen, "writes_gradients")
    ):
        got = f"the class {chosen.__name__}" if isinstance(chosen, type) else type(backend).__name__
        raise TypeError(f"backend: expected a name or a Backend, got {got}")
    check_timeout(timeout)
    name = choose(transport, virtual=plan.rank is None)
    ranks = None
    if plan.rank is not None:
        members = plan.process_group(group)
        check_connections(q.device)
        plan.agree(members, q.device, q.dtype, timeout)
        connection = connect(name, members, q.device)
        ranks = _Ranks(connection, f"layer {layer}", plan.digest_of(q.dtype).numpy().tobytes(), timeout)
    schedules = plan.schedules_on(q.device)[layer]
    works = [work for schedule in schedules.values() for work in schedule.works]
    chosen.prepare(works, group=shape.heads // shape.kv_heads, head_dim=shape.head_dim)
    run = _Run(schedules, plan.order.lengths, chosen, ranks, shape.softmax_scale, debug)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = _Attention.apply(q, k, v, run)
    return (out, lse.T) if return_lse else out


@dataclass(frozen=True)
class _Ranks:
    """Real ranks, and what their messages say that they belong to."""

    connection: Connection
    layer: str
    digest: bytes
    timeout: timedelta | None

    def operation(self, name: str) -> Operation:
        return Operation(f"{self.layer}, {name}", self.digest, self.timeout)


@dataclass(frozen=True)
class _Run:
    """How to run one layer's schedules: one on real ranks, or without them those of all ranks."""

    schedules: Mapping[int, Schedule]
    lengths: tuple[int, ...]
    backend: Backend
    ranks: _Ranks | None
    scale: float
    debug: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        results = self._run(
            "forward",
            [q, k, v],
            lambda *args: executor.forward(*args, scale=self.scale, reserve=self.reserve),
        )
        return _join([out for out, _ in results]), _join([lse for _, lse in results], dim=1)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        results = self._run(
            "backward",
            [q, k, v, out, lse, dout],
            lambda *args: executor.backward(*args, scale=self.scale, reserve=self.reserve),
        )
        return tuple(_join(parts) for parts in zip(*results, strict=True))

    @property
    def reserve(self) -> Reserve | None:
        return None if self.ranks is None else self.ranks.connection.reserve

    def _run(self, name: str, tensors: Sequence[Tensor], program: Callable[..., Program[Any]]) -> list[Any]:
        # Autocast would send the backend's float32 products through its own lower precision.
        with torch.autocast(tensors[0].device.type, enabled=False):
            if self.ranks is not None:
                (schedule,) = self.schedules.values()
                mine = self._watched(program(schedule, self.backend, *tensors), schedule, name)
                return [self.ranks.connection.run(mine, self.ranks.operation(name))]
            # Log-sum-exps are [heads, tokens], everything else begins with the tokens.
            pieces = [tensor.split(self.lengths, dim=0 if tensor.ndim == 3 else 1) for tensor in tensors]
            programs = {
                rank: self._watched(program(schedule, self.backend, *(piece[rank] for piece in pieces)), schedule, name)
                for rank, schedule in self.schedules.items()
            }
            return list(local.run_together(programs).values())

    def _watched(self, program: Program[Any], schedule: Schedule, name: str) -> Program[Any]:
        declared = schedule.forward if name == "forward" else schedule.backward
        return watched(program, declared, schedule.rank) if self.debug else program


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class _Attention(torch.autograd.Function):
    """One function for all ranks of this process: per-rank functions would deadlock in the autograd engine."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: _Run) -> tuple[Tensor, Tensor]:
        out, lse = run.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run = run
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        with torch.no_grad():
            gradients = ctx.run.backward(*inputs, dout.contiguous())
            # Sums lie where the next pass's will; a gradient that was written rounded is nobody else's.
            copy = accumulation_dtype(inputs[0].dtype) == inputs[0].dtype
            rounded = [gradient.to(x.dtype, copy=copy) for gradient, x in zip(gradients, inputs[:3], strict=True)]
        if torch.is_grad_enabled():  # they depend on the inputs whatever dout does
            rounded = _Gradients.apply(rounded, *inputs[:3], dout)
        return *rounded, None


class _Gradients(torch.autograd.Function):
    """Gradients that are not differentiable again, and say so to who tries."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *_: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        raise RuntimeError(
            "marble.attention: second derivatives are not computed; call grad or backward without create_graph, or "
            "detach what attention's gradients go into"
        )


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Plan, layer: int) -> AttentionShape:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected the result of marble.plan, got {type(plan).__name__}")
    layer = as_int(layer, "layer")
    if not 0 <= layer < len(plan.layers):
        raise ValueError(f"layer: the plan has layers 0 to {len(plan.layers) - 1}, got {layer!r}")
    shape = plan.layers[layer]
    for name, tensor, heads in (("q", q, shape.heads), ("k", k, shape.kv_heads), ("v", v, shape.kv_heads)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: {tensor.dtype} is not supported; use bfloat16, float16, float32 or float64")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {tensor.dtype} differs from q's {q.dtype}; cast them to one")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got {tensor.layout}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: on {tensor.device}, but q is on {q.device}; move them to one device")
        if tensor.ndim != 3:
            raise ValueError(f"{name}: expected [tokens, heads, head_dim], got shape {tuple(tensor.shape)}")
        if tensor.shape[0] != plan.local_tokens:
            raise ValueError(
                f"{name}: the plan expects {plan.local_tokens} tokens here, got {tensor.shape[0]}; pass it through "
                "plan.shard, or plan for this layout"
            )
        if tensor.shape[1] != heads:
            raise ValueError(f"{name}: layer {layer} was planned with {heads} heads, got {tensor.shape[1]}")
        if tensor.shape[2] != shape.head_dim:
            raise ValueError(f"{name}: layer {layer} was planned with head_dim {shape.head_dim}, got {tensor.shape[2]}")
    if q.is_meta:
        raise ValueError("q: on meta, where nothing is computed; move it to a CPU or a GPU")
    return shape
