"""The public op as users call it: scales, log-sum-exps, strides, dtypes, autograd modes, own masks, pickled plans."""

import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import Data, assert_equal, check, dense, differ, distributed, each_heads, legal, make_plan
from torch import Tensor

import marble
from marble import AttentionShape, Layout, Span
from marble.compose.packing import Packed
from marble.compose.planner import forget

MIXED = Layout(
    [
        [Span("causal", 5), Span("full", 7), Span("noise", 4), Span("causal", 3), Span("noise", 6)],
        [Span("group", 4), Span("causal", 2), Span("group", 5), Span("causal", 9)],
        [Span("pad", 3)],
    ]
)
MASK = legal(MIXED)


@each_heads
@pytest.mark.parametrize("scale", [1e-3, 0.5, 1, 3.0])
def test_softmax_scale(scale: float, heads: tuple[int, int]) -> None:
    data = Data.of(MIXED.tokens, heads)
    found = distributed(make_plan(MIXED, heads, 3, block=4, scale=scale), data)
    assert_equal(found, dense(data, MASK, scale))
    assert differ(found, dense(data, MASK), ["out", "dv"])


def test_layers_that_differ_in_scale_keep_their_own() -> None:
    data = Data.of(MIXED.tokens, (2, 2))
    plan = marble.plan(MIXED, [AttentionShape(2, 2, 8, scale=scale) for scale in (0.2, None, 2.0)], ranks=2, block=4)
    for layer, scale in enumerate((0.2, None, 2.0)):
        assert_equal(distributed(plan, data, layer), dense(data, MASK, scale))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_on_request(dtype: torch.dtype) -> None:
    data = Data.of(MIXED.tokens, (4, 2), dtype=dtype)
    plan = make_plan(MIXED, (4, 2), 3, block=4)
    q, k, v = (plan.shard(x).requires_grad_() for x in data.tensors[:3])
    alone = marble.attention(q, k, v, plan)
    out, lse = marble.attention(q, k, v, plan, return_lse=True)
    assert isinstance(alone, Tensor)
    assert torch.equal(out, alone)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (MIXED.tokens, 4)
    assert not lse.requires_grad
    expected = dense(data, MASK).lse
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5  # the inputs are the same: scores are never rounded
    torch.testing.assert_close(plan.unshard(lse).double(), expected, rtol=tolerance, atol=tolerance)
    assert (plan.unshard(lse)[-3:] == -torch.inf).all()


def test_slices_of_a_fused_projection() -> None:
    plan = make_plan(MIXED, (3, 3), 2, block=4)
    data = Data.of(MIXED.tokens, (3, 3))
    fused = torch.stack([plan.shard(x) for x in data.tensors[:3]], 1).requires_grad_()
    q, k, v = fused.unbind(1)
    assert not q.is_contiguous()
    out = plan.unshard(marble.attention(q, k, v, plan))
    out.backward(data.dout)
    expected = dense(data, MASK)
    torch.testing.assert_close(out, expected.out)
    assert fused.grad is not None
    for gradient, name in zip(fused.grad.unbind(1), ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(plan.unshard(gradient), getattr(expected, name))


@pytest.mark.parametrize("strides", [(2, 1, 0), (1, 0, 2), (0, 2, 1)], ids=str)
def test_inputs_of_any_strides(strides: tuple[int, int, int]) -> None:
    """Stored with other dimensions innermost, then viewed as [tokens, heads, head_dim]."""
    back = tuple(strides.index(dim) for dim in range(3))
    plan, data = make_plan(MIXED, (4, 2), 2, block=4), Data.of(MIXED.tokens, (4, 2))
    plain = [plan.shard(x) for x in data.tensors]
    twisted = [x.permute(strides).contiguous().permute(back) for x in plain]
    assert all(torch.equal(x, y) and not x.is_contiguous() for x, y in zip(twisted, plain, strict=True))
    answers = []
    for q, k, v, dout in (plain, twisted):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = marble.attention(*leaves, plan)
        assert isinstance(out, Tensor)
        answers.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(x, y) for x, y in zip(*answers, strict=True))


