"""Bad input is refused before any work, with an error that names the argument and says what would do."""

import json
import math
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from marble import AttentionShape, Layout, Span, attention, plan

Case = tuple[str, Callable[[], Any], type[Exception], str]

DOCUMENTS = Layout.from_cu_seqlens([0, 5, 12])
SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=8)
PLAN = plan(DOCUMENTS, [SHAPE, AttentionShape(2, 2, 8, window=3)], ranks=2, block=4)
RANK_PLAN = plan(DOCUMENTS, SHAPE, ranks=2, rank=0, block=4)


class Untouchable:
    """A backend that must not be reached."""

    name = "untouchable"
    writes_gradients = False

    def prepare(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("reached a kernel")

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("reached a kernel")

    def delta(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("reached a kernel")

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("reached a kernel")


def refuses(cases: list[Case]) -> Any:
    return pytest.mark.parametrize(
        ("call", "error", "message"), [pytest.param(*case[1:], id=case[0]) for case in cases]
    )


def expect(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    assert error in (TypeError, ValueError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a bad input is refused, not warned about
        with pytest.raises(error, match=message):
            call()


def layout(*samples: list[Any]) -> Layout:
    return Layout(samples)


def token_types(types: Any, **options: Any) -> Layout:
    return Layout.from_token_types(types, **options)


TEXT, PAD = Span("causal", 4), Span("pad", 2)

LAYOUT_CASES: list[Case] = [
    ("span length 0", lambda: Span("causal", 0), ValueError, r"^Span\.length: .*at least 1.*leave empty spans out"),
    ("span length negative", lambda: Span("full", -3), ValueError, r"^Span\.length: .*at least 1.*got -3"),
    ("span length float", lambda: Span("full", 3.0), TypeError, r"^Span\.length: expected an integer, got float"),
    ("span length bool", lambda: Span("full", True), TypeError, r"^Span\.length: expected an integer, got bool"),
    ("span length none", lambda: Span("full", None), TypeError, r"^Span\.length: expected an integer, got NoneType"),
    ("span mode unknown", lambda: Span("image", 3), ValueError, r"^Span\.mode: 'image' .*use one of 'causal', 'full'"),
    ("span mode none", lambda: Span(None, 3), ValueError, r"^Span\.mode: None .*use one of 'causal'"),
    ("group on causal", lambda: Span("causal", 3, group=0), ValueError, r"^Span\.group: only group and noise .*causal"),
    ("group on full", lambda: Span("full", 3, group=0), ValueError, r"^Span\.group: only group and noise .*full"),
    ("group on pad", lambda: Span("pad", 3, group=0), ValueError, r"^Span\.group: only group and noise .*pad"),
    ("group negative", lambda: Span("group", 3, group=-1), ValueError, r"^Span\.group: .*0 or more, got -1"),
    ("group float", lambda: Span("noise", 3, group=1.0), TypeError, r"^Span\.group: expected an integer, got float"),
    (
        "group in two samples",
        lambda: layout([Span("group", 3, group=4)], [TEXT, Span("group", 3, group=4)]),
        ValueError,
        r"^Layout\.samples\[1\]: group 4 .*sample 0.*use a new id",
    ),
    (
        "group under two modes",
        lambda: layout([Span("group", 3, group=4), Span("noise", 3, group=4)]),
        ValueError,
        r"^Layout\.samples\[0\]: group 4 .*one id per mode",
    ),
    ("empty layout", lambda: layout(), ValueError, r"^Layout\.samples: .*at least one sample"),
    ("empty sample", lambda: layout([TEXT], []), ValueError, r"^Layout\.samples\[1\]: .*leave empty samples out"),
    ("sample of pairs", lambda: layout([("causal", 4)]), TypeError, r"^Layout\.samples\[0\]: expected Span, got tuple"),
    ("spans without samples", lambda: Layout([TEXT]), TypeError, r"^Layout\.samples: .*each a sequence of Span"),
    ("layout of a number", lambda: Layout(7), TypeError, r"^Layout\.samples: give a sequence of samples"),
    (
        "padding mixed in",
        lambda: layout([TEXT, PAD]),
        ValueError,
        r"^Layout\.samples\[0\]: padding .*sample of its own",
    ),
    ("padding first", lambda: layout([PAD, TEXT]), ValueError, r"^Layout\.samples\[0\]: padding .*sample of its own"),
    ("cu_seqlens from 1", lambda: Layout.from_cu_seqlens([1, 4]), ValueError, r"^cu_seqlens: must start at 0"),
    ("cu_seqlens empty", lambda: Layout.from_cu_seqlens([]), ValueError, r"^cu_seqlens: .*at least one document"),
    ("cu_seqlens only 0", lambda: Layout.from_cu_seqlens([0]), ValueError, r"^cu_seqlens: .*at least one document"),
    ("cu_seqlens falls", lambda: Layout.from_cu_seqlens([0, 5, 3]), ValueError, r"^cu_seqlens: .*cannot decrease"),
    ("cu_seqlens floats", lambda: Layout.from_cu_seqlens([0, 5.0]), TypeError, r"^cu_seqlens: expected an integer"),
    (
        "cu_seqlens float tensor",
        lambda: Layout.from_cu_seqlens(torch.tensor([0.0, 5.0])),
        TypeError,
        r"^cu_seqlens: expected an integer, got float",
    ),
    (
        "cu_seqlens matrix",
        lambda: Layout.from_cu_seqlens(torch.tensor([[0, 5]])),
        TypeError,
        r"^cu_seqlens: expected an integer, got list",
    ),
    ("cu_seqlens none", lambda: Layout.from_cu_seqlens(None), TypeError, r"^cu_seqlens: expected .*got NoneType"),
    ("cu_seqlens number", lambda: Layout.from_cu_seqlens(torch.tensor(5)), TypeError, r"^cu_seqlens: expected"),
    ("cu_seqlens past tokens", lambda: Layout.from_cu_seqlens([0, 5], tokens=4), ValueError, r"^tokens: 4 .*5 tokens"),
    ("tokens float", lambda: Layout.from_cu_seqlens([0, 5], tokens=8.0), TypeError, r"^tokens: expected an integer"),
    ("all documents empty", lambda: Layout.from_cu_seqlens([0, 0, 0]), ValueError, r"^cu_seqlens: all .*empty"),
    ("token types float", lambda: token_types(torch.zeros(4)), ValueError, r"^token_type_ids: expected integers"),
    ("token types bool", lambda: token_types([True, False]), ValueError, r"^token_type_ids: expected integers"),
    ("token types empty", lambda: token_types([]), ValueError, r"^token_type_ids: .*at least one token"),
    ("token types cube", lambda: token_types(torch.zeros(2, 2, 2).int()), ValueError, r"^token_type_ids: .*\[tokens\]"),
    ("token types ragged", lambda: token_types([[0, 1], [0]]), ValueError, r"^token_type_ids: expected integers"),
    (
        "attention mask shape",
        lambda: token_types([0, 1, 1], attention_mask=[1, 1]),
        ValueError,
        r"^attention_mask: shape \(2,\) differs .*\(3,\)",
    ),
    (
        "token types and cu_seqlens differ",
        lambda: token_types([0, 1, 1], cu_seqlens=[0, 2]),
        ValueError,
        r"^cu_seqlens: must rise from 0 to the 3 tokens",
    ),
    (
        "token types cu_seqlens fall",
        lambda: token_types([0, 1, 1], cu_seqlens=[0, 2, 1, 3]),
        ValueError,
        r"^cu_seqlens: must rise from 0 to the 3 tokens",
    ),
    (
        "token types cu_seqlens empty",
        lambda: token_types([0, 1, 1], cu_seqlens=[]),
        ValueError,
        r"^cu_seqlens: must rise from 0 to the 3 tokens",
    ),
    (
        "batch with cu_seqlens",
        lambda: token_types([[0, 1], [1, 1]], cu_seqlens=[0, 4]),
        ValueError,
        r"^cu_seqlens: .*flatten it or leave this out",
    ),
    ("token type without mode", lambda: token_types([0, 2]), ValueError, r"^modes: no mode for token type 2; add it"),
    (
        "token type of unknown mode",
        lambda: token_types([0, 1], modes={0: "causal", 1: "image"}),
        ValueError,
        r"^modes: .*'image'.*use one of 'causal'",
    ),
    ("modes not a mapping", lambda: token_types([0], modes=["causal"]), TypeError, r"^modes: expected a mapping"),
    ("json broken", lambda: Layout.from_json("{"), ValueError, r"^layout JSON: expected .*samples"),
    ("json without samples", lambda: Layout.from_json("{}"), ValueError, r"^layout JSON: expected .*samples"),
    ("json list", lambda: Layout.from_json("[]"), ValueError, r"^layout JSON: expected .*samples"),
    ("json number", lambda: Layout.from_json(json.dumps({"samples": 3})), ValueError, r"^layout JSON: expected"),
    (
        "json float length",
        lambda: Layout.from_json('{"samples": [[["causal", 2.5]]]}'),
        ValueError,
        r"^layout JSON: .*Span\.length: expected an integer",
    ),
    (
        "json unknown mode",
        lambda: Layout.from_json('{"samples": [[["image", 2]]]}'),
        ValueError,
        r"Span\.mode: 'image' .*use one of",
    ),
]


def shape(**changes: Any) -> AttentionShape:
    return AttentionShape(**({"heads": 4, "kv_heads": 2, "head_dim": 8} | changes))


def planned(**changes: Any) -> Any:
    arguments = {"layout": DOCUMENTS, "layers": SHAPE, "ranks": 2, "block": 4} | changes
    return plan(**{name: value for name, value in arguments.items() if value is not ...})


def masked(mask: Any, **changes: Any) -> Any:
    return planned(mask=mask, **changes)


def masked_by(mask: Any, **tracks: Any) -> Any:
    return planned(mask=mask, tracks=tracks)


def same(q: Any, k: Any) -> Any:
    return q.sample == k.sample


WINDOW = shape(window=3)
INTERLEAVED = Layout([[Span("group", 2, number % 2) for number in range(6)]])
TWELVE = torch.arange(12)

PLAN_CASES: list[Case] = [
    ("no heads", lambda: shape(heads=0), ValueError, r"^AttentionShape\.heads: must be at least 1, got 0"),
    ("no kv heads", lambda: shape(kv_heads=0), ValueError, r"^AttentionShape\.kv_heads: must be at least 1, got 0"),
    ("heads float", lambda: shape(heads=4.0), TypeError, r"^AttentionShape\.heads: expected an integer, got float"),
    ("kv heads do not divide", lambda: shape(kv_heads=3), ValueError, r"^AttentionShape\.kv_heads: 3 .*divide 4"),
    ("more kv heads than heads", lambda: shape(kv_heads=8), ValueError, r"^AttentionShape\.kv_heads: 8 .*divide 4"),
    ("head_dim 0", lambda: shape(head_dim=0), ValueError, r"^AttentionShape\.head_dim: must be at least 1, got 0"),
    ("window 0", lambda: shape(window=0), ValueError, r"^AttentionShape\.window: .*at least 1, got 0; .*window=None"),
    (
        "window −1",
        lambda: shape(window=-1),
        ValueError,
        r"^AttentionShape\.window: .*at least 1, got -1; .*window=None",
    ),
    ("window float", lambda: shape(window=1.5), TypeError, r"^AttentionShape\.window: expected an integer, got float"),
    ("scale 0", lambda: shape(scale=0.0), ValueError, r"^AttentionShape\.scale: must be positive and finite, got 0"),
    ("scale −1", lambda: shape(scale=-1), ValueError, r"^AttentionShape\.scale: must be positive and finite, got -1"),
    ("scale nan", lambda: shape(scale=math.nan), ValueError, r"^AttentionShape\.scale: must be positive .*got nan"),
    ("scale inf", lambda: shape(scale=math.inf), ValueError, r"^AttentionShape\.scale: must be positive .*got inf"),
    ("scale text", lambda: shape(scale="x"), TypeError, r"^AttentionShape\.scale: expected a number, got str"),
    ("scale bool", lambda: shape(scale=True), TypeError, r"^AttentionShape\.scale: expected a number, got bool"),
    ("no layout", lambda: planned(layout=[[TEXT]]), TypeError, r"^layout: expected marble\.Layout, got list"),
    ("layers of another type", lambda: planned(layers=[(4, 2, 8)]), TypeError, r"^layers: expected an AttentionShape"),
    ("layers none", lambda: planned(layers=None), TypeError, r"^layers: expected an AttentionShape"),
    ("no layers", lambda: planned(layers=[]), ValueError, r"^layers: .*at least one layer"),
    ("ranks missing", lambda: planned(ranks=...), ValueError, r"^ranks: say how many .*or give their process group"),
    ("rank without ranks", lambda: planned(ranks=..., rank=0), ValueError, r"^ranks: say how many"),
    ("ranks 0", lambda: planned(ranks=0), ValueError, r"^ranks: must be at least 1, got 0"),
    ("ranks float", lambda: planned(ranks=2.0), TypeError, r"^ranks: expected an integer, got float"),
    ("rank too large", lambda: planned(rank=2), ValueError, r"^rank: must be 0 to 1, got 2"),
    ("rank negative", lambda: planned(rank=-1), ValueError, r"^rank: must be 0 to 1, got -1"),
    ("rank float", lambda: planned(rank=0.0), TypeError, r"^rank: expected an integer, got float"),
    ("group and ranks", lambda: planned(group=object()), ValueError, r"^group: give either a group or ranks"),
    (
        "group of another type",
        lambda: planned(ranks=..., group="all"),
        TypeError,
        r"^group: expected .*DeviceMesh, got str",
    ),
    ("block 0", lambda: planned(block=0), ValueError, r"^block: expected 1 to 128 tokens, got 0"),
    ("block 129", lambda: planned(block=129), ValueError, r"^block: expected 1 to 128 tokens, got 129"),
    ("block float", lambda: planned(block=1.5), TypeError, r"^block: expected an integer, got float"),
    ("schedule unknown", lambda: planned(schedule="zigzag"), ValueError, r"^schedule: 'zigzag' .*use one of 'ring'"),
    ("schedule none", lambda: planned(schedule=None), TypeError, r"^schedule: expected .*got None"),
    ("schedules too many", lambda: planned(schedule=["ring"] * 2), ValueError, r"^schedule: 2 names for 1 layers"),
    ("ulysses 0", lambda: planned(ulysses=0), ValueError, r"^ulysses: must be at least 1, got 0"),
    ("ulysses float", lambda: planned(ulysses=2.0), TypeError, r"^ulysses: expected an integer, got float"),
    (
        "ulysses and ranks",
        lambda: planned(ranks=6, ulysses=4),
        ValueError,
        r"^ulysses: 4 does not divide 6 ranks; .*works is 2$",
    ),
    (
        "ulysses and heads",
        lambda: planned(ranks=8, ulysses=8),
        ValueError,
        r"^ulysses: 8 ranks .*the 4 query heads of layer 0 evenly; .*works is 4$",
    ),
    (
        "ulysses and the heads of one layer",
        lambda: planned(ranks=4, ulysses=4, layers=[SHAPE, shape(heads=6)]),
        ValueError,
        r"^ulysses: 4 ranks .*the 6 query heads of layer 1 evenly; .*works is 2$",
    ),
    (
        "chunked window",
        lambda: planned(schedule=["ring", "chunked"], layers=[SHAPE, WINDOW], order="ptrr"),
        ValueError,
        r"^schedule: layer 1 cannot be 'chunked': .*sliding window.*'sparse_a2a'$",
    ),
    (
        "chunked mask of one's own",
        lambda: masked(same, schedule="chunked"),
        ValueError,
        r"^schedule: layer 0 cannot be 'chunked': a mask of one's own .*'ring' or 'sparse_a2a'$",
    ),
    (
        "chunked interleaved groups",
        lambda: planned(schedule="chunked", layout=INTERLEAVED),
        ValueError,
        r"^schedule: layer 0 cannot be 'chunked': the span at position 6 .*interleave; use 'ring'$",
    ),
    (
        "chunks for a mask of one's own",
        lambda: masked(same, order="chunks"),
        ValueError,
        r"^order: 'chunks' needs a mask that dense calls can express, but a mask of one's own",
    ),
    ("order unknown", lambda: planned(order="zigzag"), ValueError, r"^order: 'zigzag' .*use one of 'ptrr'"),
    ("order not a name", lambda: planned(order=["ptrr"]), TypeError, r"^order: expected .*got list"),
    ("mask not callable", lambda: masked("causal"), TypeError, r"^mask: expected a function of \(q, k\), got str"),
    ("mask of one operand", lambda: masked(lambda q: q), TypeError, r"^mask: .*\(q, k\)"),
    ("mask on a window layer", lambda: masked(same, layers=WINDOW), ValueError, r"^mask: .*put the window into"),
    (
        "mask with and",
        lambda: masked(lambda q, k: q.pos >= k.pos and q.sample == k.sample),
        TypeError,
        r"^mask: combine conditions with & \| ~, not with and",
    ),
    (
        "mask with not",
        lambda: masked(lambda q, k: not (q.pos >= k.pos)),
        TypeError,
        r"^mask: combine conditions with & \| ~, not with and, or, not",
    ),
    (
        "mask with a chain",
        lambda: masked(lambda q, k: 0 <= q.pos - k.pos < 3),
        TypeError,
        r"^mask: combine conditions with & \| ~, not with .*chained comparisons",
    ),
    ("mask of a track", lambda: masked(lambda q, k: 1 if q.pos else 0), TypeError, r"^mask: compare tracks"),  # noqa: ARG005
    ("mask of ints", lambda: masked(lambda q, k: q.pos - k.pos), TypeError, r"^mask: .*compar"),
    ("mask of 1", lambda: masked(lambda q, k: 1), TypeError, r"^mask: .*compar"),  # noqa: ARG005
    ("mask of None", lambda: masked(lambda q, k: None), TypeError, r"^mask: .*compar"),  # noqa: ARG005
    ("mask with a float", lambda: masked(lambda q, k: q.pos * 0.5 > k.pos), TypeError, r"^mask: tracks are integers"),
    ("mask with /", lambda: masked(lambda q, k: q.pos / 2 > k.pos), TypeError, r"^mask: .*//"),
    ("mask with // 0", lambda: masked(lambda q, k: q.pos // 0 == k.pos), TypeError, r"^mask: .*positive integer"),
    ("mask of an unknown track", lambda: masked(lambda q, k: q.shot == k.shot), ValueError, r"^mask: .*'shot'.*tracks"),
    ("track too short", lambda: masked_by(same, shot=TWELVE[:5]), ValueError, r"^tracks: 'shot' .*\[12\]"),
    ("track of floats", lambda: masked_by(same, shot=TWELVE.float()), ValueError, r"^tracks: 'shot' .*one integer"),
    ("track of text", lambda: masked_by(same, shot=["a"] * 12), ValueError, r"^tracks: 'shot' .*one integer"),
    ("track complex", lambda: masked_by(same, shot=TWELVE * 1j), ValueError, r"^tracks: 'shot' .*one integer"),
    ("track beyond int32", lambda: masked_by(same, shot=TWELVE << 40), ValueError, r"^tracks: 'shot' .*int32"),
    (
        "track beyond int64",
        lambda: masked_by(same, shot=TWELVE.to(torch.uint64)),
        ValueError,
        r"^tracks: 'shot' .*int32",
    ),
    ("track named 3", lambda: planned(mask=same, tracks={3: TWELVE}), TypeError, r"^tracks: names must be strings"),
    ("device unknown", lambda: planned(device="gpu"), ValueError, r"^device: expected a device such as .*'gpu'"),
    ("device none", lambda: planned(device=None), ValueError, r"^device: expected a device such as .*None"),
    ("device without data", lambda: planned(device="meta"), ValueError, r"^device: plans are made on .* not on 'meta'"),
    ("device not here", lambda: planned(device="cuda:99"), ValueError, r"^device: 'cuda:99' is not here"),
    (
        "layout of too many tokens",
        lambda: planned(layout=Layout([[Span("causal", 2**31)]])),
        ValueError,
        r"^layout: 2147483648 tokens are more than 2147483647",
    ),
    ("track of a reserved name", lambda: masked_by(same, pos=TWELVE), ValueError, r"^tracks: 'pos' .*another name"),
    ("tracks not a mapping", lambda: planned(mask=same, tracks=[TWELVE]), TypeError, r"^tracks: expected a mapping"),
    ("tracks without a mask", lambda: planned(tracks={"shot": TWELVE}), ValueError, r"^tracks: .*mask"),
]


def called(
    q: Any = (12, 4, 8), k: Any = (12, 2, 8), v: Any = (12, 2, 8), used: Any = PLAN, layer: Any = 0, **options: Any
) -> Any:
    q, k, v = (torch.zeros(x) if isinstance(x, tuple) else x for x in (q, k, v))
    return attention(q, k, v, used, layer=layer, **({"backend": Untouchable()} | options))


def zeros(*size: int, **options: Any) -> Tensor:
    return torch.zeros(size, **options)


OTHER_PLAN = plan(Layout.from_cu_seqlens([0, 5, 13]), SHAPE, ranks=2, block=4)
MINE = RANK_PLAN.local_tokens
LOCAL = {"q": (MINE, 4, 8), "k": (MINE, 2, 8), "v": (MINE, 2, 8), "used": RANK_PLAN}

CALL_CASES: list[Case] = [
    ("plan for other lengths", lambda: called(used=OTHER_PLAN), ValueError, r"^q: .*13 tokens .*12; .*plan for this"),
    ("q tokens", lambda: called(q=(11, 4, 8)), ValueError, r"^q: .*12 tokens here, got 11; .*plan\.shard"),
    ("k tokens", lambda: called(k=(11, 2, 8)), ValueError, r"^k: .*12 tokens here, got 11; .*plan\.shard"),
    ("v tokens", lambda: called(v=(24, 2, 8)), ValueError, r"^v: .*12 tokens here, got 24; .*plan\.shard"),
    ("q heads", lambda: called(q=(12, 2, 8)), ValueError, r"^q: layer 0 .*4 heads, got 2"),
    ("k heads", lambda: called(k=(12, 4, 8)), ValueError, r"^k: layer 0 .*2 heads, got 4"),
    ("v heads", lambda: called(v=(12, 1, 8)), ValueError, r"^v: layer 0 .*2 heads, got 1"),
    ("heads of another layer", lambda: called(layer=1), ValueError, r"^q: layer 1 .*2 heads, got 4"),
    ("q head_dim", lambda: called(q=(12, 4, 16)), ValueError, r"^q: layer 0 .*head_dim 8, got 16"),
    ("v head_dim", lambda: called(v=(12, 2, 4)), ValueError, r"^v: layer 0 .*head_dim 8, got 4"),
    ("q of ints", lambda: called(q=zeros(12, 4, 8).int()), TypeError, r"^q: torch\.int32 .*use bfloat16, float16"),
    ("q complex", lambda: called(q=zeros(12, 4, 8) * 1j), TypeError, r"^q: torch\.complex64 .*use bfloat16, float16"),
    ("k of another dtype", lambda: called(k=zeros(12, 2, 8).double()), TypeError, r"^k: dtype .*float32; cast them"),
    ("v of another dtype", lambda: called(v=zeros(12, 2, 8).half()), TypeError, r"^v: dtype .*float32; cast them"),
    (
        "k elsewhere",
        lambda: called(k=zeros(12, 2, 8, device="meta")),
        ValueError,
        r"^k: on meta, but q is on cpu; move",
    ),
    (
        "q elsewhere",
        lambda: called(q=zeros(12, 4, 8, device="meta")),
        ValueError,
        r"^k: on cpu, but q is on meta; move",
    ),
    (
        "q flat",
        lambda: called(q=(12, 32)),
        ValueError,
        r"^q: expected \[tokens, heads, head_dim\], got shape \(12, 32\)",
    ),
    ("v with a batch", lambda: called(v=(1, 12, 2, 8)), ValueError, r"^v: expected \[tokens, heads, head_dim\]"),
    ("q a list", lambda: called(q=[[1.0]]), TypeError, r"^q: expected a tensor, got list"),
    ("k none", lambda: called(k=None), TypeError, r"^k: expected a tensor, got NoneType"),
    ("layer too large", lambda: called(layer=2), ValueError, r"^layer: the plan has layers 0 to 1, got 2"),
    ("layer negative", lambda: called(layer=-1), ValueError, r"^layer: the plan has layers 0 to 1, got -1"),
    ("layer a name", lambda: called(layer="0"), TypeError, r"^layer: expected an integer, got str"),
    ("layer a bool", lambda: called(layer=False), TypeError, r"^layer: expected an integer, got bool"),
    ("backend unknown", lambda: called(backend="flash"), ValueError, r"^backend: 'flash' .*use one of 'reference'"),
    (
        "backend a class",
        lambda: called(backend=Untouchable),
        TypeError,
        r"^backend: expected .*got the class Untouchable",
    ),
    (
        "all without data",
        lambda: called(*(zeros(12, heads, 8, device="meta") for heads in (4, 2, 2))),
        ValueError,
        r"^q: on meta, where nothing is computed",
    ),
    ("v sparse", lambda: called(v=zeros(12, 2, 8).to_sparse()), TypeError, r"^v: expected a dense tensor, got torch\."),
    ("backend none", lambda: called(backend=None), TypeError, r"^backend: expected .*got NoneType"),
    (
        "timeout a number",
        lambda: called(timeout=2.0),
        TypeError,
        r"^timeout: expected a datetime\.timedelta, got float",
    ),
    ("timeout 0", lambda: called(timeout=timedelta(0)), ValueError, r"^timeout: must be positive, got 0:00:00"),
    ("plan a layout", lambda: called(used=DOCUMENTS), TypeError, r"^plan: expected the result of marble\.plan, got"),
    (
        "rank plan alone",
        lambda: called(**LOCAL),
        ValueError,
        r"^group: .*rank 0 of 2, .*initialise it, or plan without",
    ),
    ("rank plan, all tokens", lambda: called(used=RANK_PLAN), ValueError, rf"^q: .*{MINE} tokens here, got 12"),
    ("shard a list", lambda: PLAN.shard([1]), TypeError, r"^shard: expected a tensor, got list"),
    ("shard length", lambda: PLAN.shard(zeros(13, 3)), ValueError, r"^shard: .*12 tokens in dimension 0, got 13; plan"),
    ("shard other dim", lambda: PLAN.shard(zeros(12, 3), 1), ValueError, r"^shard: .*12 tokens in dimension 1, got 3"),
    ("shard no such dim", lambda: PLAN.shard(zeros(12, 3), 2), ValueError, r"^shard: dim 2 is not a dimension"),
    ("shard dim a name", lambda: PLAN.shard(zeros(12, 3), "tokens"), TypeError, r"^shard: dim: .*integer, got str"),
    ("unshard length", lambda: PLAN.unshard(zeros(11)), ValueError, r"^unshard: .*12 tokens in dimension 0, got 11"),
    ("unshard no such dim", lambda: PLAN.unshard(zeros(12), -2), ValueError, r"^unshard: dim -2 is not a dimension"),
    ("unshard all of them", lambda: RANK_PLAN.unshard(zeros(12)), ValueError, rf"^unshard: .*{MINE} tokens .*got 12"),
    ("unshard alone", lambda: RANK_PLAN.unshard(zeros(MINE)), ValueError, r"^group: .*initialise it, or plan without"),
    ("unshard timeout", lambda: PLAN.unshard(zeros(12), timeout=5), TypeError, r"^timeout: expected a datetime"),
    (
        "unshard timeout negative",
        lambda: PLAN.unshard(zeros(12), timeout=timedelta(-1)),
        ValueError,
        r"^timeout: must be positive",
    ),
    ("synchronize timeout", lambda: PLAN.synchronize("cpu", timeout=5), TypeError, r"^timeout: expected a datetime"),
    (
        "unshard with gradients",
        lambda: RANK_PLAN.unshard(zeros(MINE, requires_grad=True)),
        ValueError,
        r"^unshard: gradients .*x\.detach\(\)",
    ),
]


@refuses(LAYOUT_CASES)
def test_layout(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    expect(call, error, message)


@refuses(PLAN_CASES)
def test_plan(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    expect(call, error, message)


@refuses(CALL_CASES)
def test_call(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    expect(call, error, message)


def test_the_same_call_with_good_input_reaches_the_backend() -> None:
    with pytest.raises(AssertionError, match="reached a kernel"):
        called()


def test_the_largest_token_type_is_not_padding() -> None:
    types = torch.tensor([0, 127, 127], dtype=torch.int8)
    spans = Layout.from_token_types(types, modes={0: "causal", 127: "full"}).samples
    assert spans == ((Span("causal", 1), Span("full", 2)),)


def test_cases_have_distinct_names() -> None:
    names = [case[0] for case in LAYOUT_CASES + PLAN_CASES + CALL_CASES]
    assert len(names) == len(set(names)) >= 45
