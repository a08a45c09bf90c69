"""Ranks wait for each other where rows move between them, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marble.cost.waiting import ends

SECONDS = st.floats(0.0, 10.0)


def test_ranks_without_transfers_wait_for_nobody() -> None:
    """Many short steps and one long one each, on different ranks: all end at once."""
    found = ends(np.array([[5.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 5.0]]), np.zeros((3, 3)))
    assert found.tolist() == [[5.0, 1.0, 1.0], [6.0, 6.0, 2.0], [7.0, 7.0, 7.0]]


def test_transfers_begin_when_all_who_move_rows_have_come_to_the_step() -> None:
    compute = np.array([[4.0, 1.0, 1.0], [1.0, 3.0, 1.0]])
    links = np.array([[0.0, 0.0, 0.0], [2.0, 0.5, 0.0]])
    assert ends(compute, links)[-1].tolist() == [6.0, 4.5, 2.0], "rank 1 waits for rank 0, rank 2 for nobody"


@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_no_rank_is_faster_than_its_own_work_nor_the_pass_slower_than_its_slowest_steps(
    data: st.DataObject, steps: int, ranks: int
) -> None:
    compute, links = (data.draw(arrays(np.float64, (steps, ranks), elements=SECONDS)) for _ in range(2))
    found = ends(compute, links)
    assert (found[-1] >= np.maximum(compute, links).sum(0) - 1e-9).all()
    assert found[-1].max() <= np.maximum(compute, links).max(1).sum() + 1e-9
    assert (np.diff(found, axis=0) >= 0).all()
    everyone = ends(compute, np.maximum(links, 1e-9))
    assert (everyone[-1] >= found[-1] - 1e-9).all()


def test_equal_ranks_take_the_sum_of_their_steps() -> None:
    compute, links = np.full((3, 4), 2.0), np.full((3, 4), 3.0)
    assert ends(compute, links)[-1] == pytest.approx(np.full(4, 9.0))
