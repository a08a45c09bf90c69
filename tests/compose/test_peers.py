"""What breaks for users of other context-parallel attentions, as small inputs with the right values (PEERS.md).

Everything runs through the public API on virtual ranks, in float64, against the dense attention beside this file.
"""

import dataclasses
import itertools
import time
from random import Random
from typing import Any

import pytest
import torch
from dense_attention import ORDERS, Data, assert_equal, check, dense, differ, distributed, each_heads, legal, make_plan
from torch import Tensor

import marble
from marble import AttentionShape, Layout, Span

# 1. Any length works, without padding by the user.


@each_heads
@pytest.mark.parametrize("block", [1, 2, 4, 128])
@pytest.mark.parametrize("tail", [[Span("pad", 3)], [Span("causal", 3)]], ids=["padding", "document"])
def test_last_token_of_a_document_of_seven_counts(tail: list[Span], block: int, heads: tuple[int, int]) -> None:
    layout = Layout([[Span("causal", 7)], tail])
    for order in ORDERS:
        found = check(layout, heads, 2, block=block, order=order)
        assert found.out[6].abs().min() > 0
        assert found.dk[6].abs().max() > 0
        assert found.dv[6].abs().max() > 0


@each_heads
@pytest.mark.parametrize("order", ORDERS)
def test_ragged_documents_on_eight_ranks(order: str, heads: tuple[int, int]) -> None:
    check(Layout.from_cu_seqlens([0, 137, 137 + 2041, 137 + 2041 + 89]), heads, 8, order=order)


@each_heads
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_one_token_more_than_divides(k: int, ranks: int, heads: tuple[int, int]) -> None:
    tokens = 2 * ranks * k + 1
    for block in (3, 16):
        check(Layout.from_cu_seqlens([0, tokens]), heads, ranks, block=block)


# 2. Sliding windows stay windows.

GEMMA = Layout([[Span("causal", 5), Span("full", 7), Span("causal", 3), Span("full", 6), Span("causal", 4)]])


@each_heads
def test_window_differs_from_causal(heads: tuple[int, int]) -> None:
    layout = Layout.from_cu_seqlens([0, 16])
    for block in (1, 4, 8, 128):
        narrow, wide = (check(layout, heads, 2, block=block, window=window) for window in (4, None))
        assert differ(narrow, wide)
        assert torch.equal(narrow.out[:4], wide.out[:4])


@each_heads
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 100])
def test_windows_over_documents_and_images(window: int, heads: tuple[int, int]) -> None:
    for layout in (Layout.from_cu_seqlens([0, 9, 10, 33]), GEMMA, Layout(GEMMA.samples * 2 + ((Span("pad", 3),),))):
        for ranks, block in ((2, 4), (3, 2), (4, 8)):
            check(layout, heads, ranks, block=block, window=window)


# 3. Documents do not leak.


@each_heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_perturbing_one_document_leaves_every_bit_of_the_other(
    order: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    layout = Layout.from_cu_seqlens([0, 8, 16])
    data, other = Data.of(16, heads, dtype=dtype), Data.of(16, heads, dtype=dtype, seed=1).map(lambda x: 100 * x)
    for perturbed, kept in ((slice(0, 8), slice(8, 16)), (slice(8, 16), slice(0, 8))):
        mixed = Data(*(x.clone() for x in data.tensors))
        for x, y in zip(mixed.tensors, other.tensors, strict=True):
            x[perturbed] = y[perturbed]
        for ranks, block in ((1, 16), (2, 3), (2, 4), (3, 1), (2, 128)):
            plan = make_plan(layout, heads, ranks, block=block, order=order)
            before, after = distributed(plan, data), distributed(plan, mixed)
            for name, value in before.items():
                assert torch.equal(value[kept], getattr(after, name)[kept]), name
                assert not torch.equal(value[perturbed], getattr(after, name)[perturbed]), name


# 4. Spans are bidirectional, groups reach further, and both survive a rank boundary.

SPANS = {
    "full": """
        x........
        xx.......
        xxxxx....
        xxxxx....
        xxxxx....
        xxxxxx...
        xxxxxxxxx
        xxxxxxxxx
        xxxxxxxxx""",
    "group": """
        x........
        xx.......
        xxxxx.xxx
        xxxxx.xxx
        xxxxx.xxx
        xxxxxx...
        xxxxxxxxx
        xxxxxxxxx
        xxxxxxxxx""",
    "noise": """
        x........
        xx.......
        xxxxx....
        xxxxx....
        xxxxx....
        xx...x...
        xx...xxxx
        xx...xxxx
        xx...xxxx""",
}


def text_image_text_image(mode: str) -> Layout:
    return Layout([[Span("causal", 2), Span(mode, 3), Span("causal", 1), Span(mode, 3)]])


def drawn(mode: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in SPANS[mode].split()])


