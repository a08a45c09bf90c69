"""One mask, two attention engines: a mask function becomes FlexAttention's ``mask_mod`` or FlashAttention-4's.

FlexAttention evaluates the function on tensors. For a CuTe kernel the function is recorded once as a short list of
integer operations, and each kernel replays that list on its own values. The list is also what FlashAttention's compile
cache is keyed by: two masks that compute the same share one kernel, and two that differ never do. (By default the key
would hold the function's address, which says nothing about a captured window and may be reused.)
"""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from marble.mask.algebra import MaskFn
from marble.mask.tracks import Tracks

MaskMod = Callable[..., Any]
Step = tuple[str, int] | tuple[str, int, int]

_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGIC = ("and_", "or_")


def flex_mask_mod(mask: MaskFn, q: Tracks, k: Tracks) -> MaskMod:
    """FlexAttention's form of a mask.

    Args:
        mask: a function of two operands.
        q: tracks of the queries, int32 [query tokens] each, on the device of the attention.
        k: tracks of the keys, int32 [key tokens] each, with the same names.

    Returns:
        ``mask_mod(b, h, q_idx, kv_idx)`` over integer tensors of any shapes that broadcast (0-dimensional under
        FlexAttention's vmap), giving a bool tensor. Every batch entry and head gets the same mask.

    Raises:
        ValueError: if queries and keys have different tracks.
    """
    q_columns, k_columns = q.columns, k.columns
    if q_columns.keys() != k_columns.keys():
        raise ValueError(f"tracks: queries have {sorted(q_columns)}, keys have {sorted(k_columns)}; give both the same")

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return mask(_Row(q_columns, q_idx), _Row(k_columns, kv_idx))

    return mask_mod


def cute_mask_mod(mask: MaskFn, tracks: tuple[str, ...] = ("sample", "seg", "noise", "pos")) -> MaskMod:
    """FlashAttention-4's form of a mask, for its CuTe kernels on Hopper.

    Args:
        mask: a function of two operands. Besides tracks it may use integers and truth values.
        tracks: the names in the order of the auxiliary tensors.

    Returns:
        A ``cute.jit`` function ``mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors)``. The four indices
        are CuTe vectors (``TensorSSA``) of one Int32, and so is the result, of one Boolean. ``aux_tensors`` holds
        2·len(tracks) int32 tensors: first every track of the queries, [query tokens] each, then every track of the
        keys, [key tokens] each, both in the order of ``tracks``. Batch, head and sequence lengths are not read, so
        the attention runs with batch size 1 or with one mask for all entries. Masks that compute the same expression
        get the same function. FlashAttention also evaluates the rows beyond the last query of a partly filled tile
        (and drops the result), so the tracks of the queries need storage up to a multiple of the tile.

    Raises:
        ImportError: if the CuTe DSL is not installed.
        ValueError: if a track is named twice, or an integer of the mask does not fit int32.
        AttributeError: if the mask reads a track that is not in ``tracks``.
        TypeError: if the mask decides in Python (``and``, ``or``, ``not``, ``if``, a chained comparison), calculates
            with anything but integers, calculates with two truth values, or does not return a truth value.
    """
    return _compile(_record(mask, tuple(tracks)))


class _Row:
    """A mask's operand at some tokens. A class of our own, since torch.compile cannot build a ``SimpleNamespace``."""

    def __init__(self, columns: Mapping[str, Tensor], index: Tensor) -> None:
        for name, column in columns.items():
            setattr(self, name, column[index])


class _Tape:
    """The distinct steps of a mask, numbered in order; a step names earlier ones by their numbers."""

    def __init__(self, bits: int) -> None:
        self.steps: dict[Step, int] = {}
        self.bits = bits
        """Of the integers that it may hold."""

    def add(self, step: Step, *, condition: bool) -> _Value:
        return _Value(self, self.steps.setdefault(step, len(self.steps)), condition)

    def lift(self, value: Any) -> _Value:
        """A value of the tape, from one or from a Python constant."""
        if isinstance(value, _Value):
            return value
        if isinstance(value, bool):
            return self.add(("condition", int(value)), condition=True)
        try:
            number = operator.index(value)
        except TypeError:
            kind = type(value).__name__
            raise TypeError(f"mask: combine tracks with integers or truth values, not with {kind}") from None
        if not -(2 ** (self.bits - 1)) <= number < 2 ** (self.bits - 1):
            raise ValueError(f"mask: {number} does not fit int{self.bits}")
        return self.add(("number", number), condition=False)

    def number(self, value: _Value) -> int:
        """The step that holds the value as an integer; a truth value counts as 0 or 1."""
        return self.add(("int", value.step), condition=False).step if value.condition else value.step

    def combine(self, name: str, left: Any, right: Any) -> _Value:
        a, b = self.lift(left), self.lift(right)
        if a.condition and b.condition:
            if name in _LOGIC:
                return self.add((name, a.step, b.step), condition=True)
            if name in _ARITHMETIC:  # on tensors, True + True is True
                raise TypeError(f"mask: {name} of two truth values; combine conditions with & | ~")
        return self.add((name, self.number(a), self.number(b)), condition=name in _COMPARISONS)


