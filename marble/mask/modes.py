"""The built-in masks: the five attention modes of a packed multimodal sequence, written once."""

from __future__ import annotations

from typing import Any

from marble.mask.algebra import MaskFn, and_masks, or_masks


def causal(window: int | None = None) -> MaskFn:
    """Keys at or before the query, within the last ``window`` tokens (the query itself counts as one)."""

    def mask(q: Any, k: Any) -> Any:
        distance = q.pos - k.pos
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    return mask


def same_span(q: Any, k: Any) -> Any:
    """Both tokens lie in one bidirectional span or group."""
    return (q.seg == k.seg) & (k.seg >= 0)


def keep_noise(q: Any, k: Any) -> Any:
    """A noise key is visible inside its own noise group only."""
    return (k.noise < 0) | (q.noise == k.noise)


def same_sample(q: Any, k: Any) -> Any:
    """Both tokens belong to one sample."""
    return q.sample == k.sample


def not_padding(q: Any, k: Any) -> Any:
    """Neither token is padding."""
    return (q.sample >= 0) & (k.sample >= 0)


def packed_mask(window: int | None = None) -> MaskFn:
    """The mask of a packed multimodal layout, for a global layer or one with a sliding window.

    Source: MARBLE, section 01 (Luma AI, October 2026).
    """
    return and_masks(or_masks(causal(window), same_span), keep_noise, same_sample)
