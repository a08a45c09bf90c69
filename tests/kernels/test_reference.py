"""The contract of `marble.kernels.contract`, on the reference backend."""

from dataclasses import dataclass, fields, replace
from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from marble.kernels import launch
from marble.kernels.contract import Backend, Band, State, Tiles, Touch, Varlen, Work, accumulation_dtype, move
from marble.kernels.predicates import covered
from marble.kernels.reference import ReferenceBackend
from marble.layout import Layout, Span
from marble.mask.domains import dense
from marble.mask.storage import Storage
from marble.testing.layouts import planned_storage, random_layout, random_window, stored_mask

rngs = st.builds(Random, st.integers(0, 2**32 - 1))
SCALE = 0.6
BOTH = Touch.FIRST | Touch.LAST


@pytest.fixture(scope="module", autouse=True)
def _poison():
    """NaN in all memory that is handed out uninitialised."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@dataclass
class Attention:
    """Inputs and everything that calls write, unset as an executor hands it over."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def __post_init__(self) -> None:
        rows, heads, head_dim = self.q.shape
        sums = accumulation_dtype(self.q.dtype)
        self.state = State.empty(heads, rows, head_dim, sums, "cpu")
        self.out, self.lse = torch.empty_like(self.q), torch.empty(heads, rows, dtype=sums)
        self.dq = torch.zeros(heads, rows, head_dim, dtype=sums)
        self.dk, self.dv = (torch.zeros(self.k.shape[1], len(self.k), head_dim, dtype=sums) for _ in range(2))

    @classmethod
    def random(cls, queries: int, keys: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 5, **to) -> "Attention":
        make = torch.Generator().manual_seed(queries * 1000 + keys)
        shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
        to = {"dtype": torch.float64, **to}
        return cls(*(torch.randn(*shape, head_dim, generator=make, dtype=torch.float64).to(**to) for shape in shapes))

    def again(self, dtype: torch.dtype | None = None) -> "Attention":
        """The same inputs, nothing computed."""
        return Attention(*(x.to(dtype or x.dtype) for x in (self.q, self.k, self.v, self.dout)))

    def forward(self, *works: Work, backend: Backend | None = None) -> "Attention":
        backend = backend or ReferenceBackend()
        for work in works:
            backend.forward(self.q, self.k, self.v, work, self.state, self.out, self.lse, scale=SCALE)
        return self

    def backward(self, *works: Work, backend: Backend | None = None) -> "Attention":
        backend = backend or ReferenceBackend()
        delta = backend.delta(self.out, self.dout)
        for work in works:
            backend.backward(
                self.q, self.k, self.v, self.dout, self.lse, delta, work, self.dq, self.dk, self.dv, scale=SCALE
            )
        return self

    @property
    def results(self) -> dict[str, Tensor]:
        return {"out": self.out, "lse": self.lse, "dq": self.dq, "dk": self.dk, "dv": self.dv}


