"""The main job on real input: is ring attention over real packs as exact as a single call?

``make demo`` packs real documents (images and texts that installed packages ship) and the models' workloads, plans
them for several ring degrees, and runs forward and backward on virtual ranks and on four gloo processes. It prints
the error ratio of every result beside that of rounding at every step, draws the first real pack, and exits with 1 if
a ratio is above the gate, if float64 differs from dense attention, or if the gate lets per-step rounding pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.harness import Row, command_line, write
from marble import AttentionShape, Layout
from marble.plots import show
from marble.testing.exactness import (
    GATE,
    RESULTS,
    Problem,
    Results,
    distributed,
    error_ratios,
    reference,
    single_call,
    worst_difference,
)
from marble.testing.processes import run_processes
from marble.workloads import WORKLOADS, build
from marble.workloads.real import real_documents

TOKENS = 4096
PROCESSES = 4
FLOAT64_GATE = 1e-10
HEADS = {"MHA": (2, 2), "GQA": (4, 2)}
REAL = {"qwen": 1 / 4, "molmo": 1 / 4, "gemma": 1 / 4, "bagel": 1 / 16}
FOLDER = Path("demo")


@dataclass(frozen=True)
class Case:
    """One layout and layer, with the ring degrees to try."""

    name: str
    layout: Layout
    window: int | None = None
    ranks: tuple[int, ...] = (1, 2, 4, 8)

    def problem(self, heads: str) -> Problem:
        """Random inputs for the layer."""
        return Problem.random(self.layout, AttentionShape(*HEADS[heads], 64, self.window))


@dataclass(frozen=True)
class Outcome:
    """Error ratios of one case at one ring degree."""

    case: str
    heads: str
    ranks: str
    ours: dict[str, float]
    rounded: dict[str, float]

    @property
    def passes(self) -> bool:
        return all(ratio <= GATE for ratio in self.ours.values())

    @property
    def rounding_fails(self) -> bool:
        return max(self.rounded.values()) > GATE


def cases(console: Console) -> Iterator[Case]:
    """Real documents by every model's rule, then the workloads, each layer kind once."""
    for model, scale in REAL.items():
        pack = real_documents(model, TOKENS, scale=scale)
        images = ", ".join(f"{image.name} {image.height}×{image.width}" for image in pack.images[:3])
        texts = ", ".join(text.source.split()[0] for text in pack.texts[:3])
        console.print(
            f"[bold]real documents, {model}[/bold]: {len(pack.layout.samples)} documents, {len(pack.images)} images "
            f"({images}, …), {len(pack.texts)} texts ({texts}, …)"
        )
        yield Case(f"real {model}", pack.layout, ranks=(1, 2, 4, 8, 16) if model == "molmo" else (1, 2, 4, 8))
    for name, workload in WORKLOADS.items():
        layout = build(name, TOKENS, scale=workload.demo_scale)
        for kind in workload.layers:
            # A window as large a part of the pack as the model's is of a 64k-token one.
            window = None if kind.window is None else kind.window // 16
            yield Case(name if window is None else f"{name}, window {window}", layout, window)


def on_processes(rank: int, layouts: list[tuple[str, int | None]]) -> list[dict[str, tuple[Results, Results]]]:
    """What one of several gloo processes does: every case, exact and rounded. Rank 0 hands in the results."""
    found = []
    for layout, window in layouts:
        case = Case("", Layout.from_json(layout), window)
        found.append({})
        for heads in HEADS:
            problem = case.problem(heads)
            plan = problem.plan_here()
            found[-1][heads] = distributed(problem, plan), distributed(problem, plan, backend="rounded")
    return found if rank == 0 else []


def is_telling(case: Case) -> bool:
    """Whether a case can show a mistake: two spans of two tokens in every mode that it has, some span on two ranks."""
    modes = {span.mode for sample in case.layout.samples for span in sample}
    spans = [span.mode for sample in case.layout.samples for span in sample if span.length > 1]
    holder = torch.empty(case.layout.tokens, dtype=torch.int64)
    order = case.problem("GQA").plan(2).order
    for rank in range(2):
        holder[order.index(rank)] = rank
    borders = case.layout.table.start[1:]
    crossing = (holder.diff() != 0).nonzero().flatten() + 1
    return all(spans.count(mode) > 1 for mode in modes) and not bool(torch.isin(crossing, borders).all())


