"""Waiting for one's turn to add to global memory, by tickets and counters (`marble.kernels.cute.tickets`).

A unit adds when a counter has reached its ticket, and raises the counter when it has added. What the next one adds is
then added behind it, because:

* Who raises a counter has a fence in front, and has waited for all that it answers for: a warp for its reductions by
  the copy engine, until they are done and not only read; a group for its threads' reductions, at a barrier.
* Who waits has a fence behind, and a group a barrier behind that. Raising and reading the counter are relaxed, so the
  two fences make the former's sums happen before the latter's, and memory adds to a word in that order. The fence in
  front of a counter cannot be left out: without it, though reductions are done, bits differed from run to run.
* The copy engine works by another proxy. The end of its work, once it has been waited for, is a fence between the
  proxies; in front of more work `before_copies` is one. So the chain is: reductions, wait for their end, fence, raise;
  read, fence, fence between proxies, reductions.

Of a group one thread reads the counter, and the others wait at a hardware barrier; the dQ warp's lanes all read it.
"""

import cutlass
from cutlass import Boolean, Int32, cute

from marble.kernels.cute.backward_config import UNIT_SLOTS, Field, Shared
from marble.kernels.cute.binding import GROUP, Lists
from marble.kernels.cute.intrinsics import load_counter, math_thread, raise_counter


@cute.jit
def await_turn(counter: cute.Pointer, ticket: Int32, reached: Int32) -> None:
    """Wait until it is the turn of ``ticket``; ``reached``: what the counter was when it was last read."""
    while reached < ticket:
        reached = load_counter(counter)
    cute.arch.fence_acq_rel_gpu()


# dQ by the copy engine, from one warp --------------------------------------------------------------------------------


@cute.jit
def tickets_from(lists: Lists, place: Int32) -> tuple[Int32, Int32]:
    """Of 32 tiles from a place on, one per lane: the number of the query tile, and the ticket."""
    number, ticket, own = Int32(0), Int32(0), place + cute.arch.lane_idx()
    if own < lists.order.tickets.shape[0]:
        number, ticket = lists.order.tickets[own, 0], lists.order.tickets[own, 1]
    return number, ticket


@cute.jit
def end_copies(lists: Lists, open_turn: Int32) -> None:
    """Wait until all reductions of this warp are done, and raise the counter that they were for, if it is not −1.

    The fence is also behind what the warp has read of another counter before.
    """
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
    cute.arch.fence_acq_rel_gpu()
    if open_turn >= 0:
        with cute.arch.elect_one():
            raise_counter(lists.order.served.iterator + open_turn, 1)


@cute.jit
def before_copies() -> None:
    """Behind `await_turn`, in front of a reduction by the copy engine. The lanes meet."""
    cute.arch.sync_warp()
    cute.arch.fence_proxy("async.global")


# By the threads of a group -------------------------------------------------------------------------------------------


def leads() -> Boolean:
    """Whether this is the first thread of its group."""
    return math_thread() & (GROUP - 1) == 0


@cute.jit
def end_turn(counter: cute.Pointer, by: Int32) -> None:
    """Raise a counter. By one thread, behind a barrier that all threads have reached which have added."""
    cute.arch.fence_acq_rel_gpu()
    raise_counter(counter, by)


# dK and dV, which each math group adds -------------------------------------------------------------------------------


@cute.jit
def unit_tickets(
    lists: Lists,
    unit: Int32,
    kv_head: Int32,
    head: Int32,
    heads: Int32,
    group: Int32,
    groups: cutlass.Constexpr[int],
) -> list[Int32]:
    """`Field.KEY_COUNTER`, `Field.KEY_TICKET` and `Field.TICKET` of a row of `Ordered.units`, for ``heads`` query heads
    from ``head`` on, of the ``group`` of a key/value head. The counter counts heads, once for every math group."""
    counter, own, first = (lists.order.units[unit, i] for i in range(3))
    ticket = Int32(-1)
    if own >= 0 or heads < group:
        ticket = (cutlass.max(own, 0) * group + head) * groups
    return [kv_head * lists.order.keys_served.shape[1] + counter, ticket, first]


@cute.jit
def await_key_turn(lists: Lists, shared: Shared, turn: Int32, barrier: cutlass.Constexpr[int]) -> None:
    """Wait until it is a math group's turn to add dK and dV of a unit: all groups of the units before have added then.

    ``barrier``: the first group's.
    """
    ticket = shared.units[Field.KEY_TICKET, turn % UNIT_SLOTS]
    if ticket >= 0:
        if leads():
            counter = _key_counter(lists, shared, turn)
            await_turn(counter, ticket, load_counter(counter))
        cute.arch.barrier(barrier_id=barrier + (math_thread() >> 7), number_of_threads=GROUP)


@cute.jit
def end_key_turn(lists: Lists, shared: Shared, turn: Int32, barrier: cutlass.Constexpr[int]) -> None:
    """A math group has added dK and dV of a unit."""
    if shared.units[Field.KEY_TICKET, turn % UNIT_SLOTS] >= 0:
        cute.arch.barrier(barrier_id=barrier + (math_thread() >> 7), number_of_threads=GROUP)
        if leads():
            end_turn(_key_counter(lists, shared, turn), shared.units[Field.HEADS, turn % UNIT_SLOTS])


def _key_counter(lists: Lists, shared: Shared, turn: Int32) -> cute.Pointer:
    return lists.order.keys_served.iterator + shared.units[Field.KEY_COUNTER, turn % UNIT_SLOTS]
