"""How the Triton kernels are launched, kept as data in ``tuned.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FILE = Path(__file__).with_name("tuned.toml")

Choice = Mapping[str, int]
"""Values of a kernel's compile-time parameters, and ``num_warps``, the warps of a program."""

_choices: dict[str, Choice] = tomllib.loads(FILE.read_text())


def tuned(kernel: str) -> Choice:
    """How a kernel is launched, as keyword arguments."""
    return _choices[kernel]


def kernels() -> list[str]:
    """The kernels that have a choice."""
    return sorted(_choices)


@contextmanager
def trying(kernel: str, choice: Choice) -> Iterator[None]:
    """Launch a kernel otherwise meanwhile.

    Raises:
        ValueError: if the choice is not of the kernel's parameters.
    """
    usual = _choices[kernel]
    if set(choice) != set(usual):
        raise ValueError(f"tuned: {kernel} has {sorted(usual)}, got {sorted(choice)}")
    _choices[kernel] = dict(choice)
    try:
        yield
    finally:
        _choices[kernel] = usual
