"""One rank per process over ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

Nothing waits for ever: a transfer that does not end within the caller's timeout, or whose connection breaks, is a
`TransportError` that names the rank, the step and the rows; on GPUs, where a stream waits and cannot raise, the next
call raises it. Messages of different operations and steps have different tags (gloo keeps them apart; NCCL knows no
tags), so ranks that run different things wait rather than mix their data. A group in which a rank failed may hold
messages that nobody will ask for, and is refused from then on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from marble.comm.arena import Arena
from marble.comm.lane import watch_gpu
from marble.comm.transport import Arrive, Operation, Program, Result, Start, TransportError, Wait, drive
from marble.comm.watchdog import Awaited, Pending, Watchdog

_KEPT_DIGESTS = 4096
_SHORTEST = timedelta(milliseconds=1)
"""``Work.wait`` takes 0 for its own default."""
_REMEDY = (
    "That rank died, stalled or raised, lost a rank itself, or runs something else; to go on, make a new group without "
    "it"
)


@dataclass
class _Known:
    """What this process knows of a group.

    Attributes:
        failure: why it can no longer be used, or None.
        agreed: digests that its ranks have found equal, oldest first. The same on all ranks, as they agree together.
        watchdogs: by GPU.
        aborted: whether a watchdog ended all that is under way.
        arenas: memory for what moves, by device.
    """

    failure: TransportError | None = None
    agreed: dict[bytes, None] = field(default_factory=dict)
    watchdogs: dict[torch.device, Watchdog] = field(default_factory=dict)
    aborted: bool = False
    arenas: dict[torch.device, Arena] = field(default_factory=dict)

    def check(self) -> None:
        """Raise if it failed before."""
        failures = [*(watchdog.failure for watchdog in self.watchdogs.values()), self.failure]
        failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None:
            raise TransportError(
                f"group: it failed before and may hold old messages; make a new group. It failed with: {failure}",
                failure.wait,
            )

    def watchdog(self, device: torch.device) -> Watchdog:
        """What looks after messages of a GPU."""
        if device not in self.watchdogs:
            self.watchdogs[device] = Watchdog(_REMEDY, partial(watch_gpu, device))
        return self.watchdogs[device]


_groups: WeakKeyDictionary[dist.ProcessGroup, _Known] = WeakKeyDictionary()


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

    On GPUs the stream waits for what arrives, not the host; with gloo the host does.

    Raises:
        TransportError: if a transfer fails or takes longer than the operation's timeout, or if one failed before in
            this group.
    """
    known = _groups.setdefault(group, _Known())
    known.check()
    driver = _Driver(group, operation)
    try:
        return drive(program, driver)
    except TransportError as error:
        known.failure = error
        raise
    except BaseException as error:
        if driver.step >= 0:
            known.failure = TransportError(f"{operation.name}, step {driver.step}: this rank raised {error!r}")
        raise


class Messages:
    """A connection by messages of a group.

    Args:
        group: the ranks.
        device: where their tensors lie.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.known = _groups.setdefault(group, _Known())
        allocate = partial(torch.empty, dtype=torch.uint8, device=device)
        self.arena = self.known.arenas.setdefault(device, Arena(allocate))

    def reserve(self, nbytes: int) -> Tensor:
        """See `marble.comm.transport.Connection`."""
        return self.arena.reserve(nbytes)

    def run(self, program: Program[Result], operation: Operation) -> Result:
        """See `run`."""
        return run(program, self.group, operation)

    def synchronize(self, timeout: timedelta | None) -> None:
        """See `marble.comm.transport.Connection`. On GPUs an operation's own timeout counts, and this one does not."""
        del timeout
        if self.device.type == "cuda":
            self.known.watchdog(self.device).synchronize(torch.cuda.current_stream(self.device).record_event(), None)
        self.known.check()


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
        _groups[self.group].check()
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
        if self.pending and self.pending[0][1].buffer.is_cuda:
            self._wait_on_stream()
        else:
            self._wait_on_host()
        for _, message in self.pending:
            if message.targets:
                parts = message.buffer.split([target.numel() for target in message.targets])
                for target, part in zip(message.targets, parts, strict=True):
                    target.copy_(part.view(target.shape))
        self.pending = []

    def _wait_on_host(self) -> None:
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

    def _wait_on_stream(self) -> None:
        """The messages are one batch: what is not done is not known of one, so the first stands for all."""
        device, timeout = self.pending[0][1].buffer.device, self.operation.timeout
        stream = torch.cuda.current_stream(device)
        watched = timeout is not None and not torch.cuda.is_current_stream_capturing()
        reached = stream.record_event() if watched else None
        for work, _ in self.pending:
            work.wait()
        if reached is not None and timeout is not None:
            waits = [self._wait(message) for _, message in self.pending]
            others = "".join(f", or rank {wait.peer}, {wait.transfer}" for wait in waits[1:])
            wait = replace(waits[0], transfer=waits[0].transfer + others)
            awaited = Awaited(wait, stream.record_event(), self._abort)
            watchdog = _groups[self.group].watchdog(device)
            watchdog.watch(Pending(reached, (awaited,), timeout.total_seconds()))

    def _abort(self) -> None:
        known = _groups[self.group]
        if not known.aborted:
            known.aborted = True
            self.group.abort()

    def _wait(self, message: _Message) -> Wait:
        direction = "to send" if message.call is dist.isend else "to receive"
        return Wait(
            self.rank,
            message.peer,
            dist.get_global_rank(self.group, message.peer),
            self.operation.name,
            self.step,
            f"{direction} {message.rows}",
        )

    def _error(self, message: _Message, reason: str) -> TransportError:
        wait = self._wait(message)
        return TransportError(f"{wait}: {reason}. {_REMEDY}", wait)


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

    alike = f"{x.dtype}, {tuple(x.shape[1:])}".encode()  # else ranks wait for one another and do not mix their bytes
    return run(program(), group, Operation(f"gathering {what}", alike, timeout))


def meet(group: dist.ProcessGroup, device: torch.device, what: str, timeout: timedelta) -> None:
    """Wait on the host until all ranks of a group have come here.

    Args:
        group: the ranks.
        device: where the group communicates from.
        what: what for, for messages.
        timeout: how long to wait for other ranks.

    Raises:
        TransportError: as `run`.
    """
    here = torch.zeros(1, dtype=torch.int64, device=device)
    torch.cat(gather(here, [1] * group.size(), group, what, timeout)).cpu()
    _groups[group].check()


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
    _groups[group].check()  # a stream that was released gives anything
    if not different:
        agreed[key] = None
        if len(agreed) > _KEPT_DIGESTS:  # the oldest is the same one on all ranks
            del agreed[next(iter(agreed))]
    return different
