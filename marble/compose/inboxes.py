"""A debug mode: every inbox is watched from the arrival of its rows until they have been read.

It stands between a rank's program and its driver, so it watches any executor over any transport. It copies and
compares what arrives, which is slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marble.comm.transport import Program, Result, Start
from marble.compose.schedule import Pass, Rows, Step


class InboxError(RuntimeError):
    """Received rows were overwritten before, or while, they were read."""


@dataclass
class _Inbox:
    """Rows that have arrived.

    Attributes:
        rows: which.
        here: the rows themselves.
        copy: what they were on arrival.
        step: when that was.
        read: whether anything has read them since.
    """

    rows: Rows
    here: Tensor
    copy: Tensor
    step: int
    read: bool = False

    def intact(self) -> bool:
        """Whether they still are, bit for bit, what they were."""
        here, copy = (x.contiguous().view(torch.uint8) for x in (self.here, self.copy))
        return torch.equal(here, copy)


def watched(program: Program[Result], declared: Pass, rank: int) -> Program[Result]:
    """The same program, with its inboxes watched. Rows are NaN from the start of their transfer to its end.

    Args:
        program: runs the steps of ``declared``.
        declared: the pass.
        rank: whose it is.

    Raises:
        InboxError: while it runs, with the rank, the step and the rows.
    """
    watch = _Watch(rank)
    steps = iter(declared.steps)
    while True:
        try:
            request = next(program)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Start):
            watch.begin(next(steps), request)
            yield request
        else:
            watch.computed()
            yield request
            watch.arrived()


class _Watch:
    """What has arrived on one rank. A step is begun, then computed, then its transfers arrive."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, -1
        self.inboxes: list[_Inbox] = []

    def begin(self, step: Step, start: Start) -> None:
        """Before transfers start and calls run: nothing that they read has changed, or changes under their hands."""
        self.number += 1
        self.step, self.start = step, start
        self.arriving = [transfer.dst for transfer in step.transfers if transfer.target == self.rank]
        self.reads = _reads(step, self.rank)
        self.writes = _writes(step)
        for rows in self.arriving:
            for name, others in (("read", self.reads), ("written", self.writes)):
                if any(rows.overlaps(other) for other in others):
                    self.fail(rows, f"arrive while they are {name}")
        for rows in [*self.arriving, *step.clears]:
            for inbox in self.inboxes:
                if not inbox.read and rows.overlaps(inbox.rows):
                    self.fail(inbox.rows, f"came in step {inbox.step} and are overwritten before they are read")
        self.verify([*self.reads, *self.writes], "before")
        self.forget(self.arriving)
        for rows in self.arriving:
            start.view(rows).fill_(float("nan"))

    def computed(self) -> None:
        """After the calls: what they read has not changed meanwhile."""
        self.forget(self.writes)
        self.verify(self.reads, "while")
        self.mark_read(self.reads)

    def arrived(self) -> None:
        """After the transfers and before what arrived is added."""
        for rows in self.arriving:
            here = self.start.view(rows)
            self.inboxes.append(_Inbox(rows, here, here.clone(), self.number))
        self.mark_read([add.src for add in self.step.adds])
        self.forget([add.dst for add in self.step.adds])

    def verify(self, reads: list[Rows], when: str) -> None:
        for inbox in self.inboxes:
            if any(inbox.rows.overlaps(rows) for rows in reads) and not inbox.intact():
                self.fail(inbox.rows, f"came in step {inbox.step} and were overwritten {when} they are read")

    def mark_read(self, reads: list[Rows]) -> None:
        for inbox in self.inboxes:
            inbox.read |= any(inbox.rows.overlaps(rows) for rows in reads)

    def forget(self, written: list[Rows]) -> None:
        """These rows change rightfully."""
        self.inboxes = [box for box in self.inboxes if not any(box.rows.overlaps(rows) for rows in written)]

    def fail(self, rows: Rows, what: str) -> Any:
        raise InboxError(f"inbox: rank {self.rank}, step {self.number}: {rows} {what}")


def _whole(buffer: str) -> Rows:
    return Rows(buffer, 0, 1 << 62)


def _reads(step: Step, rank: int) -> list[Rows]:
    """What a step sends, and what its calls read and leave as it is."""
    rows = [transfer.src for transfer in step.transfers if transfer.source == rank]
    for call in step.calls:
        backward = (call.dout, call.lse, call.delta) if call.dkv is not None else ()
        rows += [call.kv, *map(_whole, (call.q, *backward))]
    return rows


def _writes(step: Step) -> list[Rows]:
    """What a step clears, and what its calls write or add to."""
    rows = list(step.clears)
    for call in step.calls:
        rows += [_whole(call.out), _whole(call.lse)] if call.dkv is None else [call.dkv, _whole(call.dq)]
    return rows
