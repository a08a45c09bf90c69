"""A mask gives the same values inside FlexAttention and inside FlashAttention-4's kernels as on plain tensors.

Run as a script, this file compiles FlashAttention-4's Hopper kernels with lowered masks and prints what it found as
JSON; no GPU is needed, but the target has to be set before the import.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from marble.layout import Layout, Span
from marble.mask.algebra import MaskFn, and_masks
from marble.mask.lowering import cute_mask_mod, flex_mask_mod
from marble.mask.modes import not_padding, packed_mask
from marble.mask.tracks import Tracks

TRACKS = ("sample", "seg", "noise", "pos")
WITH_USER = (*TRACKS, "shot")
LAYOUTS = {
    "documents": Layout.from_cu_seqlens([0, 11, 12, 40, 57]),
    "all modes": Layout(
        [
            [Span("causal", 7), Span("full", 9), Span("noise", 6), Span("causal", 3), Span("noise", 4)],
            [Span("group", 5), Span("causal", 4), Span("group", 6), Span("causal", 3)],
            [Span("pad", 8)],
        ]
    ),
    "linked": Layout(
        [
            [Span("pad", 3)],
            [Span("noise", 4, group=7), Span("causal", 2), Span("noise", 5, group=7), Span("full", 8)],
            [Span("group", 6, group=1), Span("full", 4), Span("group", 3, group=2), Span("group", 7, group=1)],
        ]
    ),
}


def every_operation(q: Any, k: Any) -> Any:
    """A user's mask: divisors and dividends of both signs, reflected operators, constants on either side."""
    residues = (q.seg % 3 == k.pos % 4) | (7 % (k.shot - 5) == q.noise % -3)
    quotients = ~((q.pos // -3) <= 9 // (2 * k.shot + 1)) & (5 - k.noise + 2 * q.shot > 1 + q.pos)
    bits = (q.pos & 3 | ~k.pos) != (6 | k.sample)
    return True & (residues | quotients) & bits & ((q.seg >= 0) * 2 + (k.seg < 0) >= 1) | (q.seg == k.seg) & False


MASKS: dict[str, MaskFn] = {
    "global": packed_mask(),
    "window": packed_mask(5),
    "no padding": and_masks(packed_mask(9), not_padding),
    "user": every_operation,
}

by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
by_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
needs_cute = pytest.mark.skipif(find_spec("cutlass") is None, reason="the CuTe DSL (marble-attention[cuda]) is missing")
needs_fa4 = pytest.mark.skipif(
    find_spec("cutlass") is None or find_spec("flash_attn") is None,
    reason="FlashAttention-4 (marble-attention[cuda]) is missing",
)


def tracks_of(layout: Layout) -> Tracks:
    return Tracks.of(layout, {"shot": torch.arange(layout.tokens) // 3 % 5 - 1})


def a_shard(tracks: Tracks) -> Tracks:
    """Some of the tokens, out of order: after sharding, keys are not the queries' tokens."""
    return tracks.take(torch.arange(len(tracks)).flip(0)[3::2])


def on_tensors(mask: MaskFn, q: Tracks, k: Tracks) -> Tensor:
    return mask(q.operand(lambda column: column[:, None]), k.operand(lambda column: column[None, :]))


# FlexAttention


@by_mask
@by_layout
def test_flex_equals_the_mask_on_tensors(layout: Layout, mask: MaskFn) -> None:
    q = tracks_of(layout)
    k = a_shard(q)
    expected = on_tensors(mask, q, k)
    mask_mod = flex_mask_mod(mask, q, k)
    row, column = torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    assert torch.equal(mask_mod(torch.tensor(0), torch.tensor(0), row, column), expected)

    block = 8
    blocks = create_block_mask(mask_mod, None, None, len(q), len(k), device="cpu", BLOCK_SIZE=block, _compile=False)
    padded = torch.zeros(-(-len(q) // block) * block, -(-len(k) // block) * block, dtype=torch.bool)
    padded[: len(q), : len(k)] = expected
    tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    assert torch.equal(blocks.to_dense()[0, 0].bool(), tiles.any(3).any(1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@by_mask
@by_layout
def test_flex_attention_equals_a_dense_softmax(layout: Layout, mask: MaskFn) -> None:
    tracks = tracks_of(layout)
    tokens = len(tracks)
    mask_mod = flex_mask_mod(mask, tracks, tracks)
    blocks = create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu", _compile=False)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, tokens, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    scores = (q @ k.mT / 4).masked_fill(~on_tensors(mask, tracks, tracks), -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0.0) @ v
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), expected, rtol=1e-12, atol=1e-12)


def test_flex_mask_mod_compiles_in_one_graph() -> None:
    tracks = tracks_of(LAYOUTS["all modes"])
    tokens = len(tracks)
    mask_mod = flex_mask_mod(packed_mask(5), tracks, tracks)
    blocks = create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu", _compile=False)
    q, k, v = torch.randn(3, 1, 1, tokens, 16).unbind()
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)(q, k, v, block_mask=blocks)
    with warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(compiled, flex_attention(q, k, v, block_mask=blocks))


def test_flex_rejects_different_tracks() -> None:
    layout = LAYOUTS["documents"]
    with pytest.raises(ValueError, match=r"queries have .*'shot'.* keys have"):
        flex_mask_mod(packed_mask(), tracks_of(layout), Tracks.of(layout))


# FlashAttention-4: values, on the host


def on_host(mask: MaskFn, q: Tracks, k: Tracks) -> Tensor:
    """The lowered mask for all pairs, compiled by the CuTe DSL for the CPU; called as FlashAttention-4 calls it."""
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    mask_mod = cute_mask_mod(mask, WITH_USER)

    @cute.jit
    def fill(out: cute.Tensor, aux_tensors: tuple) -> None:
        for i in range(out.shape[0]):
            for j in range(out.shape[1]):
                zero, q_idx, kv_idx = (cute.full((1,), index, Int32) for index in (0, i, j))
                out[i, j] = Int32(mask_mod(zero, zero, q_idx, kv_idx, None, aux_tensors)[0])

    out = torch.full((len(q), len(k)), -1, dtype=torch.int32)
    fill(from_dlpack(out), tuple(from_dlpack(side.columns[name]) for side in (q, k) for name in WITH_USER))
    return out


@needs_cute
@by_mask
@by_layout
def test_cute_equals_the_mask_on_tensors(layout: Layout, mask: MaskFn) -> None:
    q = tracks_of(layout)
    for k in (q, a_shard(q)):
        assert torch.equal(on_host(mask, q, k), on_tensors(mask, q, k).int())


@needs_cute
def test_cute_hash_follows_what_a_mask_computes() -> None:
    assert cute_mask_mod(packed_mask(64)) is cute_mask_mod(packed_mask(64))
    masks = [packed_mask(), packed_mask(64), packed_mask(65), not_padding]
    assert len({cute_mask_mod(mask).__cute_hash__ for mask in masks}) == 4
    # the key tracks lie elsewhere when there are more of them
    assert cute_mask_mod(packed_mask()).__cute_hash__ != cute_mask_mod(packed_mask(), WITH_USER).__cute_hash__


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (lambda q, k: q.pos >= k.pos and q.seg == k.seg, TypeError, "write & | ~"),
        (lambda q, k: 0 <= q.pos - k.pos < 4, TypeError, "write & | ~"),
        (lambda q, k: not q.pos >= k.pos, TypeError, "write & | ~"),
        (lambda q, k: q.pos - k.pos, TypeError, "returned an integer"),
        (lambda q, k: True, TypeError, "returned bool"),  # noqa: ARG005
        (lambda q, k: q.pos * 0.5 > k.pos, TypeError, "not with float"),
        (lambda q, k: (q.pos > k.pos) + (q.seg == k.seg) >= 2, TypeError, "add of two truth values"),
        (lambda q, k: q.pos - k.pos < 2**31, ValueError, "does not fit int32"),
        (lambda q, k: q.shot == k.shot, AttributeError, "reads the track 'shot'"),
    ],
)
def test_cute_rejects_what_a_kernel_cannot_compute(mask: MaskFn, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cute_mask_mod(mask)


def test_cute_rejects_a_track_named_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        cute_mask_mod(packed_mask(), (*TRACKS, "pos"))


def test_cute_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(ImportError, match=r"pip install marble-attention\[cuda\]"):
        cute_mask_mod(packed_mask(123_457))  # a mask that no other test has compiled


# FlashAttention-4: its kernels


@needs_fa4
def test_fa4_hopper_kernels_compile_with_a_lowered_mask() -> None:
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    script = subprocess.run(
        [sys.executable, __file__], env=os.environ | target, capture_output=True, text=True, timeout=280, check=False
    )
    assert script.returncode == 0, script.stderr
    found = json.loads(script.stdout.splitlines()[-1])
    assert found == {
        "global, dense, d64": [1, 0],
        "window, block-sparse, d128": [1, 1],
        "window again": [0, 0],
        "user, dense, d64": [1, 0],
        "keys' tracks missing": "IndexError",
    }


def compile_fa4() -> dict[str, Any]:
    """How many kernels (forward, backward) each case added to FlashAttention-4's compile cache."""
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from torch._subclasses.fake_tensor import FakeTensorMode

    tokens, blocks = 1024, 8
    caches = [interface._flash_attn_fwd.compile_cache.cache, interface._flash_attn_bwd.compile_cache.cache]

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cuda")

    def case(
        mask: MaskFn, head_dim: int, tracks: tuple[str, ...] = TRACKS, *, sparse: bool = False, missing: int = 0
    ) -> list[int]:
        before = [len(cache) for cache in caches]
        q = torch.empty(1, tokens, 4, head_dim, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(1, tokens, 1, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        options: dict[str, Any] = {
            "mask_mod": cute_mask_mod(mask, tracks),
            "aux_tensors": [ints(tokens) for _ in range(2 * len(tracks) - missing)],
        }
        if sparse:
            tables = [ints(1, 1, blocks), ints(1, 1, blocks, blocks)] * 2
            options["block_sparse_tensors"] = BlockSparseTensorsTorch(*tables, block_size=(128, 128))
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)
        if sparse:
            interface._flash_attn_bwd(q, k, v, out, torch.empty_like(q), lse, **options)
        return [len(cache) - count for cache, count in zip(caches, before, strict=True)]

    def error_of(call: Callable[[], object]) -> str:
        try:
            call()
        except Exception as error:
            return type(error).__name__
        return "none"

    with FakeTensorMode():
        return {
            "global, dense, d64": case(packed_mask(), 64),
            "window, block-sparse, d128": case(packed_mask(1024), 128, sparse=True),
            "window again": case(packed_mask(1024), 128, sparse=True),
            "user, dense, d64": case(every_operation, 64, WITH_USER),
            "keys' tracks missing": error_of(lambda: case(packed_mask(3), 64, missing=4)),
        }


if __name__ == "__main__":
    print(json.dumps(compile_fa4()))
