"""Balance of the token orders: work and tokens of the busiest rank, and what a ring pays step by step.

``python -m bench.balance`` writes ``bench/results/balance.json``. Visited tiles of 128×128, one kind of
layer per row; all layers of a model share one token order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

import marble
from bench.harness import Row, command_line, write
from marble.compose.cost import summarise
from marble.workloads import WORKLOADS, build

TOKENS = 512 * 1024
RANKS = 8
BOUNDS = {"ptrr": (1.001, 1.001), "balanced_samples": (1.08, 1.08), "contiguous": None}
"""Orders with the largest work and tokens of a rank over the mean that they may have, in every layer of a model."""


def main(words: Sequence[str] | None = None) -> int:
    """Plan every workload under every order; exit code 1 if a bound does not hold."""
    given = command_line("balance", __doc__).parse_args(words)
    rows: list[Row] = []
    table = Table(title=f"{TOKENS:,} tokens, {RANKS} ranks: busiest over mean")
    for column in ("workload", "window", "order", "work", "tokens", "Σ slowest step", "partial"):
        table.add_column(column, justify="left" if column in ("workload", "order") else "right", no_wrap=True)
    missed = []
    for name, order in track([(name, order) for name in WORKLOADS for order in BOUNDS], description="planning"):
        kinds = WORKLOADS[name].layers
        shapes = [marble.AttentionShape(k.heads, k.kv_heads, k.head_dim, k.window, k.scale) for k in kinds]
        plan = marble.plan(build(name, TOKENS), shapes, ranks=RANKS, order=order)
        for kind, schedules in zip(kinds, plan.schedules, strict=True):
            summary = summarise([schedules[rank] for rank in range(RANKS)], kind.head_dim)
            case = f"{name}, window {kind.window}, {order}"
            row = Row(f"balance of {order}", case, "work busiest/mean", summary.total_balance)
            found = [
                row,
                replace(row, metric="tokens fullest/mean", value=summary.token_balance),
                replace(row, metric="sum of slowest steps/mean", value=summary.step_balance),
                replace(row, metric="partial tiles/visited", value=summary.partial_share),
            ]
            rows += found
            table.add_row(name, str(kind.window or "–"), order, *(f"{row.value:.4f}" for row in found))
            bounds = BOUNDS[order]
            if bounds is not None and any(row.value > bound for row, bound in zip(found, bounds, strict=False)):
                missed.append(case)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    write("balance", rows, given.out)
    console.print(f"out of bounds: {missed}" if missed else "all within bounds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
