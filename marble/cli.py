"""The command line: look at layouts and plans, check exactness, draw the picture."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import marble
from marble.compose.builders import ORDERS, SCHEDULES
from marble.compose.check import check as check_schedules
from marble.compose.cost import summarise
from marble.compose.planner import ranking, usual_order
from marble.cost.fit import fit as fit_profile
from marble.cost.profile import SHIPPED, Profile
from marble.cost.timer import CudaTimer
from marble.kernels import launch
from marble.layout import Layout
from marble.replays import Expected, Strategy
from marble.replays import replay as replay_ranks
from marble.tables import as_record, rank_table, ranking_table, replay_record, replay_tables, step_table
from marble.testing import exactness
from marble.workloads import WORKLOADS, build

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact sequence-parallel attention over packed multimodal sequences.",
)
# A pipe has no width to fit into.
# What is printed holds names of files and what users wrote: no markup, no emoji.
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False, emoji=False)
progress_console = Console(stderr=True, highlight=False, markup=False, emoji=False)

Source = Annotated[
    str, typer.Argument(help=f"a workload ({', '.join(WORKLOADS)}) or the path of a layout in JSON", show_default=False)
]
Tokens = Annotated[int, typer.Option(help="length of a workload's layout", min=1)]
Seed = Annotated[int, typer.Option(help="seed of a workload's layout, and of random inputs", min=0)]
Scale = Annotated[float, typer.Option(help="shrink a workload's spans by this factor, at most 1")]
Ranks = Annotated[int, typer.Option(help="number of ranks", min=1)]
Window = Annotated[int | None, typer.Option(help="sliding window of the layer; none for a global layer", min=1)]
Order = Annotated[str | None, typer.Option(help=f"token order: {', '.join(ORDERS)}; by default by the schedule")]
Ulysses = Annotated[int, typer.Option(help="ranks that share the heads of their tokens", min=1)]
ScheduleName = Annotated[str, typer.Option("--schedule", help=f"what moves between ranks: {', '.join(SCHEDULES)}")]
PICTURES = (".png", ".pdf", ".svg")
Block = Annotated[int, typer.Option(help="tokens of a tile's block", min=1, max=128)]
Shape = Annotated[str, typer.Option(help="query heads : key/value heads : size of a head")]


@app.command()
def workload(
    source: Source,
    tokens: Tokens = 65536,
    seed: Seed = 0,
    scale: Scale = 1.0,
    out: Annotated[Path | None, typer.Option(help="write the layout to this JSON file")] = None,
) -> None:
    """Build a layout and say what is in it."""
    _expect_writable(out)
    layout = _layout(source, tokens, seed, scale)
    spans, lengths = Counter[str](), Counter[str]()
    for sample in layout.samples:
        for span in sample:
            spans[span.mode] += 1
            lengths[span.mode] += span.length
    table = Table(title=f"{source}: {layout.tokens:,} tokens in {len(layout.samples):,} samples")
    for column in ("mode", "spans", "tokens", "share", "mean length"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, count in spans.most_common():
        share = lengths[mode] / layout.tokens
        table.add_row(mode, f"{count:,}", f"{lengths[mode]:,}", f"{share:.1%}", f"{lengths[mode] / count:.1f}")
    console.print(table)
    if out is not None:
        out.write_text(layout.to_json())


@app.command()
def plan(
    source: Source,
    tokens: Tokens = 65536,
    seed: Seed = 0,
    scale: Scale = 1.0,
    ranks: Ranks = 8,
    window: Window = None,
    schedule: Annotated[
        str,
        typer.Option(
            help=f"what moves between ranks: {', '.join(SCHEDULES)}; or whom to choose for: {', '.join(SHIPPED)} or "
            "a profile's TOML file"
        ),
    ] = "ring",
    order: Order = None,
    ulysses: Annotated[int | None, typer.Option(help="ranks that share the heads of their tokens", min=1)] = None,
    block: Block = 128,
    shape: Shape = "32:8:128",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Plan a layer and show its work per rank and step, its balance and its bytes; or rank what a plan could be."""
    layout = _layout(source, tokens, seed, scale)
    layer = _attention_shape(shape, window)
    if schedule not in SCHEDULES:
        if schedule not in SHIPPED and not Path(schedule).is_file():
            raise ValueError(
                f"schedule: {schedule!r} is neither one of {', '.join(SCHEDULES)} nor a profile, {', '.join(SHIPPED)} "
                "or a file"
            )
        profile = Profile.load(schedule)
        with _busy("choosing"):
            ranked = ranking(layout, layer, ranks, profile, order=order, ulysses=ulysses, block=block)
        if as_json:
            typer.echo(json.dumps([as_record(candidate) for candidate in ranked]))
            return
        console.print(ranking_table(ranked, f"{source}: {layout.tokens:,} tokens on {ranks} × {profile.machine}"))
        left_out = [name for name in ("across", "step") if getattr(profile, name) is None]
        if left_out:
            console.print(f"not in the profile, so not counted: {', '.join(left_out)}")
        return
    with _busy("planning"):
        planned = marble.plan(layout, layer, ranks=ranks, schedule=schedule, order=order, ulysses=ulysses, block=block)
    summary = summarise([planned.schedules[0][rank] for rank in range(ranks)], layer.head_dim, block=block)
    if as_json:
        fields = {name: getattr(summary, name).tolist() for name in summary.__dataclass_fields__}
        ratios = {
            name: getattr(summary, name) for name in ("total_balance", "step_balance", "token_balance", "partial_share")
        }
        typer.echo(
            json.dumps(
                {"source": source, "schedule": schedule, "order": planned.order.name, "block": block, "ranks": ranks}
                | {"ulysses": planned.ulysses, "idle": planned.idle}
                | fields
                | ratios
            )
        )
        return
    console.print(rank_table(summary, f"{source}: {planned}, tiles of {block}×{block}"))
    console.print(step_table(summary))
    console.print(
        f"busiest rank / mean {summary.total_balance:.4f} · sum of slowest steps / mean {summary.step_balance:.4f} · "
        f"most tokens / mean {summary.token_balance:.4f} · partial tiles {summary.partial_share:.1%}"
    )


