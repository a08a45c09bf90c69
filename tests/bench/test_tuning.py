"""Tuning the Triton kernels: what is tried, what is kept, and the file that it is kept in."""

import tomllib
from typing import Any
from unittest import mock

import pytest

from bench.harness import Row
from bench.tuning import as_toml, kept, measured, said, ways
from marble.kernels.triton import tuned


def test_the_way_in_the_file_is_among_those_tried() -> None:
    for kernel in tuned.kernels():
        tried = ways(kernel)
        assert tuned.tuned(kernel) in tried
        assert len({said(way) for way in tried}) == len(tried)
        assert {tuple(sorted(way)) for way in tried} == {tuple(sorted(tuned.tuned(kernel)))}


def test_a_kernel_is_launched_as_tried_and_afterwards_as_before() -> None:
    usual = tuned.tuned("merge")
    with tuned.trying("merge", {"BLOCK": 64, "num_warps": 2}):
        assert tuned.tuned("merge") == {"BLOCK": 64, "num_warps": 2}
    assert tuned.tuned("merge") == usual
    with pytest.raises(ValueError, match="merge has"), tuned.trying("merge", {"num_warps": 2}):
        pass
    with pytest.raises(KeyError, match="nothing"):
        tuned.tuned("nothing")


def test_every_way_is_timed_and_those_that_fail_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def run() -> None:
        way = dict(tuned.tuned("classify"))
        if way["num_warps"] == 16:
            raise RuntimeError("out of resources")
        seen.append(way)

    def clock(runs: Any, repeats: int) -> dict[str, float]:
        assert repeats == 3
        return {name: float(number + 1) for number, (name, (one,)) in enumerate(runs.items()) if one() is None}

    with mock.patch("bench.tuning.interleave", clock):
        rows = measured("classify", run, 3)
    left = [way for way in ways("classify") if way["num_warps"] != 16]
    assert [row.metric for row in rows] == list(map(said, left))
    assert seen[len(left) :] == left
    assert {(row.bar, row.case, row.baseline) for row in rows} == {("tuned", "classify", said(tuned.tuned("classify")))}
    assert capsys.readouterr().out.count("RuntimeError") == len(ways("classify")) - len(left)


def test_what_is_clearly_faster_is_kept_in_the_file() -> None:
    def row(kernel: str, way: tuned.Choice, ratio: float) -> Row:
        return Row("tuned", kernel, said(way), 10 * ratio, "us", said(tuned.tuned(kernel)), 10.0, ratio)

    faster, hardly = {"BLOCK": 64, "num_warps": 2}, {"num_warps": 2}
    rows = [row("merge", faster, 0.9), row("merge", tuned.tuned("merge"), 1.0), row("words", hardly, 0.98)]
    choices = kept(rows)
    assert choices == {kernel: tuned.tuned(kernel) for kernel in tuned.kernels()} | {"merge": faster}
    written = as_toml(choices, "# Why.")
    assert written.startswith("# Why.\n\n[add_sums]\n")
    assert tomllib.loads(written) == choices
