"""Which backend serves a call. Requests by name are never replaced by another backend."""

from __future__ import annotations

from collections.abc import Callable

from marble.kernels.contract import Backend
from marble.kernels.reference import ReferenceBackend
from marble.kernels.rounded import PerStepRounding

_BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "rounded": lambda: PerStepRounding(ReferenceBackend()),
}


def backend(name: str = "reference") -> Backend:
    """The backend called ``name``: ``reference``, or ``rounded``, which shows what rounding at every step costs.

    Raises:
        ValueError: if there is no such backend.
    """
    if name not in _BACKENDS:
        raise ValueError(f"backend: {name!r} is unknown; use one of {', '.join(map(repr, _BACKENDS))}")
    return _BACKENDS[name]()
