"""Combining masks. A mask is a plain function of two operands, ``mask(q, k)``.

Operands carry the token tracks as attributes (``q.sample``, ``q.seg``, ``q.noise``, ``q.pos`` and any user track).
A mask combines them with ``+ - * // %`` and comparisons, and what these give with ``& | ~ ^ == !=``, never with
``and``, ``or``, ``not`` or chained comparisons, which Python would answer itself. The same function then runs on
tensors and on block summaries (in int64), inside FlexAttention and inside a CuTe kernel (in int32).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

MaskFn = Callable[[Any, Any], Any]


def and_masks(*masks: MaskFn) -> MaskFn:
    """The pairs that every mask allows."""
    _check(masks)
    return lambda q, k: reduce(lambda left, right: left & right, (mask(q, k) for mask in masks))


def or_masks(*masks: MaskFn) -> MaskFn:
    """The pairs that at least one mask allows."""
    _check(masks)
    return lambda q, k: reduce(lambda left, right: left | right, (mask(q, k) for mask in masks))


def _check(masks: tuple[MaskFn, ...]) -> None:
    if not masks or not all(callable(mask) for mask in masks):
        raise TypeError("mask: give one or more functions of (q, k)")
