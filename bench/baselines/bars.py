"""What the kernels must show (issues 3 and 4), and the tables that say whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.baselines.ordered import ANY_ORDER, METRIC
from bench.baselines.settings import DENSE, FOUR
from bench.harness import Row


@dataclass(frozen=True)
class Bar:
    """What rows of one kind must show: a ratio of at least ``must``, or of at most that."""

    bar: str
    metric: str
    baseline: str
    must: float
    stretch: float
    most: bool = False

    def covers(self, row: Row) -> bool:
        return (row.bar, row.metric, row.baseline) == (self.bar, self.metric, self.baseline)

    def met(self, row: Row, limit: float | None = None) -> bool:
        limit = self.must if limit is None else limit
        assert row.ratio is not None
        return row.ratio <= limit if self.most else row.ratio >= limit


BARS = (
    Bar("K1", "fwd time", FOUR, 1.2, 1.35),
    Bar("K2", "bwd time", FOUR, 1.3, 1.45),
    Bar("K3", "fwd visited-tile rate", DENSE, 0.95, 1.0),
    Bar("K4", "bwd visited-tile rate", DENSE, 0.93, 1.0),
    Bar("K5", "fwd time", FOUR, 1.3, 1.5),
    Bar("K6", "bwd time", FOUR, 1.3, 1.5),
    Bar("K7", "bwd time", FOUR, 1.4, 1.8),
    Bar("K8", "bwd visited-tile rate", DENSE, 1.0, 1.3),
    Bar("K13", METRIC, ANY_ORDER, 1.25, 1.1, most=True),
    Bar("K14", "fwd visited-tile rate", DENSE, 0.93, 1.0),
    Bar("K9", "all range tiles", "all full tiles", 1.15, 1.05, most=True),
    Bar("K9", "all bit tiles", "all full tiles", 1.25, 1.05, most=True),
    Bar("K10", "8 calls", "one call", 1.04, 1.01, most=True),
    Bar("K10", "8 calls", "one call and 1.25 × state", 1.0, 1.0, most=True),
    Bar("K11", "8 calls", FOUR, 1.0, 1.0, most=True),
)


def missed(rows: Sequence[Row]) -> list[Row]:
    """Rows that miss their bar."""
    return [row for row in rows for bar in BARS if bar.covers(row) and not bar.met(row)]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every other figure, then the ratios that have a bar: what matters most is printed last."""
    found = []
    for title, chosen in (("beside", False), ("bars", True)):
        table = Table(title=title)
        for column in ("bar", "case", "metric", "value", "baseline", "its value", "ratio", "must"):
            table.add_column(column, justify="right" if column in ("value", "its value", "ratio", "must") else "left")
        for row in rows:
            bar = next((bar for bar in BARS if bar.covers(row)), None)
            if (bar is not None) is chosen:
                base = "" if row.baseline_value is None else f"{row.baseline_value:.4g} {row.unit}"
                ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
                must = ""
                if bar is not None:
                    reached = "stretch" if bar.met(row, bar.stretch) else "met" if bar.met(row) else "MISSED"
                    must = f"{'≤' if bar.most else '≥'} {bar.must} {reached}"
                value = f"{row.value:.4g} {row.unit}"
                table.add_row(row.bar, row.case, row.metric, value, row.baseline or "", base, ratio, must)
        found.append(table)
    return found
