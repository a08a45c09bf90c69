"""The checker accepts what the builders build, and nothing that gives wrong numbers."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from mutations import ALWAYS_HARMFUL, MUTATIONS
from mutations_dense import DENSE_MUTATIONS, HEAD_MUTATIONS
from virtual import case_of, differences, nan_in_new_memory, random_inputs, run

from marble.compose.check import ScheduleError, check
from marble.compose.schedule import Buffer, Kind, Pass, Rows
from marble.layout import Layout, Span
from marble.mask.domains import dense
from marble.mask.storage import Storage
from marble.order.token_order import TokenOrder
from marble.testing.layouts import Case, random_case, stored_mask

rngs = st.builds(Random, st.integers(0, 2**32 - 1))
TRIALS = 8


@pytest.fixture(scope="module", autouse=True)
def _poison():
    with nan_in_new_memory():
        yield


@settings(max_examples=100)
@given(rng=rngs)
def test_built_schedules_are_accepted(rng):
    case = random_case(rng)
    note(repr(case))
    report = check(case.schedules(), case.order, case.mask)
    assert report.pairs == int(dense(case.mask.mask, case.mask.tracks, case.mask.tracks).sum())
    everything = case.layout.tokens * (case.world - 1) * case.kv_heads
    if case.ulysses > 1:
        assert report.received_rows > 0 or max(case.order.lengths) == case.layout.tokens
    elif case.schedule == "sparse_a2a":
        assert report.received_rows <= everything
        assert report.unused_rows == 0
    else:
        assert report.received_rows == everything
        assert 0 <= report.unused_rows <= everything


def rejected(schedules: list, case: Case) -> bool:
    """Whether the checker refuses the schedules in its own words; any other exception passes through."""
    try:
        check(schedules, case.order, case.mask)
    except ScheduleError:
        return True
    return False


def harmful(broken: list, case: Case) -> bool:
    """Whether broken schedules give wrong numbers, or none at all."""
    inputs = random_inputs(case)
    expected = run(case.schedules(), case.order, inputs)
    try:
        return differences(run(broken, case.order, inputs), expected, 1e-9) != []
    except Exception:
        return True


EVERY_MUTATION = MUTATIONS | DENSE_MUTATIONS | HEAD_MUTATIONS
OPTIONS: dict[str, dict] = {name: {"schedules": ("chunked",)} for name in DENSE_MUTATIONS}
OPTIONS |= {name: {"degrees": (2, 3, 4)} for name in HEAD_MUTATIONS}
"""What cases a mutation needs to find something to break."""


@pytest.mark.parametrize(
    ("name", "which"), [(name, which) for name, (passes, _) in EVERY_MUTATION.items() for which in passes]
)
def test_broken_schedules_are_rejected(name, which):
    """What the checker accepts gives right numbers; the trials break enough for that to mean something."""
    caught = 0
    for seed in range(100):
        rng = Random(f"{name}, {which}, {seed}")
        # Mostly packs whose spans see a lot of each other, small enough to run.
        case = random_case(rng, samples=2, spans=4, ranks=(1, 5), blocks=(1, 2, 3, 4, 5, 7), **OPTIONS.get(name, {}))
        try:
            broken = EVERY_MUTATION[name][1](rng, case.schedules(), which)
        except ValueError:  # refused when it is built
            caught += 1
            continue
        if broken is None:
            continue
        if rejected(broken, case):
            caught += 1
        else:
            assert name not in ALWAYS_HARMFUL, f"accepted, seed {seed}: {case}"
            wrong = harmful(broken, case)
            assert not wrong, f"accepted, seed {seed}: {case}"
        if caught == TRIALS:
            break
    assert caught >= TRIALS // 2, f"only {caught} schedules were rejected: the mutation finds too little to break"


def small_case(world: int = 2) -> Case:
    layout = Layout([[Span("causal", 6), Span("full", 4), Span("causal", 2)]])
    mask = stored_mask(Storage.natural(layout))
    ranks = torch.tensor([0, 1, 1, 0]) % world
    return Case(layout, None, None, 3, world, 2, 1, mask, TokenOrder.of_blocks("mine", mask.storage, world, ranks, 3))


def test_schedules_must_be_complete_and_in_order():
    case = small_case()
    schedules = case.schedules()
    with pytest.raises(ScheduleError, match="ranks 0 to 1"):
        check(schedules[:1], case.order, case.mask)
    with pytest.raises(ScheduleError, match="in order"):
        check(schedules[::-1], case.order, case.mask)


def test_schedules_must_be_for_the_order():
    case = small_case()
    pieces = torch.tensor([[0, 5, 0], [5, 12, 1]])
    with pytest.raises(ScheduleError, match="another token order"):
        check(case.schedules(), TokenOrder("other", case.mask.storage, 2, pieces), case.mask)


def test_schedules_must_be_for_the_mask():
    case = small_case()
    with pytest.raises(ScheduleError, match="forward, at the end, rank 1: 0 legal pairs are not computed, 6 illegal"):
        check(case.schedules(), case.order, stored_mask(case.mask.storage, user="(q.pos >= k.pos) | (q.pos < 0)"))


def test_ranks_must_have_as_many_steps():
    case = small_case()
    one, other = case.schedules()
    short = replace(one, forward=replace(one.forward, steps=one.forward.steps[:-1]))
    with pytest.raises(ScheduleError, match="different numbers of steps"):
        check([short, other], case.order, case.mask)


def test_rows_that_nobody_reads_are_reported():
    """Two documents on two ranks: all that a ring sends is for nothing."""
    layout = Layout.from_cu_seqlens([0, 6, 12])
    mask = stored_mask(Storage.natural(layout))
    order = TokenOrder("mine", mask.storage, 2, torch.tensor([[0, 6, 0], [6, 12, 1]]))
    case = Case(layout, None, None, 3, 2, 1, 1, mask, order)
    report = check(case.schedules(), order, mask)
    assert (report.pairs, report.received_rows, report.unused_rows) == (42, 12, 12)


def test_the_error_says_where():
    case = small_case()
    schedules = MUTATIONS["an add is dropped"][1](Random(0), case.schedules(), "backward")
    with pytest.raises(ScheduleError, match=r"backward, .*rank [01]: "):
        check(schedules, case.order, case.mask)


def test_a_call_that_forgets_its_state_is_rejected():
    case = case_of(Layout([[Span("causal", 12)]]), [[0, 6, 0], [6, 12, 1]], 2, 4)
    schedules = case.schedules()
    forward = schedules[1].forward
    steps = [replace(step, calls=tuple(replace(call, carries=False) for call in step.calls)) for step in forward.steps]
    schedules[1] = replace(schedules[1], forward=replace(forward, steps=tuple(steps)))
    with pytest.raises(ScheduleError, match="carries no state"):
        check(schedules, case.order, case.mask)


def test_a_lost_share_is_missed_beside_another_on_the_same_keys():
    """Two calls of one step read the same keys; the gradients of one go to a buffer that nobody brings home."""
    spans = [Span("causal", 5), Span("full", 6), Span("causal", 2), Span("full", 4)]
    case = replace(case_of(Layout([spans]), [[0, 6, 0], [6, 17, 1]], 2, 4), schedule="chunked")
    schedules = case.schedules()
    backward = schedules[1].backward
    at = max(range(len(backward.steps)), key=lambda step: len(backward.steps[step].calls))
    calls = backward.steps[at].calls
    assert len(calls) > 1
    assert calls[0].kv == calls[1].kv
    spare = Rows("spare", 0, len(calls[0].kv))
    lost = replace(
        backward.steps[at],
        calls=(replace(calls[0], dkv=spare), *calls[1:]),
        clears=(*backward.steps[at].clears, spare),
    )
    steps = (*backward.steps[:at], lost, *backward.steps[at + 1 :])
    buffers = (*backward.buffers, Buffer("spare", Kind.PAIR_SUMS, len(spare), case.kv_heads))
    schedules[1] = replace(schedules[1], backward=Pass(buffers, steps))
    assert harmful(schedules, case)
    with pytest.raises(ScheduleError, match="shares of the gradients in 'dkv' did not come home"):
        check(schedules, case.order, case.mask)


def test_a_head_that_reads_another_key_head_is_rejected():
    case = replace(random_case(Random(1), degrees=(2,), ranks=(2, 2), schedules=("ring",)), heads=4, kv_heads=2)
    schedules = case.schedules()
    check(schedules, case.order, case.mask)
    first = schedules[0].forward.steps[0]
    wrong = []
    for schedule in schedules:
        forward = schedule.forward
        moves = tuple(
            replace(move, src=replace(move.src, heads=(0, 1))) if move.src.buffer == "kv" else move
            for move in forward.steps[0].transfers
        )
        wrong.append(
            replace(
                schedule,
                forward=replace(forward, steps=(replace(forward.steps[0], transfers=moves), *forward.steps[1:])),
            )
        )
    assert first.transfers != wrong[0].forward.steps[0].transfers
    with pytest.raises(ScheduleError, match=r"query heads \[2, 3\] of a call read the key/value heads \[0\]"):
        check(wrong, case.order, case.mask)


@pytest.mark.parametrize(
    ("which", "name", "change"),
    [
        ("forward", "out", {"kind": Kind.TOKEN_SUMS}),
        ("backward", "dq", {"kind": Kind.TOKENS}),
        ("backward", "dkv", {"heads": 2}),
        ("forward", "q", {"rows": 7}),
        ("backward", "lse", {"name": "other"}),
    ],
)
def test_the_buffers_of_the_caller_are_as_it_knows_them(which, name, change):
    """Also where no call would notice: a layout of padding only."""
    case = case_of(Layout([[Span("pad", 12)]]), [[0, 6, 0], [6, 12, 1]], 2, 4)
    schedules = case.schedules()
    old = getattr(schedules[1], which)
    buffers = tuple(replace(buffer, **change) if buffer.name == name else buffer for buffer in old.buffers)
    made = replace(old, buffers=buffers, steps=() if "name" in change else old.steps)
    schedules[1] = replace(schedules[1], **{which: made})
    with pytest.raises(ScheduleError, match=f"{which}, rank 1: the caller expects .*'{name}'"):
        check(schedules, case.order, case.mask)


@pytest.mark.parametrize("field", ["whole", "split"])
def test_ranks_reserve_alike(field):
    """Otherwise one would write to the wrong place in another's memory."""
    case = small_case()
    schedules = case.schedules()
    forward = schedules[1].forward
    buffers = [replace(b, **{field: getattr(b, field) + 1}) if b.name == "kv" else b for b in forward.buffers]
    schedules[1] = replace(schedules[1], forward=Pass(tuple(buffers), forward.steps))
    with pytest.raises(ScheduleError, match="forward: ranks declare different buffers, or room"):
        check(schedules, case.order, case.mask)


def test_rows_move_only_where_there_is_room():
    schedule = small_case().schedules()[0]
    bare = tuple(replace(buffer, whole=0) for buffer in schedule.forward.buffers)
    with pytest.raises(ValueError, match=r"'kv' declares no room for Transfer"):
        replace(schedule, forward=Pass(bare, schedule.forward.steps))
