"""Balance of the token orders: work and tokens of the busiest rank, and what a ring pays step by step.

``python -m bench.balance`` writes ``bench/results/balance.json``. Visited tiles of 128×128, one layer per row.
"""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

import marble
from bench.harness import Row, write
from marble.compose.cost import summarise
from marble.workloads import WORKLOADS, build

TOKENS = 512 * 1024
RANKS = 8
ORDERS = ("ptrr", "balanced_samples", "contiguous")
BARS = {"ptrr": "F2-ptrr", "balanced_samples": "F2-balanced", "contiguous": "F2-contiguous"}


def main() -> None:
    """Plan every workload under every order."""
    rows: list[Row] = []
    table = Table(title=f"{TOKENS:,} tokens, {RANKS} ranks: busiest over mean")
    for column in ("workload", "window", "order", "work", "tokens", "Σ slowest step", "partial"):
        table.add_column(column, justify="left" if column in ("workload", "order") else "right")
    cases = [(name, kind) for name, workload in WORKLOADS.items() for kind in workload.layers]
    for name, kind in track(cases, description="planning"):
        layout = build(name, TOKENS)
        shape = marble.AttentionShape(kind.heads, kind.kv_heads, kind.head_dim, kind.window, kind.scale)
        for order in ORDERS:
            plan = marble.plan(layout, shape, ranks=RANKS, order=order)
            summary = summarise([plan.schedules[0][rank] for rank in range(RANKS)], kind.head_dim)
            case = f"{name}, window {kind.window}, {order}"
            row = Row(BARS[order], case, "work busiest/mean", summary.total_balance)
            rows.append(row)
            rows.append(replace(row, metric="tokens fullest/mean", value=summary.token_balance))
            rows.append(replace(row, metric="sum of slowest steps/mean", value=summary.step_balance))
            rows.append(replace(row, metric="partial tiles/visited", value=summary.partial_share))
            figures = [f"{row.value:.4f}" for row in rows[-4:]]
            table.add_row(name, str(kind.window or "–"), order, *figures)
    Console().print(table)
    write("balance", rows)


if __name__ == "__main__":
    main()