def truth(x: Attention, legal: Tensor) -> dict[str, Tensor]:
    """One dense softmax and PyTorch's autograd, in float64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (x.q, x.k, x.v))
    group = q.shape[1] // k.shape[1]
    scores = SCALE * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores.masked_fill(~legal, -torch.inf)
    lse = scores.logsumexp(2) if legal.shape[1] else scores.new_full(scores.shape[:2], -torch.inf)
    seen = legal.any(1)
    weights = torch.where(seen.unsqueeze(1), scores, 0).softmax(2) * seen.unsqueeze(1)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
    dq, dk, dv = (g.transpose(0, 1) for g in torch.autograd.grad(out, (q, k, v), x.dout.double()))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].double(), value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def split(tiles: Tiles, rng: Random, calls: int) -> list[Tiles]:
    """The same tiles over several calls, dealt by key block, with the touches that carry state between them."""
    deal = torch.tensor([rng.randrange(calls) for _ in tiles.key_row])
    parts = []
    for call in range(calls):
        chosen = (deal == call).nonzero().flatten()
        number = torch.full((len(deal),), -1)
        number[chosen] = torch.arange(len(chosen))
        parts.append(
            replace(
                tiles,
                by_query=_only(tiles.by_query, number),
                key_row=tiles.key_row[chosen],
                key_len=tiles.key_len[chosen],
            )
        )
    busy = torch.stack([part.by_query.counts() > 0 for part in parts])
    order = busy.long().cumsum(0)
    flags = (busy & (order == 1)) * int(Touch.FIRST) + (busy & (order == order[-1:])) * int(Touch.LAST)
    return [replace(part, touch=flag.to(torch.uint8)) for part, flag in zip(parts, flags, strict=True)]


def _only(tiles, number: Tensor):
    """Some inner blocks, renumbered; runs become runs of one block."""
    lists = {}
    for name, entries in (("run", tiles.runs), ("part", tiles.parts)):
        owner = torch.repeat_interleave(torch.arange(tiles.outer), getattr(tiles, f"{name}_ptr").diff().long())
        if name == "run":
            owner = owner.repeat_interleave(entries[:, 1].long())
            inner = torch.cat(
                [torch.arange(first, first + count) for first, count in entries.tolist()] or [torch.arange(0)]
            )
            entries = torch.stack([inner, torch.ones_like(inner)], 1)
        keep = number[entries[:, 0].long()] >= 0
        kept = entries[keep].clone()
        kept[:, 0] = number[kept[:, 0].long()]
        lists[f"{name}s"] = kept.int()
        lists[f"{name}_ptr"] = torch.searchsorted(owner[keep].contiguous(), torch.arange(tiles.outer + 1)).int()
    return replace(tiles, **lists)


@settings(max_examples=60)
@given(rng=rngs)
def test_one_call_and_several_with_carried_state(rng):
    layout, window, block = random_layout(rng, samples=3, spans=4), random_window(rng), rng.randint(2, 9)
    mask = stored_mask(planned_storage(layout, window), window)
    note(f"{layout.to_json()}, window {window}, block {block}")
    everything = torch.arange(layout.tokens)
    legal = dense(mask.mask, mask.tracks, mask.tracks)
    whole = mask.tiles(everything, everything, block)
    calls = split(whole, rng, rng.randint(2, 4))
    count = sum(_count(call, layout.tokens) for call in calls)
    assert torch.equal(count, legal.int())
    x = Attention.random(layout.tokens, layout.tokens)
    expected = truth(x, legal)
    touched = (whole.by_query.counts() > 0).repeat_interleave(block)[: layout.tokens]
    for works in ([whole], calls):
        y = x.again().forward(*works)
        for rows in (y.out.transpose(0, 1), y.lse):
            assert rows[:, ~touched].isnan().all(), "rows that no call touches are left alone"
        y.out[~touched], y.lse[:, ~touched] = 0, -torch.inf
        assert_close(y.backward(*works).results, expected)


def _count(call: Tiles, keys: int) -> Tensor:
    index = torch.cat(
        [
            torch.arange(row, row + length)
            for row, length in zip(call.key_row.tolist(), call.key_len.tolist(), strict=True)
        ]
        or [torch.arange(0)]
    )
    count = torch.zeros(call.query_rows, keys, dtype=torch.int32)
    if len(index):
        # Only the shard's last key block is ragged: give every block a whole block of columns, then keep what is real.
        columns = torch.cat([torch.arange(length) + at * call.block for at, length in enumerate(call.key_len.tolist())])
        found = covered(call.by_query, call.query_rows, len(call.key_row) * call.block, call.block)
        count[:, index] = found[:, columns]
    return count


def sequences(queries: list, keys: list, band: Band, touch: Touch = BOTH) -> Varlen:
    return Varlen(
        torch.tensor(queries).int(),
        torch.tensor(keys).int(),
        band,
        torch.full((len(queries),), int(touch), dtype=torch.uint8),
    )


def band_mask(work: Varlen, rows: int, cols: int) -> Tensor:
    """The pairs of a varlen call, from the words of `Band`."""
    legal = torch.zeros(rows, cols, dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(work.queries.tolist(), work.keys.tolist(), strict=True):
        n, m = q1 - q0, k1 - k0
        for i in range(n):
            for j in range(m):
                causal = j <= i + (m - n)
                legal[q0 + i, k0 + j] = {Band.FULL: True, Band.CAUSAL: causal, Band.REVERSE_CAUSAL: not causal}[
                    work.band
                ]
    return legal


UNALIGNED = ([[0, 3], [3, 8], [10, 14]], [[2, 9], [0, 2], [9, 13]])


@pytest.mark.parametrize("band", Band)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_varlen_bands(band, heads, kv_heads):
    """Longer and shorter keys than queries, in any place; rows between sequences are left alone."""
    work = sequences(*UNALIGNED, band)
    x = Attention.random(14, 13, heads, kv_heads).forward(work)
    assert x.out[8:10].isnan().all()
    assert x.lse[:, 8:10].isnan().all()
    x.out[8:10], x.lse[:, 8:10] = 0, -torch.inf
    assert_close(x.backward(work).results, truth(x, band_mask(work, 14, 13)))


def test_causal_and_reverse_causal_are_everything():
    queries, keys = [[0, 3], [3, 8]], [[2, 9], [0, 6]]
    x = Attention.random(8, 9)
    full = sequences(queries, keys, Band.FULL)
    for bands in ((Band.CAUSAL, Band.REVERSE_CAUSAL), (Band.REVERSE_CAUSAL, Band.CAUSAL)):
        halves = [
            sequences(queries, keys, band, touch) for band, touch in zip(bands, (Touch.FIRST, Touch.LAST), strict=True)
        ]
        one, two = x.again().forward(full).backward(full), x.again().forward(*halves).backward(*halves)
        assert_close(two.results, one.results)


def test_varlen_with_empty_and_one_row_sequences():
    cu_q, cu_k = torch.tensor([0, 0, 0, 1023]), torch.tensor([0, 0, 1, 2046])
    for band in Band:
        work = Varlen.from_cu_seqlens(cu_q, cu_k, band, BOTH)
        assert work.queries.tolist() == [[0, 0], [0, 0], [0, 1023]]
        assert work.keys.tolist() == [[0, 0], [0, 1], [1, 2046]]
        x = Attention.random(1023, 2046, 2, 1, 4).forward(work).backward(work)
        index = torch.arange(1023).unsqueeze(1), torch.arange(2045)
        causal = index[1] <= index[0] + (2045 - 1023)
        legal = {Band.FULL: torch.ones_like(causal), Band.CAUSAL: causal, Band.REVERSE_CAUSAL: ~causal}[band]
        assert_close(x.results, truth(x, torch.cat([torch.zeros(1023, 1, dtype=torch.bool), legal], 1)))
        assert (x.dk[:, 0] == 0).all()


@pytest.mark.parametrize("band", Band)
def test_varlen_queries_without_keys(band):
    """A sequence of no keys: output 0, log-sum-exp −inf, no gradient."""
    work = sequences([[0, 3], [3, 5]], [[0, 0], [0, 4]], band)
    x = Attention.random(5, 4).forward(work).backward(work)
    assert (x.out[:3] == 0).all()
    assert (x.lse[:, :3] == -torch.inf).all()
    assert_close(x.results, truth(x, band_mask(work, 5, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_see_nothing(dtype):
    """Causal with fewer keys than queries: the first queries see none. In one call, and in two with carried state."""
    one = sequences([[0, 6]], [[0, 2]], Band.CAUSAL)
    first, last = (replace(one, touch=torch.full_like(one.touch, int(touch))) for touch in (Touch.FIRST, Touch.LAST))
    empty = sequences([[0, 6]], [[2, 4]], Band.CAUSAL, Touch.CARRY)
    for works in ([one], [first, replace(empty, touch=last.touch)]):
        x = Attention.random(6, 4, dtype=dtype).forward(*works).backward(*works)
        assert (x.out[:4] == 0).all()
        assert (x.lse[:, :4] == -torch.inf).all()
        assert (x.dq[:, :4] == 0).all()
        for value in (x.out, x.dq, x.dk, x.dv, x.lse[:, 4:]):
            assert value.isfinite().all()


def test_keys_that_come_late_restart_nothing():
    """A row's first call has no key for it, its second has: the −inf maximum must not poison the sum."""
    nothing = sequences([[0, 4]], [[0, 2]], Band.CAUSAL, Touch.FIRST)
    rest = sequences([[0, 4]], [[2, 6]], Band.FULL, Touch.LAST)
    x = Attention.random(4, 6).forward(nothing, rest).backward(nothing, rest)
    assert_close(x.results, truth(x, band_mask(nothing, 4, 6) | band_mask(rest, 4, 6)))


