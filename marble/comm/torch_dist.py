"""One rank per process over ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

Nothing waits for ever: a transfer that does not end within the caller's timeout, or whose connection breaks, is a
`TransportError` that names the rank, the step and the rows. Messages of different operations and steps have different
tags (gloo keeps them apart; NCCL knows no tags), so ranks that run different things wait rather than mix their data. A
group in which a rank failed may hold messages that nobody will ask for, and is refused from then on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from marble.comm.transport import Arrive, Program, Result, Start, TransportError, Wait

_KEPT_DIGESTS = 4096
_SHORTEST = timedelta(milliseconds=1)
"""``Work.wait`` takes 0 for its own default."""


@dataclass
class _Known:
    """What this process knows of a group.

    Attributes:
        failure: why it can no longer be used, or None.
        agreed: digests that its ranks have found equal, oldest first. The same on all ranks, as they agree together.
    """

    failure: TransportError | None = None
    agreed: dict[bytes, None] = field(default_factory=dict)


_groups: WeakKeyDictionary[dist.ProcessGroup, _Known] = WeakKeyDictionary()


@dataclass(frozen=True)
class Operation:
    """What a program is, and how long its steps may take.

    Attributes:
        name: for messages, such as ``layer 1, forward``.
        digest: what all ranks must have in common for their messages to belong together.
        timeout: how long a step may wait for other ranks; None for the group's own timeout.
    """

    name: str
    digest: bytes = b""
    timeout: timedelta | None = None

    def tag(self, step: int) -> int:
        """The tag of a step's messages."""
        return crc32(f"{self.name}, {step}".encode(), crc32(self.digest)) & 0x7FFFFFFF


@dataclass(frozen=True)
class _Message:
    """A message to another rank, or from one.

    Attributes:
        call: ``isend`` or ``irecv``.
        peer: the other rank, by its number in the group.
        buffer: what is sent or received; it lives until that is done.
        targets: rows to fill from ``buffer`` once it is here; none if it is those rows itself, or is sent.
        rows: the names of the rows.
    """

    call: Callable[..., Any]
    peer: int
    buffer: Tensor
    targets: tuple[Tensor, ...]
    rows: str


def run(program: Program[Result], group: dist.ProcessGroup, operation: Operation) -> Result:
    """Run this rank's program; its transfers become point-to-point messages of ``group``, one per peer and step.

    The stream waits for what arrives, not the host; with gloo, and on GPUs if the operation has a timeout, the host
    does.

    Raises:
        TransportError: if a transfer fails or takes longer than the operation's timeout, or if one failed before in
            this group.
    """
    known = _groups.setdefault(group, _Known())
    if known.failure is not None:
        raise TransportError(
            f"group: it failed before and may hold old messages; make a new group. It failed with: {known.failure}",
            known.failure.wait,
        )
    driver = _Driver(group, operation)
    try:
        while True:
            request = next(program)
            if isinstance(request, Start):
                driver.start(request)
            else:
                assert isinstance(request, Arrive)
                driver.finish()
    except StopIteration as stop:
        return stop.value
    except TransportError as error:
        known.failure = error
        raise
    except BaseException as error:
        if driver.step >= 0:
            known.failure = TransportError(f"{operation.name}, step {driver.step}: this rank raised {error!r}")
        raise


class _Driver:
    """Performs the transfers of one program, step by step."""

    def __init__(self, group: dist.ProcessGroup, operation: Operation) -> None:
        self.group, self.operation = group, operation
        self.rank = group.rank()
        self.step = -1
        self.pending: list[tuple[dist.Work, _Message]] = []

    def start(self, start: Start) -> None:
        """Post the messages of the next step."""
        self.step += 1
        messages = _messages(start, self.rank)
        # One batch for NCCL; one by one elsewhere, so that it is known which peer an error is about.
        batches = [messages] if messages and messages[0].buffer.is_cuda else [[message] for message in messages]
        self.pending = []
        for batch in batches:
            tag = self.operation.tag(self.step)
            calls = [dist.P2POp(m.call, m.buffer, group=self.group, tag=tag, group_peer=m.peer) for m in batch]
            try:
                works = dist.batch_isend_irecv(calls)
            except RuntimeError as error:
                raise self._error(batch[0], "the connection is broken") from error
            # NCCL answers a batch with one work for all of it.
            works += [works[-1]] * (len(batch) - len(works))
            self.pending += zip(works, batch, strict=True)

    def finish(self) -> None:
        """Wait for the messages of this step and put what came in its place."""
        timeout = self.operation.timeout
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work, message in self.pending:
            try:
                if deadline is None:
                    work.wait()
                else:
                    work.wait(max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST))
            except RuntimeError as error:
                late = deadline is not None and time.monotonic() >= deadline
                reason = f"not done after {timeout}" if late else "the connection is broken"
                raise self._error(message, reason) from error
        for _, message in self.pending:
            if message.targets:
                parts = message.buffer.split([target.numel() for target in message.targets])
                for target, part in zip(message.targets, parts, strict=True):
                    target.copy_(part.view(target.shape))
        self.pending = []

    def _error(self, message: _Message, reason: str) -> TransportError:
        direction = "to send" if message.call is dist.isend else "to receive"
        wait = Wait(
            self.rank,
            message.peer,
            dist.get_global_rank(self.group, message.peer),
            self.operation.name,
            self.step,
            f"{direction} {message.rows}",
        )
        return TransportError(
            f"{wait}: {reason}. Rank {message.peer} died, stalled or raised, lost a rank itself, or runs something "
            "else; to go on, make a new group without it",
            wait,
        )


