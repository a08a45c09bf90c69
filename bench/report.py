"""One HTML page and its figures, from ``bench/results/*.json`` alone.

``python -m bench.report`` writes ``build/report/index.html`` and PNG figures beside it; ``--results`` and ``--out``
name other folders. Nothing is measured here, and no number comes from anywhere else.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.harness import RESULTS, ROOT, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECTIONS = {
    "kernels": "Kernels: one call on one GPU",
    "kernels_log": "Kernels: the log of attempts",
    "layer": "Layers: forward and backward on one and two GPUs",
    "node": "All GPUs of a host: errors and scaling",
    "demo": "Accuracy",
    "planning": "Planning",
    "balance": "Balance",
    "chunks": "Chunks of the chunked ring",
    "fetch": "Keys fetched by the sparse all-to-all",
    "selection": "Selection of the strategy",
    "choices": "Choices against measurements",
    "replay": "Replays",
}
"""Titles of the benches, in the order of the page. Parts of a bench (``layer_qwen_video``) come with it, and other
benches follow under their own names."""

REPLAYS = {"replay"}
"""Benches whose layer times are replays: calls timed on one GPU, transfers priced by a profile."""

LEAST_BARS, MOST_BARS = 4, 32
"""Cases that a figure shows one by one; of more it shows how they are distributed. Fewer are as plain in the table."""

LETTERS = 56
"""Of a line of a label beside or below a figure; longer labels have several lines."""

_HEAD = ("machine", "gpu", "versions", "commit", "date", "command", "rows")
_ROW, _LINE = 0.26, 0.13  # inches of a row with a label of one line, and of every further line
_BLUE, _GREY = "#0072B2", "#9AA5B1"  # colour-blind safe (Okabe and Ito, 2008)


@dataclass(frozen=True)
class Group:
    """Rows of one bench that answer the same question.

    Attributes:
        bar: the id that they share.
        metric: name of their values.
        unit: of their values.
        rows: one per case.
        figure: name of the picture's file; None if there is nothing to draw.
    """

    bar: str
    metric: str
    unit: str
    rows: tuple[Row, ...]
    figure: str | None = None


@dataclass(frozen=True)
class Record:
    """A results file.

    Attributes:
        bench: its name.
        head: machine, GPU, versions, commit, date and command.
        groups: its rows, in their order.
        left_out: what was not measured, and why.
    """

    bench: str
    head: dict[str, Any]
    groups: tuple[Group, ...]
    left_out: tuple[str, ...] = ()

    @property
    def section(self) -> str | None:
        """Its key in `SECTIONS`, if it has one."""
        fits = [key for key in SECTIONS if self.bench == key or self.bench.startswith(f"{key}_")]
        return max(fits, key=len, default=None)

    @property
    def title(self) -> str:
        """Heading of its section."""
        if self.section is None:
            return self.bench
        return SECTIONS[self.section] + (f" ({self.bench})" if self.bench != self.section else "")

    @property
    def replayed(self) -> bool:
        """Whether its layer times are replays."""
        return self.section in REPLAYS


def read(path: Path) -> Record:
    """A results file as `bench.harness.write` leaves it.

    Raises:
        ValueError: if it is something else.
    """
    try:
        given = json.loads(path.read_text())
        rows = [Row(**row) for row in given["rows"]]
        head = {name: given[name] for name in _HEAD[:-1]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path.name}: not a results file of bench.harness: {error!r}") from error
    grouped: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.bar, row.metric, row.unit].append(row)
    groups = tuple(Group(*key, tuple(found)) for key, found in grouped.items())
    return Record(path.stem, head, groups, tuple(given.get("left_out", ())))


def build(results: Path = RESULTS, out: Path = ROOT / "build" / "report", *, figures: bool = True) -> Path:
    """Write the page and its figures.

    Args:
        results: folder of results files.
        out: folder to write to.
        figures: whether to draw; tables alone take a second.

    Returns:
        The page.

    Raises:
        ValueError: if there are no results, or a file is not one.
    """
    records = [read(path) for path in sorted(results.glob("*.json"))]
    if not records:
        raise ValueError(f"{results}: no results files")
    order = list(SECTIONS)
    records.sort(key=lambda record: len(order) if record.section is None else order.index(record.section))
    out.mkdir(parents=True, exist_ok=True)
    if figures:
        records = [
            replace(
                record,
                groups=tuple(_drawn(record.bench, at, each, out) for at, each in enumerate(record.groups)),
            )
            for record in records
        ]
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = figure
    page = out / "index.html"
    columns = [field.name for field in fields(Row) if field.name not in ("bar", "metric")]
    page.write_text(environment.get_template("report.html").render(records=records, columns=columns))
    return page


def figure(value: object) -> str:
    """A value of a table as text: four digits of a number."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _drawn(bench: str, number: int, group: Group, out: Path) -> Group:
    """The group with its picture, if there are enough cases to compare."""
    rows = [row for row in group.rows if math.isfinite(row.value)]
    if len(rows) < LEAST_BARS:
        return group
    name = f"{bench}-{number}.png"
    picture(rows, f"{group.metric}, {group.unit}" if group.unit else group.metric).savefig(out / name, dpi=110)
    return replace(group, figure=name)