def test_touches():
    """A first touch reads no state, a last one writes none; calls in between write neither output nor lse."""
    work = sequences([[0, 4]], [[0, 3]], Band.FULL)
    x = Attention.random(4, 3).forward(work)
    assert x.state.acc.isnan().all()
    assert x.state.m.isnan().all()
    assert x.state.l.isnan().all()
    assert x.out.isfinite().all()
    y = x.again().forward(sequences([[0, 4]], [[0, 3]], Band.FULL, Touch.FIRST))
    assert y.out.isnan().all()
    assert y.lse.isnan().all()
    scores = torch.einsum("qhd,khd->hqk", x.q, x.k.repeat_interleave(2, 1))
    largest = scores.amax(2)
    weights = (SCALE * (scores - largest.unsqueeze(2))).exp()
    torch.testing.assert_close(y.state.m, largest)  # before the softmax scale
    torch.testing.assert_close(y.state.l, weights.sum(2))
    torch.testing.assert_close(y.state.acc, torch.einsum("hqk,khd->hqd", weights, x.v.repeat_interleave(2, 1)))


def test_gradients_are_added():
    """To what is there already, and only to the rows of the call."""
    work = sequences([[2, 5]], [[1, 4]], Band.FULL)
    x = Attention.random(6, 5).forward(sequences([[0, 6]], [[0, 5]], Band.FULL))
    once = x.again().forward(sequences([[0, 6]], [[0, 5]], Band.FULL)).backward(work)
    for total in (x.dq, x.dk, x.dv):
        total += 7
    x.backward(work)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(x.results[name], once.results[name] + 7)
    assert (x.dq[:, [0, 1, 5]] == 7).all()
    assert (x.dk[:, [0, 4]] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_carried_is_never_rounded(dtype):
    """State and gradients in float32: 40 calls of one key each are as exact as one call, for every result."""
    keys = 40
    x = Attention.random(64, keys, 4, 2, 16, dtype=dtype)
    one = sequences([[0, 64]], [[0, keys]], Band.FULL)
    many = [sequences([[0, 64]], [[key, key + 1]], Band.FULL, Touch.CARRY) for key in range(keys)]
    for at, flag in ((0, Touch.FIRST), (-1, Touch.LAST)):
        many[at] = replace(many[at], touch=torch.full_like(one.touch, int(flag)))
    expected = truth(x, torch.ones(64, keys, dtype=torch.bool))
    single, carried = x.again().forward(one).backward(one), x.again().forward(*many).backward(*many)
    assert carried.state.acc.dtype == carried.state.m.dtype == carried.state.l.dtype == torch.float32
    for name, value in expected.items():
        errors = [float((run.results[name].double() - value).norm()) for run in (carried, single)]
        assert errors[0] <= errors[1] * 1.1 + 1e-5 * float(value.norm()), name


def test_bfloat16_rounds_where_documented():
    """Scores, softmax and sums in float32, probabilities and scaled score gradients to bf16 before a product, output
    once."""
    x = Attention.random(16, 12, 2, 1, 8, dtype=torch.bfloat16)
    work = sequences([[0, 16]], [[0, 12]], Band.FULL)
    x.forward(work).backward(work)
    q, k, v, dout = (t.float().transpose(0, 1) for t in (x.q, x.k, x.v, x.dout))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2)
    weights = (SCALE * (scores - scores.amax(2, keepdim=True))).exp()
    out = (weights.bfloat16().float() @ v) / weights.sum(2, keepdim=True)
    assert torch.equal(x.out, out.transpose(0, 1).bfloat16())
    lse = SCALE * scores.amax(2) + weights.sum(2).log()
    torch.testing.assert_close(x.lse, lse, rtol=1e-6, atol=1e-6)
    delta = (x.out.float().transpose(0, 1) * dout).sum(2)
    p = (SCALE * scores - x.lse.unsqueeze(2)).exp()
    ds = (p * (dout @ v.transpose(1, 2) - delta.unsqueeze(2)) * SCALE).bfloat16().float()
    # The last bits of a float32 matrix product depend on its shape.
    torch.testing.assert_close(x.dq, ds @ k, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.dk[0], (ds.transpose(1, 2) @ q).sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.dv[0], (p.bfloat16().float().transpose(1, 2) @ dout).sum(0), rtol=1e-4, atol=1e-4)


