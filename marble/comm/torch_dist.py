"""One rank per process over ``torch.distributed``: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from marble.comm.transport import Program, Result, Start


def run(program: Program[Result], group: dist.ProcessGroup) -> Result:
    """Run this rank's program; its transfers become point-to-point messages of ``group``.

    The stream waits for what arrives, not the host (with gloo, the host does).
    """
    rank = group.rank()
    pending: list[tuple[dist.Work, Tensor | None, Tensor | None]] = []
    try:
        while True:
            request = next(program)
            pending = _post(request, rank, group) if isinstance(request, Start) else _finish(pending)
    except StopIteration as stop:
        return stop.value


def _post(start: Start, rank: int, group: dist.ProcessGroup) -> list[tuple[dist.Work, Tensor | None, Tensor | None]]:
    messages: list[dist.P2POp] = []
    copies: list[tuple[Tensor | None, Tensor | None]] = []  # (target, staged) of received rows that need a copy
    for transfer in start.transfers:
        if transfer.source == transfer.target:
            start.view(transfer.dst).copy_(start.view(transfer.src))
        elif transfer.source == rank:
            rows = start.view(transfer.src).contiguous()
            messages.append(dist.P2POp(dist.isend, rows, group=group, group_peer=transfer.target))
            copies.append((None, rows))  # the message needs them until it is sent
        else:
            target = start.view(transfer.dst)
            staged = target if target.is_contiguous() else target.new_empty(target.shape)
            messages.append(dist.P2POp(dist.irecv, staged, group=group, group_peer=transfer.source))
            copies.append((None, None) if staged is target else (target, staged))
    if not messages:
        return []
    works = dist.batch_isend_irecv(messages)
    # NCCL answers a batch with one work for all of it.
    works += [works[-1]] * (len(messages) - len(works))
    return [(work, *copy) for work, copy in zip(works, copies, strict=True)]


def _finish(
    pending: list[tuple[dist.Work, Tensor | None, Tensor | None]],
) -> list[tuple[dist.Work, Tensor | None, Tensor | None]]:
    for work, _, _ in pending:
        work.wait()
    for _, target, staged in pending:
        if target is not None and staged is not None:
            target.copy_(staged)
    return []
