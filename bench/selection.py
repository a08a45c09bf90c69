"""Choosing a strategy: how long it takes (C4), and the seed's 512-token rule for the chunked ring beside the cost.

``python -m bench.selection`` writes ``bench/results/selection.json``. Nothing is run on a GPU: what is chosen is an
estimate for the assumed profile ``h100-cluster``, so C1 to C3 are not answered here. Every choice is of a fresh layout
and made without what earlier ones kept; times are the best of five. Torch has one thread, as in a data loader's worker;
choosing itself takes two.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import marble
from bench.harness import Row, command_line, write
from marble.compose import planner
from marble.cost.profile import Profile
from marble.cost.select import Candidate
from marble.workloads import WORKLOADS, build

MI = 1024 * 1024
TOKENS, RANKS, REPEATS = 4 * MI, (32, 64), 5
SECONDS = 2.0
CASES = ((MI, 32),)
LEAST = 512
"""The seed's rule: the chunked ring where the median full or noise span has at least so many tokens."""


def choice(name: str, tokens: int, ranks: int) -> tuple[float, float, list[Candidate]]:
    """Seconds and CPU seconds that choosing for a workload's model takes, and the candidates."""
    kinds = WORKLOADS[name].layers
    shapes = [marble.AttentionShape(k.heads, k.kv_heads, 128, k.window, k.scale) for k in kinds]
    fresh, profile = marble.Layout(build(name, tokens).samples), Profile.load("h100-cluster")
    planner.forget()
    start, cpu = time.perf_counter(), time.process_time()
    found = planner.ranking(fresh, shapes, ranks, profile)
    return time.perf_counter() - start, time.process_time() - cpu, found


def described(candidate: Candidate) -> str:
    """A strategy in a few words."""
    split = f"{candidate.ranks // candidate.ulysses}×{candidate.ulysses}"
    return f"{' + '.join(candidate.schedules)}, {candidate.order}, {split}"


def rule(name: str, tokens: int, ranks: int) -> list[Row]:
    """The rule against the cost, for the rings of global layers: which of them is faster, and by what."""
    layout = build(name, tokens)
    wide = sorted(span.length for sample in layout.samples for span in sample if span.mode in ("full", "noise"))
    median = wide[len(wide) // 2] if wide else 0
    shape = next(k for k in WORKLOADS[name].layers if k.window is None)
    found = planner.ranking(
        layout, marble.AttentionShape(shape.heads, shape.kv_heads, 128), ranks, Profile.load("h100-cluster")
    )
    best = found[0]
    ring, chunked = (next(c for c in found if c.schedules == (which,)) for which in ("ring", "chunked"))
    case = f"{name}, {tokens // MI}M tokens, {ranks} ranks"
    ratio = chunked.seconds / ring.seconds
    return [
        Row("C3", case, f"estimate of the fastest: {described(best)}", best.seconds * 1e3, "ms"),
        Row("rule", case, "chunked ring, estimate", chunked.seconds * 1e3, "ms", "ring", ring.seconds * 1e3, ratio),
        Row("rule", case, "median full or noise span", median, "tokens", "the seed's least", LEAST, median / LEAST),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure; exit code 1 if C4 is missed."""
    given = command_line("selection", __doc__).parse_args(words)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows, missed = [], []
    for name, ranks in track([(name, ranks) for name in WORKLOADS for ranks in RANKS], console=console):
        runs = [choice(name, TOKENS, ranks) for _ in range(REPEATS)]
        seconds, cpu, found = min(runs, key=lambda run: run[0])
        count = len(found)
        case = f"{name}, {TOKENS // MI}M tokens, {ranks} ranks, {count} candidates"
        rows.append(Row("C4", case, "choosing", seconds, "s", "bar for 128", SECONDS, seconds / SECONDS))
        rows.append(Row("C4", case, "choosing, CPU time", cpu, "s"))
        missed += [case] if seconds > SECONDS else []
    for name in track(WORKLOADS, description="rule", console=console):
        for tokens, ranks in CASES:
            rows += rule(name, tokens, ranks)
    table = Table(title="choosing a strategy")
    for column in ("bar", "case", "metric", "value", "baseline", "ratio"):
        table.add_column(column)
    for row in rows:
        baseline = "" if row.baseline is None else f"{row.baseline}: {row.baseline_value:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.bar, row.case, row.metric, f"{row.value:.4g} {row.unit}", baseline, ratio)
    console.print(table)
    console.print(f"out of bounds: {missed}" if missed else "all within bounds")
    write("selection", rows, given.out)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
