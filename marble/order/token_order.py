"""A token order: which rank holds which tokens, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        start, stop, rank = self._columns
        tokens = self.storage.layout.tokens
        gapless = start[0] == 0 and stop[-1] == tokens and (start[1:] == stop[:-1]).all()
        if not gapless or not (start < stop).all():
            raise ValueError(f"order: pieces must cover the {tokens} stored tokens once, in rising order")
        if rank.min() < 0 or rank.max() >= self.world:
            raise ValueError(f"order: pieces must belong to ranks 0 to {self.world - 1}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # the rest derives from them

    @classmethod
    def of_blocks(cls, name: str, storage: Storage, world: int, ranks: Tensor, block: int) -> TokenOrder:
        """Blocks of ``block`` stored tokens, block i on rank ``ranks[i]``; neighbours on one rank become one piece."""
        rank = ranks.numpy()
        first = np.flatnonzero(np.append(True, rank[1:] != rank[:-1]))
        return cls(name, storage, world, _pieces(first * block, storage.layout.tokens, rank[first]))

    def split(self, parts: int) -> TokenOrder:
        """Every rank's tokens cut into ``parts`` even parts for neighbouring ranks: rank r's are the ranks r · parts
        and following. Parts differ by one token at most."""
        start, stop, _ = self._columns
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
        return TokenOrder(self.name, self.storage, self.world * parts, _pieces(low, stop[-1], rank))

    def segments(self, rank: int) -> Tensor:
        """A rank's pieces, int64 [its pieces, 2] of (first storage position, one past the last), rising."""
        return self.pieces[self.pieces[:, 2] == rank, :2]

    def shard(self, rank: int) -> Tensor:
        """Storage positions of a rank's tokens, int64 [its tokens]."""
        shard = self.shards[rank]
        return expand(shard.start, shard.stop)[1]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Every rank's tokens, as stretches of the storage order."""
        start, stop, rank = (column[self._rank_order] for column in self._columns)
        length, lengths = stop - start, np.array(self.lengths)
        row = length.cumsum() - length - (lengths.cumsum() - lengths)[rank]
        columns = torch.from_numpy(np.stack([start, stop, row])).to(self.storage.device, non_blocking=True)
        counts = np.bincount(rank, minlength=self.world).tolist()
        parts = zip(*(column.split(counts) for column in columns), self.lengths, strict=True)
        return tuple(Shard(*part) for part in parts)

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], ...]:
        """The columns of ``pieces``: many steps over them are small, and NumPy takes small steps sooner."""
        return tuple(self.pieces.numpy().T)

    @cached_property
    def _rank_order(self) -> NDArray[np.int64]:
        """The pieces, rank after rank."""
        rank = self._columns[2].astype(np.min_scalar_type(self.world))  # NumPy sorts short integers by radix
        return np.argsort(rank, kind="stable")

    def index(self, rank: int) -> Tensor:
        """Sequence positions of a rank's tokens, int64 [its tokens]."""
        return self.storage.sequence[self.shard(rank)]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every rank."""
        start, stop, rank = self._columns
        return tuple(np.bincount(rank, stop - start, self.world).astype(int).tolist())


def _pieces(start: NDArray[np.int64], stop: int, rank: NDArray[np.int64]) -> Tensor:
    """Pieces from where each begins, where the last one stops, and their ranks."""
    return torch.from_numpy(np.stack([start, np.append(start[1:], stop), rank])).T
