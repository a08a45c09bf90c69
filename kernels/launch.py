"""Which backend serves a call. Requests by name are never replaced by another backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from marble.kernels.contract import Backend
from marble.kernels.reference import ReferenceBackend
from marble.kernels.rounded import PerStepRounding


def _cute() -> Backend:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        raise ValueError(f"backend: 'cute' runs on Hopper GPUs (SM 9.0), found {found}; 'reference' runs everywhere")
    try:
        from marble.kernels.cute.backend import CuteBackend
    except ModuleNotFoundError as error:
        raise ValueError(f"backend: 'cute' needs marble-attention[cuda]: {error}") from error
    return CuteBackend(_multiprocessors)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "rounded": lambda: PerStepRounding(ReferenceBackend()),
    "cute": _cute,
}


def backend(name: str = "reference") -> Backend:
    """The backend called ``name``: ``reference`` anywhere, ``cute`` on Hopper GPUs, or ``rounded``, which shows what
    rounding at every step costs.

    Raises:
        ValueError: if there is no such backend, or it cannot run here.
    """
    if name not in _BACKENDS:
        raise ValueError(f"backend: {name!r} is unknown; use one of {', '.join(map(repr, _BACKENDS))}")
    return _BACKENDS[name]()
