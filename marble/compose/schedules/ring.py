"""Ring attention: key/value shards travel from rank to rank, one hop per step.

Source: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
The carried fp32 state and the travelling fp32 gradients: MARBLE, section 03 (Luma AI, October 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from marble.compose.schedule import Add, Buffer, Call, Kind, Pass, Rows, Schedule, Step, Transfer
from marble.compose.schedules.touches import flag_touches, whole_blocks
from marble.kernels.contract import Work
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder


def ring(order: TokenOrder, mask: StoredMask, rank: int, block: int, heads: int, kv_heads: int) -> Schedule:
    """One rank's ring schedule.

    Forward, step s computes the rank's queries against the shard of rank (r − s) mod R while that shard moves on to
    the next rank. Backward, the shard's fp32 gradients follow it one step behind: each rank computes its share into
    a buffer of its own while the sum so far is on its way, adds that, and sends the result on. The local shard comes
    last, when the sum of all others is on its way home; the first hop of the keys has nothing to hide behind.

    Args:
        order: the token order; any one.
        mask: the mask over the stored tokens.
        rank: whose schedule to build.
        block: rows of a tile's block.
        heads: query heads.
        kv_heads: key/value heads.
    """
    tiles = mask.tiles_of(order.shards[rank], [order.shards[other] for other in sources(rank, order.world)], block)
    found = flag_touches(tiles)
    works = zip(found.calls, found.carries, found.busy, strict=True)
    steps = [[(work, carry)] if busy else [] for work, carry, busy in works]
    return rotate(Ring(rank, order.lengths, block, heads, kv_heads), steps, found.untouched)


def sources(rank: int, world: int) -> list[int]:
    """Whose keys a rank computes on, step by step."""
    return [(rank - step) % world for step in range(world)]


@dataclass(frozen=True)
class Ring:
    """Where a rank stands in a ring, and the sizes of what travels.

    Attributes:
        rank: the rank.
        lengths: tokens of every rank.
        block: shards lie apart in whole blocks of this many rows.
        heads: query heads.
        kv_heads: key/value heads.
    """

    rank: int
    lengths: tuple[int, ...]
    block: int
    heads: int
    kv_heads: int

    @property
    def slot(self) -> int:
        """Rows kept for one shard, whichever it is."""
        return whole_blocks(max(self.lengths), self.block)


def rotate(ring: Ring, works: Sequence[Sequence[tuple[Work, bool]]], untouched: tuple[Rows, ...]) -> Schedule:
    """The ring's schedule for given work.

    Args:
        ring: the rank and the sizes.
        works: for every step of `sources` the calls on that shard's keys, in order, and whether each carries state.
        untouched: rows of ``out`` and ``lse`` that no call touches.
    """
    return Schedule(ring.rank, ring.lengths, _forward(ring, works, untouched), _backward(ring, works))


def _forward(ring: Ring, works: Sequence[Sequence[tuple[Work, bool]]], untouched: tuple[Rows, ...]) -> Pass:
    rank, lengths, slot = ring.rank, ring.lengths, ring.slot
    world, mine, heads, kv_heads = len(lengths), lengths[rank], ring.heads, ring.kv_heads

    def resident(step: int, at: int) -> Rows:
        """Where the shard that rank ``at`` computes on in ``step`` lies: at home, then in two inboxes by turns."""
        base = 0 if step == 0 else slot * (2 - step % 2)
        return Rows("kv", base, base + lengths[(at - step) % world])

    steps = []
    for step in range(world):
        moves = _exchange(rank, world, partial(resident, step), partial(resident, step + 1))
        steps.append(
            Step(
                transfers=moves if step < world - 1 else (),
                clears=untouched if step == 0 else (),
                calls=tuple(Call(work, resident(step, rank), carries=carry) for work, carry in works[step]),
            )
        )
    buffers = (
        Buffer("q", Kind.TOKENS, mine, heads),
        _moving("kv", Kind.PAIRS, slot * min(world, 3), kv_heads, world),
        Buffer("out", Kind.TOKENS, mine, heads),
        Buffer("lse", Kind.STATISTICS, mine, heads),
    )
    return Pass(buffers, tuple(steps))


def _backward(ring: Ring, works: Sequence[Sequence[tuple[Work, bool]]]) -> Pass:
    rank, lengths, slot = ring.rank, ring.lengths, ring.slot
    world, mine, heads, kv_heads = len(lengths), lengths[rank], ring.heads, ring.kv_heads

    def keys(step: int, at: int) -> Rows:
        """Keys of the shard of rank (at − step): its home, then the inboxes by turns."""
        base = 0 if step % world == 0 else slot * (2 - step % 2)
        return Rows("kv", base, base + lengths[(at - step) % world])

    def sums(step: int, at: int) -> Rows:
        """Where rank ``at`` computes that shard's gradients: its home, or two buffers by turns."""
        base = 0 if step % world == 0 else slot * (2 - step % 2)
        return Rows("dkv", base, base + lengths[(at - step) % world])

    def inbox(step: int, at: int) -> Rows:
        """Where the sum of the ranks before ``at`` arrives."""
        return Rows("dkv", slot * 3, slot * 3 + lengths[(at - step) % world])

    # Step 0 only moves keys; step s computes the shard that is s hops from home; step R is the local shard.
    steps = []
    for step in range(world + 1 if world > 1 else 1):
        last = step == world or world == 1
        moves: tuple[Transfer, ...] = ()
        if step < world - 1:
            moves += _exchange(rank, world, partial(keys, step), partial(keys, step + 1))
        arrives = step >= 2
        if arrives:
            moves += _exchange(rank, world, partial(sums, step - 1), partial(inbox, step))
        clears: tuple[Rows, ...] = (Rows("dq", 0, mine),) if step == 0 else ()
        calls: tuple[Call, ...] = ()
        if step > 0 or last:
            clears += (sums(step, rank),)
            calls = tuple(Call(work, keys(step, rank), dkv=sums(step, rank)) for work, _ in works[step % world])
        adds = (Add(inbox(step, rank), sums(step, rank)),) if arrives else ()
        steps.append(Step(moves, clears, calls, adds))
    buffers = (
        Buffer("q", Kind.TOKENS, mine, heads),
        _moving("kv", Kind.PAIRS, slot * min(world, 3), kv_heads, world),
        Buffer("dout", Kind.TOKENS, mine, heads),
        Buffer("lse", Kind.STATISTICS, mine, heads),
        Buffer("delta", Kind.STATISTICS, mine, heads),
        Buffer("dq", Kind.TOKEN_SUMS, mine, heads),
        _moving("dkv", Kind.PAIR_SUMS, slot * (1 if world == 1 else 4), kv_heads, world),
    )
    return Pass(buffers, tuple(steps))


def _exchange(
    rank: int, world: int, leaves: Callable[[int], Rows], lands: Callable[[int], Rows]
) -> tuple[Transfer, ...]:
    """A rank's two parts in one hop around the ring: what it sends and what it receives, in one order for all."""
    moves = []
    for source in sorted({rank, (rank - 1) % world}):
        target = (source + 1) % world
        if len(leaves(source)):
            moves.append(Transfer(source, leaves(source), target, lands(target)))
    return tuple(moves)


def _moving(name: str, kind: Kind, rows: int, heads: int, world: int) -> Buffer:
    """A buffer of as many rows on every rank, which move unless there is one rank."""
    return Buffer(name, kind, rows, heads, whole=rows if world > 1 else 0)
