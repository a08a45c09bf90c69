"""One call over the keys of several shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble.kernels.contract import TileList, Tiles
from marble.mask.predicates import dedupe


@dataclass(frozen=True, eq=False)
class Part:
    """The tiles against one shard, of whose key blocks some are resident.

    Attributes:
        tiles: all tiles between the queries and the shard.
        resident: bool [key blocks]; blocks that are not resident have no tiles.
        first_row: row at which the resident blocks begin. They follow one another without gaps.
    """

    tiles: Tiles
    resident: Tensor
    first_row: int


def join_keys(parts: Sequence[Part]) -> Tiles:
    """The tiles of all parts as one call over their resident key blocks, part after part.

    Source: MARBLE, section 04 (Luma AI, October 2026): one pass over the local and the fetched keys.
    """
    base, rows, lengths, renumbered = 0, [], [], []
    for part in parts:
        length = part.tiles.key_len[part.resident]
        rows.append(part.first_row + length.cumsum(0) - length)
        lengths.append(length)
        renumbered.append(part.resident.long().cumsum(0) - 1 + base)
        base += len(length)
    first = parts[0].tiles
    by_key = [(part.tiles.by_key, _Renumber(block, None)) for part, block in zip(parts, renumbered, strict=True)]
    by_query = [(part.tiles.by_query, _Renumber(None, block)) for part, block in zip(parts, renumbered, strict=True)]
    key_row, key_len = torch.cat(rows).int(), torch.cat(lengths).int()
    return Tiles(
        first.block,
        first.query_rows,
        key_row,
        key_len,
        _stack(by_query, first.by_query.outer),
        _stack(by_key, base),
        first.touch,
    )


@dataclass(frozen=True, eq=False)
class _Renumber:
    """New numbers of outer and inner blocks, or None where they stay."""

    outer: Tensor | None
    inner: Tensor | None


def _stack(lists: Sequence[tuple[TileList, _Renumber]], outer: int) -> TileList:
    """Tile lists over renumbered blocks as one list of ``outer`` outer blocks."""
    runs, parts = [], []
    ranges, bits = _Tables(), _Tables()
    for tiles, number in lists:
        entries = []
        for ptr, values in ((tiles.run_ptr, tiles.runs), (tiles.part_ptr, tiles.parts)):
            owner = torch.repeat_interleave(ptr.diff().long())
            inner = values[:, 0].long()
            owner = owner if number.outer is None else number.outer[owner]
            inner = inner if number.inner is None else number.inner[inner]
            entries.append(torch.stack([owner, inner, values[:, 1].long()], 1))
        slot = entries[1][:, 2]
        entries[1][:, 2] = torch.where(slot >= 0, slot + ranges.base(tiles.ranges), slot - bits.base(tiles.bits))
        runs.append(entries[0])
        parts.append(entries[1])
    merged = torch.cat(parts)
    slots = merged[:, 2].clone()
    distinct_ranges, merged[slots >= 0, 2] = dedupe(torch.cat(ranges.tables), slots[slots >= 0])
    distinct_bits, bit_of = dedupe(torch.cat(bits.tables), ~slots[slots < 0])
    merged[slots < 0, 2] = ~bit_of
    return TileList(
        *_compress(torch.cat(runs), outer), *_compress(merged, outer), ranges=distinct_ranges, bits=distinct_bits
    )


class _Tables:
    """Tables of predicates one after the other, each table once: the shards of one rank share theirs."""

    def __init__(self) -> None:
        self.tables: list[Tensor] = []

    def base(self, table: Tensor) -> int:
        """The first row of a table."""
        if not any(table is other for other in self.tables):
            self.tables.append(table)
        at = next(number for number, other in enumerate(self.tables) if other is table)
        return sum(map(len, self.tables[:at]))


def _compress(entries: Tensor, outer: int) -> tuple[Tensor, Tensor]:
    """Entries (outer, inner, value) as CSR, sorted by outer, then inner."""
    width = int(entries[:, 1].max()) + 1 if len(entries) else 1
    entries = entries[torch.argsort(entries[:, 0] * width + entries[:, 1])]
    ptr = torch.searchsorted(entries[:, 0].contiguous(), torch.arange(outer + 1, device=entries.device)).int()
    return ptr, entries[:, 1:].int()
