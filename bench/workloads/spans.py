"""From the parts of a sample to spans: merging, shrinking for a demo, packing to an exact length."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from marble.layout import Layout, Mode, Span

Part = tuple[Mode, int]
"""Attention mode and number of tokens of one piece of a sample."""


@lru_cache(maxsize=1 << 16)
def _span(mode: Mode, length: int) -> Span:
    return Span(mode, length)


def merge(parts: Iterable[Part]) -> list[Part]:
    """Join neighbouring causal parts and leave out empty ones; other modes keep their borders."""
    merged: list[Part] = []
    for mode, length in parts:
        if length < 1:
            continue
        if mode is Mode.CAUSAL and merged and merged[-1][0] is Mode.CAUSAL:
            merged[-1] = (mode, merged[-1][1] + length)
        else:
            merged.append((mode, length))
    return merged


def shrink(parts: Iterable[Part], scale: float) -> list[Part]:
    """Every length times ``scale``, but at least 1 token of a causal part and 2 of any other."""
    if scale == 1:
        return list(parts)
    return [(mode, max(1 if mode is Mode.CAUSAL else 2, round(length * scale))) for mode, length in parts]


def pack(samples: Iterable[Iterable[Part]], tokens: int, scale: float = 1.0) -> Layout:
    """Concatenate samples until the layout holds exactly ``tokens`` tokens.

    The sample that does not fit keeps the spans that do, and a causal tail fills the rest, whatever mode the cut span
    had. Nothing is drawn from ``samples`` after that.

    Raises:
        ValueError: if ``tokens`` or ``scale`` is out of range, or ``samples`` ends too early.

    Example:
        >>> sample = [(Mode.FULL, 6), (Mode.CAUSAL, 4)]
        >>> [[(str(s.mode), s.length) for s in spans] for spans in pack([sample, sample], 13).samples]
        [[('full', 6), ('causal', 4)], [('causal', 3)]]
    """
    if tokens < 1:
        raise ValueError(f"tokens: a layout needs at least 1 token, got {tokens}")
    if not 0 < scale <= 1:
        raise ValueError(f"scale: must be in (0, 1], got {scale}")
    packed: list[tuple[Span, ...]] = []
    left = tokens
    for sample in samples:
        parts = shrink(merge(sample), scale)
        total = sum(length for _, length in parts)
        if total > left:
            parts = _cut(parts, left)
        if parts:
            packed.append(tuple(_span(mode, length) for mode, length in parts))
        left -= min(total, left)
        if not left:
            return Layout(tuple(packed))
    raise ValueError(f"samples: ended {left} tokens before the {tokens} asked for")


def _cut(parts: list[Part], tokens: int) -> list[Part]:
    kept: list[Part] = []
    for mode, length in parts:
        if length > tokens:
            return merge([*kept, (Mode.CAUSAL, tokens)])
        kept.append((mode, length))
        tokens -= length
    return kept
