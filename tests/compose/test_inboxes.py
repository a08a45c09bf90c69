"""The debug mode changes no bit, and catches inboxes that are overwritten before or while they are read."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import marble
from marble import AttentionShape, Layout, Plan, Span
from marble.comm.local import run_together
from marble.comm.transport import Program, Start
from marble.compose import executor
from marble.compose.inboxes import InboxError, watched
from marble.compose.schedule import Pass, Schedule
from marble.kernels.reference import ReferenceBackend

LAYOUT = Layout([[Span("causal", 13), Span("full", 29), Span("causal", 8)], [Span("causal", 41)], [Span("pad", 6)]])


def plan_for(schedule: str = "ring", ulysses: int = 1, ranks: int = 4) -> Plan:
    return marble.plan(LAYOUT, AttentionShape(4, 2, 8), ranks=ranks, schedule=schedule, ulysses=ulysses, block=4)


def inputs(plan: Plan) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [plan.shard(torch.randn(plan.tokens, heads, 8, generator=generator)) for heads in (4, 2, 2, 4)]


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("schedule", ["ring", "sparse_a2a", "chunked", "all_gather"])
def test_right_schedules_give_the_same_bits(schedule: str, ulysses: int) -> None:
    plan = plan_for(schedule, ulysses, 4 * ulysses)
    answers = []
    for debug in (False, True):
        *leaves, dout = inputs(plan)
        leaves = [x.requires_grad_() for x in leaves]
        out = marble.attention(*leaves, plan, debug=debug)
        assert isinstance(out, torch.Tensor)
        answers.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(x, y) for x, y in zip(*answers, strict=True))


def swapped(which: Pass, first: int) -> Pass:
    """A pass with the transfers of two neighbouring steps in the wrong order."""
    steps = list(which.steps)
    one, other = steps[first], steps[first + 1]
    steps[first], steps[first + 1] = (
        replace(one, transfers=other.transfers),
        replace(other, transfers=one.transfers),
    )
    return replace(which, steps=tuple(steps))


def late(which: Pass, step: int) -> Pass:
    """A pass with a step's calls after those of the next step, when their inbox is written again."""
    steps = list(which.steps)
    one, other = steps[step], steps[step + 1]
    steps[step], steps[step + 1] = replace(one, calls=()), replace(other, calls=(*other.calls, *one.calls))
    return replace(which, steps=tuple(steps))


def forward(schedules: list[Schedule], plan: Plan, inside: Any = None, outside: Any = None) -> None:
    """The forward pass of all ranks, watched; rank 1's program is wrapped under the watch's eyes, or around it."""
    pieces = [x.split(plan.order.lengths) for x in inputs(plan)[:3]]
    programs = {}
    for schedule in schedules:
        rank = schedule.rank
        mine = executor.forward(schedule, ReferenceBackend(), *(piece[rank] for piece in pieces), scale=1.0)
        mine = inside(mine) if inside is not None and rank == 1 else mine
        programs[rank] = watched(mine, schedule.forward, rank)
    if outside is not None:
        programs[1] = outside(programs[1])
    run_together(programs)


@pytest.mark.parametrize(("change", "at"), [(swapped, 0), (swapped, 1), (late, 1)])
def test_a_schedule_in_the_wrong_order_is_caught(change: Any, at: int) -> None:
    plan = plan_for()
    schedules = [plan.schedules[0][rank] for rank in range(4)]
    forward(schedules, plan)
    with pytest.raises(InboxError, match=r"^inbox: rank 0, step \d: \w+\[\d+:\d+\] arrive while they are read"):
        forward([replace(schedule, forward=change(schedule.forward, at)) for schedule in schedules], plan)


def test_rows_that_nobody_read_are_not_overwritten() -> None:
    """A ring whose calls and further transfers are left out in step 1: the rows of step 0 are lost in step 2."""
    plan = plan_for()

    def blind(which: Pass) -> Pass:
        first = which.steps[0]
        return replace(which, steps=(first, replace(first, calls=(), clears=())))

    schedules = [plan.schedules[0][rank] for rank in range(4)]
    with pytest.raises(InboxError, match=r"came in step 0 and are overwritten before they are read"):
        forward([replace(schedule, forward=blind(schedule.forward)) for schedule in schedules], plan)


def hasty(program: Program[Any]) -> Program[Any]:
    """As if a transport put rows into inboxes once more when the next step begins."""
    arrived: list[torch.Tensor] = []
    while True:
        try:
            request = next(program)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Start):
            for inbox in arrived:
                inbox.zero_()
            arrived = [request.view(transfer.dst) for transfer in request.transfers if transfer.target == 1]
        yield request


@pytest.mark.parametrize(("place", "when"), [("inside", "before"), ("outside", "while")])
def test_a_transport_that_overwrites_an_inbox_is_caught(place: str, when: str) -> None:
    plan = plan_for()
    message = rf"^inbox: rank 1, step 1: .* came in step 0 and were overwritten {when} they are read"
    with pytest.raises(InboxError, match=message):
        forward([plan.schedules[0][rank] for rank in range(4)], plan, **{place: hasty})
