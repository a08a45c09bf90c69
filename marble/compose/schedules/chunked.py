"""The chunked ring: every step of a ring as a few dense varlen calls.

A rank's rows of one sample are in sequence order, text and clean spans first, noise (or group) spans behind. So on its
own keys one causal sequence covers the clean rows of a sample, all its chunks together, and reverse-causal ones add
what bidirectional spans see of themselves; on another rank's keys, the queries of a chunk see a prefix of that rank's
clean rows, one full sequence. A span that crosses a chunk border sees a few keys more of the rank that holds the rest.
Spans set apart take one full sequence over the clean rows before them, and one over their own rows.

Source: MARBLE, section 03, chunked ring attention (Luma AI, October 2026). There chunks keep the sequence order, so a
rank needs a causal sequence per chunk; here the storage order joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble.compose.schedule import Rows, Schedule
from marble.compose.schedules.ring import Ring, rotate, sources
from marble.kernels.contract import Band, Touch, Varlen, Work
from marble.mask.pieces import Pieces, dense_pieces
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder


def chunked(order: TokenOrder, mask: StoredMask, rank: int, block: int, heads: int, kv_heads: int) -> Schedule:
    """One rank's chunked ring. Arguments as for `marble.compose.schedules.ring.ring`.

    Any token order will do, but every piece of it is a sequence in every step: give it few and large ones
    (`marble.order.chunks`).

    Raises:
        NotDenseError: if dense calls cannot express the mask: sliding windows, interleaved groups, masks of one's own.
    """
    # The whole sequence first, so that every rank refuses a mask that some rank must refuse.
    dense_pieces(mask, torch.tensor([[0, mask.storage.layout.tokens]]))
    mine = dense_pieces(mask, order.segments(rank))
    remote = [_remote(mine, order.segments(source)) for source in sources(rank, order.world)[1:]]
    later = torch.zeros(len(mine), dtype=torch.bool)
    for call in (call for step in remote for call in step):
        later |= call.touched
    steps = [_own(mine, order.segments(rank), later), *remote]
    works, untouched = _flag(mine, steps)
    return rotate(Ring(rank, order.lengths, block, heads, kv_heads), works, untouched)


@dataclass(frozen=True, eq=False)
class _Dense:
    """A call before it is cut into sequences: per piece of queries the key rows that its band is laid over.

    Attributes:
        band: the pairs of every sequence.
        keys: int64 [pieces, 2], first key row and one past the last; empty for pieces that the call leaves out.
    """

    band: Band
    keys: Tensor

    @property
    def touched(self) -> Tensor:
        """Which pieces the call computes, bool [pieces]."""
        return self.keys[:, 0] < self.keys[:, 1]


def _remote(pieces: Pieces, segments: Tensor) -> list[_Dense]:
    """The calls on another rank's keys. All queries of a piece see the same: a causal piece lies in one stretch of
    storage, so its own rank holds all keys that its queries differ in."""
    keys = _rows_before(segments, pieces.last)
    return _some(_full(keys[:, :2], keys[:, 2:]))


def _own(pieces: Pieces, segments: Tensor, later: Tensor) -> list[_Dense]:
    """The calls on the rank's own keys; ``later`` says which pieces other steps touch, bool [pieces].

    Causal pieces take causal sequences. A bidirectional piece that ends the keys that it sees joins its neighbours'
    sequence, and a reverse-causal one adds the rest. If no other step touches it, its last touch would cut that
    sequence, so it takes a full one of its own.
    """
    rows = _rows_before(segments, torch.stack([pieces.start, pieces.stop], 1))
    first, last = _rows_before(segments, pieces.first), _rows_before(segments, pieces.last)
    main, behind = last[:, :2], last[:, 2:]
    grows = last[:, 1] > first[:, 1]
    ends = (main[:, 1] == rows[:, 1]) & (main[:, 0] <= rows[:, 0]) & later
    chain = grows | ends
    alike = (main[1:, 0] == main[:-1, 0]) & chain[1:] & chain[:-1]
    joined = torch.nn.functional.pad(alike, (1, 0)) | torch.nn.functional.pad(alike, (0, 1))
    causal = grows | (ends & joined)
    # A causal piece of one token ends with itself too: nothing is left for a reverse-causal sequence.
    reverse = causal & ~grows & (rows[:, 1] - rows[:, 0] > 1)
    return _some(
        [
            _Dense(Band.CAUSAL, _only(causal, main)),
            *_full(_only(~causal, main), behind),
            _Dense(Band.REVERSE_CAUSAL, _only(reverse, rows)),
        ]
    )


def _some(calls: Sequence[_Dense]) -> list[_Dense]:
    """Those with any pairs."""
    return [call for call in calls if call.touched.any()]


def _full(main: Tensor, behind: Tensor) -> list[_Dense]:
    """Both ranges of every piece in at most two calls, and in one where they touch or only one has keys."""
    nothing = main[:, 0] >= main[:, 1]
    one = torch.where(nothing.unsqueeze(1), behind, main)
    two = _only(~nothing, behind)
    touch = (one[:, 1] == two[:, 0]) & (two[:, 0] < two[:, 1])
    one = torch.where(touch.unsqueeze(1), torch.stack([one[:, 0], two[:, 1]], 1), one)
    return [_Dense(Band.FULL, one), _Dense(Band.FULL, _only(~touch, two))]


def _only(chosen: Tensor, ranges: Tensor) -> Tensor:
    """The ranges of the chosen pieces; those of others are empty."""
    return torch.where(chosen.unsqueeze(1), ranges, 0)


def _flag(pieces: Pieces, steps: Sequence[Sequence[_Dense]]) -> tuple[list[list[tuple[Work, bool]]], tuple[Rows, ...]]:
    """Sequences with first and last touches; and the rows of ``out`` and ``lse`` that no call touches."""
    stop = (pieces.stop - pieces.start).cumsum(0)
    rows = torch.stack([stop - (pieces.stop - pieces.start), stop], 1)
    calls = [call for step in steps for call in step]
    touched = torch.stack([call.touched for call in calls] or [torch.zeros(len(pieces), dtype=torch.bool)])
    place = touched.long().cumsum(0)
    first, last = touched & (place == 1), touched & (place == place[-1:])
    flags = (first * int(Touch.FIRST) + last * int(Touch.LAST)).to(torch.uint8)
    works = iter(_sequences(call, rows, flag) for call, flag in zip(calls, flags, strict=bool(calls)))
    alone = ~touched.any(0)
    untouched = tuple(Rows(buffer, start, stop) for start, stop in rows[alone].tolist() for buffer in ("out", "lse"))
    return [[next(works) for _ in step] for step in steps], untouched


def _sequences(call: _Dense, rows: Tensor, flags: Tensor) -> tuple[Varlen, bool]:
    """A call's pieces, those in a row that one sequence can compute together; and whether it carries state."""
    chosen = call.touched.nonzero().flatten()
    rows, keys, flags = rows[chosen], call.keys[chosen], flags[chosen]
    if call.band is Band.REVERSE_CAUSAL:
        follows = torch.zeros(max(len(rows) - 1, 0), dtype=torch.bool)
    else:
        # Full: the same keys. Causal: as many keys more as queries.
        step = rows[1:, 1] - rows[1:, 0] if call.band is Band.CAUSAL else 0
        follows = (rows[1:, 0] == rows[:-1, 1]) & (flags[1:] == flags[:-1])
        follows &= (keys[1:, 0] == keys[:-1, 0]) & (keys[1:, 1] == keys[:-1, 1] + step)
    begin, end = (
        torch.nn.functional.pad(~follows, (1, 0), value=True),
        torch.nn.functional.pad(~follows, (0, 1), value=True),
    )
    queries = torch.stack([rows[begin, 0], rows[end, 1]], 1)
    covered = torch.stack([keys[begin, 0], keys[end, 1]], 1)
    carries = bool((flags != int(Touch.FIRST | Touch.LAST)).any())
    return Varlen(queries.int(), covered.int(), call.band, flags[begin]), carries


def _rows_before(segments: Tensor, positions: Tensor) -> Tensor:
    """How many rows of a shard lie before some storage positions; ``segments`` are the shard's."""
    if not len(segments):
        return torch.zeros_like(positions)
    start, stop = segments.T.contiguous()
    before = (stop - start).cumsum(0) - (stop - start)
    at = (torch.searchsorted(start, positions, right=True) - 1).clamp(min=0)
    inside = torch.minimum((positions - start[at]).clamp(min=0), (stop - start)[at])
    return before[at] + inside
