"""What a plan costs, counted from its schedules: work per rank and step, bytes, tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble.compose.schedule import Buffer, Kind, Pass, Rows, Schedule
from marble.kernels.contract import MAX_BLOCK, Band, Tiles, Varlen


@dataclass(frozen=True, eq=False)
class Summary:
    """The cost of one layer over all ranks. All schemes synchronise after every step.

    Attributes:
        tokens: tokens of each rank, int64 [ranks].
        visited: tiles of each rank's forward calls, int64 [ranks, steps].
        partial: those of them that are partial, int64 [ranks, steps].
        runs: runs of full tiles, int64 [ranks, steps].
        touches: query blocks touched, int64 [ranks, steps].
        forward_bytes: bytes that each rank receives in the forward pass, int64 [ranks].
        backward_bytes: the same for the backward pass.
    """

    tokens: Tensor
    visited: Tensor
    partial: Tensor
    runs: Tensor
    touches: Tensor
    forward_bytes: Tensor
    backward_bytes: Tensor

    @property
    def total_balance(self) -> float:
        """Work of the busiest rank over the mean."""
        return _over_mean(self.visited.sum(1))

    @property
    def step_balance(self) -> float:
        """Σ over steps of the busiest rank's work, over the mean rank's total: what a ring pays."""
        mean = self.visited.sum(1).double().mean().item()
        return self.visited.amax(0).sum().item() / mean if mean else 1.0

    @property
    def token_balance(self) -> float:
        """Tokens of the fullest rank over the mean."""
        return _over_mean(self.tokens)

    @property
    def partial_share(self) -> float:
        """Partial tiles over visited tiles."""
        visited = self.visited.sum().item()
        return self.partial.sum().item() / visited if visited else 0.0


def summarise(schedules: Sequence[Schedule], head_dim: int, itemsize: int = 2, block: int = MAX_BLOCK) -> Summary:
    """Count the work and the bytes of all ranks' schedules.

    Args:
        schedules: one per rank.
        head_dim: size of a head.
        itemsize: bytes per element of the inputs; sums across ranks are float32.
        block: rows of the tiles that a dense call counts as; a call over tiles has its own.
    """
    counts = torch.zeros(4, len(schedules), max(len(s.forward.steps) for s in schedules), dtype=torch.int64)
    for rank, schedule in enumerate(schedules):
        for number, step in enumerate(schedule.forward.steps):
            for call in step.calls:
                counts[:, rank, number] += (
                    tile_counts(call.work) if isinstance(call.work, Tiles) else dense_counts(call.work, block)
                )
    received = [
        torch.tensor([_received(schedule.rank, which(schedule), head_dim, itemsize) for schedule in schedules])
        for which in (lambda schedule: schedule.forward, lambda schedule: schedule.backward)
    ]
    return Summary(torch.tensor(schedules[0].tokens), *counts, *received)


def tile_counts(work: Tiles) -> Tensor:
    """Visited tiles, partial tiles, runs and touched query blocks of a call, int64 [4]."""
    tiles = work.by_query
    return torch.tensor([work.visited, tiles.partial, len(tiles.runs), int((tiles.counts() > 0).sum())])


def dense_counts(work: Varlen, block: int) -> Tensor:
    """The same for a dense call, with every sequence cut into blocks from its first query and its first key."""
    rows, keys = (ends[:, 1].long() - ends[:, 0].long() for ends in (work.queries, work.keys))
    blocks = -(-rows // block)
    first = torch.arange(int(blocks.sum())) - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
    rows, keys = torch.repeat_interleave(rows, blocks), torch.repeat_interleave(keys, blocks)
    first, whole = first * block, (first + 1) * block <= rows
    last = torch.minimum(first + block, rows) - 1
    # Keys that some row of a query block sees, [some, end), and that all its rows see, [every, until).
    some, every, end, until = torch.zeros_like(keys), torch.zeros_like(keys), keys, keys
    if work.band is Band.CAUSAL:
        end, until = ((row + keys - rows + 1).clamp(min=0) for row in (last, first))
    elif work.band is Band.REVERSE_CAUSAL:
        some, every = ((row + keys - rows + 1).clamp(min=0) for row in (first, last))
    visited = torch.where(some < end, -(-end // block) - some // block, 0)
    full = torch.where(whole, (until // block + every.neg() // block).clamp(min=0), 0)
    touched = len(visited)
    return torch.tensor([int(visited.sum()), int((visited - full).sum()), int((full > 0).sum()), touched])


def _received(rank: int, which: Pass, head_dim: int, itemsize: int) -> int:
    buffers = {buffer.name: buffer for buffer in which.buffers}
    total = 0
    for step in which.steps:
        for transfer in step.transfers:
            if transfer.target == rank != transfer.source:
                total += row_bytes(buffers[transfer.dst.buffer], transfer.dst, head_dim, itemsize)
    return total


def row_bytes(buffer: Buffer, rows: Rows, head_dim: int, itemsize: int) -> int:
    """Bytes of some rows of a buffer, of all heads or of those that the rows name."""
    heads = buffer.heads if rows.heads is None else rows.heads[1] - rows.heads[0]
    return len(rows) * heads * head_bytes(buffer.kind, head_dim, itemsize)


def head_bytes(kind: Kind, head_dim: int, itemsize: int) -> int:
    """Bytes of one head in a row of a kind; sums across ranks are float32."""
    return kind.values(head_dim) * (4 if kind.accumulates else itemsize)


def _over_mean(values: Tensor) -> float:
    mean = values.double().mean().item()
    return values.max().item() / mean if mean else 1.0
