"""Which backend serves a call. Requests by name are never replaced by another backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from marble.kernels.contract import Backend
from marble.kernels.reference import ReferenceBackend
from marble.kernels.rounded import PerStepRounding

HOPPER = (9, 0)
BLACKWELL = ((10, 0), (10, 3))
"""Compute capabilities."""


def _cute() -> Backend:
    chip = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if chip not in (HOPPER, *BLACKWELL):
        found = f"{torch.cuda.get_device_name()} (SM {chip[0]}.{chip[1]})" if chip else "no GPU"
        raise ValueError(
            f"backend: 'cute' runs on Hopper GPUs (SM 9.0) and is compiled for Blackwell (SM 10.0 and 10.3), found "
            f"{found}; 'reference' runs everywhere"
        )
    try:
        if chip == HOPPER:
            from marble.kernels.cute.backend import CuteBackend

            return CuteBackend(_multiprocessors)
        from marble.kernels.blackwell.backend import BlackwellBackend

        return BlackwellBackend()
    except ModuleNotFoundError as error:
        raise ValueError(f"backend: 'cute' needs marble-attention[cuda]: {error}") from error


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "rounded": lambda: PerStepRounding(ReferenceBackend()),
    "cute": _cute,
}


def backend(name: str = "reference") -> Backend:
    """The backend called ``name``: ``reference`` anywhere, ``cute`` on Hopper and Blackwell GPUs, or ``rounded``, which
    shows what rounding at every step costs. Kernels for Blackwell have been compiled, never run.

    Raises:
        ValueError: if there is no such backend, or it cannot run here.
    """
    if name not in _BACKENDS:
        raise ValueError(f"backend: {name!r} is unknown; use one of {', '.join(map(repr, _BACKENDS))}")
    return _BACKENDS[name]()