def test_delta():
    x = Attention.random(6, 5, dtype=torch.bfloat16).forward(sequences([[0, 6]], [[0, 5]], Band.FULL))
    delta = ReferenceBackend().delta(x.out, x.dout)
    assert delta.dtype == torch.float32
    torch.testing.assert_close(delta, (x.out.float() * x.dout.float()).sum(2).T)


def test_strided_inputs():
    """Only the last dimension must be contiguous: slices of packed heads and of a key/value buffer."""
    x = Attention.random(8, 8)
    packed = torch.stack([x.k, x.v], 1)
    wide = torch.cat([x.q, x.q * 0], 1)
    y = Attention(wide[:, :4], packed[:, 0], packed[:, 1], x.dout)
    assert not y.k.is_contiguous()
    work = sequences([[0, 8]], [[0, 8]], Band.CAUSAL)
    assert_close(y.forward(work).backward(work).results, x.forward(work).backward(work).results, 0)


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_accumulation_types(dtype, sums):
    assert accumulation_dtype(dtype) == sums


PACK = Layout([[Span("causal", 20), Span("full", 9), Span("causal", 4)], [Span("causal", 12)]])


def pack_tiles(block: int = 4) -> tuple[Tiles, Tensor]:
    mask = stored_mask(Storage.natural(PACK))
    everything = torch.arange(PACK.tokens)
    return mask.tiles(everything, everything, block), dense(mask.mask, mask.tracks, mask.tracks)


