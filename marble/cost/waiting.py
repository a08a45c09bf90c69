"""What a pass lasts when ranks wait for each other only where rows move between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def ends(compute: Array, links: Array) -> Array:
    """When every rank ends every step of a pass, in seconds from its beginning.

    A rank begins a step when it has ended the one before. Its transfers begin when every rank that has some in that
    step has begun it: who sends to whom is not looked at, so ranks never wait less than here. A rank without
    transfers in a step waits for nobody. A step ends when its calls and its transfers have.

    Args:
        compute: seconds of the calls of every step on every rank, float64 [steps, ranks].
        links: seconds of its transfers, float64 [steps, ranks]; 0 where there are none.

    Returns:
        float64 [steps, ranks].
    """
    found = np.zeros_like(compute)
    begun = np.zeros(compute.shape[1])
    for step, (calls, moves) in enumerate(zip(compute, links, strict=True)):
        moving = moves > 0
        ready = begun[moving].max(initial=0.0)
        begun = np.maximum(begun + calls, np.where(moving, ready + moves, 0.0))
        found[step] = begun
    return found
