"""A token order: which rank holds which tokens, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marble.layout import CPU
from marble.mask.shards import Shard, expand
from marble.mask.storage import Storage


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Pieces of the storage order dealt to ranks; a rank keeps its pieces in storage order.

    Attributes:
        name: how the pieces were dealt.
        storage: the storage order.
        world: number of ranks. Ranks may stay without tokens.
        pieces: int64 [pieces, 3] of (first storage position, one past the last, rank), rising and without gaps.
    """

    name: str
    storage: Storage
    world: int
    pieces: Tensor

    def __post_init__(self) -> None:
        start, stop, rank = self.pieces.T
        tokens = self.storage.layout.tokens
        gapless = start[0] == 0 and stop[-1] == tokens and bool((start[1:] == stop[:-1]).all())
        if not gapless or not bool((start < stop).all()):
            raise ValueError(f"order: pieces must cover the {tokens} stored tokens once, in rising order")
        if int(rank.min()) < 0 or int(rank.max()) >= self.world:
            raise ValueError(f"order: pieces must belong to ranks 0 to {self.world - 1}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # the rest derives from them

    @classmethod
    def of_blocks(cls, name: str, storage: Storage, world: int, ranks: Tensor, block: int) -> TokenOrder:
        """Blocks of ``block`` stored tokens, block i on rank ``ranks[i]``; neighbours on one rank become one piece."""
        tokens = storage.layout.tokens
        rank, count = torch.unique_consecutive(ranks, return_counts=True)
        stop = (count.cumsum(0) * block).clamp(max=tokens)
        start = torch.cat([stop.new_zeros(1), stop[:-1]])
        return cls(name, storage, world, torch.stack([start, stop, rank], 1))

    def split(self, parts: int) -> TokenOrder:
        """Every rank's tokens cut into ``parts`` even parts for neighbouring ranks: rank r's are the ranks r · parts
        and following. Parts differ by one token at most."""
        start, stop, _ = self.pieces.numpy().T
        # Rows count over the tokens of all ranks, rank after rank; every part begins at a row.
        length, lengths = (stop - start)[self._rank_order], np.array(self.lengths)
        row = length.cumsum() - length
        cuts = ((lengths.cumsum() - lengths)[:, None] + np.arange(parts) * lengths[:, None] // parts).flatten()
        part = np.flatnonzero(np.diff(cuts, append=lengths.sum()))
        cuts = cuts[part]
        # The first piece that begins in each part; a part that begins inside a piece cuts that one.
        first = np.searchsorted(row, cuts)
        rank = np.empty_like(start)
        rank[self._rank_order] = np.repeat(part, np.diff(first, append=len(row)))
        holder = np.searchsorted(row, cuts, side="right") - 1
        inside = row[holder] < cuts
        cut_at = start[self._rank_order[holder[inside]]] + (cuts - row[holder])[inside]
        order = np.argsort(cut_at)
        place = np.searchsorted(start, cut_at[order])
        low, rank = np.insert(start, place, cut_at[order]), np.insert(rank, place, part[inside][order])
        pieces = torch.from_numpy(np.stack([low, np.append(low[1:], stop[-1:]), rank], 1))
        return TokenOrder(self.name, self.storage, self.world * parts, pieces)

    def segments(self, rank: int) -> Tensor:
        """A rank's pieces, int64 [its pieces, 2] of (first storage position, one past the last), rising."""
        return self.pieces[self.pieces[:, 2] == rank, :2]

    def shard(self, rank: int) -> Tensor:
        """Storage positions of a rank's tokens, int64 [its tokens]."""
        shard = self.shards[rank]
        return expand(shard.start, shard.stop - shard.start)[1]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Every rank's tokens, as stretches of the storage order."""
        start, stop, rank = self.pieces[torch.from_numpy(self._rank_order)].T
        length, lengths = stop - start, torch.tensor(self.lengths, device=CPU)
        row = length.cumsum(0) - length - (lengths.cumsum(0) - lengths)[rank]
        columns = torch.stack([start, stop, row]).to(self.storage.device, non_blocking=True)
        counts = torch.bincount(rank, minlength=self.world).tolist()
        parts = zip(*(column.split(counts) for column in columns), self.lengths, strict=True)
        return tuple(Shard(*part) for part in parts)

    @cached_property
    def _rank_order(self) -> NDArray[np.int64]:
        """The pieces, rank after rank."""
        rank = self.pieces[:, 2].numpy().astype(np.min_scalar_type(self.world))  # NumPy sorts short integers by radix
        return np.argsort(rank, kind="stable")

    def index(self, rank: int) -> Tensor:
        """Sequence positions of a rank's tokens, int64 [its tokens]."""
        return self.storage.sequence[self.shard(rank)]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every rank."""
        start, stop, rank = self.pieces.T
        return tuple(stop.new_zeros(self.world).index_add_(0, rank, stop - start).tolist())
