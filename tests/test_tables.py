"""What the command line's tables say."""

import torch

from marble.compose.cost import Summary
from marble.tables import step_table


def rows(visited: list[list[int]]) -> list[list[str]]:
    """The step table for visited tiles [ranks, steps]."""
    tiles, none = torch.tensor(visited), torch.zeros(len(visited), dtype=torch.int64)
    table = step_table(Summary(none, tiles, tiles, tiles, tiles, none, none))
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_a_step_with_less_than_a_tile_a_rank_is_as_uneven_as_it_is() -> None:
    assert rows([[1, 0], [0, 0]]) == [["0", "0", "1", "0.5", "2.000"], ["1", "0", "0", "0", "1.000"]]
    assert rows([[0]] * 255 + [[1]]) == [["0", "255", "1", "0.00391", "256.000"]]


def test_larger_means_are_whole() -> None:
    assert rows([[3000], [1002]]) == [["0", "0", "3,000", "2,001", "1.499"]]