@each_heads
def test_expanded_output_gradient(heads: tuple[int, int]) -> None:
    data = Data.of(MIXED.tokens, heads)
    plan = make_plan(MIXED, heads, 3, block=4)
    q, k, v = (plan.shard(x).requires_grad_() for x in data.tensors[:3])
    out = marble.attention(q, k, v, plan)
    assert isinstance(out, Tensor)
    out.sum().backward()
    expected = dense(Data(data.q, data.k, data.v, torch.ones_like(data.dout)), MASK)
    for x, name in ((q, "dq"), (k, "dk"), (v, "dv")):
        assert x.grad is not None
        torch.testing.assert_close(plan.unshard(x.grad), getattr(expected, name))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", ""])
def test_inputs_that_need_no_gradient(wanted: str) -> None:
    data, plan = Data.of(MIXED.tokens, (4, 2)), make_plan(MIXED, (4, 2), 2, block=4)
    inputs = {name: plan.shard(x).requires_grad_(name in wanted) for name, x in zip("qkv", data.tensors, strict=False)}
    out = marble.attention(*inputs.values(), plan)
    assert isinstance(out, Tensor)
    assert out.requires_grad == bool(wanted)
    expected = dense(data, MASK)
    torch.testing.assert_close(plan.unshard(out).detach(), expected.out)
    if wanted:
        out.backward(plan.shard(data.dout))
    for name, x in inputs.items():
        assert (x.grad is not None) == (name in wanted)
        if x.grad is not None:
            torch.testing.assert_close(plan.unshard(x.grad), getattr(expected, "d" + name))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode: Any) -> None:
    data, plan = Data.of(MIXED.tokens, (2, 2)), make_plan(MIXED, (2, 2), 3, block=4)
    q, k, v = (plan.shard(x).requires_grad_() for x in data.tensors[:3])
    with mode():
        out = marble.attention(q, k, v, plan)
    assert isinstance(out, Tensor)
    assert not out.requires_grad
    torch.testing.assert_close(plan.unshard(out).clone(), dense(data, MASK).out)


def test_inputs_are_left_as_they_are() -> None:
    data, plan = Data.of(MIXED.tokens, (4, 2)), make_plan(MIXED, (4, 2), 3, block=4)
    inputs = [plan.shard(x).requires_grad_() for x in data.tensors[:3]]
    before = [x.detach().clone() for x in inputs]
    out = marble.attention(*inputs, plan)
    assert isinstance(out, Tensor)
    dout = plan.shard(data.dout)
    out.backward(dout, retain_graph=True)
    once = [x.grad.clone() for x in inputs if x.grad is not None]
    out.backward(dout)  # a second time: nothing that the backward pass needs was overwritten
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert torch.equal(dout, plan.shard(data.dout))
    assert [torch.equal(x.grad, 2 * y) for x, y in zip(inputs, once, strict=True)] == [True] * 3


def test_gradcheck() -> None:
    layout = Layout([[Span("causal", 2), Span("full", 3)], [Span("pad", 1)], [Span("noise", 2), Span("causal", 1)]])
    plan = make_plan(layout, (2, 1), 2, dim=3, block=2)
    inputs = tuple(plan.shard(x).requires_grad_() for x in Data.of(layout.tokens, (2, 1), 3).tensors[:3])
    assert torch.autograd.gradcheck(lambda q, k, v: marble.attention(q, k, v, plan), inputs)


def test_a_mask_and_a_track_of_ones_own() -> None:
    layout = Layout.from_cu_seqlens([0, 20, 33], tokens=36)
    speaker = torch.arange(36) * 7 // 5 % 3

    def mask(q: Any, k: Any) -> Any:
        recent = (q.pos - k.pos < 6) & (q.pos >= k.pos)
        return (q.sample == k.sample) & (recent | ((q.speaker == k.speaker) & (k.pos < q.pos + 4)))

    sample = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 13, 3]))
    distance = torch.arange(36).unsqueeze(1) - torch.arange(36)
    near = ((distance >= 0) & (distance < 6)) | ((speaker.unsqueeze(1) == speaker) & (distance > -4))
    expected = near & (sample.unsqueeze(1) == sample) & (sample < 2)
    data = Data.of(36, (4, 2))
    for ranks, block in ((1, 128), (2, 5), (3, 4), (4, 1)):
        plan = make_plan(layout, (4, 2), ranks, block=block, mask=mask, tracks={"speaker": speaker})
        assert_equal(distributed(plan, data), dense(data, expected))
        assert_equal(distributed(pickle.loads(pickle.dumps(plan)), data), dense(data, expected))


