"""What a plan costs: dense calls are counted in the tiles that they visit."""

from dataclasses import replace
from random import Random

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from virtual import case_of

from marble.compose.cost import summarise
from marble.compose.coverage import covered_pairs
from marble.compose.schedule import Call, Rows, Step
from marble.kernels.contract import Band, Touch, Varlen
from marble.layout import Layout, Span


@settings(max_examples=120)
@given(rng=st.builds(Random, st.integers(0, 2**32 - 1)))
def test_tiles_of_dense_calls(rng):
    """Every sequence on its own, cut into blocks from its first query and key: tiles with a pair, and full ones."""
    block, band, schedule = rng.choice([1, 2, 3, 5]), rng.choice(list(Band)), case_of(*LITTLE).schedules()[0]
    ends = [(rng.randint(0, 9), rng.randint(0, 12)) for _ in range(rng.randint(1, 4))]
    note(f"{ends}, {band.name}, block {block}")
    expected = torch.zeros(4, dtype=torch.int64)
    calls = []
    for rows, keys in ends:
        queries, columns = torch.tensor([[0, rows]]).int(), torch.tensor([[0, keys]]).int()
        work = Varlen(queries, columns, band, torch.tensor([int(Touch.FIRST | Touch.LAST)]).byte())
        calls.append(Call(work, Rows("kv", 0, keys)))
        pairs = covered_pairs(calls[-1], rows, keys)
        for low in range(0, rows, block):
            parts = pairs[low : low + block].split(block, 1) if keys else ()
            visited = sum(bool(part.any()) for part in parts)
            full = sum(part.shape == (block, block) and bool(part.all()) for part in parts)
            expected += torch.tensor([visited, visited - full, full > 0, 1])
    sizes = tuple(replace(buffer, rows=12) for buffer in schedule.forward.buffers)
    made = replace(schedule.forward, buffers=sizes, steps=(Step(calls=tuple(calls)),))
    found = summarise([replace(schedule, forward=made)], 8, block=block)
    assert [int(part.sum()) for part in (found.visited, found.partial, found.runs, found.touches)] == expected.tolist()


LITTLE = (Layout([[Span("causal", 2)]]), [[0, 2, 0]], 1, 2)
