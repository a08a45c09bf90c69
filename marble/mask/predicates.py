"""What partial tiles compute: range words and bit tiles, each distinct one once.

Three ways lead to a tile's predicate, the cheapest that holds. Where the outer block's tokens have ranges and the
inner block's rows are neighbours in storage, every cell of the outer block gives a clamped ramp; tiles with equal
ramps are recognised before any row is written. Inner blocks with gaps are resolved row by row, and what has no ranges
pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marble.mask.ranges import Ramp, SpanRanges
from marble.mask.shards import Blocks, expand, true_at
from marble.mask.vectors import by_kernel, running_max, take

CHUNK = 256
"""Tiles that are looked at pair by pair in one go: 4 Mi pairs."""


@dataclass(frozen=True, eq=False)
class Side:
    """Blocks as one side of tiles: queries or keys.

    Attributes:
        blocks: the blocks.
        ranges: the visible ranges of the tokens of this side, or None.
    """

    blocks: Blocks
    ranges: SpanRanges | None

    @cached_property
    def exact(self) -> Tensor:
        """Whether all tokens of a block have ranges, bool [blocks]."""
        some = self.ranges is not None
        exact = torch.full((len(self.blocks),), some, device=self.blocks.of.device)
        if self.ranges is None or self.ranges.complete:
            return exact
        broken = self.blocks.of[true_at(~self.ranges.exact.index_select(0, self.blocks.span))]
        return exact.index_fill_(0, broken, False)

    @property
    def complete(self) -> bool:
        """Whether all tokens of the layout have ranges."""
        return self.ranges is not None and self.ranges.complete

    @cached_property
    def left(self) -> Tensor:
        """The blocks that are not exact, int64 [such blocks], rising."""
        return self.blocks.of[:0] if self.complete else true_at(~self.exact)

    @cached_property
    def common(self) -> Tensor:
        """For a key side: the first query that sees every key of a block, and one past the last, int64 [2, blocks]; not
        above the first if there is none, and for blocks that are not exact."""
        (lo, hi), of = self.ramps, self.blocks.of
        nothing = torch.zeros(len(self.blocks), dtype=torch.int64, device=of.device)
        from_ = nothing.scatter_reduce(0, of, lo.last, "amax")
        to = nothing.scatter_reduce(0, of, hi.first, "amin", include_self=False)
        return torch.stack([from_, to if self.complete else torch.where(self.exact, to, from_)])

    @cached_property
    def ramps(self) -> tuple[Ramp, ...]:
        """The bounds cell by cell; places are rows of the block."""
        assert self.ranges is not None
        cells = self.blocks
        first, last, offset = take(self.ranges.table, cells.span).unbind(1)
        place = cells.within + offset
        high = (place + (cells.rows - 1)).clamp_(first, last)
        return tuple(map(Ramp, place.clamp(first, last), high, place - cells.row))


def _at_once(device: torch.device) -> int:
    """Tiles whose rows are written in one go: on a CPU few enough to stay in a core's cache."""
    return 1024 if device.type == "cpu" else 1 << 20


Legal = Callable[[Tensor, Tensor], Tensor]
"""The mask over some tiles: (outer blocks, inner blocks) [tiles] to bool [tiles, outer rows, inner rows]."""