def test_a_pickled_plan_works_alike() -> None:
    shapes = [AttentionShape(4, 2, 8), AttentionShape(4, 2, 8, window=3), AttentionShape(4, 2, 8)]
    plan = marble.plan(MIXED, shapes, ranks=3, block=4)
    data = Data.of(MIXED.tokens, (4, 2), dtype=torch.float32)
    before = [distributed(plan, data, layer) for layer in range(3)]
    copy = pickle.loads(pickle.dumps(plan))  # after use: nothing that was cached gets in the way
    assert copy.schedules[0] is copy.schedules[2]
    assert torch.equal(copy.index, plan.index)
    for layer in range(3):
        after = distributed(copy, data, layer)
        assert all(torch.equal(value, getattr(after, name)) for name, value in before[layer].items())


def test_plans_are_kept_by_layout() -> None:
    shape, copy = AttentionShape(4, 2, 8), Layout.from_json(MIXED.to_json())
    kept = marble.plan(MIXED, shape, ranks=3, block=4)
    assert marble.plan(copy, shape, ranks=3, block=4) is kept
    for layout, change in (
        (MIXED, {"block": 5}),
        (MIXED, {"rank": 1}),
        (MIXED, {"ranks": 2}),
        (MIXED, {"order": "contiguous"}),
        (MIXED, {"schedule": "sparse_a2a"}),
        (MIXED, {"layers": AttentionShape(4, 2, 8, window=3)}),
        (Layout([*MIXED.samples, [Span("causal", 1)]]), {}),
        (Layout([[span for sample in MIXED.samples[:2] for span in sample], *MIXED.samples[2:]]), {}),
    ):
        arguments = {"layers": shape, "ranks": 3, "block": 4} | change
        assert marble.plan(layout, **arguments) is not kept
    own = {"ranks": 3, "block": 4, "mask": lambda q, k: q.pos >= k.pos}
    assert marble.plan(MIXED, shape, **own) is not marble.plan(MIXED, shape, **own)


class _Planner(torch.utils.data.Dataset[Any]):
    """Batches with their plans, as a data loader's worker makes them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        layout = Layout([*MIXED.samples, [Span("causal", index + 1)]])
        shapes = [AttentionShape(4, 2, 8), AttentionShape(4, 2, 8, window=3)]
        return layout, marble.plan(layout, shapes, ranks=3, block=4)


def test_plans_made_in_a_data_loader_worker() -> None:
    """A worker's plan arrives as it is made here, without a file descriptor for each tensor, and runs."""
    loader = torch.utils.data.DataLoader(_Planner(), batch_size=None, num_workers=1)
    batches = list(loader)
    assert len(batches) == 3
    for index, (layout, plan) in enumerate(batches):
        here = _Planner()[index][1]
        assert torch.equal(plan.digest, here.digest)
        data = Data.of(layout.tokens, (4, 2))
        for layer in range(2):
            one, other = distributed(plan, data, layer), distributed(here, data, layer)
            assert all(torch.equal(value, getattr(other, name)) for name, value in one.items())


def test_a_plan_goes_to_a_device_in_one_piece() -> None:
    plan = marble.plan(MIXED, [AttentionShape(4, 2, 8), AttentionShape(4, 2, 8, window=3)], ranks=2, block=4)
    there = plan.schedules_on(torch.device("meta"))
    assert plan.schedules_on(torch.device("meta")) is there
    storages = set()
    for schedules in there:
        for schedule in schedules.values():
            works = [call.work for step in schedule.forward.steps for call in step.calls]
            assert works
            for work in works:
                lists = [getattr(work.by_query, name) for name in ("run_ptr", "runs", "part_ptr", "parts", "ranges")]
                assert all(tensor.device.type == "meta" for tensor in [*lists, work.key_row, work.touch])
                storages |= {tensor.untyped_storage()._cdata for tensor in lists}
    assert len(storages) == 1, "one copy for all tables of one type"


