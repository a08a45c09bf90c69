"""The simulation of turns: by hand, and on a workload's lists."""

import pytest

pytest.importorskip("cutlass")

from bench.turns import UNIT_COST, Unit, Walk, main, makespan, units
from marble import Layout
from marble.kernels.cute.backward_config import plan_units, plan_units_in_order
from marble.kernels.cute.worklist import lower
from marble.testing.layouts import whole_call


def unit(*turns: tuple[int, int], heads: int = 1) -> Unit:
    return Unit(Walk([1.0] * len(turns), [list(turn) for turn in turns]), range(heads))


def test_the_second_one_adds_a_handover_later():
    both = [unit((0, 0)), unit((0, 1))]
    assert makespan(both, 2, 0.25) == UNIT_COST + 1.25
    assert makespan(both, 1, 0.25) == 2 * (UNIT_COST + 1)
    apart = [unit((0, 0), (1, 1)), unit((1, 0), (0, 1))]
    assert makespan(apart, 2, 0.25) == UNIT_COST + 2


def test_products_go_on_for_a_block_while_the_first_one_waits():
    # The last adds its first block when the first unit has added its third, then one every block.
    first, last = unit((1, 0), (2, 0), (0, 0)), unit((0, 1), (3, 0), heads=1)
    assert makespan([first, last], 2, 0.5) == UNIT_COST + 3.5 + 0.5
    assert makespan([Unit(first.walk, range(2)), last], 2, 0.5) == UNIT_COST + 6


def test_turns_that_nobody_comes_to_are_found():
    with pytest.raises(RuntimeError, match="wait for one another: 0 of 2"):
        makespan([unit((0, 1)), unit((0, 0))], 1, 0.25)


@pytest.mark.parametrize("ordered", [False, True], ids=["anyhow", "in_order"])
@pytest.mark.parametrize("heads", [(32, 4), (32, 8), (28, 4)])
@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 32768])
def test_units_end_together(tokens, heads, ordered):
    """Of one causal document, without turns: the kernel's units leave multiprocessors idle for 2 % at most."""
    lists = lower(whole_call(Layout.from_cu_seqlens([0, tokens]))).by_key
    items, several = len(lists.items), (heads[1], heads[0] // heads[1], 132)
    plan = plan_units_in_order(items, lists.tiles, *several) if ordered else plan_units(items, *several)
    some = list(units(lists, None, *heads, plan))
    work = sum(UNIT_COST + sum(unit.walk.costs) * len(unit.heads) for unit in some)
    assert makespan(some, 132, 0.0) <= 1.02 * work / 132


def test_a_workload(capsys):
    assert main(["--tokens", "4096", "--workloads", "gemma_docs", "--heads", "own", "--sms", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()[:2]
    assert ["window 1024" in line for line in lines] == [False, True]
    assert all(0.9 < float(line.split()[-1]) < 1.2 for line in lines)