def main(words: Sequence[str] | None = None) -> int:
    """Run all cases; the exit code."""
    given = command_line("demo", __doc__, FOLDER).parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    outcomes: list[Outcome] = []
    worst64 = 0.0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("reading images and texts", total=None)
        todo = list(cases(console))
        progress.update(bar, description=f"all cases on {PROCESSES} processes")
        real_ranks = run_processes(on_processes, PROCESSES, [(case.layout.to_json(), case.window) for case in todo])[0]
        steps = sum(len(HEADS) * (1 + len(case.ranks)) for case in todo)
        progress.update(bar, description="all cases on virtual ranks", total=steps)
        for index, case in enumerate(todo):
            for heads in HEADS:
                problem = case.problem(heads)
                ref, single = reference(problem), single_call(problem)
                progress.advance(bar)
                for ranks in case.ranks:
                    plan = problem.plan(ranks)
                    worst64 = max(worst64, worst_difference(distributed(problem, plan, torch.float64), ref))
                    ours = error_ratios(distributed(problem, plan), single, ref)
                    rounded = error_ratios(distributed(problem, plan, backend="rounded"), single, ref)
                    outcomes.append(Outcome(case.name, heads, str(ranks), ours, rounded))
                    progress.advance(bar)
                ours, rounded = (error_ratios(results, single, ref) for results in real_ranks[index][heads])
                outcomes.append(Outcome(case.name, heads, f"{PROCESSES} processes", ours, rounded))
    return report(console, todo, outcomes, worst64, given.out)


def report(console: Console, todo: list[Case], outcomes: list[Outcome], worst64: float, folder: Path) -> int:
    """Print the table, draw the picture, write the rows; the exit code."""
    table = Table(title=f"error over a single call's (gate {GATE}); right: partial results rounded at every step")
    for column in ("case", "heads", "ranks", *RESULTS, *RESULTS):
        table.add_column(column, justify="left" if column in ("case", "heads") else "right")
    for outcome in outcomes:
        ours = [f"[{'green' if ratio <= GATE else 'red'}]{ratio:.3f}" for ratio in outcome.ours.values()]
        rounded = [f"[{'dim' if ratio <= GATE else 'red'}]{ratio:.3f}" for ratio in outcome.rounded.values()]
        table.add_row(outcome.case, outcome.heads, outcome.ranks, *ours, *rounded)
    console.print(table)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "plan.png"
    show(todo[1].problem("GQA").plan(4, block=64), picture, title=f"{todo[1].name}: {TOKENS:,} tokens on 4 ranks")
    results = write("demo", [
        Row("exactness", f"{outcome.case}, {outcome.heads}, {outcome.ranks} ranks, {name}", "error ratio",
            outcome.ours[name], "", "rounded at every step", outcome.rounded[name])
        for outcome in outcomes for name in RESULTS
    ], folder)  # fmt: skip
    telling = [case.name for case in todo if is_telling(case)]
    spread = [outcome for outcome in outcomes if outcome.ranks != "1"]
    checks = {
        f"every ratio ≤ {GATE}, largest {max(max(o.ours.values()) for o in outcomes):.4f}": all(
            outcome.passes for outcome in outcomes
        ),
        f"float64 equals dense attention to {FLOAT64_GATE}, largest difference {worst64:.1e}": worst64 <= FLOAT64_GATE,
        f"rounding at every step fails the gate in all {len(spread)} rows with more than one rank, smallest maximum "
        f"{min(max(o.rounded.values()) for o in spread):.3f}": all(outcome.rounding_fails for outcome in spread),
    }
    checks["every case has two spans of each of its modes and a span across two ranks"] = len(telling) == len(todo)
    for claim, holds in checks.items():
        console.print(f"[{'green' if holds else 'red'}]{'holds' if holds else 'FAILS'}[/]  {claim}")
    console.print(f"wrote {picture} and {results}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
