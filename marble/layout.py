"""The layout of a packed sequence: samples made of spans, each span with its own attention mode.

A layout is the only thing that marble needs to know about a batch. Everything else (token tracks, masks, token
orders, schedules) derives from it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU = torch.device("cpu")


class Mode(StrEnum):
    """How the tokens of a span attend, inside one sample.

    Every mode but ``PAD`` also reads the earlier spans of its sample that are not noise.
    """

    CAUSAL = "causal"
    """Left to right; later spans see it. Text, or an image that is read like text."""
    FULL = "full"
    """Bidirectional inside the span; later spans see it. An image, a clean frame."""
    NOISE = "noise"
    """Bidirectional inside the span (or its noise group); no other span sees it. A frame being generated."""
    GROUP = "group"
    """Bidirectional over all spans of the group, earlier and later; later spans see it. Images of one document."""
    PAD = "pad"
    """Attends to nothing and is seen by nothing: output 0, LSE −inf, zero gradients. Its rows must be finite."""


_MODES = tuple(Mode)
_LINKABLE = (Mode.GROUP, Mode.NOISE)


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` consecutive tokens that share one attention mode.

    Args:
        mode: a `Mode` or its name.
        length: number of tokens, at least 1.
        group: links spans of the mode ``group`` or ``noise`` that attend to each other in both directions. Ids are
            non-negative and belong to the whole layout, so one id cannot appear in two samples. By default all
            ``group`` spans of a sample form one group, and each ``noise`` span stands alone.
    """

    mode: Mode
    length: int
    group: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", as_mode(self.mode, "Span.mode"))
        object.__setattr__(self, "length", as_int(self.length, "Span.length"))
        if self.length < 1:
            raise ValueError(f"Span.length: a span needs at least 1 token, got {self.length}; leave empty spans out")
        if self.group is not None:
            object.__setattr__(self, "group", as_int(self.group, "Span.group"))
            if self.mode not in _LINKABLE:
                raise ValueError(f"Span.group: only group and noise spans can be linked, not a {self.mode} span")
            if self.group < 0:
                raise ValueError(f"Span.group: an id is 0 or more, got {self.group}")


