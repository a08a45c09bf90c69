"""Calls that the kernels are tested on."""

from functools import reduce
from operator import or_
from typing import Any

import torch

from marble import Layout, Mode, Span
from marble.kernels.contract import Tiles
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.testing.layouts import whole_call
from marble.workloads import WORKLOADS, build

BLOCK = 128


def scattered(queries: int, keys: int) -> Tiles:
    """A mask without structure: most tiles take bits, and some rows and one query block see nothing."""
    tokens = max(queries, keys)
    layout = Layout.from_cu_seqlens([0, tokens])
    user = {"a": torch.randint(0, 6, (tokens,)), "b": torch.randint(0, 6, (tokens,))}
    user["a"][BLOCK : 2 * BLOCK] = 9
    stored = StoredMask(Storage.natural(layout), lambda q, k: (q.a == k.b) | (q.a == k.a + 2), user=user)
    return stored.tiles(torch.arange(queries), torch.arange(keys), BLOCK)


def gappy() -> Layout:
    """Padding, spans of one token and a sample that ends inside a block."""
    text, full, noise, pad = Mode.CAUSAL, Mode.FULL, Mode.NOISE, Mode.PAD
    return Layout(
        (
            (Span(text, 200), Span(full, 131), Span(text, 1), Span(full, 260)),
            (Span(pad, 77),),
            (Span(text, 3), Span(noise, 190), Span(full, 190), Span(text, 61)),
        )
    )


def quartered(queries: int, keys: int) -> tuple[Tiles, Tiles, Tiles]:
    """Calls in which quarters of tiles have pairs, or not, at random: one with all pairs, and two with some each.

    Most rows of a strip of 64 see the same six strips of keys. One strip sees nothing; every other query block also
    sees, but not in the last call, the first six strips.
    """
    tokens, half = max(queries, keys), BLOCK // 2
    strip = torch.arange(tokens) // half
    some = torch.stack([6 + torch.randperm(-(-keys // half) - 6)[:6] for _ in range(int(strip[-1]) + 1)])
    some[2] = -1
    user = {f"some_{i}": torch.where(torch.rand(tokens) < 0.9, some[strip, i], -1) for i in range(6)}
    user |= {"strip": strip, "whole": torch.where(strip // 2 % 2 == 0, 6, 0)}
    storage = Storage.natural(Layout.from_cu_seqlens([0, tokens]))

    def call(tracks: range) -> Tiles:
        def mask(q: Any, k: Any) -> Any:
            seen = reduce(or_, (getattr(q, f"some_{i}") == k.strip for i in tracks))
            return seen | (k.strip < q.whole) if 0 in tracks else seen

        return StoredMask(storage, mask, user=user).tiles(torch.arange(queries), torch.arange(keys), BLOCK)

    return call(range(6)), call(range(3)), call(range(3, 6))


CALLS = {
    "causal": lambda: whole_call(Layout.from_cu_seqlens([0, 1000])),
    "documents": lambda: whole_call(Layout.from_cu_seqlens([0, 137, 2178, 2267])),
    "one_token": lambda: whole_call(Layout.from_cu_seqlens([0, 1])),
    "length_257": lambda: whole_call(Layout.from_cu_seqlens([0, 257])),
    "gappy": lambda: whole_call(gappy()),
    "window": lambda: whole_call(Layout.from_cu_seqlens([0, 1300]), 200),
    "group": lambda: whole_call(build("molmo_video", 2500, scale=WORKLOADS["molmo_video"].demo_scale)),
    "noise": lambda: whole_call(build("bagel_mix", 2500, scale=WORKLOADS["bagel_mix"].demo_scale)),
    "bits": lambda: scattered(700, 900),
}
