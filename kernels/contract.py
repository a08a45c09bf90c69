"""What a kernel backend offers to the executor, and what the data that they exchange means.

A backend knows nothing of masks, spans, ranks or transfers. It gets query and key rows, and tile lists that say which
pairs to compute. Everything that is carried from one call to the next (`State`, gradients) is row-major, with the head
first, ``[heads, rows, head_dim]``, and in the accumulation type: float32 for bfloat16, float16 and float32 inputs,
float64 for float64 inputs. State is contiguous; gradients may be views of a buffer that travels, with any strides
between heads and between rows. A ragged block never writes outside its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum, IntFlag
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MAX_BLOCK = 128
"""Largest block: tile-local columns fit in one byte of a range word."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that state and gradients are carried in, for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def move(value: T, device: torch.device | str, moved: dict[int, Any] | None = None) -> T:
    """A frozen dataclass of tensors, on another device.

    Args:
        value: the dataclass.
        device: where to.
        moved: what has been moved there already, by identity; shared between calls, it keeps shared parts shared.
    """
    moved = {} if moved is None else moved
    if id(value) not in moved:
        if isinstance(value, Tensor):
            moved[id(value)] = value.to(device, non_blocking=True)
        elif is_dataclass(value) and not isinstance(value, type):
            parts = {field.name: move(getattr(value, field.name), device, moved) for field in fields(value)}
            moved[id(value)] = type(value)(**parts)
        else:
            return value
    return moved[id(value)]


class Touch(IntFlag):
    """What a forward call does with the state of the query rows that it computes. Query blocks without tiles are left
    alone, whatever their flags."""

    CARRY = 0
    """State is read and written."""
    FIRST = 1
    """State is not read: the accumulator starts at 0, the row maximum at −inf and the row sum at 0."""
    LAST = 2
    """State is not written: the output is normalised, rounded once and stored together with the log-sum-exp."""


@dataclass(frozen=True, eq=False)
class TileList:
    """The tiles of a call in one orientation, compressed by rows of tiles (CSR).

    "Outer" blocks are those that the list is sorted by, "inner" blocks those that it walks over: query and key blocks
    in `Tiles.by_query`, key and query blocks in `Tiles.by_key`.

    Attributes:
        run_ptr: int32 [outer + 1], where each outer block's runs begin.
        runs: int32 [runs, 2], (first inner block, number of blocks): neighbours in which every pair is computed. All
            blocks of a run, and its outer block, are whole.
        part_ptr: int32 [outer + 1], where each outer block's partial tiles begin.
        parts: int32 [parts, 2], (inner block, slot). A slot ≥ 0 is a row of ``ranges``, a slot < 0 is ``bits[~slot]``.
            Every tile has a pair.
        ranges: int32 [slots, block], one word per outer row: at most two ranges of inner columns, as the bytes
            lo₀, hi₀, lo₁, hi₁ from the lowest up. Columns count from the tile's first; an empty range is (0, 0).
        bits: int32 [slots, block, ⌈block / 32⌉], one bit per pair: column c of an outer row is bit c % 32 of word
            c // 32.

    Rows and columns behind the end of a ragged block are never set. Equal predicates share a slot.
    """

    run_ptr: Tensor
    runs: Tensor
    part_ptr: Tensor
    parts: Tensor
    ranges: Tensor
    bits: Tensor

    @property
    def outer(self) -> int:
        """Number of outer blocks."""
        return self.run_ptr.shape[0] - 1

    def counts(self) -> Tensor:
        """Visited tiles of each outer block, int64 [outer]."""
        full = _segment_sums(self.runs[:, 1], self.run_ptr)
        return full + self.part_ptr.diff().long()

    @property
    def full(self) -> int:
        """Number of full tiles."""
        return int(self.runs[:, 1].sum())

    @property
    def partial(self) -> int:
        """Number of partial tiles."""
        return self.parts.shape[0]


@dataclass(frozen=True, eq=False)
class Tiles:
    """One attention call over blocks: which pairs of a query shard and of resident key rows it computes.

    Query block i holds the query rows from ``i · block``; only the last may be ragged. Key block j holds ``key_len[j]``
    key rows from ``key_row[j]``, no row twice; rows that a key block lacks to a whole block may be read, so they must
    be finite.

    Attributes:
        block: rows of a whole block, 1 to `MAX_BLOCK`.
        query_rows: number of query rows.
        key_row: int32 [key blocks], first row of each key block in the call's key rows.
        key_len: int32 [key blocks], rows of each key block.
        by_query: the tiles by query block, for the forward pass.
        by_key: the same tiles by key block, for the backward pass.
        touch: uint8 [query blocks], the `Touch` of each query block in a forward call.
    """

    block: int
    query_rows: int
    key_row: Tensor
    key_len: Tensor
    by_query: TileList
    by_key: TileList
    touch: Tensor

    @property
    def visited(self) -> int:
        """Number of tiles that the call computes, full and partial."""
        return self.by_query.full + self.by_query.partial


