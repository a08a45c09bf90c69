"""Lists of calls are what the kernels are compiled for; a launch checks that, but needs a GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from marble import Layout
from marble.kernels.contract import Band, Touch, Varlen
from marble.kernels.cute.binding import Tickets, fake_lists, lists_of
from marble.kernels.cute.parts import parts_of
from marble.kernels.cute.tickets import ordered
from marble.kernels.cute.worklist import lower
from marble.testing.layouts import whole_call


def dense(queries: list[int], keys: list[int]) -> Varlen:
    return Varlen.from_cu_seqlens(torch.tensor(queries), torch.tensor(keys), Band.CAUSAL, Touch.FIRST)


WORKS = {
    "tiles": whole_call(Layout.from_cu_seqlens([0, 1, 300, 2000])),
    "dense": dense([0, 7, 900], [0, 300, 500]),
    "nothing": dense([0, 0], [0, 0]),
}


def check(lists: Any, compiled: Any) -> None:
    """Types, sizes that are known, and strides."""
    for name, table in lists._asdict().items():
        expected = getattr(compiled, name)
        if expected is None:
            assert table is None
        elif isinstance(table, tuple):
            check(table, expected)
        else:
            assert str(table.dtype).removeprefix("torch.") == str(expected.dtype).lower(), name
            known = [size if isinstance(size, int) else None for size in expected.shape]
            assert [mine if size is not None else None for mine, size in zip(table.shape, known, strict=True)] == known
            divisors = [getattr(stride, "divisibility", None) for stride in expected.stride]
            for mine, stride, divisor in zip(table.stride(), expected.stride, divisors, strict=True):
                assert mine == stride if divisor is None else mine % divisor == 0, name


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_lists_fit_the_kernels(work: Any) -> None:
    lists = lower(work)
    for together in (1, 2):
        check(lists_of(parts_of(lists.by_query, group=3, together=together)), fake_lists(parts=True))
    check(lists_of(lists.by_query), fake_lists())
    check(lists_of(lists.by_key), fake_lists())
    order = ordered(lists.by_key, 2)
    tickets = Tickets(order.tickets, order.units, *order.served(4, 2))
    check(lists_of(order.lists, tickets), fake_lists(deterministic=True))