PLAN_BYTES = """
from hashlib import sha256
from pickle import dumps
from test_public_op import MIXED, AttentionShape, marble
plans = [marble.plan(MIXED, [AttentionShape(4, 2, 8)] * 2, ranks=3, rank=rank, block=4) for rank in (None, 0, 1, 2)]
print([sha256(dumps(plan)).hexdigest() for plan in plans])
"""


def test_plans_are_deterministic() -> None:
    shapes = [AttentionShape(4, 2, 8, window) for window in (None, 5, None)]
    for order in ("ptrr", "balanced_samples", "contiguous"):
        copy = Layout.from_json(MIXED.to_json())
        first = marble.plan(MIXED, shapes, ranks=3, block=4, order=order)
        forget()
        second = marble.plan(copy, shapes, ranks=3, block=4, order=order)
        assert first is not second
        assert pickle.dumps(first) == pickle.dumps(second)
    other = marble.plan(MIXED, shapes, ranks=3, block=5)
    assert pickle.dumps(first) != pickle.dumps(other)


def test_plans_are_the_same_in_every_process() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PLAN_BYTES],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate(timeout=120)[0] for run in runs)
    assert len(first) > 256
    assert first == second


def test_a_plan_for_one_rank_is_its_part_of_the_plan_for_all() -> None:
    every = marble.plan(MIXED, AttentionShape(4, 2, 8), ranks=3, block=4)
    for rank in range(3):
        mine = marble.plan(MIXED, AttentionShape(4, 2, 8), ranks=3, rank=rank, block=4)
        assert list(mine.schedules[0]) == [rank]
        part, whole = (pickle.dumps(Packed.of(plan.schedules[0][rank])) for plan in (mine, every))
        assert part == whole
        assert torch.equal(mine.index, every.order.index(rank))
        assert mine.local_tokens == len(mine.index) == every.order.lengths[rank]


