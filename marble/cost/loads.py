"""What every rank does in every step, in numbers that the constants of a machine turn into seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from marble.compose.cost import dense_counts, head_bytes, row_bytes, tile_counts
from marble.compose.schedule import Call, Pass, Schedule
from marble.cost.profile import Profile
from marble.cost.waiting import Array, ends
from marble.kernels.contract import Tiles, Touch


@dataclass(frozen=True, eq=False)
class Loads:
    """One pass of one layer: float64 [steps, ranks] each, or [steps, groups] for groups of ranks that share heads.

    Attributes:
        tiles: visited tiles, once for every query head.
        partial: those of them that are partial.
        units: forward, query blocks with a tile, once for every query head; backward, key blocks with a tile, once for
            every key/value head.
        memory: bytes of state and of sums that are read and written.
        inside: bytes that a rank sends to ranks of its node, or receives from them, whichever are more.
        across: the same of other nodes.
    """

    tiles: Array
    partial: Array
    units: Array
    memory: Array
    inside: Array
    across: Array

    @classmethod
    def zeros(cls, steps: int, ranks: int) -> Loads:
        """No load yet."""
        return cls(*np.zeros((6, steps, ranks)))

    def of_groups(self, degree: int) -> Loads:
        """The loads [steps, groups] of groups of ``degree`` neighbouring ranks that share heads: of each, the most that
        a rank of the group has. They compute the same; their transfers can differ."""
        steps, ranks = self.tiles.shape
        parts = (getattr(self, name).reshape(steps, ranks // degree, degree) for name in self.__dataclass_fields__)
        return Loads(*(part.max(2) for part in parts))


@dataclass(frozen=True, eq=False)
class Cost:
    """What a pass takes, in seconds.

    Attributes:
        steps: float64 [steps], how much later the last rank ends a step than the step before (`marble.cost.waiting`).
        compute: what the busiest rank computes.
        fixed: what steps with transfers take beside them, over all steps.
    """

    steps: Array
    compute: float
    fixed: float

    @property
    def exposed(self) -> float:
        """What waiting adds to that, for transfers and for other ranks."""
        return float(self.steps.sum()) - self.compute

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return float(self.steps.sum()) + self.fixed


def price(loads: Loads, profile: Profile, head_dim: int, block: int, *, backward: bool) -> Cost:
    """The cost of a pass. Arguments and errors as for `compute_seconds` and `transfer_seconds`."""
    compute = compute_seconds(loads, profile, head_dim, block, backward=backward)
    links = transfer_seconds(loads, profile)
    moving = int((links > 0).any(1).sum())
    last = ends(compute, links).max(1)
    return Cost(np.diff(last, prepend=0.0), float(compute.sum(0).max()), moving * (profile.step or 0.0))


def compute_seconds(loads: Loads, profile: Profile, head_dim: int, block: int, *, backward: bool) -> Array:
    """What every rank computes in every step of a pass, in seconds, float64 [steps, ranks].

    Args:
        loads: what its ranks do.
        profile: the machine.
        head_dim: size of a head.
        block: rows of a tile's block; ragged tiles take as long as whole ones.
        backward: whether it is a backward pass: five products for each tile instead of two.

    Raises:
        ProfileError: if the profile does not know the head size.
    """
    partial, unit = (
        (profile.backward_partial, profile.backward_unit)
        if backward
        else (profile.forward_partial, profile.forward_unit)
    )
    per_tile = (10 if backward else 4) * block**2 * head_dim / profile.rates(head_dim)[backward]
    work = loads.tiles + (partial - 1) * loads.partial + unit * loads.units
    return work * per_tile + loads.memory / profile.memory


def transfer_seconds(loads: Loads, profile: Profile) -> Array:
    """What every rank's transfers of every step take, in seconds, float64 [steps, ranks].

    Raises:
        ProfileError: if there is more than one node to cross, and the profile has no bandwidth between them.
    """
    links = loads.inside / profile.inside
    if loads.across.any():
        links = links + loads.across / profile.bandwidth_across
    return links


def loads_of(
    schedules: Sequence[Schedule], head_dim: int, gpus_per_node: int, itemsize: int = 2, *, block: int, backward: bool
) -> Loads:
    """The loads of all ranks' schedules, counted call by call and transfer by transfer.

    Args:
        schedules: one per rank.
        head_dim: size of a head.
        gpus_per_node: ranks of a node; neighbours share one.
        itemsize: bytes per element of the inputs.
        block: rows of the tiles that a dense call counts as.
        backward: which pass.
    """
    which: Callable[[Schedule], Pass] = (lambda s: s.backward) if backward else (lambda s: s.forward)
    steps = max(len(which(schedule).steps) for schedule in schedules)
    found = Loads.zeros(steps, len(schedules))
    sent = np.zeros((2, 2, steps, len(schedules)))  # received or sent, inside or across
    for schedule in schedules:
        declared, rank = which(schedule), schedule.rank
        buffers = declared.buffers_by_name
        for number, step in enumerate(declared.steps):
            for call in step.calls:
                heads, kv_heads = buffers[call.q].heads, buffers[call.kv.buffer].heads
                tiles, partial, units, state = _call(call, block, backward=backward)
                found.tiles[number, rank] += tiles * heads
                found.partial[number, rank] += partial * heads
                found.units[number, rank] += units * (kv_heads if backward else heads)
                width = 4 * (2 * head_dim * kv_heads if backward else (head_dim + 2) * heads)
                found.memory[number, rank] += state * width
            for rows in step.clears:
                found.memory[number, rank] += row_bytes(buffers[rows.buffer], rows, head_dim, itemsize)
            for add in step.adds:
                found.memory[number, rank] += 3 * row_bytes(buffers[add.dst.buffer], add.dst, head_dim, itemsize)
            for move in step.transfers:
                if move.source == move.target:
                    continue
                received = move.target == rank
                rows = move.dst if received else move.src
                far = move.source // gpus_per_node != move.target // gpus_per_node
                sent[int(received), int(far), number, rank] += row_bytes(buffers[rows.buffer], rows, head_dim, itemsize)
    found.inside[:], found.across[:] = sent.max(0)
    return found


def memory_of(which: Pass, head_dim: int, itemsize: int = 2) -> int:
    """Bytes of a pass's buffers, and of the state that its calls carry."""
    total = sum(buffer.rows * buffer.heads * head_bytes(buffer.kind, head_dim, itemsize) for buffer in which.buffers)
    carried = {call.q for step in which.steps for call in step.calls if call.carries}
    queries = (which.buffers_by_name[name] for name in carried)
    return total + sum(buffer.rows * buffer.heads * 4 * (head_dim + 2) for buffer in queries)


def _call(call: Call, block: int, *, backward: bool) -> tuple[int, int, int, float]:
    """Visited tiles, partial ones, outer blocks, and rows of state that are read and written (both count)."""
    work = call.work
    if isinstance(work, Tiles):
        visited, partial, _, touched = tile_counts(work).tolist()
        if backward:
            units = int((work.by_key.counts() > 0).sum())
            return visited, partial, units, 2.0 * units * block
        some = (work.by_query.counts() > 0).numpy()
        touch = work.touch.numpy()[some]
        moved = ((touch & Touch.FIRST) == 0).sum() + ((touch & Touch.LAST) == 0).sum()
        return visited, partial, touched, float(moved * block)
    visited, partial, _, touched = dense_counts(work, block).tolist()
    rows, keys = ((ends[:, 1] - ends[:, 0]).numpy() for ends in (work.queries, work.keys))
    if backward:
        units = int((-(-keys[rows > 0] // block)).sum())
        return visited, partial, units, 2.0 * units * block
    touch = work.touch.numpy()
    moved = rows * (((touch & Touch.FIRST) == 0).astype(int) + ((touch & Touch.LAST) == 0))
    return visited, partial, touched, float(moved.sum())