class SpanTable:
    """A layout as columns, one int64 entry per span [spans]; what vectorised code works on.

    Attributes:
        columns: int64 [6, spans], all that follow.
        start: first token of the span in the sequence.
        length: tokens in the span.
        sample: index of the sample, −1 for padding.
        seg: id shared by the spans that attend to each other in both directions, −1 for causal spans and padding.
            Ids grow with the sequence.
        noise: ``seg`` for noise spans, −1 for all others.
        linked: 1 for spans of the mode ``group``, else 0.
    """

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self.start, self.length, self.sample, self.seg, self.noise, self.linked = columns

    @property
    def ordinal(self) -> Tensor:
        """A number that grows from sample to sample, padding samples included."""
        number = torch.zeros_like(self.sample)
        torch.cumsum(self.sample[1:] != self.sample[:-1], 0, out=number[1:])
        return number

    def to(self, device: torch.device) -> SpanTable:
        """The table on another device."""
        return self if self.start.device == device else SpanTable(self.columns.to(device, non_blocking=True))

    @property
    def stop(self) -> Tensor:
        """One past the last token of each span."""
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """A packed sequence: samples that never attend to each other, each a sequence of spans.

    Args:
        samples: one sequence of `Span` per sample, in the order of the tokens.

    Raises:
        TypeError: if ``samples`` does not hold sequences of `Span`.
        ValueError: if a sample is empty, a group id appears in two samples or under two modes, or padding shares a
            sample with other spans.

    Example:
        >>> image, text = Span("full", 256), Span("causal", 40)
        >>> Layout([[text, image, text], [text]]).tokens
        376
    """

    samples: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        try:
            samples = tuple(tuple(sample) for sample in self.samples)
        except TypeError:
            raise TypeError("Layout.samples: give a sequence of samples, each a sequence of Span") from None
        if not samples:
            raise ValueError("Layout.samples: a layout needs at least one sample")
        object.__setattr__(self, "samples", samples)
        if not self._sound():
            _complain(samples)

    def _sound(self) -> bool:
        """Whether nothing is wrong with the samples; `_complain` says what."""
        kinds = set(map(type, itertools.chain.from_iterable(self.samples)))
        if not all(self.samples) or not all(issubclass(kind, Span) for kind in kinds):
            return False
        counts, mode, _, group = self._columns
        padding = np.add.reduceat(mode == _MODES.index(Mode.PAD), counts.cumsum() - counts, dtype=np.int64)
        if ((padding > 0) & (padding < counts)).any():
            return False
        named = _named(group)
        if not named:
            return True
        sample = np.repeat(np.arange(len(counts)), counts)
        users: dict[int | None, tuple[int, int]] = {}
        return all(users.setdefault(group[at], user := (sample[at], mode[at])) == user for at in named)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return int(self.table.length.sum())

    @cached_property
    def sample_bounds(self) -> Tensor:
        """First token and one past the last of every sample, int64 [samples, 2]."""
        stop = torch.tensor([sum(span.length for span in sample) for sample in self.samples]).cumsum(0)
        return torch.stack([torch.cat([stop.new_zeros(1), stop[:-1]]), stop], 1)

    def __getstate__(self) -> dict[str, Any]:
        # Columns are small and quick to write; the rest is cached and derives from them.
        counts, mode, length, group = self._columns
        return {
            "spans": counts.tolist(),
            "modes": mode.tobytes(),
            "lengths": length.tolist(),
            "groups": {at: group[at] for at in _named(group)},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        known: dict[tuple[int, int, int | None], Span] = {}
        spans = []
        for at, (mode, length) in enumerate(zip(state["modes"], state["lengths"], strict=True)):
            key = (mode, length, state["groups"].get(at))
            if key not in known:
                known[key] = Span(_MODES[mode], *key[1:])
            spans.append(known[key])
        rest = iter(spans)
        samples = tuple(tuple(itertools.islice(rest, count)) for count in state["spans"])
        object.__setattr__(self, "samples", samples)

    @cached_property
    def digest(self) -> bytes:
        """A fingerprint: equal for equal layouts, in every process."""
        counts, mode, length, group = self._columns
        sha = hashlib.sha256(f"{len(counts)} samples".encode())
        for column in (counts.astype("<i8"), mode, length.astype("<i8")):  # the same bytes on every machine
            sha.update(column.tobytes())
        sha.update(repr([(at, group[at]) for at in _named(group)]).encode())
        return sha.digest()

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64], list[int | None]]:
        """The number of spans of each sample; per span its mode, as its place among all modes, its length and group."""
        counts = np.fromiter(map(len, self.samples), np.int64, len(self.samples))
        spans = list(itertools.chain.from_iterable(self.samples))
        # Modes are single objects, and comparing them as numbers is many times faster than as members of an enum.
        which = np.fromiter(map(id, map(attrgetter("mode"), spans)), np.int64, len(spans))
        mode = np.zeros(len(spans), dtype=np.uint8)
        for place, known in enumerate(_MODES):
            mode[which == id(known)] = place
        length = np.fromiter(map(attrgetter("length"), spans), np.int64, len(spans))
        return counts, mode, length, list(map(attrgetter("group"), spans))

    @cached_property
    def table(self) -> SpanTable:
        """The spans as columns."""
        counts, mode, length, group = self._columns
        count, named = len(mode), _named(group)
        full, noise, linked, pad = (
            mode == _MODES.index(which) for which in (Mode.FULL, Mode.NOISE, Mode.GROUP, Mode.PAD)
        )
        owner = np.repeat(np.arange(len(counts)), counts)
        # Spans that attend to each other are led by the first of them: of one id, or group spans of a sample without.
        leader = np.arange(count)
        unnamed = linked.copy()
        unnamed[named] = False
        some = np.flatnonzero(unnamed)
        fresh = np.append(True, np.diff(owner[some]) != 0)[: len(some)]
        leader[some] = some[fresh].repeat(np.diff(np.flatnonzero(fresh), append=len(some)))
        leaders: dict[int | None, int] = {}
        leader[named] = [leaders.setdefault(group[at], at) for at in named]
        wide = full | noise | linked
        # Leaders of spans that are wide are numbered as they come.
        leads = wide & (leader == np.arange(count))
        seg = np.where(wide, (leads.cumsum() - 1)[leader], -1)
        columns = (length.cumsum() - length, length, np.where(pad, -1, owner), seg, np.where(noise, seg, -1), linked)
        return SpanTable(torch.from_numpy(np.stack(columns)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int] | Tensor, *, tokens: int | None = None) -> Layout:
        """Causal documents from cumulative lengths, the format of variable-length attention.

        Args:
            cu_seqlens: [documents + 1], from 0 upwards; empty documents (equal neighbours) are left out.
            tokens: length of the sequence; what lies behind the last document becomes padding.

        Raises:
            ValueError: if the lengths do not start at 0, decrease, or exceed ``tokens``.
        """
        bounds = as_ints(cu_seqlens, "cu_seqlens")
        if len(bounds) < 2 or bounds[0] != 0:
            raise ValueError("cu_seqlens: must start at 0 and hold at least one document")
        if any(low > high for low, high in itertools.pairwise(bounds)):
            raise ValueError("cu_seqlens: cumulative lengths cannot decrease")
        samples = [[Span(Mode.CAUSAL, high - low)] for low, high in itertools.pairwise(bounds) if high > low]
        if tokens is not None:
            padding = as_int(tokens, "tokens") - bounds[-1]
            if padding < 0:
                raise ValueError(f"tokens: {tokens} is less than the {bounds[-1]} tokens of cu_seqlens")
            if padding:
                samples.append([Span(Mode.PAD, padding)])
        if not samples:
            raise ValueError("cu_seqlens: all documents are empty")
        return cls(tuple(map(tuple, samples)))

    @classmethod
    def from_token_types(
        cls,
        token_type_ids: Sequence[int] | Tensor,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        attention_mask: Sequence[int] | Tensor | None = None,
        modes: Mapping[int, Mode | str] | None = None,
    ) -> Layout:
        """Spans from per-token type ids as Hugging Face processors emit them: each run of one type is one span.

        Args:
            token_type_ids: [tokens], or [batch, tokens] where every row is a sample.
            cu_seqlens: [samples + 1] sample borders of a one-dimensional ``token_type_ids``; by default one sample.
            attention_mask: same shape as ``token_type_ids``; where it is 0 the token is padding.
            modes: attention mode of each type id; by default 0 is ``causal`` and 1 is ``full`` (Gemma 3). Molmo 2
                wants ``{0: "causal", 1: "group"}``.

        Raises:
            ValueError: if shapes or ``cu_seqlens`` do not match the tokens, or a type has no mode.
        """
        types = _integers(token_type_ids, "token_type_ids")
        if types.ndim not in (1, 2):
            raise ValueError(
                f"token_type_ids: expected integers of shape [tokens] or [batch, tokens], got {tuple(types.shape)}"
            )
        keep = torch.ones_like(types) if attention_mask is None else _integers(attention_mask, "attention_mask")
        if keep.shape != types.shape:
            raise ValueError(
                f"attention_mask: shape {tuple(keep.shape)} differs from token_type_ids {tuple(types.shape)}"
            )
        if not bool(((keep == 0) | (keep == 1)).all()):
            raise ValueError("attention_mask: expected 1 for tokens and 0 for padding")
        if types.ndim == 2:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens: a batch has one sample per row already; flatten it or leave this out")
            bounds = [row * types.shape[1] for row in range(types.shape[0] + 1)]
        else:
            bounds = [0, types.numel()] if cu_seqlens is None else as_ints(cu_seqlens, "cu_seqlens")
        rising = len(bounds) > 1 and bounds[0] == 0 and all(a <= b for a, b in itertools.pairwise(bounds))
        if not rising or bounds[-1] != types.numel():
            raise ValueError(f"cu_seqlens: must rise from 0 to the {types.numel()} tokens of token_type_ids")
        if modes is not None and not isinstance(modes, Mapping):
            raise TypeError(f"modes: expected a mapping from type id to mode, got {type(modes).__name__}")
        known = {
            key: as_mode(mode, "modes") for key, mode in ({0: "causal", 1: "full"} if modes is None else modes).items()
        }
        types, keep = types.flatten(), keep.flatten()
        missing = sorted(set(types[keep == 1].unique().tolist()) - set(known))
        if missing:
            raise ValueError(f"modes: no mode for token type {missing[0]}; add it to the mapping")
        samples = []
        for low, high in itertools.pairwise(bounds):
            samples += _samples_of_types(types[low:high], keep[low:high], known)
        return cls(tuple(samples))

    def to_json(self) -> str:
        """The layout as JSON: ``{"samples": [[["causal", 12], ["group", 83, 0]], ...]}``."""
        rows = [
            [[span.mode.value, span.length] + ([] if span.group is None else [span.group]) for span in sample]
            for sample in self.samples
        ]
        return json.dumps({"samples": rows})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The inverse of `to_json`.

        Raises:
            ValueError: if the text is not such a JSON document.
        """
        try:
            rows = json.loads(text)["samples"]
            samples = tuple(tuple(Span(*span) for span in sample) for sample in rows)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'layout JSON: expected {{"samples": [[[mode, length], ...], ...]}} ({error})') from None
        return cls(samples)


def _named(group: list[int | None]) -> list[int]:
    """The places of spans with an id of their own."""
    if group.count(None) == len(group):
        return []
    return [at for at, number in enumerate(group) if number is not None]


def _complain(samples: tuple[tuple[Span, ...], ...]) -> None:
    """Raise what `Layout` promises about samples that do not make one."""
    owner: dict[int, tuple[int, Mode]] = {}
    for index, sample in enumerate(samples):
        if not sample:
            raise ValueError(f"Layout.samples[{index}]: a sample needs at least one span; leave empty samples out")
        for span in sample:
            if not isinstance(span, Span):
                raise TypeError(f"Layout.samples[{index}]: expected Span, got {type(span).__name__}")
            if span.mode is Mode.PAD and any(other.mode is not Mode.PAD for other in sample):
                raise ValueError(f"Layout.samples[{index}]: padding cannot share a sample; give it a sample of its own")
            if span.group is None:
                continue
            first, mode = owner.setdefault(span.group, (index, span.mode))
            if first != index:
                raise ValueError(
                    f"Layout.samples[{index}]: group {span.group} is already used in sample {first}; samples never "
                    "attend to each other, so use a new id"
                )
            if mode is not span.mode:
                raise ValueError(
                    f"Layout.samples[{index}]: group {span.group} links a {mode} span to a {span.mode} span; "
                    "use one id per mode"
                )


def _samples_of_types(types: Tensor, keep: Tensor, modes: Mapping[int, Mode]) -> list[tuple[Span, ...]]:
    """One sample from its type ids, with padding before and behind it as samples of their own."""
    runs, lengths = torch.unique_consecutive(torch.stack([types * keep, keep], 1), dim=0, return_counts=True)
    samples: list[tuple[Span, ...]] = []
    for real, group in itertools.groupby(zip(runs.tolist(), lengths.tolist(), strict=True), lambda run: run[0][1]):
        samples.append(tuple(Span(modes[kind] if real else Mode.PAD, length) for (kind, _), length in group))
    if sum(sample[0].mode is not Mode.PAD for sample in samples) > 1:
        raise ValueError("attention_mask: padding inside a sample; move it to an end, or split the sample there")
    return samples


def as_mode(value: Any, name: str) -> Mode:
    """``value`` as a mode, or a ValueError that names it and lists the modes."""
    try:
        return Mode(value)
    except ValueError:
        names = ", ".join(repr(mode.value) for mode in Mode)
        raise ValueError(f"{name}: {value!r} is not a mode; use one of {names}") from None


def _integers(values: Any, name: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}: expected integers, the same number in every row") from None
    booleans = tensor.dtype == torch.bool and name != "attention_mask"
    if not tensor.numel():
        raise ValueError(f"{name}: expected at least one token")
    if tensor.is_floating_point() or tensor.is_complex() or booleans:
        raise ValueError(f"{name}: expected integers, got {tensor.dtype}")
    return tensor.long()


def as_int(value: Any, name: str) -> int:
    """``value`` as an int, or a TypeError that names it; booleans and floats are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    return value.__index__()


def as_ints(values: Iterable[int] | Tensor, name: str) -> list[int]:
    """A sequence or tensor of integers as a list."""
    flat = values.tolist() if isinstance(values, Tensor) else values
    if not isinstance(flat, Iterable):
        raise TypeError(f"{name}: expected a sequence of integers, got {type(values).__name__}")
    return [as_int(value, name) for value in flat]
