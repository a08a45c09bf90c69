"""The chunked ring: few dense sequences, and nothing but dense ones."""

import pytest
import torch
from virtual import case_of

import marble
from marble import AttentionShape, Layout, Span
from marble.compose.check import check
from marble.compose.schedule import Schedule
from marble.compose.schedules.chunked import chunked
from marble.kernels.contract import Band, Touch, Varlen
from marble.order.set_apart import set_apart
from marble.order.token_order import TokenOrder
from marble.testing.layouts import stored_mask

FRAME = [Span("causal", 4), Span("noise", 10), Span("full", 10)]
VIDEO = Layout([FRAME * 6, FRAME * 2])


def sequences(schedule: Schedule) -> list[list[tuple[str, list, list]]]:
    """Per step, each call as (band, queries, keys)."""
    steps = schedule.forward.steps
    for step in steps:
        assert all(isinstance(call.work, Varlen) for call in step.calls)
    return [
        [(call.work.band.name, call.work.queries.tolist(), call.work.keys.tolist()) for call in step.calls]
        for step in steps
    ]


def test_own_keys_take_a_causal_sequence_per_sample_and_a_reverse_causal_one_per_clean_frame() -> None:
    """Two frames of the first sample are elsewhere, and the frames behind them see these later."""
    plan = frames_by_turns([0, 1, 0, 0, 1, 0, 0, 0])
    causal, *full, reverse = sequences(plan[0])[0]
    assert {band for band, _, _ in full} == {"FULL"}
    # The first frame of each sample ends here: its text and its clean frame have sequences of their own.
    assert causal == ("CAUSAL", [[0, 4], [14, 56], [96, 100], [110, 114]], [[0, 4], [0, 56], [96, 100], [96, 114]])
    assert reverse == ("REVERSE_CAUSAL", *[[[at + 4, at + 14] for at in (14, 28, 42)]] * 2)
    covered = [pair for call in full for pair in zip(map(tuple, call[1]), map(tuple, call[2]), strict=True)]
    assert ((4, 14), (0, 14)) in covered, "a clean frame that nothing else touches"
    # Noise frames lie behind, the last first; each sees the clean rows before it, and itself.
    assert {((76, 86), (0, 18)), ((76, 86), (76, 86))} <= set(covered)


def frames_by_turns(owner: list[int]) -> list[Schedule]:
    """The schedules for `VIDEO` with whole frames dealt to two ranks; proved."""
    storage = set_apart(VIDEO)
    mask, table = stored_mask(storage), VIDEO.table
    ranks = torch.tensor(owner).repeat_interleave(3)[storage.span_order]
    start = storage.offset[storage.span_order]
    pieces = torch.stack([start, start + table.length[storage.span_order], ranks], 1)
    order = TokenOrder("frames", storage, 2, pieces)
    schedules = [chunked(order, mask, rank, 8, 2, 1) for rank in range(2)]
    check(schedules, order, mask)
    return schedules


def test_remote_steps_take_one_full_sequence_for_the_clean_and_one_for_the_noise_rows_of_a_chunk() -> None:
    """Chunks that cut no span: a chunk and a sample have two sequences at most, on whole stretches of keys."""
    for schedule in frames_by_turns([0, 1, 0, 1, 0, 1, 0, 1]):
        _, remote = schedule.forward.steps
        (call,) = remote.calls
        assert isinstance(call.work, Varlen)
        assert call.work.band is Band.FULL
        chunks = 4 if schedule.rank == 1 else 3  # the first frame of a sample sees nothing elsewhere
        assert len(call.work.queries) <= 2 * chunks


def test_a_span_on_two_ranks_sees_both_halves() -> None:
    """Queries 3 to 6 of a full span are cut off its other half; they see three keys more than the text before them."""
    case = case_of(Layout([[Span("causal", 3), Span("full", 6)]]), [[0, 6, 0], [6, 9, 1]], 2, 4)
    schedules = [chunked(case.order, case.mask, rank, 4, 2, 1) for rank in range(2)]
    check(schedules, case.order, case.mask)
    remote = [schedule.forward.steps[1].calls for schedule in schedules]
    assert [call.work.queries.tolist() for call in remote[0]] == [[[3, 6]]]
    assert [call.work.keys.tolist() for call in remote[0]] == [[[0, 3]]]
    assert [call.work.queries.tolist() for call in remote[1]] == [[[0, 3]]]
    assert [call.work.keys.tolist() for call in remote[1]] == [[[0, 6]]]


def test_first_and_last_touches_are_flagged_and_state_is_carried_only_where_needed() -> None:
    case = case_of(Layout([[Span("causal", 6)], [Span("full", 4)]]), [[0, 3, 0], [3, 10, 1]], 2, 4)
    first, second = (chunked(case.order, case.mask, rank, 4, 2, 1) for rank in range(2))
    (only,) = first.forward.steps[0].calls
    assert only.work.touch.tolist() == [int(Touch.FIRST | Touch.LAST)]
    assert not only.carries
    assert not first.forward.steps[1].calls
    causal, full = second.forward.steps[0].calls
    assert (causal.carries, full.carries) == (True, False)
    assert causal.work.touch.tolist() == [int(Touch.FIRST)]
    (remote,) = second.forward.steps[1].calls
    assert remote.work.touch.tolist() == [int(Touch.LAST)]
    assert remote.carries


@pytest.mark.parametrize("ranks", [1, 3])
def test_padding_is_cleared(ranks: int) -> None:
    layout = Layout([[Span("pad", 4)], [Span("causal", 5)], [Span("pad", 3)]])
    plan = marble.plan(layout, AttentionShape(2, 1, 8), ranks=ranks, schedule="chunked", block=1)
    cleared = sum(
        len(rows)
        for schedule in plan.schedules[0].values()
        for rows in schedule.forward.steps[0].clears
        if rows.buffer == "out"
    )
    assert cleared == 7


def test_a_window_wider_than_every_sample_is_none() -> None:
    """What decides is what a query sees, not how the layer is called."""
    layout = Layout([[Span("causal", 8), Span("full", 4)]] * 2)
    plan = marble.plan(layout, AttentionShape(2, 1, 8, window=12), ranks=2, schedule="chunked", block=4)
    assert plan.masks is not None
    assert check([plan.schedules[0][rank] for rank in range(2)], plan.order, plan.masks[0]).pairs == 168
    with pytest.raises(ValueError, match="sliding window"):
        marble.plan(layout, AttentionShape(2, 1, 8, window=11), ranks=2, schedule="chunked", block=4)


def test_global_layers_are_chunked_beside_window_layers() -> None:
    layout = Layout([[Span("causal", 30), Span("full", 20), Span("causal", 15)]])
    layers = [AttentionShape(2, 1, 8, window=5), AttentionShape(2, 1, 8)]
    plan = marble.plan(layout, layers, ranks=3, schedule=["sparse_a2a", "chunked"], block=4)
    assert plan.order.name == "chunks"
    assert plan.masks is not None
    for mask, schedules in zip(plan.masks, plan.schedules, strict=True):
        check([schedules[rank] for rank in range(3)], plan.order, mask)


def test_every_rank_refuses_what_one_must_refuse() -> None:
    """Rank 0 holds the causal document only."""
    layout = Layout([[Span("causal", 16)], [Span("group", 4, number % 2) for number in range(4)]])
    for rank in range(2):
        with pytest.raises(ValueError, match=r"position 20 .* interleave"):
            marble.plan(
                layout,
                AttentionShape(2, 1, 8),
                ranks=2,
                rank=rank,
                schedule="chunked",
                order="contiguous",
                block=4,
            )
