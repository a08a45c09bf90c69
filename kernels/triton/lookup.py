"""What the kernels of planning look up: the bounds of visible ranges, and places in sorted tables."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bound(bounds, number, span, spans, place):
    """Where a bound of the tokens at some places of a span lies: the ramp clamp(place + offset, first, last)."""
    at = bounds + 3 * number * spans + span
    return tl.minimum(tl.maximum(place + tl.load(at + 2 * spans), tl.load(at)), tl.load(at + spans))


@triton.jit
def below(values, size, wanted, here):
    """How many of ``size`` rising values are below each wanted one."""
    low, high = tl.zeros_like(wanted), tl.zeros_like(wanted) + size
    left = size
    while left > 0:
        left = left // 2
        middle, on = (low + high) // 2, here & (low < high)
        passed = tl.load(values + middle, on, 0) < wanted
        low, high = tl.where(on & passed, middle + 1, low), tl.where(on & ~passed, middle, high)
    return low