def _messages(start: Start, rank: int) -> list[_Message]:
    """The messages of a step, one per peer, direction and type; copies inside the rank are made at once."""
    # Both ends list their transfers in one order, so rows of one type pack and unpack alike.
    leaving: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
    arriving: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
    for transfer in start.transfers:
        if transfer.source == transfer.target:
            start.view(transfer.dst).copy_(start.view(transfer.src))
        elif transfer.source == rank:
            rows = start.view(transfer.src)
            leaving[transfer.target, rows.dtype].append((str(transfer.src), rows))
        else:
            rows = start.view(transfer.dst)
            arriving[transfer.source, rows.dtype].append((str(transfer.dst), rows))
    messages = []
    for (peer, _), named in leaving.items():
        names, parts = zip(*named, strict=True)
        packed = parts[0].contiguous() if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        messages.append(_Message(dist.isend, peer, packed, (), ", ".join(names)))
    for (peer, _), named in arriving.items():
        names, parts = zip(*named, strict=True)
        direct = len(parts) == 1 and parts[0].is_contiguous()
        buffer = parts[0] if direct else parts[0].new_empty(sum(part.numel() for part in parts))
        messages.append(_Message(dist.irecv, peer, buffer, () if direct else parts, ", ".join(names)))
    return messages


@dataclass(frozen=True)
class _Share:
    """What one rank gives to a gather."""

    owner: int
    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class _Copy:
    """A share on its way to another rank."""

    source: int
    src: _Share
    target: int
    dst: _Share


def gather(
    x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, what: str, timeout: timedelta | None = None
) -> list[Tensor]:
    """Every rank's ``x``, on every rank.

    Args:
        x: [lengths[rank], ...], alike on all ranks but for its length.
        lengths: by rank.
        group: the ranks.
        what: what it is, for messages.
        timeout: how long to wait for other ranks; None for the group's own timeout.

    Raises:
        TransportError: as `run`.
    """
    rank = group.rank()
    parts = [x if owner == rank else x.new_empty(length, *x.shape[1:]) for owner, length in enumerate(lengths)]
    shares = [_Share(owner, what) for owner in range(len(lengths))]
    others = [other for other in range(len(lengths)) if other != rank]
    copies = [_Copy(rank, shares[rank], other, shares[rank]) for other in others if parts[rank].numel()]
    copies += [_Copy(other, shares[other], rank, shares[other]) for other in others if parts[other].numel()]

    def program() -> Program[list[Tensor]]:
        yield Start(tuple(copies), lambda share: parts[share.owner])
        yield Arrive()
        return parts

    return run(program(), group, Operation(f"gathering {what}", timeout=timeout))


def disagreeing(
    digest: Tensor, device: torch.device, group: dist.ProcessGroup, timeout: timedelta | None = None
) -> list[int]:
    """The ranks of a group whose digest is not this rank's. Once they have agreed on one they do not ask again.

    Args:
        digest: int64 [4], on the CPU.
        device: where the group communicates from.
        group: the ranks.
        timeout: how long to wait for other ranks; None for the group's own timeout.

    Raises:
        TransportError: as `run`.
    """
    agreed, key = _groups.setdefault(group, _Known()).agreed, digest.numpy().tobytes()
    if key in agreed:
        return []
    rank = group.rank()
    digests = gather(digest.to(device), [len(digest)] * group.size(), group, "the digest of the plan", timeout)
    different = [other for other, theirs in enumerate(digests) if not torch.equal(theirs, digests[rank])]
    if not different:
        agreed[key] = None
        if len(agreed) > _KEPT_DIGESTS:  # the oldest is the same one on all ranks
            del agreed[next(iter(agreed))]
    return different
