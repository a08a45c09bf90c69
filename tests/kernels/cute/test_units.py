"""How the backward kernel's work becomes units."""

import pytest

pytest.importorskip("cutlass")

from marble.kernels.cute.backward_config import (
    ENOUGH_UNITS,
    MANY_UNITS,
    UNIT_TILES,
    Units,
    plan_units,
    plan_units_in_order,
)

SMS = 132


def test_few_heads_come_apart_in_order_where_units_are_long_anyhow() -> None:
    assert plan_units_in_order(512, 512 * UNIT_TILES, 4, 8, SMS) == Units(0, 1, apart=True)
    assert plan_units_in_order(512, 512 * UNIT_TILES - 1, 4, 8, SMS) == Units(0, 2, apart=True)
    assert plan_units_in_order(512, 512 * UNIT_TILES // 4, 4, 8, SMS) == Units(0, 4, apart=True)


@pytest.mark.parametrize("length", [0, UNIT_TILES // 7])
def test_the_last_units_are_split_where_all_heads_make_no_long_one(length: int) -> None:
    whole = Units(512 - 33, 1)
    assert plan_units(512, 4, 7, SMS) == plan_units_in_order(512, 512 * length, 4, 7, SMS) == whole


@pytest.mark.parametrize("group", [1, 2, 7, 8, 12])
@pytest.mark.parametrize("items", [0, 1, 10, 100, 1000])
@pytest.mark.parametrize("length", [1, 5, 50, 500])
def test_every_multiprocessor_has_enough_units(items: int, length: int, group: int) -> None:
    """If the heads allow it; many, where units come apart and end in any order."""
    for plan in plan_units(items, 4, group, SMS), plan_units_in_order(items, items * length, 4, group, SMS):
        assert group % plan.few == 0
        assert 0 <= plan.whole <= items
        launched = 4 * (plan.whole + (items - plan.whole) * group // plan.few)
        assert not plan.apart or plan.whole == 0
        assert launched >= (MANY_UNITS if plan.apart else ENOUGH_UNITS) * SMS or plan == Units(0, 1)