@pytest.mark.parametrize("mode", SPANS)
def test_masks_are_the_ones_drawn_by_hand(mode: str) -> None:
    layout, mask = text_image_text_image(mode), drawn(mode)
    assert torch.equal(legal(layout), mask)
    # With q · k = 0 and one-hot values, the output is the mask with its rows normalised.
    zeros, one_hot = torch.zeros(9, 1, 9, dtype=torch.float64), torch.eye(9, dtype=torch.float64).unsqueeze(1)
    for ranks in (1, 2, 3, 4):
        for block in (1, 2, 4):
            plan = make_plan(layout, (1, 1), ranks, dim=9, block=block)
            out = marble.attention(plan.shard(zeros), plan.shard(zeros), plan.shard(one_hot), plan)
            assert isinstance(out, Tensor)
            torch.testing.assert_close(plan.unshard(out).squeeze(1), mask / mask.double().sum(1, keepdim=True))


@each_heads
def test_full_group_and_noise_differ_and_cross_ranks(heads: tuple[int, int]) -> None:
    data = Data.of(9, heads)
    for order in ORDERS:
        for ranks, block in ((2, 4), (3, 1)):
            found = {}
            for mode in SPANS:
                plan = make_plan(text_image_text_image(mode), heads, ranks, block=block, order=order)
                found[mode] = distributed(plan, data)
                assert_equal(found[mode], dense(data, drawn(mode)))
            assert differ(found["full"], found["group"], ["out", "dk"])
            assert differ(found["full"], found["noise"], ["out", "dk"])
            assert differ(found["group"], found["noise"], ["out", "dk"])


def test_a_span_that_a_rank_boundary_cuts() -> None:
    plan = make_plan(text_image_text_image("full"), (2, 2), 2, block=4, order="contiguous")
    first = set(plan.order.index(0).tolist())
    assert {2, 3} <= first
    assert 4 in plan.order.index(1).tolist() or {6, 7, 8} & first != {6, 7, 8}


# 5. Layers with different masks share one plan and one order.


@each_heads
def test_two_layers_with_different_masks_over_one_pack(heads: tuple[int, int]) -> None:
    layout = Layout([*GEMMA.samples, (Span("causal", 30),), (Span("pad", 2),)])
    layers = [AttentionShape(*heads, 8, window) for window in (5, None, 5)]
    plan = marble.plan(layout, layers, ranks=4, block=4)
    data = Data.of(layout.tokens, heads)
    x = torch.arange(layout.tokens)
    assert torch.equal(plan.unshard(plan.shard(x)), x)
    assert sorted(plan.index.tolist()) == x.tolist()
    results = [distributed(plan, data, layer) for layer in range(3)]
    for result, window in zip(results, (5, None, 5), strict=True):
        assert_equal(result, dense(data, legal(layout, window)))
    assert differ(results[0], results[1])
    assert all(torch.equal(value, getattr(results[2], name)) for name, value in results[0].items())


def test_layers_that_are_alike_share_their_schedules() -> None:
    shapes = [AttentionShape(4, 2, 8, window) for window in (5, None, 5, 5, None)]
    plan = marble.plan(GEMMA, [*shapes, AttentionShape(4, 2, 8, scale=0.5)], ranks=2, block=4)
    assert plan.schedules[0] is plan.schedules[2] is plan.schedules[3]
    assert plan.schedules[1] is plan.schedules[4] is plan.schedules[5]
    assert plan.schedules[0] is not plan.schedules[1]


