"""The domains that a mask runs on: tensors, pair by pair, and block summaries, block pair by block pair.

On summaries a comparison answers true, false or unknown for a whole block pair, from the smallest and largest value
of each track in a block and a small bitmap of the values it holds. True means that every pair is legal, false that
none is, unknown that the pair must be looked into. This is sound for any mask and not always tight.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marble.layout import CPU
from marble.mask.algebra import MaskFn
from marble.mask.tracks import Operand, Tracks

_BITMAP = 64


def dense(mask: MaskFn, q: Tracks, k: Tracks) -> Tensor:
    """The mask, pair by pair: bool [queries, keys], or [..., queries, keys] for tracks of shape [..., tokens]."""
    value = mask(
        q.operand(lambda column: column.long().unsqueeze(-1)), k.operand(lambda column: column.long().unsqueeze(-2))
    )
    shape = torch.broadcast_shapes(q.pos.unsqueeze(-1).shape, k.pos.unsqueeze(-2).shape)
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        raise TypeError(f"mask: must combine comparisons of q and k into a boolean, got {type(value).__name__}")
    return value.expand(shape)


@dataclass(frozen=True, eq=False)
class BlockSummaries:
    """What a block of tokens is known by: one `Interval` per track, each of shape [blocks]."""

    columns: dict[str, Interval]

    @classmethod
    def of(cls, tracks: Tracks, block: int) -> BlockSummaries:
        """Summaries of consecutive blocks of ``block`` tokens; the last may be shorter."""
        blocks = -(-len(tracks) // block)
        # Repeating the last token completes the last block without changing what the block holds.
        index = torch.arange(blocks * block, device=tracks.pos.device).clamp(max=len(tracks) - 1)
        return cls.of_blocks(tracks.take(index.view(blocks, block)))

    @classmethod
    def of_blocks(cls, tracks: Tracks) -> BlockSummaries:
        """Summaries of blocks, from tracks of shape [blocks, block]."""
        columns = {}
        for name, column in tracks.columns.items():
            filled = column.long()
            low, high = filled.aminmax(dim=1)
            columns[name] = Interval(low, high, _bitmap(filled))
        return cls(columns)

    def take(self, index: Tensor) -> BlockSummaries:
        """The summaries of some blocks."""
        return BlockSummaries({name: column.map(lambda part: part[index]) for name, column in self.columns.items()})

    def operand(self, dim: int) -> Operand:
        """A mask's operand, with blocks along the rows (``dim`` −1) or the columns (``dim`` −2) of the answer."""
        return Operand({name: column.map(lambda part: part.unsqueeze(dim)) for name, column in self.columns.items()})


def summarise(mask: MaskFn, q: BlockSummaries, k: BlockSummaries) -> tuple[Tensor, Tensor]:
    """Which block pairs are full (every pair legal) and which may hold a legal pair: two bool [q blocks, k blocks]."""
    value = mask(q.operand(-1), k.operand(-2))
    if not isinstance(value, Ternary):
        raise TypeError(f"mask: must combine comparisons of q and k into one condition, got {type(value).__name__}")
    shape = (len(q.columns["pos"].low), len(k.columns["pos"].low))
    return (~value.may_be_false).expand(shape), value.may_be_true.expand(shape)


def probe(mask: MaskFn, tracks: Tracks) -> None:
    """Call a user's mask once on block summaries, so that what is wrong with it is said before anything is planned.

    Raises:
        TypeError: if it is not a function of (q, k) that combines comparisons into one condition.
        ValueError: if it reads a track that does not exist.
    """
    try:
        signature = inspect.signature(mask)
        signature.bind(None, None)
    except TypeError:
        raise TypeError(f"mask: expected a function of (q, k), got {mask!r}") from None
    except ValueError:
        pass  # a builtin without a signature
    summaries = BlockSummaries.of(tracks.take(slice(0, 1)), 1)
    summarise(mask, summaries, summaries)


def _bitmap(values: Tensor) -> Tensor:
    """A 64-bit set of the residues of ``values`` [blocks, block], as int64 [blocks]."""
    present = torch.zeros(values.shape[0], _BITMAP, dtype=torch.int64, device=values.device)
    present.scatter_(1, values.remainder(_BITMAP), 1)
    return (present << torch.arange(_BITMAP, device=values.device)).sum(1)


def _refused(what: str) -> Any:
    def method(self: Any, *others: Any) -> Any:  # noqa: ARG001
        raise TypeError(f"mask: {what}")

    return method


_no_number = _refused("conditions are combined with & | ~ ^ == and !=, and are no numbers")


