"""The backward pass: one kernel for each head dimension, compiled once per process and launched on a list of work."""

from functools import lru_cache
from typing import Any

import torch
from cutlass import Float32, Int32, cute
from torch import Tensor

from marble.kernels.cute.backward_config import BackwardConfig, Gradients, Units, plan_units, plan_units_in_order
from marble.kernels.cute.backward_sm90 import BackwardSm90
from marble.kernels.cute.backward_split_sm90 import PASSES, BackwardSplitSm90, SplitConfig
from marble.kernels.cute.binding import ELEMENTS, Tickets, compiled, fake, fake_lists, lists_of
from marble.kernels.cute.tickets import ordered
from marble.kernels.cute.units import counter_of
from marble.kernels.cute.worklist import WorkList, WorkLists


@lru_cache
def compile_backward(dtype: torch.dtype, head_dim: int, deterministic: bool = False, rounds: bool = False) -> Any:
    """The backward kernel for every size, stride, scale and mask. Needs no GPU; compiled once per process."""
    kind, sym = ELEMENTS[dtype], cute.sym_int
    key_gradient = kind if rounds else Float32
    queries, keys, heads, kv_heads = sym(), sym(), sym(), sym()
    query, key = (queries, heads, head_dim), (keys, kv_heads, head_dim)
    return compiled(
        BackwardSm90(kind, BackwardConfig(head_dim, deterministic, rounds)),
        *(fake(kind, *shape) for shape in (query, key, key, query)),
        *(fake(Float32, heads, queries, aligned=False) for _ in range(2)),
        Gradients(
            dq=fake(Float32, heads, queries, head_dim),
            dk=fake(key_gradient, kv_heads, keys, head_dim),
            dv=fake(key_gradient, kv_heads, keys, head_dim),
        ),
        fake_lists(deterministic),
        Int32(1),
        Int32(1),
        Int32(0),
        fake(Int32, 1, aligned=False),
        Float32(1.0),
        Int32(1),
    )


@lru_cache
def compile_pass(dtype: torch.dtype, head_dim: int, gradient: str, rounds: bool = False) -> Any:
    """The kernel of one gradient of `PASSES`, as `compile_backward`; ``rounds``: see `SplitConfig`."""
    kind, sym = ELEMENTS[dtype], cute.sym_int
    queries, keys, heads, kv_heads = sym(), sym(), sym(), sym()
    query, key = (queries, heads, head_dim), (keys, kv_heads, head_dim)
    rows = (heads, queries) if gradient == "dq" else (kv_heads, keys)
    return compiled(
        BackwardSplitSm90(kind, SplitConfig(head_dim, gradient=gradient, rounds=rounds)),
        *(fake(kind, *shape) for shape in (query, key, key, query)),
        *(fake(Float32, heads, queries, aligned=False) for _ in range(2)),
        fake(kind if rounds else Float32, *rows, head_dim),
        fake_lists(),
        Int32(1),
        Int32(1),
        Int32(0),
        fake(Int32, 1, aligned=False),
        Float32(1.0),
        Int32(1),
    )


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    work: WorkList,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    sms: int,
    *,
    deterministic: bool = False,
) -> None:
    """Add the gradients of the listed tiles (by key block) to dq, dk and dv; see `Backend.backward`.

    If dk and dv are in the type of the inputs, the rows of listed blocks are written and the others left as they are;
    then all units are whole (see `whole_units`), and sums have no order.

    Args:
        work: the list.
        sms: thread blocks at most.
        deterministic: whether the sums have one order, so that equal calls give equal bits on GPUs of one kind.

    The others are those of `Backend.backward`.

    Raises:
        ValueError: if sums over the list's tiles have no order (see `marble.kernels.cute.tickets.ordered`), or should
            have one though dk and dv are to be written.
    """
    heads, head_dim = q.shape[1:]
    kv_heads, rounds = k.shape[1], dk.dtype == q.dtype
    config = BackwardConfig(head_dim, deterministic, rounds)
    items, group = len(work.items), heads // kv_heads
    units = Units(items, group) if rounds else plan_units(items, kv_heads, group, sms)
    lists = lists_of(work)
    if deterministic:
        order = ordered(work, config.halves)
        if not order.shared:
            units = plan_units_in_order(items, work.tiles, kv_heads, group, sms)
        lists = lists_of(order.lists, Tickets(order.tickets, order.units, *order.served(heads, kv_heads)))
    counter = counter_of(q.device)
    grid = min(kv_heads * (units.whole + (items - units.whole) * (group // units.few)), sms)
    kernel = compile_backward(q.dtype, head_dim, deterministic, rounds)
    kernel(q, k, v, dout, lse, delta, Gradients(dq, dk, dv), lists, *map(int, units), counter, scale, grid)


def run_passes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    work: WorkLists,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    sms: int,
) -> None:
    """As `run_backward`, one gradient after the other: each row of one has one writer, so they are deterministic.

    Of a gradient in the type of the inputs, the rows of listed blocks are written and the others left as they are; no
    two blocks may share rows then.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    counter = counter_of(q.device)
    for gradient, target in zip(PASSES, (dq, dk, dv), strict=True):
        lists = work.by_query if gradient == "dq" else work.by_key
        items = len(lists.items)
        # Units of single query heads, or of all that a key/value head has.
        units, grid = (Units(0, 1), items * heads) if gradient == "dq" else (Units(items, 1), items * kv_heads)
        compile_pass(q.dtype, head_dim, gradient, rounds=target.dtype == q.dtype)(
            *(q, k, v, dout, lse, delta, target),
            *(lists_of(lists), *map(int, units), counter, scale, min(grid, sms)),
        )