@app.command()
def check(
    source: Source,
    tokens: Tokens = 4096,
    seed: Seed = 0,
    scale: Annotated[float | None, typer.Option(help="as above; by default the workload's demo scale")] = None,
    ranks: Ranks = 4,
    window: Window = None,
    schedule: ScheduleName = "ring",
    order: Order = None,
    ulysses: Ulysses = 1,
    block: Block = 128,
    shape: Shape = "4:2:64",
) -> None:
    """Prove the schedules right, then compare virtual ranks with a single call. Exit code 1 if they are not exact."""
    if scale is None:
        scale = WORKLOADS[source].demo_scale if source in WORKLOADS else 1.0
    layout = _layout(source, tokens, seed, scale)
    layer = _attention_shape(shape, window)
    with _progress() as progress:
        task = progress.add_task("planning", total=6)

        def done(following: str) -> None:
            progress.update(task, advance=1, description=following)

        planned = marble.plan(layout, layer, ranks=ranks, schedule=schedule, order=order, ulysses=ulysses, block=block)
        done("proving the schedules")
        assert planned.masks is not None
        schedules = [planned.schedules[0][rank] for rank in range(ranks)]
        report = check_schedules(schedules, planned.order, planned.masks[0])
        done("float64 reference")
        problem = exactness.Problem.random(layout, layer, seed=seed)
        ref = exactness.reference(problem)
        done("single call")
        single = exactness.single_call(problem)
        done("ranks in float64")
        difference = exactness.worst_difference(exactness.distributed(problem, planned, torch.float64), ref)
        done("ranks in bfloat16")
        ratios = {
            backend: exactness.error_ratios(exactness.distributed(problem, planned, backend=backend), single, ref)
            for backend in ("reference", "rounded")
        }
        done("done")
    table = Table(title=f"{source}: error over a single call's, {ranks} ranks, {schedule}, shape {shape}")
    table.add_column("")
    for name in exactness.RESULTS:
        table.add_column(name, justify="right")
    labels = {"reference": "marble", "rounded": "rounded at every step"}
    for backend, values in ratios.items():
        table.add_row(labels[backend], *(f"{values[name]:.4f}" for name in exactness.RESULTS))
    console.print(table)
    console.print(
        f"{report.pairs:,} legal pairs, each computed once forward and once backward; "
        f"{report.unused_rows:,} of {report.received_rows:,} received rows unused; "
        f"largest float64 difference {difference:.1e}"
    )
    if difference > 1e-10 or max(ratios["reference"].values()) > exactness.GATE:
        raise typer.Exit(1)