@dataclass(frozen=True, eq=False)
class Ternary:
    """A truth value over all pairs of two blocks: may it be true for some pair, may it be false for some pair?"""

    may_be_true: Tensor
    may_be_false: Tensor

    def __and__(self, other: Ternary | bool) -> Ternary:
        other = _truth(other)
        return Ternary(self.may_be_true & other.may_be_true, self.may_be_false | other.may_be_false)

    def __or__(self, other: Ternary | bool) -> Ternary:
        other = _truth(other)
        return Ternary(self.may_be_true | other.may_be_true, self.may_be_false & other.may_be_false)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Ternary:
        return Ternary(self.may_be_false, self.may_be_true)

    def __xor__(self, other: Ternary | bool) -> Ternary:
        other = _truth(other)
        return Ternary(
            self.may_be_true & other.may_be_false | self.may_be_false & other.may_be_true,
            self.may_be_true & other.may_be_true | self.may_be_false & other.may_be_false,
        )

    __rxor__ = __xor__

    def __ne__(self, other: Ternary | bool) -> Ternary:  # type: ignore[override]
        return self ^ other

    def __eq__(self, other: Ternary | bool) -> Ternary:  # type: ignore[override]
        return ~(self ^ other)

    __hash__ = None  # type: ignore[assignment]

    __lt__ = __le__ = __gt__ = __ge__ = __abs__ = __neg__ = __pos__ = _no_number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _no_number

    def __bool__(self) -> bool:
        raise TypeError("mask: combine conditions with & | ~, not with and, or, not or chained comparisons")


def _truth(value: Ternary | bool) -> Ternary:
    if isinstance(value, Ternary):
        return value
    if isinstance(value, bool):
        return Ternary(torch.tensor(value, device=CPU), torch.tensor(not value, device=CPU))
    raise TypeError(f"mask: cannot combine a condition with {type(value).__name__}")


@dataclass(frozen=True, eq=False)
class Interval:
    """The values that an expression may take over a block, or over all pairs of two blocks: low ≤ value ≤ high.

    ``bits`` is the set of residues modulo 64 of a track's values in the block; arithmetic loses it.
    """

    low: Tensor
    high: Tensor
    bits: Tensor | None = None

    def map(self, change: Any) -> Interval:
        """``change`` applied to every part."""
        return Interval(change(self.low), change(self.high), None if self.bits is None else change(self.bits))

    def __add__(self, other: Interval | int) -> Interval:
        other = _interval(other)
        return Interval(self.low + other.low, self.high + other.high)

    __radd__ = __add__

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __sub__(self, other: Interval | int) -> Interval:
        return self + -_interval(other)

    def __rsub__(self, other: Interval | int) -> Interval:
        return -self + other

    def __mul__(self, other: Interval | int) -> Interval:
        other = _interval(other)
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        low = torch.minimum(torch.minimum(ends[0], ends[1]), torch.minimum(ends[2], ends[3]))
        high = torch.maximum(torch.maximum(ends[0], ends[1]), torch.maximum(ends[2], ends[3]))
        return Interval(low, high)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Interval:
        raise TypeError("mask: tracks are integers; divide them with //")

    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refused(
        "& | ~ ^ combine comparisons, not tracks; compare tracks first, in parentheses"
    )
    __rtruediv__ = __truediv__
    __rfloordiv__ = __rmod__ = _refused("the right side of // and % must be a positive integer, not a track")
    __abs__ = __pos__ = __pow__ = __rpow__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refused(
        "tracks are combined with + - * // and %, and compared"
    )

    def __floordiv__(self, divisor: int) -> Interval:
        divisor = _positive(divisor, "//")
        return Interval(self.low // divisor, self.high // divisor)

    def __mod__(self, divisor: int) -> Interval:
        divisor = _positive(divisor, "%")
        wraps = self.low // divisor != self.high // divisor
        return Interval(torch.where(wraps, 0, self.low % divisor), torch.where(wraps, divisor - 1, self.high % divisor))

    def __lt__(self, other: Interval | int) -> Ternary:
        other = _interval(other)
        return Ternary(self.low < other.high, self.high >= other.low)

    def __gt__(self, other: Interval | int) -> Ternary:
        return _interval(other) < self

    def __ge__(self, other: Interval | int) -> Ternary:
        return ~(self < other)

    def __le__(self, other: Interval | int) -> Ternary:
        return ~(self > other)

    def __eq__(self, other: Interval | int) -> Ternary:  # type: ignore[override]
        other = _interval(other)
        overlap = (self.low <= other.high) & (other.low <= self.high)
        if self.bits is not None and other.bits is not None:
            overlap = overlap & ((self.bits & other.bits) != 0)
        certain = (self.low == self.high) & (other.low == other.high) & (self.low == other.low)
        return Ternary(overlap, ~certain)

    def __ne__(self, other: Interval | int) -> Ternary:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("mask: compare tracks (q.pos >= k.pos) instead of using them as conditions")


def _interval(value: Interval | int) -> Interval:
    if isinstance(value, Interval):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"mask: tracks are integers and cannot be combined with {type(value).__name__}")
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"mask: {number} does not fit int64")
    exact = torch.tensor(number, dtype=torch.int64, device=CPU)  # a scalar goes with tensors on any device
    return Interval(exact, exact, torch.tensor(1, dtype=torch.int64, device=CPU) << (number % _BITMAP))


def _positive(divisor: int, sign: str) -> int:
    if isinstance(divisor, bool) or not hasattr(divisor, "__index__") or operator.index(divisor) < 1:
        raise TypeError(f"mask: the right side of {sign} must be a positive integer, got {divisor!r}")
    return operator.index(divisor)
