"""The loads of every kind of schedule from counts between ranks, without building one.

Each function follows a builder of `marble.compose.schedules` step by step; tests hold them to the loads of what it
builds. With Ulysses, ranks here are groups: the ranks of a group do the same with different heads.

Under orders of whole stored blocks (`ptrr`, `contiguous`) the tiles, partial tiles and units of calls over tiles are
equal to those. Bytes and memory are too, except:

* A ring's backward steps in which keys and their gradients both move: the most of each is added, which is more than the
  most of their sum when shards are unequal.
* State is spread over the forward calls of a rank by their query blocks; over the pass its bytes are equal. The sparse
  all-to-all's is counted half in each step.
* Forward, clearing the rows that see nothing (padding) is not counted.
* The all-to-alls and buffers of Ulysses are those of a mean rank of the group, whose tokens may be uneven.
* Where nodes cut groups at uneven places, all hops between two groups are across if any is, and every group has as many
  ranks outside its node as the one that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from marble.compose.schedules.ulysses import HeadSplit
from marble.cost.counts import Counts, PairCounts
from marble.cost.loads import Loads
from marble.cost.waiting import Array


@dataclass(frozen=True)
class Place:
    """How ranks are laid out, and what a row of theirs weighs.

    Attributes:
        groups: number of groups of ranks that share heads.
        split: heads of the layer, and how each group splits them.
        head_dim: size of a head.
        gpus_per_node: ranks of a node; neighbours share one.
        block: rows of a tile's block.
        itemsize: bytes per element of the inputs.
    """

    groups: int
    split: HeadSplit
    head_dim: int
    gpus_per_node: int
    block: int
    itemsize: int = 2

    @cached_property
    def far(self) -> NDArray[np.bool_]:
        """Whether ranks of two groups that exchange rows lie in different nodes, bool [groups, groups]."""
        node = np.arange(self.groups * self.split.degree).reshape(self.groups, -1) // self.gpus_per_node
        return (node[:, None] != node[None, :]).any(2)

    @cached_property
    def outside(self) -> float:
        """Share of the other ranks of a group that lie in another node, for the rank that has most."""
        degree = self.split.degree
        node = np.arange(self.groups * degree).reshape(self.groups, -1) // self.gpus_per_node
        return float((node[:, :, None] != node[:, None, :]).sum(2).max()) / max(degree - 1, 1)

    @property
    def queries(self) -> int:
        """Numbers of a row of a rank's query heads."""
        return self.split.inner_heads * self.head_dim

    @property
    def pairs(self) -> int:
        """Numbers of a row of its keys and values."""
        return 2 * self.split.inner_kv_heads * self.head_dim

    @property
    def state(self) -> int:
        """Bytes of the state of a row."""
        return 4 * self.split.inner_heads * (self.head_dim + 2)

    def whole(self, rows: Counts) -> Counts:
        """Rows in whole blocks."""
        return -(-rows // self.block) * self.block


@dataclass(frozen=True, eq=False)
class Estimate:
    """The loads of a layer's passes, and what its buffers take.

    Attributes:
        forward: [steps, groups].
        backward: [steps, groups].
        memory: bytes of the buffers of the fullest rank, in the pass that needs more.
    """

    forward: Loads
    backward: Loads
    memory: float


def ring(counts: PairCounts, place: Place) -> Estimate:
    """Every shard visits every rank; see `marble.compose.schedules.ring`. From dense counts, the chunked ring."""
    ranks, tokens = place.groups, counts.tokens.astype(np.float64)
    rank = np.arange(ranks)
    # In step s rank r computes on the keys of rank r − s; backward, its own keys come last.
    keys = (rank - rank[:, None]) % ranks
    shard, sums = place.itemsize * place.pairs * tokens[keys], 4 * place.pairs * tokens[keys]
    ahead, back = Loads.zeros(ranks, ranks), Loads.zeros(ranks + (ranks > 1), ranks)
    _compute(
        ahead, slice(None), counts.tiles[rank, keys], counts.partial[rank, keys], counts.query_blocks[rank, keys], place
    )
    # Of a query block's touches the first reads no state, and the last leaves none.
    carried = 2 * (1 - counts.touched / np.maximum(counts.query_blocks.sum(1), 1))
    ahead.memory[:] += carried * counts.query_blocks[rank, keys] * place.block * place.state
    _hop(ahead, slice(ranks - 1), shard[:-1], place)
    _hop(back, slice(ranks - 1), shard[:-1], place)
    turn = np.roll(np.arange(ranks), -1)
    computes, at = slice(min(1, ranks - 1), None), keys[turn]
    _add(back, computes, counts.tiles[rank, at], counts.partial[rank, at], counts.key_blocks[rank, at], place)
    back.memory[computes] += sums[turn]
    back.memory[0] += 4 * place.queries * tokens
    back.memory[2:] += 3 * sums[turn[1:]]
    _hop(back, slice(2, None), sums[1:], place)
    slot = float(place.whole(counts.tokens).max())
    key_rows = np.full(ranks, slot * min(ranks, 3))
    sum_rows = np.full(ranks, slot * (4 if ranks > 1 else 1))
    return _finish(ahead, back, counts, place, key_rows, sum_rows, carries=ranks > 1)


def sparse_a2a(counts: PairCounts, place: Place) -> Estimate:
    """Each rank fetches the key blocks that its queries see; see `marble.compose.schedules.fetch`."""
    rank = np.arange(place.groups)
    own = {name: getattr(counts, name)[rank, rank] for name in ("tiles", "partial", "query_blocks", "key_blocks")}
    other = {name: getattr(counts, name).sum(1) - own[name] for name in own}
    ahead, back = Loads.zeros(2, place.groups), Loads.zeros(3, place.groups)
    twice = own["query_blocks"] + counts.remote - counts.touched
    for step, (part, blocks) in enumerate(((own, own["query_blocks"]), (other, counts.remote))):
        _compute(ahead, step, part["tiles"], part["partial"], blocks, place)
        ahead.memory[step] += twice * place.block * place.state
    for step, part in ((1, other), (2, own)):
        _add(back, step, part["tiles"], part["partial"], part["key_blocks"], place)
    fetched = counts.key_rows * (1 - np.eye(place.groups, dtype=np.int64))
    return _exchanged(ahead, back, fetched, counts, place, carries=bool(twice.any()))


def all_gather(counts: PairCounts, place: Place) -> Estimate:
    """Every rank fetches every key and makes one call; see `marble.compose.schedules.fetch`."""
    ahead, back = Loads.zeros(2, place.groups), Loads.zeros(3, place.groups)
    tiles, partial = counts.tiles.sum(1), counts.partial.sum(1)
    _compute(ahead, 1, tiles, partial, counts.touched, place)
    _add(back, 1, tiles, partial, counts.key_blocks.sum(1), place)
    fetched = counts.tokens * (1 - np.eye(place.groups, dtype=np.int64))
    return _exchanged(ahead, back, fetched, counts, place, carries=False)


ESTIMATES: Mapping[str, Callable[[PairCounts, Place], Estimate]] = {
    "ring": ring,
    "sparse_a2a": sparse_a2a,
    "chunked": ring,
    "all_gather": all_gather,
}
"""By the names of schedules. `chunked` takes dense counts."""


def _compute(loads: Loads, step: int | slice, tiles: Counts, partial: Counts, blocks: Counts, place: Place) -> None:
    """A forward call of every rank."""
    heads = place.split.inner_heads
    loads.tiles[step] += tiles * heads
    loads.partial[step] += partial * heads
    loads.units[step] += blocks * heads


def _add(loads: Loads, step: int | slice, tiles: Counts, partial: Counts, blocks: Counts, place: Place) -> None:
    """A backward call of every rank, which adds to the gradients of the key blocks that it sees."""
    loads.tiles[step] += tiles * place.split.inner_heads
    loads.partial[step] += partial * place.split.inner_heads
    loads.units[step] += blocks * place.split.inner_kv_heads
    loads.memory[step] += 2 * 4 * place.pairs * place.block * blocks


def _hop(loads: Loads, steps: slice, sent: Array, place: Place) -> None:
    """Every rank sends bytes to the next, [steps, ranks]."""
    far = np.diagonal(np.roll(place.far, -1, 1))
    for total, chosen in ((loads.inside, ~far), (loads.across, far)):
        leaves = sent * chosen
        total[steps] += np.maximum(leaves, np.roll(leaves, 1, 1))


def _exchanged(
    ahead: Loads, back: Loads, fetched: Counts, counts: PairCounts, place: Place, *, carries: bool
) -> Estimate:
    """An all-to-all around the calls: keys before, float32 gradients home in the last backward step.

    ``fetched`` [readers, owners] is rows.
    """
    for total, chosen in (("inside", ~place.far), ("across", place.far)):
        rows = fetched * chosen
        most = np.maximum(rows.sum(1), rows.sum(0)) * place.pairs
        getattr(ahead, total)[0] += place.itemsize * most
        getattr(back, total)[0] += place.itemsize * most
        getattr(back, total)[2] += 4 * most
    areas = place.whole(counts.tokens) + place.whole(fetched).sum(1)
    back.memory[0] += 4 * (place.queries * counts.tokens + place.pairs * areas)
    back.memory[2] += 3 * 4 * place.pairs * fetched.sum(0)
    inbox = place.whole(fetched).sum(0)
    return _finish(ahead, back, counts, place, areas, areas + inbox, carries=carries)


def _finish(
    ahead: Loads,
    back: Loads,
    counts: PairCounts,
    place: Place,
    key_rows: Array | Counts,
    sum_rows: Array | Counts,
    *,
    carries: bool,
) -> Estimate:
    """The all-to-alls of Ulysses around both passes, and the bytes of all buffers."""
    tokens, item, heads = counts.tokens.astype(np.float64), place.itemsize, place.split.inner_heads
    queries, pairs = place.queries, place.pairs
    first = tokens * (2 * item * queries + 4 * heads) + item * pairs * key_rows
    second = tokens * (2 * item * queries + 8 * heads + 4 * queries) + pairs * (item * key_rows + 4 * sum_rows)
    first = first + carries * tokens * place.state
    if (degree := place.split.degree) > 1:
        mine, layer = tokens / degree, place.split
        ahead = _around(ahead, item * (queries + pairs), item * queries + 4 * heads, tokens, place)
        back = _around(back, item * (2 * queries + pairs) + 8 * heads, 4 * (queries + pairs), tokens, place)
        copies = 2 * 4 * layer.copies * place.head_dim
        back.memory[-1] += 3 * copies * mine
        both = layer.heads * place.head_dim, 2 * layer.kv_heads * place.head_dim
        first = first + mine * (item * (2 * both[0] + both[1]) + 4 * layer.heads)
        second = second + mine * (item * (2 * both[0] + both[1]) + 8 * layer.heads + 4 * sum(both) + copies)
    return Estimate(ahead, back, float(np.maximum(first, second).max()))


def _around(loads: Loads, before: float, behind: float, tokens: Array, place: Place) -> Loads:
    """A pass between two all-to-alls inside each group; ``before`` and ``behind`` are bytes of a token's part of the
    heads that one rank computes."""
    degree = place.split.degree
    remote = tokens * (degree - 1) / degree
    moved = np.stack([before * remote, behind * remote])
    ends = {"inside": moved * (1 - place.outside), "across": moved * place.outside}
    padded = {
        name: np.concatenate([ends[name][:1], getattr(loads, name), ends[name][1:]])
        if name in ends
        else np.pad(getattr(loads, name), ((1, 1), (0, 0)))
        for name in loads.__dataclass_fields__
    }
    return Loads(**padded)