@app.command()
def fit(
    out: Annotated[Path, typer.Argument(help="the profile to write", show_default=False)],
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node", min=1)] = 8,
    inside: Annotated[float | None, typer.Option(help="bytes/s between two GPUs of a node; else measured")] = None,
    across: Annotated[float | None, typer.Option(help="bytes/s of a GPU to other nodes, if known")] = None,
) -> None:
    """Measure this machine's GPUs and write a profile, for `marble plan --schedule` and `marble.plan`."""
    _expect_writable(out)
    timer = CudaTimer()
    with _busy("measuring"):
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        profile = fit_profile(timer, (64, 256, 128), gpus_per_node, inside, across, today)
    out.write_text(profile.dump(), encoding="utf-8")
    console.print(f"wrote {out}")


@app.command()
def replay(
    source: Source,
    tokens: Tokens = 65536,
    ranks: Ranks = 8,
    window: Window = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"{', '.join(SCHEDULES)}; by default what the profile expects to be fastest")
    ] = None,
    order: Order = None,
    ulysses: Annotated[int | None, typer.Option(help="ranks that share the heads of their tokens", min=1)] = None,
    shape: Shape = "32:8:128",
    profile: Annotated[
        str, typer.Option(help=f"what transfers take: {', '.join(SHIPPED)} or a profile's TOML file")
    ] = "h100-cluster",
    which: Annotated[
        str | None,
        typer.Option(help="ranks: all, or some by commas; by default the three that the layer waits for most"),
    ] = None,
    backend: Annotated[str, typer.Option(help="kernels: cute on a Hopper GPU, or reference on the CPU")] = "cute",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Time some ranks' part of a layer on one GPU, with a profile's price of what they would send and receive.

    A workload's layout has seed 0; `marble workload --seed 1 --out FILE` makes others to replay.
    """
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"schedule: {schedule!r} is unknown; use one of {', '.join(map(repr, SCHEDULES))}")
    if order not in (None, *ORDERS):
        raise ValueError(f"order: {order!r} is unknown; use one of {', '.join(map(repr, ORDERS))}")
    layout, layer, machine = _layout(source, tokens, 0, 1.0), _attention_shape(shape, window), Profile.load(profile)
    kernels = launch.backend(backend)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "cute" else torch.device("cpu")
    with _busy("choosing"):
        if schedule is None:
            best = ranking(layout, layer, ranks, machine, order=order, ulysses=ulysses)[0]
            strategy = Strategy(ranks, best.schedules[0], best.order, best.ulysses)
        else:
            strategy = Strategy(ranks, schedule, order or usual_order((schedule,)), ulysses or 1)
        expected = Expected.of(layout, layer, strategy, machine)
    chosen = _chosen_ranks(which, expected)
    with _busy(f"replaying {len(chosen)} of {ranks} ranks"):
        found = replay_ranks(layout, layer, expected, chosen, machine, kernels, device=device)
    if as_json:
        typer.echo(json.dumps(replay_record(found) | {"source": source, "profile": machine.machine}))
        return
    title = f"{source}: {layout.tokens:,} tokens on {ranks} × {machine.machine}, {strategy}"
    for table in replay_tables(found, title):
        console.print(table)
    parts = (found.layer.seconds, found.layer.forward.seconds, found.layer.backward.seconds, found.layer.exposed)
    layer_ms, forward, backward, exposed = (f"{seconds * 1e3:.3f}" for seconds in parts)
    console.print(
        f"replay, not a run on {ranks} GPUs: layer {layer_ms} ms (forward {forward}, backward {backward}), of which "
        f"{exposed} ms wait for transfers and other ranks; busiest / mean of replayed {found.layer.balance:.4f}; "
        f"{found.layer.nbytes / 2**30:.3f} GiB; the replayed ranks make up {found.covered:.1%} of the estimated layer"
    )


@app.command()
def show(
    source: Source,
    out: Annotated[Path, typer.Option(help="the picture to write")] = Path("marble.png"),
    tokens: Tokens = 4096,
    seed: Seed = 0,
    scale: Scale = 1.0,
    ranks: Ranks = 4,
    window: Window = None,
    order: Order = None,
    block: Block = 128,
) -> None:
    """Draw the mask, the tiles of every step and the work per rank to a picture."""
    from marble.plots import show as draw

    if out.suffix.lower() not in PICTURES:
        raise ValueError(f"out: expected a name that ends in one of {', '.join(PICTURES)}, got {str(out)!r}")
    _expect_writable(out)
    layout = _layout(source, tokens, seed, scale)
    with _busy("planning and drawing"):
        planned = marble.plan(layout, marble.AttentionShape(1, 1, 128, window), ranks=ranks, order=order, block=block)
        draw(planned, out, title=f"{source}, {layout.tokens:,} tokens on {ranks} ranks")
    console.print(f"wrote {out}")


def main() -> None:
    """Run the command line; bad input ends in one line and exit code 2."""
    try:
        app()
    except (ValueError, TypeError, ImportError, OSError) as error:
        progress_console.print(Text("error", "red"), str(error), soft_wrap=True)
        raise SystemExit(2) from None


def _expect_writable(out: Path | None) -> None:
    """Refuse a file that cannot be written, before the work of what would be in it.

    Raises:
        ValueError: if it is a folder, or its folder is not there, or this process may not write it.
    """
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"out: {str(out)!r} is a folder; name a file")
    if not out.parent.is_dir():
        raise ValueError(f"out: the folder {str(out.parent)!r} does not exist")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ValueError(f"out: {str(out)!r} cannot be written")


def _layout(source: str, tokens: int, seed: int, scale: float) -> Layout:
    if source in WORKLOADS:
        return build(source, tokens, seed, scale)
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"source: {source!r} is neither a workload ({', '.join(WORKLOADS)}) nor a file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"source: {source!r} is not a text file in UTF-8") from None
    return Layout.from_json(text)


def _attention_shape(text: str, window: int | None) -> marble.AttentionShape:
    try:
        heads, kv_heads, head_dim = map(int, text.split(":"))
    except ValueError:
        raise ValueError(f"shape: expected heads:kv_heads:head_dim, like 32:8:128, got {text!r}") from None
    return marble.AttentionShape(heads, kv_heads, head_dim, window)


def _chosen_ranks(text: str | None, expected: Expected) -> tuple[int, ...]:
    """The ranks that ``--which`` names."""
    ranks = expected.strategy.ranks
    if text is None:
        return expected.worth_replaying(3)
    if text == "all":
        return tuple(range(ranks))
    try:
        named = tuple(dict.fromkeys(map(int, text.split(","))))
    except ValueError:
        named = ()
    if not named or not all(0 <= rank < ranks for rank in named):
        raise ValueError(f"which: expected all, or ranks from 0 to {ranks - 1} by commas, got {text!r}")
    return named


def _progress() -> Progress:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=progress_console, transient=True)


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """A moving bar for work whose length is not known beforehand."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=progress_console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
