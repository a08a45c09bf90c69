"""Which transport carries a plan's transfers: the one that the caller names, or by a rule that is logged."""

from __future__ import annotations

import logging
import os
import warnings
from functools import cache

import torch

TRANSPORTS = {"local": "the virtual ranks of one process", "torch_dist": "one rank per process of a process group"}
_log = logging.getLogger("marble")


def choose(name: str | None, virtual: bool) -> str:
    """The transport's name: the caller's, or ``local`` for virtual ranks and ``torch_dist`` for real ones.

    What the rule gives is logged, once, at level INFO of the logger ``marble``.

    Raises:
        TypeError, ValueError: if there is no such transport, or it cannot carry this plan; another is never taken.
    """
    fits = "local" if virtual else "torch_dist"
    if name is None:
        _say(f"transport: {fits!r}, as it carries {TRANSPORTS[fits]}; none was named")
        return fits
    if not isinstance(name, str):
        raise TypeError(f"transport: expected a name, got {type(name).__name__}")
    if name not in TRANSPORTS:
        raise ValueError(f"transport: {name!r} is unknown; use one of {', '.join(map(repr, TRANSPORTS))}")
    if name != fits:
        raise ValueError(
            f"transport: {name!r} carries {TRANSPORTS[name]}, but the plan is for {TRANSPORTS[fits]}; use {fits!r}, or "
            "plan with other ranks"
        )
    return name


@cache
def _say(text: str) -> None:
    _log.info(text)


def check_connections(device: torch.device) -> None:
    """Warn, once, if CUDA has one connection only: transfers then queue behind kernels."""
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        _warn_of_one_connection()


@cache
def _warn_of_one_connection() -> None:
    warnings.warn(
        "marble.attention: CUDA_DEVICE_MAX_CONNECTIONS=1 makes transfers wait for kernels; results stay right, but "
        "nothing overlaps. Unset it, or set it to 8 or more, before CUDA starts",
        stacklevel=4,
    )
