"""One rank per process over ``torch.distributed``: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from marble.comm.transport import Program, Result, Start


@dataclass(frozen=True)
class _Message:
    """A message under way.

    Attributes:
        work: what to wait for.
        buffer: what is sent or received; it lives until then.
        targets: rows to fill from ``buffer`` once it is here; none if it is those rows itself, or is sent.
    """

    work: dist.Work
    buffer: Tensor
    targets: tuple[Tensor, ...] = ()


def run(program: Program[Result], group: dist.ProcessGroup) -> Result:
    """Run this rank's program; its transfers become point-to-point messages of ``group``, one per peer and step.

    The stream waits for what arrives, not the host (with gloo, the host does).
    """
    rank = group.rank()
    pending: list[_Message] = []
    try:
        while True:
            request = next(program)
            if isinstance(request, Start):
                pending = _post(request, rank, group)
            else:
                _finish(pending)
    except StopIteration as stop:
        return stop.value


def _post(start: Start, rank: int, group: dist.ProcessGroup) -> list[_Message]:
    # Both ends list their transfers in one order, so rows of one type pack and unpack alike.
    leaving: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    arriving: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for transfer in start.transfers:
        if transfer.source == transfer.target:
            start.view(transfer.dst).copy_(start.view(transfer.src))
        elif transfer.source == rank:
            rows = start.view(transfer.src)
            leaving[transfer.target, rows.dtype].append(rows)
        else:
            rows = start.view(transfer.dst)
            arriving[transfer.source, rows.dtype].append(rows)
    messages: list[tuple[dist.P2POp, Tensor, tuple[Tensor, ...]]] = []
    for (peer, _), parts in leaving.items():
        packed = parts[0].contiguous() if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        messages.append((dist.P2POp(dist.isend, packed, group=group, group_peer=peer), packed, ()))
    for (peer, _), parts in arriving.items():
        direct = len(parts) == 1 and parts[0].is_contiguous()
        buffer = parts[0] if direct else parts[0].new_empty(sum(part.numel() for part in parts))
        targets = () if direct else tuple(parts)
        messages.append((dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer), buffer, targets))
    if not messages:
        return []
    works = dist.batch_isend_irecv([message for message, _, _ in messages])
    # NCCL answers a batch with one work for all of it.
    works += [works[-1]] * (len(messages) - len(works))
    return [_Message(work, buffer, targets) for work, (_, buffer, targets) in zip(works, messages, strict=True)]


def _finish(pending: list[_Message]) -> None:
    for message in pending:
        message.work.wait()
    for message in pending:
        if message.targets:
            parts = message.buffer.split([target.numel() for target in message.targets])
            for target, part in zip(message.targets, parts, strict=True):
                target.copy_(part.view(target.shape))
