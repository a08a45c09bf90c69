"""The Blackwell backend with PyTorch in place of its kernels: everything around them, by the kernel contract."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("triton")

import on_host

from marble import AttentionShape, Layout, Span
from marble.kernels import oracles
from marble.kernels.blackwell.backend import BlackwellBackend, Kernels
from marble.kernels.blackwell.lists import BLOCK, SparseCall, lower
from marble.kernels.contract import Band, State, Tiles, Touch, Varlen, Work
from marble.kernels.predicates import covered
from marble.kernels.reference import ReferenceBackend, finish
from marble.kernels.triton.fold import add_tiles, fold_partial
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.testing.exactness import Problem, distributed, reference
from marble.testing.layouts import planned_storage, random_layout, stored_mask, whole_call

BOTH = Touch.FIRST | Touch.LAST
SCALE = 0.2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="PyTorch stands in for kernels on the CPU")


def blackwell(forward: Callable = on_host.forward) -> BlackwellBackend:
    return BlackwellBackend(Kernels("cpu", forward, on_host.backward, on_host.delta))


# Calls


def documents(keys: slice = slice(None)) -> Tiles:
    """Causal documents in blocks on the grid, the last ragged."""
    stored = stored_mask(planned_storage(Layout.from_cu_seqlens([0, 137, 450, 700]), None), None)
    tokens = torch.arange(700)
    return stored.tiles(tokens, tokens[keys], BLOCK)


def scattered() -> Tiles:
    """A mask without structure: tiles take bits, and one query block sees nothing."""
    user = {name: torch.randint(0, 6, (500,), generator=torch.Generator().manual_seed(0)) for name in "ab"}
    user["a"][BLOCK : 2 * BLOCK] = 9
    stored = StoredMask(Storage.natural(Layout.from_cu_seqlens([0, 500])), lambda q, k: q.a == k.b, user=user)
    tokens = torch.arange(500)
    return stored.tiles(tokens, tokens, BLOCK)


def spans() -> Tiles:
    """Spans of every kind."""
    return whole_call(random_layout(Random(5), samples=3, spans=4, length=90))


def elsewhere(tiles: Tiles) -> Tiles:
    """The same call with its key blocks apart and in another order."""
    order = torch.arange(len(tiles.key_row)).flip(0).int()
    return replace(tiles, key_row=order * (BLOCK + 3) + 5)


def dense(band: Band, touch: Touch = BOTH) -> Varlen:
    """Unaligned sequences: longer and shorter keys than queries, no keys, keys of another sequence again."""
    queries, keys = [[3, 300], [300, 310], [330, 480], [480, 500]], [[1, 200], [7, 7], [210, 500], [1, 200]]
    return Varlen(
        torch.tensor(queries).int(), torch.tensor(keys).int(), band, torch.full((4,), int(touch), dtype=torch.uint8)
    )


CALLS: dict[str, Callable[[], Work]] = {
    "documents": documents,
    "scattered": scattered,
    "spans": spans,
    "elsewhere": lambda: elsewhere(documents()),
    **{f"dense {band.name.lower()}": lambda band=band: dense(band) for band in Band},
}
each_call = pytest.mark.parametrize("name", CALLS)


def rows_of(work: Work) -> tuple[int, int]:
    if isinstance(work, Tiles):
        return work.query_rows, int((work.key_row + work.key_len).max())
    return int(work.queries.max()) + 9, int(work.keys.max()) + 7


def legal(work: Work) -> Tensor:
    """How often a call computes each pair, from what the contract says."""
    queries, keys = rows_of(work)
    count = torch.zeros(queries, keys, dtype=torch.int32)
    if isinstance(work, Tiles):
        blocks = covered(work.by_query, queries, len(work.key_row) * BLOCK, BLOCK).split(BLOCK, 1)
        for tile, row, length in zip(blocks, work.key_row.tolist(), work.key_len.tolist(), strict=True):
            count[:, row : row + length] += tile[:, :length]
        return count
    for (q0, q1), (k0, k1) in zip(work.queries.tolist(), work.keys.tolist(), strict=True):
        whole = torch.ones(q1 - q0, k1 - k0, dtype=torch.int32)
        causal = whole.tril((k1 - k0) - (q1 - q0))
        count[q0:q1, k0:k1] += {Band.FULL: whole, Band.CAUSAL: causal, Band.REVERSE_CAUSAL: whole - causal}[work.band]
    return count


def touched(work: Work) -> Tensor:
    """The query rows that a call computes."""
    rows = torch.zeros(rows_of(work)[0], dtype=torch.bool)
    if isinstance(work, Tiles):
        return (work.by_query.counts() > 0).repeat_interleave(BLOCK)[: len(rows)]
    for first, last in work.queries.tolist():
        rows[first:last] = True
    return rows


# What the kernels are told


@each_call
def test_lists_compute_the_pairs_of_the_call(name: str) -> None:
    work = CALLS[name]()
    call, expected = lower(work), legal(work)
    assert lower(work) is call
    for find in (on_host.visible, on_host.visible_by_key):
        found = find(call, len(call.queries) * BLOCK, len(call.keys) * BLOCK)
        count = torch.zeros(expected.shape[0] + BLOCK, expected.shape[1] + BLOCK, dtype=torch.int32)
        for m, (q, rows) in enumerate(zip(call.queries.first.tolist(), call.queries.length.tolist(), strict=True)):
            for n, (k, cols) in enumerate(zip(call.keys.first.tolist(), call.keys.length.tolist(), strict=True)):
                tile = found[m * BLOCK : (m + 1) * BLOCK, n * BLOCK : (n + 1) * BLOCK]
                assert not tile[rows:].any()
                assert not tile[:, cols:].any()
                count[q : q + rows, k : k + cols] += tile[:rows, :cols]
        assert torch.equal(count[: expected.shape[0], : expected.shape[1]], expected)
    packed = name == "elsewhere", name.startswith("dense")
    assert (call.queries.packed, call.keys.packed) == (packed[1], any(packed))


def test_both_kinds_of_predicates_occur() -> None:
    slots = torch.cat([lower(CALLS[name]()).table.flatten() for name in CALLS])
    assert (slots < 0).any()
    assert (slots > 0).any()


def test_blocks_of_the_same_rows_are_refused() -> None:
    tiles = documents()
    with pytest.raises(ValueError, match="two key blocks of a call hold the same rows"):
        lower(replace(tiles, key_row=torch.zeros_like(tiles.key_row)))


def test_mask_mods_on_the_host() -> None:
    """What the kernels evaluate, compiled for the CPU, against the tables read in PyTorch: tiles of two ranges, which
    go up to the last column, and tiles of bits."""
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    from marble.kernels.blackwell.predicates import by_pair, by_row

    make = torch.Generator().manual_seed(0)
    limits = torch.randint(0, BLOCK + 1, (2, BLOCK, 4), generator=make).sort(2).values
    limits[1, :9], limits[1, 9:20, 2:] = torch.tensor([0, BLOCK, 0, 0]), 0
    ranges = (limits << torch.tensor([0, 8, 16, 24])).sum(2).int()
    bits = torch.randint(-(1 << 31), 1 << 31, (2, BLOCK, 4), generator=make).int()
    table = torch.tensor([[0, 1, -1], [0, -2, 1]]).int()
    call = replace(lower(documents()), table=table, ranges=ranges, bits=bits)

    @cute.jit
    def fill(rows: cute.Tensor, cells: cute.Tensor, m: Int32, n: Int32, tables: tuple) -> None:
        for i in range(BLOCK):
            row, first = (cute.full((BLOCK,), at, Int32) for at in (m * BLOCK + i, n * BLOCK))
            words = by_row(row, row, row, first, None, tables)
            for c in range(4):
                rows[i, c] = Int32(words[c])
            for j in range(BLOCK):
                q, k = (cute.full((1,), at, Int32) for at in (m * BLOCK + i, n * BLOCK + j))
                cells[i, j] = Int32(by_pair(q, q, q, k, None, tables)[0])

    for m, n in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2)):
        rows, cells = torch.zeros(BLOCK, 4, dtype=torch.int32), torch.full((BLOCK, BLOCK), -1, dtype=torch.int32)
        fill(*map(from_dlpack, (rows, cells)), m, n, tuple(map(from_dlpack, (table, ranges, bits))))
        expected = on_host.pairs(call, m, n)
        assert 0.2 < expected.float().mean() < 0.8
        assert torch.equal(cells.bool(), expected)
        assert torch.equal((rows.unsqueeze(2) >> torch.arange(32) & 1).flatten(1).bool(), expected)


# The contract


class Attention:
    """Inputs in bfloat16 and everything that calls write, unset or, for sums, 1.

    The output is float32 too: Triton's interpreter cuts off what a GPU rounds.
    """

    def __init__(self, queries: int, keys: int, heads: tuple[int, int] = (2, 1), head_dim: int = 64) -> None:
        make = torch.Generator().manual_seed(queries)
        shapes = [(queries, heads[0]), (keys, heads[1]), (keys, heads[1]), (queries, heads[0])]
        self.inputs = [torch.randn(*shape, head_dim, generator=make).bfloat16() for shape in shapes]
        self.state = State.empty(heads[0], queries, head_dim, torch.float32, "cpu")
        for part in vars(self.state).values():
            part.fill_(torch.nan)
        self.out = torch.full_like(self.inputs[0], torch.nan, dtype=torch.float32)
        self.lse = torch.full((heads[0], queries), torch.nan)
        self.dq = torch.ones(queries, heads[0], head_dim).transpose(0, 1)
        self.dk, self.dv = (x.transpose(0, 1) for x in torch.ones(keys, 2, heads[1], head_dim).unbind(1))

    def forward(self, *works: Work, backend=None, carried: bool = True) -> "Attention":
        q, k, v, _ = self.inputs
        for work in works:
            state = self.state if carried else None
            (backend or blackwell()).forward(q, k, v, work, state, self.out, self.lse, scale=SCALE)
        return self

    def backward(self, *works: Work) -> "Attention":
        backend, (q, k, v, dout) = blackwell(), self.inputs
        delta = backend.delta(self.out, dout)
        for work in works:
            backend.backward(q, k, v, dout, self.lse, delta, work, self.dq, self.dk, self.dv, scale=SCALE)
        return self

    def truth(self, seen: Tensor) -> dict[str, Tensor]:
        """One dense softmax and PyTorch's autograd, in float64; gradients added to 1."""
        q, k, v = (x.double().requires_grad_() for x in self.inputs[:3])
        group = q.shape[1] // k.shape[1]
        scores = SCALE * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
        scores = scores.masked_fill(~seen, -torch.inf)
        some = seen.any(1)
        weights = torch.where(some.unsqueeze(1), scores, 0).softmax(2) * some.unsqueeze(1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
        grads = torch.autograd.grad(out, (q, k, v), self.inputs[3].double())
        found = {name: grad.transpose(0, 1) + 1 for name, grad in zip(("dq", "dk", "dv"), grads, strict=True)}
        return {"out": out.detach(), "lse": scores.logsumexp(2).detach(), **found}

    def check(self, seen: Tensor) -> None:
        """Results as exact as float32 allows."""
        for name, value in self.truth(seen).items():
            torch.testing.assert_close(
                getattr(self, name).double(), value, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@each_call
@pytest.mark.parametrize(("heads", "carried"), [((2, 2), False), ((2, 1), True)])
def test_one_call(name: str, heads: tuple[int, int], carried: bool) -> None:
    work = CALLS[name]()
    some = touched(work)
    x = Attention(*rows_of(work), heads).forward(work, carried=carried)
    assert all(part.isnan().all() for part in vars(x.state).values()), "a last touch writes no state"
    assert x.out[~some].isnan().all(), "rows that no call touches are left alone"
    assert x.lse[:, ~some].isnan().all()
    x.out[~some], x.lse[:, ~some] = 0, -torch.inf
    x.backward(work).check(legal(work).bool())
    assert not some.all() or name in ("documents", "elsewhere", "spans")


def shards(*cuts: int) -> list[Tiles]:
    """The documents in calls over some keys each, with the touches that carry state between them."""
    calls = [documents(slice(a, b)) for a, b in pairwise(cuts)]
    calls = [replace(call, key_row=call.key_row + a) for call, a in zip(calls, cuts, strict=False)]
    busy = torch.stack([call.by_query.counts() > 0 for call in calls])
    order = busy.long().cumsum(0)
    flags = (busy & (order == 1)) * int(Touch.FIRST) + (busy & (order == order[-1:])) * int(Touch.LAST)
    return [replace(call, touch=flag.to(torch.uint8)) for call, flag in zip(calls, flags, strict=True)]


@pytest.mark.parametrize("cuts", [(0, 256, 384, 700), (0, 100, 333, 450, 700)])
def test_state_carried_between_calls(cuts: tuple[int, ...]) -> None:
    works, whole = shards(*cuts), legal(documents()).bool()
    assert {flag for work in works for flag in work.touch.tolist()} >= {0, 1, 2, 3} or len(cuts) == 4
    Attention(700, 700).forward(*works).backward(*works).check(whole)


def test_the_state_is_one_that_other_backends_continue() -> None:
    works = shards(0, 256, 384, 700)
    for backends in ((blackwell(), ReferenceBackend()), (ReferenceBackend(), blackwell())):
        x = Attention(700, 700)
        x.forward(works[0], backend=backends[0]).forward(*works[1:], backend=backends[1])
        expected = x.truth(legal(documents()).bool())["out"]
        # The reference rounds its weights.
        assert (x.out - expected).norm() < 4e-3 * expected.norm()


def test_many_calls_are_as_exact_as_one() -> None:
    """What is carried is float32: 10 calls of 70 keys each are one rounding away from the truth, as one call is. The
    same gate fails if every call's output is rounded."""
    works = [
        Varlen(
            torch.tensor([[0, 150]]).int(),
            torch.tensor([[low, low + 70]]).int(),
            Band.FULL,
            torch.tensor([int(Touch.FIRST) * (low == 0) + int(Touch.LAST) * (low == 630)], dtype=torch.uint8),
        )
        for low in range(0, 700, 70)
    ]
    expected = Attention(150, 700).truth(torch.ones(150, 700, dtype=torch.bool))["out"]

    def rounding(*call: object) -> tuple[Tensor, Tensor]:
        out, lse = on_host.forward(*call)
        return out.bfloat16().float(), lse

    best, error, rounded = (
        float((out.bfloat16().double() - expected).norm())
        for out in (
            expected,
            Attention(150, 700).forward(*works).out,
            Attention(150, 700).forward(*works, backend=blackwell(rounding)).out,
        )
    )
    assert error < 1.001 * best
    assert rounded > 1.05 * best


def test_rows_that_see_nothing_until_late() -> None:
    """In every call, and in all but the last; with no key at all no kernel runs."""

    def never(*_: object) -> None:
        raise AssertionError("there is nothing to compute")

    one = torch.tensor([[0, 6]]).int()
    first, last = (torch.tensor([int(touch)], dtype=torch.uint8) for touch in (Touch.FIRST, Touch.LAST))
    nothing = Varlen(one, torch.tensor([[3, 3]]).int(), Band.FULL, first)
    x = Attention(6, 8).forward(nothing, replace(nothing, touch=last), backend=blackwell(never))
    assert (x.out == 0).all()
    assert (x.lse == -torch.inf).all()
    x.backward(nothing)
    assert (x.dq == 1).all()
    late = Varlen(one, torch.tensor([[0, 8]]).int(), Band.FULL, last)
    Attention(6, 8).forward(nothing, late).backward(late).check(torch.ones(6, 8, dtype=torch.bool))


def test_rows_without_sum_add_no_gradient() -> None:
    work = documents()
    x = Attention(700, 700).forward(work)
    x.lse[:, :300] = -torch.inf
    x.backward(work)
    assert (x.dq[:, :300] == 1).all()
    assert all(part.isfinite().all() for part in (x.dq, x.dk, x.dv))
    assert (x.dq[:, 300:] != 1).any()


@pytest.mark.parametrize("schedule", ["ring", "sparse_a2a", "chunked"])
def test_whole_schedules(schedule: str) -> None:
    """Three virtual ranks. The interpreter cuts the output off, which is twice the error of rounding it."""
    samples = [
        [Span("causal", 200), Span("full", 131), Span("causal", 60)],
        [Span("causal", 3), Span("noise", 190), Span("full", 60)],
    ]
    problem = Problem.random(Layout(samples), AttentionShape(2, 1, 64))
    found, expected = distributed(problem, problem.plan(3, schedule), backend=blackwell()), reference(problem)
    errors = {name: float((found[name] - ref).norm() / ref.norm()) for name, ref in expected.items()}
    assert errors["out"] < 4e-3
    assert all(errors[name] < 2.5e-3 for name in ("dq", "dk", "dv")), errors


# Small kernels against their oracles


@pytest.mark.parametrize("touch", [0, 1, 2, 3])
def test_folding(touch: int) -> None:
    """One of two blocks is touched; NaN in what may not be read shows, and so does any write beside it."""
    make = torch.Generator().manual_seed(touch)
    heads, width, rows = 2, 64, 300
    blocks = SimpleNamespace(first=torch.tensor([7, 150]).int(), length=torch.tensor([100, 0]).int())
    partial = torch.randn(256, heads, width, generator=make), torch.randn(heads, 256, generator=make) * 20
    partial[1][:, ::3] = -torch.inf
    partial[0][::3] = torch.nan
    before = [torch.randn(heads, rows, *shape, generator=make) for shape in ((width,), (), ())]
    before[2] = before[2].abs() + 1
    before[1][:, 1::2], before[2][:, 1::2], before[0][:, 1::2] = -torch.inf, 0, 0
    state = State(*(x.clone() for x in before))
    if touch & Touch.FIRST:
        state.acc[:], state.m[:], state.l[:] = torch.nan, torch.nan, torch.nan
    out, lse = torch.full((rows, heads, width), torch.nan), torch.full((heads, rows), torch.nan)
    fold_partial(blocks, torch.tensor([touch, 3]).int(), partial, state, out, lse, SCALE)
    here = slice(7, 107)
    carried = [x[:, here].double() for x in before]
    if touch & Touch.FIRST:
        carried = [torch.zeros_like(carried[0]), torch.full_like(carried[1], -torch.inf), torch.zeros_like(carried[2])]
    expected = oracles.fold_partial(
        tuple(carried), partial[0][:100].transpose(0, 1).double(), partial[1][:, :100].double(), SCALE
    )
    if touch & Touch.LAST:
        final, log_sum = finish(expected, scale=SCALE)
        torch.testing.assert_close(out[here].transpose(0, 1).double(), final, rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, here].double(), log_sum, rtol=1e-5, atol=1e-5)
    else:
        for found, wanted in zip(vars(state).values(), expected, strict=True):
            torch.testing.assert_close(found[:, here].double(), wanted, rtol=2e-5, atol=1e-5)
    left = torch.ones(rows, dtype=torch.bool)
    left[here] = bool(touch & Touch.LAST == 0)
    assert out[left].isnan().all()
    assert lse[:, left].isnan().all()
    kept = torch.ones(rows, dtype=torch.bool)
    kept[here] = bool(touch & Touch.LAST)
    for found, old in zip(vars(state).values(), before, strict=True):
        assert found[:, kept].isnan().all() if touch & Touch.FIRST else torch.equal(found[:, kept], old[:, kept])


def test_adding_tiles() -> None:
    """Blocks that overlap, one without rows, to a view with strides."""
    tiles = torch.randn(2, 3 * BLOCK * 64)
    blocks = SimpleNamespace(first=torch.tensor([0, 100, 5]).int(), length=torch.tensor([128, 77, 0]).int())
    target = torch.randn(200, 3, 2, 64)[:, 1].transpose(0, 1)
    rows = oracles.tile_rows(tiles.double(), 64).view(2, 3, BLOCK, 64) * 0.5
    expected = target.double()
    expected[:, :128] += rows[:, 0]
    expected[:, 100:177] += rows[:, 1, :77]
    add_tiles(target, tiles, blocks, 0.5)
    torch.testing.assert_close(target.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_order_of_tiles_is_the_one_that_flash_attention_describes() -> None:
    from cutlass import cute
    from flash_attn.cute.bwd_accum_tile import accum_tile_layout
    from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100

    compared = []

    @cute.jit
    def compare() -> None:
        for head_dim in (64, 128):
            rows = torch.arange(BLOCK * head_dim).double().view(1, BLOCK, head_dim)
            place = on_host.as_tiles(rows, 1)[0].long().argsort().view(BLOCK, head_dim).tolist()
            for order in FlashAttentionBackwardSm100.accum_tile_orders(False, BLOCK):
                layout = accum_tile_layout(order, BLOCK, head_dim)
                compared.extend(
                    cute.crd2idx((row, column), layout) == place[row][column]
                    for row in (0, 1, 63, 64, 127)
                    for column in (0, 1, 3, 4, 5, 31, 32, head_dim - 1)
                )

    compare()
    assert len(compared) == 160
    assert all(compared)


# Refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 96}, "head dimension 64 or 128, got torch.bfloat16 with 96"),
        ({"scale": 0.0}, "scale: must be > 0"),
        ({}, "computes on GPUs, got tensors on cpu"),
    ],
)
def test_refusals(wrong: dict[str, object], message: str) -> None:
    given = {"dtype": torch.bfloat16, "head_dim": 64, "scale": 0.1, **wrong}
    q = torch.zeros(8, 2, given["head_dim"], dtype=given["dtype"])
    with pytest.raises(ValueError, match=message):
        BlackwellBackend().forward(q, q, q, documents(), None, q, torch.zeros(2, 8), scale=given["scale"])