def picture(rows: Sequence[Row], label: str) -> Figure:
    """Rows one by one or, of many, how they are distributed, over the label of their values."""
    from matplotlib.figure import Figure

    few = len(rows) <= MOST_BARS
    lines = sum(len(_lines(row.case)) - 1 for row in rows)
    height = 0.9 + _ROW * len(rows) + _LINE * lines if few else 3.2
    drawn = Figure(figsize=(9, height + _LINE * (len(_lines(label)) - 1)), layout="constrained")
    axes = drawn.subplots()
    (_one_by_one if few else _distribution)(axes, rows)
    axes.set_xlabel("\n".join(_lines(label)))
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _lines(label: str) -> list[str]:
    """A label in lines."""
    return wrap(label, LETTERS, break_on_hyphens=False) or [""]


def _one_by_one(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars of what has a unit, its baseline in grey, and dots of what has none, each with its figure and its ratio."""
    labels = [_lines(row.case) for row in rows]
    heights = [_ROW + _LINE * (len(label) - 1) for label in labels]
    ends = list(accumulate(heights))
    places = [end - height / 2 for end, height in zip(ends, heights, strict=True)]
    values = [row.value for row in rows]
    if rows[0].unit:
        axes.barh(places, values, color=_BLUE, height=0.7 * _ROW)
        beside = [math.nan if row.baseline_value is None else row.baseline_value for row in rows]
        axes.plot(beside, places, "|", color=_GREY, markersize=13, markeredgewidth=2.5)
    else:
        axes.plot(values, places, "o", color=_BLUE)
        axes.grid(axis="x", color="#E6E9EC")
    for place, row in zip(places, rows, strict=True):
        text = f"  {row.value:.4g}" + (f" ({row.ratio:.3g}×)" if row.ratio is not None else "")
        right = max(row.value, row.baseline_value or row.value) if row.unit else row.value
        axes.annotate(text, (right, place), va="center", fontsize=7)
    axes.set_yticks(places, ["\n".join(label) for label in labels], fontsize=8)
    axes.set_ylim(ends[-1], 0)
    axes.margins(x=0.12)


def _distribution(axes: Axes, rows: Sequence[Row]) -> None:
    """The share of the cases up to each value; dashed: the median."""
    values = sorted(row.value for row in rows)
    axes.step(values, [(place + 1) / len(values) for place in range(len(values))], where="post", color=_BLUE)
    axes.axvline(median(values), color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_ylabel(f"share of {len(values)} cases")


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results files")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "report", help="folder to write to")
    parser.add_argument("--tables", action="store_true", help="no figures")
    given = parser.parse_args(words)
    try:
        print(build(given.results, given.out, figures=not given.tables))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