# 6. Rows without visible keys: in a step, or in any.


@each_heads
def test_one_document_per_rank_computes_nothing_remote(heads: tuple[int, int]) -> None:
    layout = Layout.from_cu_seqlens([0, 8, 16, 24, 32])
    for order in ORDERS:
        plan = make_plan(layout, heads, 4, block=8, order=order)
        for schedule in plan.schedules[0].values():
            calls = [len(step.calls) for step in schedule.forward.steps]
            assert calls == [1, 0, 0, 0], f"{order}: {calls}"
            assert sum(len(step.calls) for step in schedule.backward.steps) == 1
        data = Data.of(layout.tokens, heads)
        assert_equal(distributed(plan, data), dense(data, legal(layout)))


PADDED = {
    "in front": [[Span("pad", 5)], [Span("causal", 11)]],
    "between": [[Span("causal", 6)], [Span("pad", 9)], [Span("full", 4), Span("causal", 3)], [Span("pad", 2)]],
    "two in a row": [[Span("pad", 3), Span("pad", 6)], [Span("pad", 4)], [Span("group", 5), Span("noise", 2)]],
    "a whole rank": [[Span("causal", 8)], [Span("pad", 8)], [Span("causal", 8)], [Span("pad", 8)]],
    "everything": [[Span("pad", 13)]],
    "everything, in samples": [[Span("pad", 1)], [Span("pad", 7)], [Span("pad", 3)]],
}


@each_heads
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_silent(name: str, heads: tuple[int, int]) -> None:
    layout = Layout(PADDED[name])
    padding = torch.tensor([span.mode == "pad" for s in layout.samples for span in s for _ in range(span.length)])
    for order in ORDERS:
        for window in (None, 3):
            for ranks, block in ((1, 128), (2, 4), (3, 1), (4, 8)):
                found = check(layout, heads, ranks, block=block, order=order, window=window)
                assert (found.lse[padding] == -torch.inf).all()
                for part in ("out", "dq", "dk", "dv"):
                    value = getattr(found, part)
                    assert value.isfinite().all()
                    assert (value[padding] == 0).all(), part


# 9. The error does not grow with the ring.

PACK = Layout(
    [[Span("causal", 700), Span("full", 900), Span("causal", 2400), Span("full", 500)], [Span("causal", 3692)]]
)
DEGREES = (2, 4, 8, 16)
PARTS = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def ratios() -> dict[tuple[str, int], dict[str, float]]:
    """‖x − ref‖ / ‖x₁ − ref‖ of bfloat16 runs by backend and ring degree; x₁ is a single call."""
    data = Data.of(PACK.tokens, (2, 1), 32, torch.bfloat16)
    pieces, start = [], 0
    for sample in PACK.samples:
        rows = slice(start, start + sum(span.length for span in sample))
        pieces.append(dense(data.map(lambda x, rows=rows: x[rows]), legal(Layout([sample]))))
        start = rows.stop
    truth = {part: torch.cat([getattr(piece, part) for piece in pieces]) for part in PARTS}

    def errors(ranks: int, backend: str) -> dict[str, float]:
        result = distributed(make_plan(PACK, (2, 1), ranks, dim=32), data, backend=backend)
        return {part: float((getattr(result, part).double() - truth[part]).norm()) for part in PARTS}

    single = errors(1, "reference")
    runs = [("reference", ranks) for ranks in DEGREES] + [("rounded", ranks) for ranks in DEGREES]
    return {run: {part: error / single[part] for part, error in errors(run[1], run[0]).items()} for run in runs}


@pytest.mark.parametrize("ranks", DEGREES)
@pytest.mark.parametrize("part", PARTS)
def test_error_ratio_is_flat_in_the_ring_degree(ratios: Any, part: str, ranks: int) -> None:
    assert ratios["reference", ranks][part] <= 1.02


