"""What a machine is: the constants that turn counts into seconds, in a small file with a source for every figure."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

VERSION = 1
SHIPPED = ("h200", "h100-cluster")
"""Profiles that come with marble."""

_RATES = ("forward_rate", "backward_rate")
_NUMBERS = ("forward_partial", "backward_partial", "forward_unit", "backward_unit", "memory", "inside")
_OPTIONAL = ("across", "step")
_POSITIVE = (*_RATES, "forward_partial", "backward_partial", "memory", "inside", "across")


class ProfileError(ValueError):
    """A profile that cannot be used, and why."""


@dataclass(frozen=True)
class Profile:
    """The constants of one type of machine.

    Attributes:
        machine: what it is.
        gpus_per_node: ranks that reach each other without leaving their node; neighbours share one.
        forward_rate: (head size, FLOP/s) of full tiles in the forward pass.
        backward_rate: the same of the backward pass.
        forward_partial: time of a partial tile over that of a full one.
        backward_partial: the same of the backward pass.
        forward_unit: what a query block of one head costs beside its tiles, in full tiles.
        backward_unit: the same of a key block of one key/value head, in full tiles of one query head.
        memory: bytes/s at which carried state and sums are read and written.
        inside: bytes/s from one GPU to another of its node.
        across: bytes/s from one GPU to another node's; None if unknown: then only one node can be planned for.
        step: seconds that a step with transfers takes beside them; None if unknown: then it counts as nothing.
        sources: (constant, where it is from).
    """

    machine: str
    gpus_per_node: int
    forward_rate: tuple[tuple[int, float], ...]
    backward_rate: tuple[tuple[int, float], ...]
    forward_partial: float
    backward_partial: float
    forward_unit: float
    backward_unit: float
    memory: float
    inside: float
    across: float | None = None
    step: float | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def rates(self, head_dim: int) -> tuple[float, float]:
        """FLOP/s of full tiles, forward and backward.

        Raises:
            ProfileError: if the profile does not know the head size.
        """
        found = [dict(rates).get(head_dim) for rates in (self.forward_rate, self.backward_rate)]
        if found[0] is None or found[1] is None:
            known = ", ".join(str(size) for size, _ in self.forward_rate)
            raise ProfileError(
                f"profile: {self.machine!r} has no rates for head size {head_dim}, only for {known}; measure them with "
                "marble fit, or name the schedule"
            )
        return found[0], found[1]

    @property
    def bandwidth_across(self) -> float:
        """Bytes/s from one GPU to another node's.

        Raises:
            ProfileError: if the profile does not know it.
        """
        if self.across is None:
            raise ProfileError(
                f"profile: {self.machine!r} knows no bandwidth between nodes, so it holds for the "
                f"{self.gpus_per_node} GPUs of one; measure it with marble fit, or plan for fewer ranks"
            )
        return self.across

    @classmethod
    def load(cls, name: str | Path) -> Profile:
        """A shipped profile by name, or one from a TOML file.

        Raises:
            ProfileError: if there is none, or it is not a valid profile; the message says what is wrong with it.
        """
        if str(name) in SHIPPED:
            text = (resources.files("marble.cost") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
            return cls.parse(text, str(name))
        path = Path(name)
        if not path.is_file():
            raise ProfileError(f"profile: {str(name)!r} is neither a file nor one of {', '.join(SHIPPED)}")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ProfileError(f"profile: {str(name)!r} is not a text file in UTF-8") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> Profile:
        """A profile from TOML; ``name`` is for messages. Errors as for `load`."""
        try:
            found = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ProfileError(f"profile {name}: not TOML: {error}") from None
        if found.get("version") != VERSION:
            raise ProfileError(f"profile {name}: version {VERSION} is expected, found {found.get('version')!r}")
        unknown = set(found) - {"version", "machine", "gpus_per_node", *_RATES, *_NUMBERS, *_OPTIONAL}
        missing = {"machine", "gpus_per_node", *_RATES, *_NUMBERS} - set(found)
        for names, what in ((unknown, "unknown"), (missing, "missing")):
            if names:
                raise ProfileError(f"profile {name}: {what}: {', '.join(sorted(names))}")
        machine, gpus = found["machine"], found["gpus_per_node"]
        if not isinstance(machine, str) or not machine:
            raise ProfileError(f"profile {name}: machine: expected a name, found {machine!r}")
        if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
            raise ProfileError(f"profile {name}: gpus_per_node: expected a whole number above 0, found {gpus!r}")
        sources: list[tuple[str, str]] = []

        def number(key: str, entry: Any, label: str) -> float:
            value, source = _entry(f"profile {name}: {label}", entry, positive=key in _POSITIVE)
            sources.append((label, source))
            return value

        values: dict[str, Any] = {}
        for key in (*_RATES, *_NUMBERS, *_OPTIONAL):
            if key in _RATES:
                values[key] = tuple(
                    (_size(f"profile {name}: {key}", size), number(key, entry, f"{key}.{size}"))
                    for size, entry in _table(f"profile {name}: {key}", found[key]).items()
                )
            elif key in found:
                values[key] = number(key, found[key], key)
        if [size for size, _ in values["forward_rate"]] != [size for size, _ in values["backward_rate"]]:
            raise ProfileError(f"profile {name}: forward_rate and backward_rate have different head sizes")
        return cls(machine, gpus, **values, sources=tuple(sources))

    def dump(self) -> str:
        """The profile as TOML, which `parse` reads back."""
        sources = dict(self.sources)
        lines = [
            f"version = {VERSION}",
            f"machine = {json.dumps(self.machine)}",
            f"gpus_per_node = {self.gpus_per_node}",
        ]
        entries = [(f"{key}.{size}", value) for key in _RATES for size, value in getattr(self, key)]
        entries += [(key, getattr(self, key)) for key in (*_NUMBERS, *_OPTIONAL)]
        for label, value in entries:
            if value is not None:
                source = json.dumps(sources.get(label, ""), ensure_ascii=False)
                lines += ["", f"[{label}]", f"value = {float(value)!r}", f"source = {source}"]
        return "\n".join(lines) + "\n"


def _table(where: str, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping) or not entry:
        raise ProfileError(f"{where}: expected a table, found {entry!r}")
    return entry


def _size(where: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ProfileError(f"{where}: {text!r} is not a head size")
    return int(text)


def _entry(where: str, entry: Any, *, positive: bool) -> tuple[float, str]:
    """A value and its source."""
    entry = _table(where, entry)
    if set(entry) != {"value", "source"}:
        raise ProfileError(f"{where}: expected value and source, found {', '.join(sorted(entry))}")
    value, source = entry["value"], entry["source"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ProfileError(f"{where}: expected a number that is not negative, found {value!r}")
    if positive and not value:
        raise ProfileError(f"{where}: must be above 0")
    if not isinstance(source, str) or not source.strip():
        raise ProfileError(f"{where}: says no source for its value")
    return float(value), source