class Band(IntEnum):
    """Which pairs a dense varlen sequence of ``n`` queries and ``m`` keys computes (query i, key j)."""

    FULL = 0
    """All pairs."""
    CAUSAL = 1
    """j ≤ i + (m − n): the last query sees the last key."""
    REVERSE_CAUSAL = 2
    """j > i + (m − n): exactly what ``CAUSAL`` leaves out."""


@dataclass(frozen=True, eq=False)
class Varlen:
    """One attention call over dense sequences of any lengths, unaligned and possibly empty.

    Attributes:
        queries: int32 [sequences, 2], first and one past the last query row of each sequence.
        keys: int32 [sequences, 2], the same for key rows.
        band: the pairs of every sequence.
        touch: uint8 [sequences], the `Touch` of each sequence's query rows.

    Query rows of two sequences in one call do not overlap.
    """

    queries: Tensor
    keys: Tensor
    band: Band
    touch: Tensor

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, band: Band, touch: Touch) -> Varlen:
        """Sequences that follow one another, by cumulative lengths [sequences + 1]."""
        queries, keys = (torch.stack([cu[:-1], cu[1:]], 1).int() for cu in (cu_seqlens_q, cu_seqlens_k))
        return cls(queries, keys, band, torch.full_like(queries[:, 0], int(touch), dtype=torch.uint8))


Work = Tiles | Varlen


@dataclass(frozen=True, eq=False)
class State:
    """The online softmax of query rows between two calls; never rounded below the accumulation type.

    Attributes:
        acc: [heads, rows, head_dim], Σ exp(scale · (s − m)) · v, not normalised.
        m: [heads, rows], the largest score s = q · k so far, before the softmax scale; −inf where no key was seen.
        l: [heads, rows], Σ exp(scale · (s − m)).
    """

    acc: Tensor
    m: Tensor
    l: Tensor  # noqa: E741  (the name it has in every paper)

    @classmethod
    def empty(cls, heads: int, rows: int, head_dim: int, dtype: torch.dtype, device: Any) -> State:
        """Uninitialised state: a first touch does not read it."""
        return cls(
            torch.empty(heads, rows, head_dim, dtype=dtype, device=device),
            torch.empty(heads, rows, dtype=dtype, device=device),
            torch.empty(heads, rows, dtype=dtype, device=device),
        )


class Backend(Protocol):
    """The calls that an executor makes. All tensors of one call are on one device.

    Shapes: ``q``, ``out`` and ``dout`` [query rows, heads, head_dim]; ``k`` and ``v`` [key rows, kv_heads, head_dim];
    ``lse`` and ``delta`` [heads, query rows]; ``dq`` [heads, query rows, head_dim]; ``dk`` and ``dv``
    [kv_heads, key rows, head_dim]. The last dimension is contiguous, others may be strided. Query head h reads
    key/value head ``h // (heads / kv_heads)``. ``scale`` > 0 multiplies q · k.
    """

    name: str

    writes_gradients: bool
    """Whether `backward` can write gradients of 16-bit inputs rounded, instead of adding to sums."""

    def prepare(self, works: Sequence[Work], *, group: int, head_dim: int) -> None:
        """Compute what the calls of a schedule need, all of it at once, so that the calls themselves need not.

        Called before the first of the calls, and again before every layer: the second time must cost nothing.

        Args:
            works: what the calls compute.
            group: query heads of a key/value head in these calls.
            head_dim: their head dimension.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: Work,
        state: State | None,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
    ) -> None:
        """Fold the call's pairs into ``state``; on a last touch write ``out`` and ``lse`` (natural logarithm).

        ``state`` may be None if every touch is the first and the last.
        A row that has seen no key by its last touch gets output 0 and log-sum-exp −inf.
        """
        ...

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """Σ out · dout over the head dimension, in the accumulation type: [heads, query rows]."""
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        work: Work,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        scale: float,
    ) -> None:
        """Add the gradients of the call's pairs to ``dq``, ``dk`` and ``dv``, against the final ``lse``.

        A row with log-sum-exp −inf adds nothing. If this backend `writes_gradients`, any of the three may be in the
        type of the inputs, and hold anything: it is written, all rows of it, and rounded once. That is for a gradient
        that this call alone makes.
        """
        ...


def _segment_sums(values: Tensor, ptr: Tensor) -> Tensor:
    total = torch.zeros(len(values) + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(values, 0, out=total[1:])
    return total[ptr.long()].diff()
