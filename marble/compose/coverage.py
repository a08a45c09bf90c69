"""What rows hold, and what a kernel call touches, reads and computes of them: helpers of `marble.compose.check`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marble.compose.schedule import Call
from marble.kernels.contract import Band, Tiles, Varlen
from marble.kernels.predicates import covered

NOTHING, CLEARED = -1, -2
WHAT = ("kv", "q", "dout", "lse", "delta", "out")
"""What a row may hold of a token and a head."""


@dataclass(frozen=True)
class Codes:
    """Numbers for (what, token, head): what · tokens · heads + token · heads + head."""

    tokens: int
    heads: int

    def of(self, what: str, tokens: Tensor, heads: Tensor) -> Tensor:
        """The numbers of some tokens' heads, [tokens, heads]."""
        return (WHAT.index(what) * self.tokens + tokens.unsqueeze(1)) * self.heads + heads

    def read(self, codes: Tensor, what: str) -> tuple[Tensor, Tensor] | None:
        """The tokens and the heads of [rows, heads]; None unless every row holds ``what`` of one token, and all rows
        hold the same heads."""
        base = WHAT.index(what) * self.tokens * self.heads
        if not len(codes):
            return codes[:, 0], torch.arange(codes.shape[1])
        tokens, heads = (codes - base) // self.heads, (codes - base) % self.heads
        one_token = ((tokens >= 0) & (tokens < self.tokens)).all() and (tokens == tokens[:, :1]).all()
        return (tokens[:, 0], heads[0]) if one_token and (heads == heads[0]).all() else None


def touched_rows(call: Call) -> tuple[Tensor, Tensor]:
    """The query rows of a call and their flags; rows of untouched blocks are left out."""
    work = call.work
    if isinstance(work, Tiles):
        busy = (work.by_query.counts() > 0).repeat_interleave(work.block)[: work.query_rows]
        rows = busy.nonzero().flatten()
        return rows, work.touch.repeat_interleave(work.block)[rows]
    rows = torch.cat([torch.arange(start, stop) for start, stop in work.queries.tolist()] or [torch.arange(0)])
    lengths = work.queries[:, 1] - work.queries[:, 0]
    return rows, work.touch.repeat_interleave(lengths)


def used_keys(call: Call, rows: int) -> Tensor:
    """Which key rows a call reads, bool [rows]."""
    used = torch.zeros(rows, dtype=torch.bool)
    work = call.work
    if isinstance(work, Tiles):
        busy = (work.by_key.counts() > 0).nonzero().flatten()
        for start, length in zip(work.key_row[busy].tolist(), work.key_len[busy].tolist(), strict=True):
            used[start : start + length] = True
    else:
        for start, stop in work.keys.tolist():
            used[start:stop] = True
    return used


def covered_pairs(call: Call, queries: int, rows: int) -> Tensor:
    """How often a call computes each pair, int32 [queries, key rows].

    Raises:
        ValueError: if the call says one thing to the forward pass and another to the backward pass.
    """
    work = call.work
    if not isinstance(work, Tiles):
        return _covered_varlen(work, queries, rows)
    # Key block j in columns of its own, then moved to the rows where it lies.
    place = work.key_row.long().unsqueeze(1) + torch.arange(work.block)
    real = (torch.arange(work.block) < work.key_len.unsqueeze(1)).flatten()
    width = len(work.key_row) * work.block
    found = covered(work.by_query, queries, width, work.block)
    if (found != covered(work.by_key, width, queries, work.block).T).any():
        raise ValueError("the tiles of a call by query and by key are not the same")
    if found[:, ~real].any():
        raise ValueError("a call computes pairs behind the end of a key block")
    count = torch.zeros(queries, rows, dtype=torch.int32)
    return count.index_add_(1, place.flatten()[real], found[:, real])


@dataclass(frozen=True)
class PairCounts:
    """`covered_pairs` by what a call is made of: passes and ranks often make calls over the same tiles."""

    known: dict[tuple[int, ...], Tensor]

    def of(self, call: Call, queries: int, rows: int) -> Tensor:
        """See `covered_pairs`. The calls must outlive this."""
        work = call.work
        if isinstance(work, Tiles):
            key = (*map(id, (work.by_query, work.by_key, work.key_row, work.key_len)), queries, rows)
        else:
            key = (id(work.queries), id(work.keys), int(work.band), queries, rows)
        if key not in self.known:
            self.known[key] = covered_pairs(call, queries, rows)
        return self.known[key]


def _covered_varlen(work: Varlen, queries: int, rows: int) -> Tensor:
    count = torch.zeros(queries, rows, dtype=torch.int32)
    for (q0, q1), (k0, k1) in zip(work.queries.tolist(), work.keys.tolist(), strict=True):
        part = torch.ones(q1 - q0, k1 - k0, dtype=torch.int32)
        causal = part.tril((k1 - k0) - (q1 - q0))
        count[q0:q1, k0:k1] += {Band.FULL: part, Band.CAUSAL: causal, Band.REVERSE_CAUSAL: part - causal}[work.band]
    return count