def predicates(
    outer: Side, inner: Side, tiles: Tensor, legal: Legal, helper: Executor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The predicates of partial tiles, and which one each tile has.

    Args:
        outer: the side that rows of predicates belong to.
        inner: the side that their columns belong to.
        tiles: int64 [2, tiles], contiguous, the outer and the inner block of each tile.
        legal: the mask, for what has no ranges.
        helper: a thread that may help where it is free.

    Returns:
        (slots [tiles], ranges [slots, block], bits [slots, block, words]) as in `marble.kernels.contract.TileList`,
        int32; predicates in the order in which the tiles first need them.
    """
    outer_block, inner_block = tiles
    count, block = len(outer_block), outer.blocks.block
    if by_kernel(outer_block) and outer.complete:
        return _written_at_once(outer, inner, tiles)
    slots = torch.full((count,), -1, dtype=torch.int64, device=outer_block.device)
    words = []
    exact = outer.exact[outer_block] if count else slots.bool()
    left = true_at(~exact)
    if len(left) < count:
        straight = exact & inner.blocks.straight[inner_block]
        by_ramp = true_at(straight)
        slots[by_ramp], found = _ramp_words(outer, inner, outer_block[by_ramp], inner_block[by_ramp], helper)
        words.append(found)
        by_row = true_at(exact & ~straight)
        slots[by_row] = len(found) + torch.arange(len(by_row), device=slots.device)
        words.append(_row_words(outer, inner, outer_block[by_row], inner_block[by_row]))
    bits, tiled = [], torch.zeros_like(exact)
    base = sum(map(len, words))
    for at in range(0, len(left), CHUNK):
        chosen = left[at : at + CHUNK]
        pairs = legal(outer_block[chosen], inner_block[chosen])
        edges, fits = _edges(pairs)
        slots[chosen[fits]] = base + torch.arange(int(fits.sum()), device=slots.device)
        words.append(pack_ranges(edges[fits].unbind(2)))
        base += len(words[-1])
        tiled[chosen[~fits]] = True
        bits.append(pack_bits(pairs[~fits]))
    some_words = torch.cat(words) if words else slots.new_zeros(0, block, dtype=torch.int32)
    some_bits = torch.cat(bits) if bits else slots.new_zeros(0, block, -(-block // 32), dtype=torch.int32)
    ranges, range_slot = dedupe(some_words, slots[~tiled])
    tables, bit_slot = dedupe(some_bits, torch.arange(len(some_bits), device=slots.device))
    slots[~tiled], slots[tiled] = range_slot, ~bit_slot
    return slots, ranges, tables


def _written_at_once(outer: Side, inner: Side, tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The predicates of tiles whose outer blocks all have ranges, by one kernel: on a GPU, every row of every tile is
    written sooner than equal tiles are recognised."""
    from marble.kernels.triton.words import range_words

    assert outer.ranges is not None
    words, label = range_words(outer.blocks, inner.blocks, outer.ranges.table, tiles)
    ranges, slots = _distinct(words, label)
    block = outer.blocks.block
    return slots, ranges, words.new_zeros(0, block, -(-block // 32))


def _codes(outer: Side, inner: Side, tile: Tensor, cell: Tensor, inner_block: Tensor) -> list[Tensor]:
    """What each item, a cell of a tile, computes: per range both ramps in one int64 [items], 0 if it is empty. If one
    of two ranges is empty, it is the second.

    Columns count from the inner block's first and are clipped to the block. 8 bits hold the first column of a ramp, 8
    the last, and 9 the offset plus 128: offsets of ramps that rise inside a block lie between −127 and 128.
    """
    # Minima of 32-bit integers are several times as fast as those of 64 bits on a CPU.
    start, length = (
        part.int().index_select(0, inner_block).index_select(0, tile)
        for part in (inner.blocks.first, inner.blocks.length)
    )
    codes = []
    for bounds in zip(outer.ramps[::2], outer.ramps[1::2], strict=True):
        halves = []
        for bound in bounds:
            first, last, offset = (
                part.int().index_select(0, cell).sub_(start) for part in (bound.first, bound.last, bound.offset)
            )
            for end in (first, last):
                torch.minimum(end.clamp_(min=0), length, out=end)
            offset = torch.where(first < last, offset.add_(128), 128)
            halves.append(first | last << 8 | offset << 16)
        lo, hi = halves
        some = ((lo & 255) < length) & ((hi & 0xFF00) > 0)
        codes.append((lo | hi.long() << 25).mul_(some))
    if len(codes) == 1:
        return codes
    one, other = codes
    alone = one == 0
    return [torch.where(alone, other, one), other.masked_fill_(alone, 0)]


def _ramp_words(
    outer: Side, inner: Side, outer_block: Tensor, inner_block: Tensor, helper: Executor | None
) -> tuple[Tensor, Tensor]:
    """Range words of tiles from the ramps of their cells: for each tile its row, and int32 [rows, block]."""
    first, count = outer.blocks.ptr[outer_block], outer.blocks.ptr.diff()[outer_block]
    tile, cell = expand(first, first + count)
    codes = _codes(outer, inner, tile, cell, inner_block)
    place = (outer.blocks.row | outer.blocks.rows << 8).index_select(0, cell)
    # Tiles whose items are equal are written once.
    kept, of = _classes(torch.zeros_like(first).index_add_(0, tile, _mix([place, *codes])))
    base = count.cumsum(0) - count
    twin = (base[kept[of]] - base).index_select(0, tile) + torch.arange(len(tile), device=tile.device)
    twin.clamp_(0, max(len(tile) - 1, 0))
    different = place.index_select(0, twin) != place
    for code in codes:
        different |= code.index_select(0, twin) != code
    wrong = count[kept[of]] != count
    wrong[tile[different]] = True
    if wrong.any():  # a label is a hash: tiles that share one and differ after all are written one by one
        single = true_at(wrong)
        of[single] = len(kept) + torch.arange(len(single), device=of.device)
        kept = torch.cat([kept, single])
    rows = outer.blocks.rows.index_select(0, cell).index_add_(
        0, base + count - 1, outer.blocks.block - outer.blocks.length[outer_block]
    )
    words = torch.empty(len(kept), outer.blocks.block, dtype=torch.int32, device=tile.device)
    several = codes[1] != 0 if len(codes) > 1 else torch.zeros_like(tile, dtype=torch.bool)
    wide = torch.zeros_like(first).index_add_(0, tile, several.long())[kept] > 0

    def write(chosen: Tensor, used: list[Tensor]) -> None:
        item = expand(base[kept[chosen]], (base + count)[kept[chosen]])[1]
        words[chosen] = _write_ramps(rows[item], [code.index_select(0, item) for code in used], outer.blocks.block)

    at_once = _at_once(tile.device)
    jobs = [(part, used) for some, used in ((~wide, codes[:1]), (wide, codes)) for part in true_at(some).split(at_once)]
    asked = [] if helper is None else [helper.submit(write, *job) for job in jobs]
    # The helper begins with the first, this thread with the last.
    for number in reversed(range(len(jobs))):
        if helper is None or asked[number].cancel():
            write(*jobs[number])
        else:
            asked[number].result()
    # The last item of a ragged block was continued over the rows that it lacks.
    length = outer.blocks.length[outer_block[kept]]
    ragged = true_at(length < outer.blocks.block)
    words[ragged] *= torch.arange(outer.blocks.block, device=tile.device) < length[ragged].unsqueeze(1)
    return of, words


def _write_ramps(rows: Tensor, codes: list[Tensor], block: int) -> Tensor:
    """Range words of tiles whose items follow one another, from the items' rows and codes, int32 [tiles, block]."""
    item = torch.repeat_interleave(rows)
    row = torch.arange(block, dtype=torch.int32, device=rows.device).repeat(len(item) // block)
    bounds = []
    for code in codes:
        for shift in (0, 25):
            ramp = (code >> shift & 0x1FFFFFF).int().index_select(0, item)
            first, last = ramp & 255, ramp >> 8 & 255
            bounds.append(ramp.bitwise_right_shift_(16).sub_(128).add_(row).clamp_(first, last))
    return pack_ranges(bounds).view(-1, block)


def _row_words(outer: Side, inner: Side, outer_block: Tensor, inner_block: Tensor) -> Tensor:
    """Range words of tiles row by row, int32 [tiles, block]: for inner blocks with gaps."""
    block, ptr = outer.blocks.block, outer.blocks.ptr
    tile, cell = expand(ptr[outer_block], ptr[outer_block + 1])
    item, row = expand(outer.blocks.row[cell], outer.blocks.row[cell] + outer.blocks.rows[cell])
    tile, cell = tile[item], cell[item]
    bounds = [
        inner.blocks.columns(
            inner_block[tile],
            torch.minimum(torch.maximum(row + bound.offset[cell], bound.first[cell]), bound.last[cell]),
        ).int()
        for bound in outer.ramps
    ]
    words = row.new_zeros(len(outer_block) * block, dtype=torch.int32)
    words[tile * block + row] = pack_ranges(bounds)
    return words.view(len(outer_block), block)


def _edges(legal: Tensor) -> tuple[Tensor, Tensor]:
    """The ranges of set columns of bool [tiles, rows, columns]: bounds [tiles, rows, 4] and, per tile, whether two
    ranges suffice for every row."""
    change = torch.nn.functional.pad(legal.to(torch.int8), (1, 1)).diff(dim=2)
    starts, stops = change == 1, change == -1
    fits = (starts.sum(2) <= 2).flatten(1).all(1)
    bounds = []
    for edge in (starts, stops):
        first = edge.to(torch.int8).argmax(2)
        second = edge.shape[2] - 1 - edge.flip(2).to(torch.int8).argmax(2)
        two = edge.sum(2) > 1
        bounds += [torch.where(edge.any(2), first, 0), torch.where(two, second, 0)]
    return torch.stack([bounds[0], bounds[2], bounds[1], bounds[3]], 2).int(), fits


def pack_ranges(bounds: Sequence[Tensor]) -> Tensor:
    """Range words of int32 bounds, lo₀, hi₀ and maybe lo₁, hi₁: ranges sorted, empty ones 0 and last, touching ones
    joined."""
    lo0, hi0, *more = bounds
    one = (lo0 | hi0 << 8).mul_(lo0 < hi0)
    if not more:
        return one
    lo1, hi1 = more
    other = (lo1 | hi1 << 8).mul_(lo1 < hi1)
    both = (one != 0) & (other != 0)
    swap = both & (lo1 < lo0)
    first, second = torch.where(swap, other, one), torch.where(swap, one, other)
    joined = first & 255 | torch.maximum(first >> 8, second >> 8) << 8
    touch = both & ((second & 255) <= first >> 8)
    return torch.where(touch, joined, torch.where(both, first | second << 16, one | other))


def pack_bits(legal: Tensor) -> Tensor:
    """bool [tiles, rows, columns] as int32 words [tiles, rows, ⌈columns / 32⌉] of 32 bits."""
    words = -(-legal.shape[2] // 32)
    legal = torch.nn.functional.pad(legal, (0, words * 32 - legal.shape[2]))
    bits = legal.view(*legal.shape[:2], words, 32).long() << torch.arange(32, device=legal.device)
    return bits.sum(3).to(torch.int32)


_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd multipliers of 64 bits (SplitMix64)."""


def _mix(columns: list[Tensor]) -> Tensor:
    """A hash of the rows of int64 columns, [rows]."""
    label = torch.zeros_like(columns[0])
    for column in columns:
        label = (label ^ column) * _ODD[0]
        label ^= label >> 29
        label *= _ODD[1]
        label ^= label >> 32
    return label


def _classes(label: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry of each distinct label, rising, and for each entry the index of its label's first entry there."""
    sorted_label, order = torch.sort(label, stable=True)
    place = torch.arange(len(label), device=label.device)
    start = torch.zeros_like(place)
    torch.mul(place[1:], sorted_label[1:] != sorted_label[:-1], out=start[1:])
    twin = torch.empty_like(order).index_copy_(0, order, order.index_select(0, running_max(start)))
    first = twin == place
    return true_at(first), (first.cumsum(0) - 1).index_select(0, twin)


def _labels(table: Tensor) -> Tensor:
    """A hash of each row of an int32 table [rows, columns], int64 [rows]."""
    table = table.view(torch.int64) if table.shape[1] % 2 == 0 else table
    factor = torch.arange(1, 2 * table.shape[1], 2, device=table.device) * _ODD[0]
    factor ^= factor >> 31
    return torch.cat([(part * factor).sum(1) for part in table.split(_at_once(table.device))])


def dedupe(table: Tensor, uses: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows that are used, in the order of their first use, and for each use the distinct row.

    Args:
        table: int32 [rows, ...].
        uses: int64 [uses], rows of the table.
    """
    if not len(uses):
        return table[:0], uses
    rows, row = _distinct(table, _labels(table.flatten(1)))
    kept, slot = _classes(row[uses])
    return rows[row[uses[kept]]], slot


def _distinct(table: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of a table by the first of each, and for each row which one it equals; ``label`` is a hash of
    each row."""
    kept, of = _classes(label)
    flat, rows = table.flatten(1), table.index_select(0, kept)
    if not torch.equal(flat, rows.flatten(1).index_select(0, of)):
        kept, of = _classes(torch.unique(flat, dim=0, return_inverse=True)[1])
        rows = table.index_select(0, kept)
    return rows, of