def _method(name: str, *, flip: bool = False) -> Callable[[_Value, Any], _Value]:
    def method(self: _Value, other: Any) -> _Value:
        return self.tape.combine(name, *((other, self) if flip else (self, other)))

    return method


class _Value:
    """An integer or a truth value (``condition``) while a mask is recorded."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tape: _Tape, step: int, condition: bool) -> None:
        self.tape, self.step, self.condition = tape, step, condition

    __add__, __radd__ = _method("add"), _method("add", flip=True)
    __sub__, __rsub__ = _method("sub"), _method("sub", flip=True)
    __mul__, __rmul__ = _method("mul"), _method("mul", flip=True)
    __floordiv__, __rfloordiv__ = _method("floordiv"), _method("floordiv", flip=True)
    __mod__, __rmod__ = _method("mod"), _method("mod", flip=True)
    __and__, __rand__ = _method("and_"), _method("and_", flip=True)
    __or__, __ror__ = _method("or_"), _method("or_", flip=True)
    __lt__, __le__, __gt__, __ge__ = _method("lt"), _method("le"), _method("gt"), _method("ge")
    __eq__ = _method("eq")  # type: ignore[assignment]
    __ne__ = _method("ne")  # type: ignore[assignment]

    def __neg__(self) -> _Value:
        return self.tape.combine("sub", 0, self)

    def __xor__(self, other: Any) -> _Value:
        other = self.tape.lift(other)
        if not (self.condition and other.condition):
            raise TypeError("mask: ^ combines comparisons; compare tracks first, in parentheses")
        return self.tape.combine("ne", self, other)

    __rxor__ = __xor__

    def __invert__(self) -> _Value:
        return self.tape.add(("invert", self.step), condition=self.condition)

    def __bool__(self) -> bool:
        raise TypeError(
            "mask: a kernel cannot decide in Python; write & | ~ for and, or, not, and (a <= b) & (b < c) for a chain"
        )


class _Side:
    """A mask's operand while it is recorded; its tracks are auxiliary tensors ``first``, ``first`` + 1 and so on."""

    def __init__(self, tape: _Tape, index: str, tracks: tuple[str, ...], first: int) -> None:
        self._tape, self._index, self._tracks, self._first = tape, index, tracks, first

    def __getattr__(self, name: str) -> _Value:
        if name not in self._tracks:
            raise AttributeError(f"mask: reads the track {name!r}, which is not in tracks={self._tracks}")
        return self._tape.add((self._index, self._first + self._tracks.index(name)), condition=False)


def fingerprint(mask: MaskFn, tracks: Tracks) -> bytes:
    """What a mask computes: equal for equal steps over equal tracks of the user's, whatever function it is."""
    sha = hashlib.sha256(repr(_record(mask, tuple(sorted(tracks.columns)), bits=64)).encode())
    for name, column in sorted(tracks.user.items()):
        sha.update(repr(name).encode() + column.cpu().numpy().tobytes())
    return sha.digest()


def _record(mask: MaskFn, tracks: tuple[str, ...], bits: int = 32) -> tuple[Step, ...]:
    """The steps of a mask; the last one is its value."""
    if len(set(tracks)) != len(tracks):
        raise ValueError(f"tracks: {tracks} names a track twice")
    tape = _Tape(bits)
    value = mask(_Side(tape, "q_idx", tracks, 0), _Side(tape, "kv_idx", tracks, len(tracks)))
    if not isinstance(value, _Value) or not value.condition:
        kind = "an integer" if isinstance(value, _Value) else type(value).__name__
        raise TypeError(f"mask: must return a truth value per pair, made by comparing tracks; it returned {kind}")
    return tuple(tape.steps)[: value.step + 1]


@lru_cache(maxsize=256)
def _compile(steps: tuple[Step, ...]) -> MaskMod:
    """The ``mask_mod`` that replays the steps; FlashAttention's cache keys read ``__cute_hash__``."""
    try:
        from cutlass import Boolean, Int32, cute
    except ImportError as error:
        raise ImportError("cute_mask_mod needs the CuTe DSL: pip install marble-attention[cuda]") from error

    def replay(q_idx: Any, kv_idx: Any, aux_tensors: Sequence[Any]) -> Any:
        values: list[Any] = []
        for name, *rest in steps:
            match name:
                case "q_idx":
                    value = aux_tensors[rest[0]][q_idx]
                case "kv_idx":
                    value = aux_tensors[rest[0]][kv_idx]
                case "number":
                    value = Int32(rest[0])
                case "condition":
                    value = Boolean(bool(rest[0]))
                case "int":
                    value = Int32(values[rest[0]])
                case "mod":  # the DSL's own % takes the sign of the dividend, as in C
                    a, b = (values[step] for step in rest)
                    value = a - a // b * b
                case _:
                    value = getattr(operator, name)(*(values[step] for step in rest))
            values.append(value)
        return values[-1]

    @cute.jit
    def mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # noqa: ARG001
        return cute.full((1,), replay(q_idx[0], kv_idx[0], aux_tensors), Boolean)

    mask_mod.__cute_hash__ = hashlib.sha256(repr((steps, inspect.getsource(replay))).encode()).hexdigest()
    return mask_mod
