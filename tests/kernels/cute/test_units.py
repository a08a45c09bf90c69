"""How many query heads a unit of the backward kernel has."""

import pytest

pytest.importorskip("cutlass")

from marble.kernels.cute.backward_config import ENOUGH_UNITS, UNIT_TILES, heads_of_a_unit

SMS = 132


def test_few_heads_where_units_are_long_anyhow() -> None:
    """Then more would only spread what runs at the same time over more memory."""
    assert heads_of_a_unit(512, 512 * UNIT_TILES, 4, 8, SMS) == 1
    assert heads_of_a_unit(512, 512 * UNIT_TILES - 1, 4, 8, SMS) == 2
    assert heads_of_a_unit(512, 512 * UNIT_TILES // 4, 4, 8, SMS) == 4
    assert heads_of_a_unit(512, 512 * UNIT_TILES // 7, 4, 7, SMS) == 7


def test_all_heads_where_units_are_short_however() -> None:
    """Each costs about a tile more."""
    assert heads_of_a_unit(512, 512, 16, 2, SMS) == 2


@pytest.mark.parametrize("group", [1, 2, 7, 8, 12])
@pytest.mark.parametrize("items", [1, 10, 100, 1000])
@pytest.mark.parametrize("length", [1, 5, 50, 500])
def test_every_multiprocessor_has_enough_units(items: int, length: int, group: int) -> None:
    """If the heads allow it; and no unit is shorter than it must be for that or for its own cost."""
    heads = heads_of_a_unit(items, items * length, 4, group, SMS)
    assert group % heads == 0
    wanted = ENOUGH_UNITS * SMS
    assert heads == 1 or 4 * items * group // heads >= wanted
    fuller = [more for more in range(heads + 1, group + 1) if group % more == 0]
    assert heads * length >= UNIT_TILES or not fuller or 4 * items * group // fuller[0] < wanted


def test_nothing_to_do() -> None:
    assert heads_of_a_unit(0, 0, 4, 2, SMS) == 1