def test_deterministic_sums_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own sums have no order; with `warn_only`, that is said and no more."""
    from marble.kernels.blackwell.backward_sm100 import run_backward

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(RuntimeError, match="'blackwell' adds gradients in any order"):
        run_backward((), (), None, 1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: True)
    with pytest.warns(UserWarning, match="in any order"), pytest.raises(ValueError, match="not enough values"):
        run_backward((), (), None, 1.0)  # type: ignore[arg-type]


def test_sums_that_are_not_float32_are_refused() -> None:
    half, blocks = torch.zeros(1, 128, 64).bfloat16(), SimpleNamespace(first=torch.zeros(1), length=torch.zeros(1))
    with pytest.raises(ValueError, match="partial results are float32"):
        fold_partial(blocks, torch.zeros(1), (half, torch.zeros(1, 128)), None, half, torch.zeros(1, 128), 1.0)
    with pytest.raises(ValueError, match="summed in float32"):
        add_tiles(half, torch.zeros(1, 8192), blocks, 1.0)
    with pytest.raises(ValueError, match="expected tiles of 1 blocks"):
        add_tiles(half.float(), torch.zeros(1, 64), blocks, 1.0)


def test_a_lowered_call_is_of_blocks_of_128() -> None:
    assert isinstance(lower(documents()), SparseCall)
    with pytest.raises(ValueError, match="blocks of 128"):
        lower(replace(documents(), block=64))
