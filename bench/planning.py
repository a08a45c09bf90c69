"""Planning: how long a rank's plan takes, how it grows, and how even and how sparse what it plans is.

``python -m bench.planning`` writes ``bench/results/planning.json``; with ``--gpu`` it measures S2, the same planning on
a GPU, and writes ``planning_gpu.json``. Every plan is of a fresh layout and made without the cache; times are
wall-clock times of one rank, each the best of five. Torch has one thread by default, as in a data loader's worker;
large plans resolve the two orientations of their tiles on two.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import linear_regression, mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import marble
from bench.harness import Row, command_line, gpu, write
from marble import Plan
from marble.compose import planner
from marble.compose.cost import summarise
from marble.kernels.contract import Tiles
from marble.mask.modes import packed_mask
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.workloads import WORKLOADS, build

MI, RANKS, REPEATS = 1024 * 1024, 8, 5
BARS = {"S1": 0.25, "S2": 0.03, "S4 growth": 1.15, "S4 memory": 64, "S5": 0.055, "S6 partial": 0.01, "S6 runs": 2}
BARS |= {"S7": 1.05, "S7 totals": 1.001}


def timed(layout: marble.Layout, name: str, ranks: int, rank: int | None, **more: Any) -> tuple[float, Plan]:
    """Seconds that one plan for all layer kinds of a workload's model takes, and the plan."""
    shapes = [marble.AttentionShape(k.heads, k.kv_heads, k.head_dim, k.window, k.scale) for k in WORKLOADS[name].layers]
    fresh = marble.Layout(layout.samples)
    planner.forget()
    start = time.perf_counter()
    plan = marble.plan(fresh, shapes, ranks=ranks, rank=rank, **more)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, plan


def works(plan: Plan, layer: int) -> list[Tiles]:
    """All forward calls of a layer."""
    steps = (step for schedule in plan.schedules[layer].values() for step in schedule.forward.steps)
    return [call.work for step in steps for call in step.calls if isinstance(call.work, Tiles)]


def partial_share(calls: list[Tiles]) -> float:
    """Partial tiles over visited tiles."""
    return sum(call.by_query.partial for call in calls) / sum(call.visited for call in calls)


def slowest(bar: str, name: str, device: str) -> Row:
    """S1 and S2: the slowest rank's plan of a workload's model."""
    layout = build(name, 4 * MI)
    # One rank of each group of four: its members' plans differ in which heads they exchange.
    ranks = [4 * group + group % 4 for group in range(RANKS)]
    again, how = range(REPEATS), {"ulysses": 4, "device": device}
    seconds = max(min(timed(layout, name, 4 * RANKS, rank, **how)[0] for _ in again) for rank in ranks)
    return Row(bar, f"{name}, 4Mi tokens, USP {RANKS}x4, {device}", "slowest rank's plan", seconds, "s")


def growth(name: str) -> Iterator[tuple[str, Row]]:
    """S4: growth with the tokens, and memory."""
    sizes = [MI // 2, MI, 2 * MI, 4 * MI, 8 * MI]
    layouts = [build(name, size) for size in sizes]
    seconds = [min(timed(each, name, RANKS, 0)[0] for _ in range(REPEATS)) for each in layouts]
    slope = linear_regression([math.log(size) for size in sizes], [math.log(each) for each in seconds]).slope
    yield "S4 growth", Row("S4", f"{name}, 512Ki to 8Mi tokens, R={RANKS}", "exponent of time", slope)
    megabytes = len(pickle.dumps(timed(layouts[-1], name, RANKS, 0)[1])) / 1e6
    yield "S4 memory", Row("S4", f"{name}, 8Mi tokens, R={RANKS}", "plan of a rank", megabytes, "MB")


def balance(name: str) -> Iterator[tuple[str, Row]]:
    """S7: what a ring pays step by step, and the totals of PTRR."""
    _, plan = timed(build(name, 4 * MI), name, RANKS, None)
    for kind, schedules in zip(WORKLOADS[name].layers, plan.schedules, strict=True):
        case = f"{name}, window {kind.window}, 4Mi tokens, R={RANKS}"
        found = summarise([schedules[rank] for rank in range(RANKS)], kind.head_dim)
        yield "S7", Row("S7", case, "sum of slowest steps/mean", found.step_balance)
        yield "S7 totals", Row("S7", case, "work busiest/mean", found.total_balance)


def sparsity() -> Iterator[tuple[str, Row]]:
    """S5: groups set apart. S6: noise set apart."""
    plans = (timed(build("molmo_video", MI // 2, seed), "molmo_video", 1, 0)[1] for seed in range(5))
    shares = [partial_share(works(plan, 0)) for plan in plans]
    # In sequence order tiles are looked at pair by pair: every 32nd query block stands for all.
    before = StoredMask(Storage.natural(build("molmo_video", MI // 2)), packed_mask(None))
    tokens = torch.arange(MI // 2)
    natural, share = partial_share([before.tiles(tokens.view(-1, 128)[::32].flatten(), tokens, 128)]), mean(shares)
    case = "molmo_video, 512Ki tokens, five seeds"
    yield "S5", Row("S5", case, "partial/visited", share, "", "sequence order", natural, share / natural)
    calls = works(timed(build("bagel_long", MI), "bagel_long", RANKS, None)[1], 0)
    case, most = f"bagel_long, 1Mi tokens, R={RANKS}", max(int(call.by_query.run_ptr.diff().max()) for call in calls)
    yield "S6 partial", Row("S6", case, "partial/visited", partial_share(calls))
    yield "S6 runs", Row("S6", case, "most full runs per query block and rank", most)


def main(words: Sequence[str] | None = None) -> int:
    """Measure; exit code 1 if a bar does not hold."""
    parser = command_line("planning", __doc__)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--gpu", action="store_true", help="S2 alone, into planning_gpu.json")
    given = parser.parse_args(words)
    if given.gpu:
        gpu(parser, "--gpu")
    torch.set_num_threads(given.threads)
    console = Console(width=None if sys.stdout.isatty() else 120)
    found: list[tuple[str, Row]] = [] if given.gpu else list(sparsity())
    for name in track(WORKLOADS, description="planning", console=console):
        if given.gpu:
            found.append(("S2", slowest("S2", name, "cuda")))
        else:
            found += [*balance(name), ("S1", slowest("S1", name, "cpu")), *growth(name)]
    table = Table("bar", "case", "what", "value", "must be ≤", title=f"Planning on {torch.get_num_threads()} threads")
    for bar, row in sorted(found, key=lambda pair: pair[0]):
        table.add_row(row.bar, row.case, row.metric, f"{row.value:.4g} {row.unit}", f"{BARS[bar]:g}")
    console.print(table)
    missed = [f"{bar}: {row.case}" for bar, row in found if row.value > BARS[bar]]
    console.print(f"out of bounds: {missed}" if missed else "all within bounds")
    write("planning", [row for _, row in found], given.out, part="gpu" if given.gpu else "")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