def test_move_keeps_everything_but_the_device():
    tiles, _ = pack_tiles()
    work = sequences(*UNALIGNED, Band.CAUSAL)
    for value in (tiles, work):
        moved = move(value, "cpu")
        assert type(moved) is type(value)
        for field in fields(value):
            one, other = getattr(value, field.name), getattr(moved, field.name)
            if isinstance(one, Tensor):
                assert torch.equal(one, other)
            elif not hasattr(one, "__dataclass_fields__"):
                assert one == other
    there = move(tiles, "meta")
    for tensor in (there.key_row, there.touch, there.by_query.runs, there.by_key.bits, there.by_query.part_ptr):
        assert tensor.device.type == "meta"
    assert (there.block, there.query_rows) == (tiles.block, tiles.query_rows)
    assert tiles.key_row.device.type == "cpu"
    assert move(None, "meta") is None


def rounded_and_reference(calls: int) -> tuple[dict, dict, dict]:
    """Results of the backend that rounds every step, of the reference backend, and the truth.

    A pair of a query and a key chunk is a call, so that every result is summed over ``calls`` of them.
    """
    rows, size = 128, 128 // calls
    chunks = [[low, low + size] for low in range(0, rows, size)]
    flags = [(Touch.FIRST if k == chunks[0] else 0) | (Touch.LAST if k == chunks[-1] else 0) for k in chunks]
    works = [sequences([q], [k], Band.FULL, flag) for k, flag in zip(chunks, flags, strict=True) for q in chunks]
    x = Attention.random(rows, rows, 4, 4, 32, dtype=torch.bfloat16)
    runs = []
    for name in ("rounded", "reference"):
        backend = launch.backend(name)
        y = x.again().forward(*works, backend=backend).backward(*works, backend=backend)
        runs.append({n: value.bfloat16() if n != "lse" else value for n, value in y.results.items()})
    return *runs, truth(x, torch.ones(rows, rows, dtype=torch.bool))


def test_rounding_per_step_equals_the_reference_with_one_call():
    rounded, reference, _ = rounded_and_reference(1)
    for name in reference:
        assert torch.equal(rounded[name], reference[name]), name


def test_rounding_per_step_is_less_exact_with_several_calls():
    """The gate must be able to fail: rounding at every step shows in every result."""
    rounded, reference, expected = rounded_and_reference(8)
    for name in ("out", "dq", "dk", "dv"):
        errors = [float((run[name].double() - expected[name]).norm()) for run in (rounded, reference)]
        assert errors[0] > 1.1 * errors[1], f"{name}: {errors}"


def test_rounding_per_step_loses_nothing_in_float64():
    """The algebra of merging is exact; only the type rounds."""
    tiles, legal = pack_tiles()
    x = Attention.random(PACK.tokens, PACK.tokens)
    works = split(tiles, Random(0), 5)
    backend = launch.backend("rounded")
    assert_close(x.forward(*works, backend=backend).backward(*works, backend=backend).results, truth(x, legal), 1e-10)


def test_backends_by_name():
    assert launch.backend("reference").name == "reference"
    assert launch.backend("rounded").name == "reference, rounded per step"
    with pytest.raises(ValueError, match="'cute2' is unknown; use one of 'reference'"):
        launch.backend("cute2")
