"""What the sparse all-to-all fetches: remote keys on balanced samples, and the last window on window layers.

``python -m bench.fetch`` writes ``bench/results/fetch.json``. Nothing is run; key blocks of 128 are counted.
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
from marble.compose.plan import Plan
from marble.compose.schedules.fetch import Exchange
from marble.workloads import WORKLOADS, build

TOKENS = 1024 * 1024
BLOCK = 128
BALANCE = 1.08
WINDOW_RANKS = (2, 4, 8, 16, 32, 64)


def order_only(name: str, ranks: int, order: str, *, window_only: bool = False) -> Plan:
    """The token order and masks of a workload's model, with the schedule of rank 0 alone."""
    kinds = [kind for kind in WORKLOADS[name].layers if kind.window is not None or not window_only]
    shapes = [marble.AttentionShape(k.heads, k.kv_heads, k.head_dim, k.window, k.scale) for k in kinds]
    return marble.plan(build(name, TOKENS), shapes, ranks=ranks, rank=0, schedule="sparse_a2a", order=order)


def fetched(plan: Plan, layer: int) -> list[int]:
    """Key rows that each rank fetches."""
    assert plan.masks is not None
    exchange = Exchange.seen_by(plan.order, plan.masks[layer], BLOCK)
    ranks = range(plan.world)
    return [sum(exchange.rows(owner, reader) for owner in ranks if owner != reader) for reader in ranks]


def window_bounds(plan: Plan, window: int) -> list[int]:
    """Window − 1 keys before each shard and the rest of spans cut at its ends, in whole blocks."""
    table, bounds = plan.order.storage.layout.table, []
    for rank in range(plan.world):
        shard = plan.order.shard(rank)
        first, last = int(shard[0]), int(shard[-1]) + 1
        wide = table.seg >= 0
        opened, cut = ((table.start < at) & (table.stop > at) & wide for at in (first, last))
        before = min(first, max(window - 1, int((first - table.start[opened]).sum())))
        behind = int((table.stop[cut] - last).sum())
        bounds.append(sum(-(-rows // BLOCK) * BLOCK for rows in (before, behind)))
    return bounds


def main(words: Sequence[str] | None = None) -> int:
    """Count; exit code 1 if work is uneven or a window layer fetches more than its window."""
    given = command_line("fetch", __doc__).parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"{TOKENS:,} tokens, balanced samples: remote keys fetched, busiest over mean")
    for column in ("workload", "window", "ranks", "fetched", "work", "tokens"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    rows: list[Row] = []
    for name, ranks in track([(name, ranks) for name in WORKLOADS for ranks in (8, 32)], console=console):
        plan = order_only(name, ranks, "balanced_samples")
        assert plan.masks is not None
        for layer, shape in enumerate(plan.layers):
            work = plan.masks[layer].work(BLOCK).double().repeat_interleave(BLOCK)[: plan.tokens]
            loads = [float(work[plan.order.shard(rank)].sum()) for rank in range(ranks)]
            row = Row(
                "S8", f"{name}, window {shape.window}, R={ranks}", "work busiest/mean", max(loads) * ranks / sum(loads)
            )
            tokens = replace(row, metric="tokens fullest/mean", value=max(plan.order.lengths) * ranks / plan.tokens)
            share = replace(
                row, metric="fetched/remote keys", value=sum(fetched(plan, layer)) / ((ranks - 1) * plan.tokens)
            )
            rows += [row, tokens, share]
            figures = (f"{share.value:.4f}", f"{row.value:.3f}", f"{tokens.value:.3f}")
            table.add_row(name, str(shape.window or "–"), str(ranks), *figures)
    uneven = [row.case for row in rows if row.metric == "work busiest/mean" and row.value > BALANCE]
    for ranks in track(WINDOW_RANKS, console=console):
        plan = order_only("gemma_docs", ranks, "contiguous", window_only=True)
        window = plan.layers[0].window
        assert window is not None
        got, bound = fetched(plan, 0), window_bounds(plan, window)
        worst = max(range(ranks), key=lambda rank: got[rank] / max(bound[rank], 1))
        ratio = got[worst] / max(bound[worst], 1)
        case = f"gemma_docs, window {window}, contiguous, R={ranks}"
        rows.append(Row("S9", case, "keys received/bound", ratio, "", "bound in keys", bound[worst], ratio))
    console.print(table)
    over = [row.case for row in rows if row.bar == "S9" and row.value > 1]
    worst_ratio = max(row.value for row in rows if row.bar == "S9")
    console.print(f"window layers: keys received over the bound, worst of R = {WINDOW_RANKS}: {worst_ratio:.3f}")
    console.print(f"out of bounds: {uneven + over}" if uneven + over else "all within bounds")
    write("fetch", rows, given.out)
    return 1 if uneven or over else 0


if __name__ == "__main__":
    sys.exit(main())