def test_more_ranks_than_blocks_warns_and_works() -> None:
    layout, shape = Layout.from_cu_seqlens([0, 6, 10]), AttentionShape(2, 2, 8)
    data = Data.of(10, (2, 2))
    for order in ("ptrr", "balanced_samples", "contiguous"):
        with pytest.warns(UserWarning, match=r"marble\.plan: ranks \[.*\] get no tokens \(10 tokens in blocks of 4 on"):
            plan = marble.plan(layout, shape, ranks=6, block=4, order=order)
        assert 0 in plan.order.lengths
        assert_equal(distributed(plan, data), dense(data, legal(layout)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        marble.plan(layout, shape, ranks=3, block=4)
    check(layout, (2, 2), 12, block=1)


@each_heads
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_within_a_single_calls_error(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    layout = Layout([[Span("causal", 100), Span("full", 157), Span("causal", 200)], [Span("causal", 155)]])
    data = Data.of(layout.tokens, heads, 16, dtype)
    truth = dense(data, legal(layout))
    single, found = (distributed(make_plan(layout, heads, ranks, dim=16, block=16), data) for ranks in (1, 4))
    for name, value in found.items():
        error, budget = (float((x.double() - getattr(truth, name)).norm()) for x in (value, getattr(single, name)))
        assert value.dtype == (torch.float32 if name == "lse" else dtype)
        assert budget < 0.01 * float(getattr(truth, name).norm())
        assert error <= (1.5 if dtype == torch.float32 or name == "lse" else 1.02) * budget, name


def test_activations_of_any_shape_are_sharded_and_come_back() -> None:
    plan = make_plan(MIXED, (2, 2), 3, block=4)
    tokens = MIXED.tokens
    for x, dim in (
        (torch.randn(tokens, 3), 0),
        (torch.randn(2, tokens, 3), 1),
        (torch.randn(2, 3, tokens), -1),
        (torch.arange(tokens), 0),
        (torch.arange(tokens) % 2 == 0, 0),
    ):
        assert torch.equal(plan.unshard(plan.shard(x, dim), dim), x)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(tokens, 3, dtype=torch.float64)
    (plan.unshard(plan.shard(x)) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_no_bit(dtype):
    layout = Layout([[Span("causal", 20), Span("full", 30), Span("causal", 14)]])
    plan = marble.plan(layout, AttentionShape(2, 1, 16), ranks=2, block=8)
    results = []
    for enabled in (False, True):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(64, h, 16, generator=generator).to(dtype).requires_grad_() for h in (2, 1, 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = marble.attention(q, k, v, plan)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_default_device_does_not_matter():
    layout = Layout([[Span("causal", 20), Span("full", 30)]])
    with torch.device("meta"):
        plan = marble.plan(layout, AttentionShape(2, 1, 16), ranks=2, block=8)
    assert plan.index.device.type == "cpu"
    assert torch.equal(plan.index.sort().values, torch.arange(50))


def test_plans_pickle_without_what_they_can_derive():
    layout = Layout([[Span("causal", 700), Span("full", 300), Span("causal", 24)]] * 64)
    plan = marble.plan(layout, AttentionShape(2, 1, 16), ranks=8, rank=3)
    assert len(pickle.dumps(plan)) < 8 * plan.local_tokens * len(plan.schedules[0][3].forward.steps)


def test_shapes_are_equal_however_their_numbers_are_written():
    """Plans are compared between ranks by what their layers say."""
    one, other = AttentionShape(4, 2, 8, scale=1.0), AttentionShape(np.int64(4), np.int32(2), 8, scale=1)
    assert one == other
    assert repr(one) == repr(other)


def own_mask(last, documents=MIXED.tokens // 3):
    """The digest of a plan with a mask of one's own, which is made anew."""
    tracks = {"document": torch.arange(MIXED.tokens) // documents}
    mask = lambda q, k: (q.document == k.document) & (q.pos - k.pos < last)  # noqa: E731
    return marble.plan(MIXED, AttentionShape(2, 1, 8), ranks=2, order="contiguous", mask=mask, tracks=tracks).digest


def test_plans_of_other_masks_have_other_digests():
    """And of other tracks; not those of equal masks."""
    modes = marble.plan(MIXED, AttentionShape(2, 1, 8), ranks=2, order="contiguous").digest
    assert torch.equal(own_mask(9), own_mask(9))
    assert len({tuple(x.tolist()) for x in (modes, own_mask(9), own_mask(10), own_mask(9, 7))}) == 4


def test_a_plan_from_an_evaluation_serves_for_training():
    """Plans are kept, and so is what they compute when they are first used."""
    layout = Layout.from_cu_seqlens([0, 31, 64])  # of no other test
    where = {"layers": AttentionShape(2, 1, 8), "ranks": 2, "block": 16}
    with torch.inference_mode():
        plan = marble.plan(layout, **where)
        plan.shard(torch.randn(64, 2))
    assert marble.plan(layout, **where) is plan
    x = torch.randn(64, 4, 8, requires_grad=True)
    q, k, v = plan.shard(x).split([2, 1, 1], 1)
    plan.unshard(marble.attention(q, k, v, plan)).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("loss", [lambda out: out.sum(), lambda out: out.square().sum()], ids=["linear", "square"])
def test_second_derivatives_are_refused(loss):
    """Whether or not the output's gradient depends on anything; first ones are there with create_graph, too."""
    plan = marble.plan(MIXED, AttentionShape(2, 1, 8), ranks=2, block=16)
    q, k, v = (torch.randn(MIXED.tokens, heads, 8, requires_grad=True) for heads in (2, 1, 1))
    first = torch.autograd.grad(loss(marble.attention(q, k, v, plan)), (q, k, v))
    again = torch.autograd.grad(loss(marble.attention(q, k, v, plan)), (q, k, v), create_graph=True)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    for gradient in again:
        with pytest.raises(
            RuntimeError, match=r"^marble\.attention: second derivatives are not computed; .*create_graph"
        ):
            gradient.square().sum().backward(retain_graph=True)
