"""The chunked ring: how long its plan takes, and how even its steps are.

``python -m bench.chunks`` writes ``bench/results/chunks.json``. Plans are made as a data-loader worker would, one rank
at a time from a layout that nothing is cached for, in one thread; the best of three runs counts, against noise from
other processes. Evenness is C at τ = 0 over the mean: the pairs of every ring step's slowest rank, summed, over those
of the mean rank.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import marble
from bench.harness import Row, command_line, write
from marble.compose import planner
from marble.kernels.contract import Varlen
from marble.layout import Layout
from marble.mask.modes import packed_mask
from marble.mask.ranges import VisibleRanges
from marble.mask.tiles import StoredMask
from marble.order.chunks import RANGE_COST, chunks
from marble.order.set_apart import set_apart
from marble.workloads import WORKLOADS, build

WORKLOAD = "bagel_long"
MEGA = 1 << 20
PLANNED = (8 * MEGA, 16)
SECONDS, REPEATS = 0.5, 3
EVEN = {(4 * MEGA, 8): 1.03, (8 * MEGA, 16): 1.05}
"""Tokens and ranks, and what C may be over the mean."""
LEAST = 128


def planning(layout: Layout, ranks: int, rank: int) -> tuple[float, float, marble.Plan]:
    """Seconds and CPU seconds of one rank's plan, and the plan."""
    kind = WORKLOADS[WORKLOAD].layers[0]
    shape = marble.AttentionShape(kind.heads, kind.kv_heads, kind.head_dim, kind.window, kind.scale)
    fresh = Layout(layout.samples)
    planner.forget()
    start, cpu = time.perf_counter(), time.process_time()
    plan = marble.plan(fresh, shape, ranks=ranks, rank=rank, schedule="chunked")
    return time.perf_counter() - start, time.process_time() - cpu, plan


def sequences(plan: marble.Plan) -> Counter[str]:
    """Dense sequences of a rank's forward pass, by band."""
    found = Counter[str]()
    for schedules in plan.schedules:
        for schedule in schedules.values():
            for step in schedule.forward.steps:
                for call in step.calls:
                    assert isinstance(call.work, Varlen)
                    found[call.work.band.name.lower()] += len(call.work.queries)
    return found


def evenness(tokens: int, ranks: int) -> list[Row]:
    """C at τ = 0 over the mean, refined and dealt plainly, and C with the default τ."""
    storage = set_apart(build(WORKLOAD, tokens))
    mask = StoredMask(storage, packed_mask(), VisibleRanges(storage))
    plain, refined = (chunks(mask, ranks, LEAST, tau=0.0, refine=refine) for refine in (False, True))
    priced = chunks(mask, ranks, LEAST)
    case = f"{WORKLOAD}, {tokens // MEGA}M tokens, R={ranks}"
    ratio = refined.cost / refined.mean
    base = plain.cost / plain.mean
    name = f"plain deal of {len(plain.rank) // ranks} chunks a rank"
    return [
        Row("S10", case, "C at τ = 0 over the mean", ratio, "", name, base, ratio / base),
        Row("S10", case, "chunks a rank at τ = 0", len(refined.rank) // ranks),
        Row("S10", case, f"C at τ = {RANGE_COST:.0f} over the mean", priced.cost / priced.mean),
        Row("S10", case, f"chunks a rank at τ = {RANGE_COST:.0f}", len(priced.rank) // ranks),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure; exit code 1 if a bar is missed."""
    given = command_line("chunks", __doc__).parse_args(words)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    tokens, ranks = PLANNED
    layout, rows = build(WORKLOAD, tokens), []
    planning(layout, ranks, 0)  # imports and first allocations are not the plan's
    found = [
        min((planning(layout, ranks, rank) for _ in range(REPEATS)), key=lambda run: run[0])
        for rank in track(range(ranks), console=console)
    ]
    case = f"{WORKLOAD}, {tokens // MEGA}M tokens, R={ranks}, slowest rank"
    seconds, cpu = (max(each[at] for each in found) for at in (0, 1))
    most = max((sequences(plan) for _, _, plan in found), key=lambda count: count.total())
    rows.append(Row("S3", case, "plan", seconds, "s", "the seed, 12 threads", 1.1, seconds / 1.1))
    rows.append(Row("S3", case, "plan, CPU time", cpu, "s"))
    rows += [Row("S3", case, f"{band} sequences, most", count) for band, count in sorted(most.items())]
    for size in track(EVEN, console=console):
        rows += evenness(*size)
    table = Table(title="chunked ring")
    for column in ("bar", "case", "metric", "value", "baseline"):
        table.add_column(column)
    for row in rows:
        baseline = "" if row.baseline is None else f"{row.baseline}: {row.baseline_value:.4g}"
        table.add_row(row.bar, row.case, row.metric, f"{row.value:.4f} {row.unit}", baseline)
    console.print(table)
    even = [row.value for row in rows if row.metric == "C at τ = 0 over the mean"]
    kept = seconds <= SECONDS and all(value <= bound for value, bound in zip(even, EVEN.values(), strict=True))
    console.print("all within bounds" if kept else "out of bounds")
    write("chunks", rows, given.out)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