@pytest.mark.parametrize("ranks", DEGREES)
def test_the_gate_fails_for_rounding_at_every_step(ratios: Any, ranks: int) -> None:
    rounded = ratios["rounded", ranks]
    assert rounded["out"] > 1.02
    if ranks >= 8:
        assert rounded["dq"] > 1.02
        assert max(rounded["dk"], rounded["dv"]) > 1.02


# 10. Every step of the backward ring reads its own keys.


@each_heads
@pytest.mark.parametrize("mode", ["causal", "full"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_backward_reads_the_keys_of_each_step(ranks: int, mode: str, heads: tuple[int, int]) -> None:
    layout = Layout([[Span(mode, 8 * ranks)]])
    plan = make_plan(layout, heads, ranks, block=4)
    data, mask = Data.of(layout.tokens, heads), legal(layout)
    assert_equal(distributed(plan, data), dense(data, mask))
    # One rank's queries at a time, so that no error can hide behind another rank's share.
    for rank in range(ranks):
        dout = torch.zeros_like(data.dout)
        dout[plan.order.index(rank)] = data.dout[plan.order.index(rank)]
        alone = dataclasses.replace(data, dout=dout)
        found = distributed(plan, alone)
        assert_equal(found, dense(alone, mask))
        if mode == "full":
            assert all(found.dk[plan.order.index(other)].abs().max() > 1e-4 for other in range(ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_comparison_would_notice_step_zeros_keys(ranks: int) -> None:
    layout = Layout([[Span("full", 8 * ranks)]])
    plan = make_plan(layout, (2, 2), ranks, block=4, order="contiguous")

    def stuck(schedule: Any) -> Any:
        home = dataclasses.replace
        steps = [
            home(step, calls=tuple(home(call, kv=home(call.kv, start=0, stop=8)) for call in step.calls))
            for step in schedule.backward.steps
        ]
        return home(schedule, backward=home(schedule.backward, steps=tuple(steps)))

    wrong = {rank: stuck(schedule) for rank, schedule in plan.schedules[0].items()}
    data = Data.of(layout.tokens, (2, 2))
    right, found = dense(data, legal(layout)), distributed(dataclasses.replace(plan, schedules=(wrong,)), data)
    torch.testing.assert_close(found.out, right.out)
    assert differ(found, right, ["dq", "dk", "dv"])


# 11. Planning takes milliseconds, and a new length costs nothing more.


def document_lengths(seed: int) -> list[int]:
    """32 documents of about 800k tokens in all."""
    rng = Random(seed)
    return [rng.randint(10_000, 40_000) for _ in range(32)]


def causal_tiles(lengths: list[int], block: int) -> int:
    """Tiles that causal documents visit: from the block where the document of a block's first token begins."""
    stops = list(itertools.accumulate(lengths))
    tiles, document = 0, 0
    for first in range(0, stops[-1], block):
        while stops[document] <= first:
            document += 1
        tiles += first // block - (stops[document] - lengths[document]) // block + 1
    return tiles


def test_planning_many_documents_is_quick() -> None:
    """Five layouts, each planned in a fraction of a second of one core; the others made users wait for minutes."""
    for seed in range(5):
        lengths = document_lengths(seed)
        layout = Layout([[Span("causal", length)] for length in lengths])
        assert 600_000 < layout.tokens < 1_000_000
        start = time.thread_time()
        plan = marble.plan(layout, AttentionShape(32, 4, 128), ranks=8, rank=0)
        assert time.thread_time() - start < 2
        visited = [call.work.visited for step in plan.schedules[0][0].forward.steps for call in step.calls]
        expected = causal_tiles(lengths, 128) / 8
        assert abs(sum(visited) - expected) < 0.01 * expected


def test_five_layouts_compile_nothing() -> None:
    """Layouts are data to every part of a call: nothing is specialised to one of them."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for seed in range(5):
        check(Layout([[Span("causal", length // 1000)] for length in document_lengths(seed)]), (2, 1), 2, block=32)
    assert not torch._dynamo.utils.counters["stats"]
