"""Which units of work a thread block computes: it takes them from a counter in device memory, in the order of the list.

A unit is an item of a work list with one head, or some. Units of a section come together, and in it those of a head,
so that thread blocks that run at the same time read the same keys and values (or queries) from the L2 cache.
"""

from functools import lru_cache

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from flash_attn.cute import utils
from torch import Tensor

from marble.kernels.cute.binding import Lists


@cute.jit
def unit_at(lists: Lists, number: Int32, kv_heads: Int32, group: Int32, begin: Int32 = 0):
    """The item, key/value head and place in its ``group`` of query heads of a unit, of items × kv_heads × group, where
    items are those of a list from ``begin`` on.

    The order is: section, key/value head, item, place in the group.
    """
    section = begin + number // (kv_heads * group)
    first, items = lists.sections[section, 0], lists.sections[section, 1]
    place = number - first * kv_heads * group
    kv_head = place // (items * group)
    place -= kv_head * items * group
    item = place // group
    return begin + first + item, kv_head, place - item * group


@cute.jit
def fetch(counter: cute.Tensor, units: Int32, dealt: cutlass.Constexpr[bool] = True) -> Int32:
    """The number of the next unit for this thread block; by a whole warp.

    If units are ``dealt``, it began with the unit of its own number. Otherwise it fetches the first one, too, so that
    those which thread blocks have are the first ones, however late some thread blocks may begin.

    At or above ``units`` there is none, and the thread block must not fetch again: as every one fetches once in vain,
    the last fetch of a launch is known, and sets the counter back to 0.
    """
    fetched = Int32(0)
    fetches = units if const_expr(dealt) else units + cute.arch.grid_dim()[0]
    if cute.arch.lane_idx() == 0:
        fetched = utils.atomic_add_i32(1, counter.iterator)
        if fetched == fetches - 1:
            counter[0] = Int32(0)
    if const_expr(not dealt):
        return cute.arch.shuffle_sync(fetched, 0)
    return cute.arch.shuffle_sync(fetched, 0) + cute.arch.grid_dim()[0]


def counter_of(device: torch.device) -> Tensor:
    """The counter of the launches on a device's current stream, int32 [1]. A launch leaves it at 0, as it found it."""
    return _counter_of(device, torch.cuda.current_stream(device).cuda_stream)


@lru_cache
def _counter_of(device: torch.device, stream: int) -> Tensor:
    del stream
    return torch.zeros(1, dtype=torch.int32, device=device)
