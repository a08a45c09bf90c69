"""What the command line prints: tables of a plan's work, of ranked strategies and of replays."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from marble.compose.cost import Summary
from marble.cost.select import Candidate
from marble.replays import Replay

MOST_COLUMNS, MOST_ROWS = 8, 12


def rank_table(summary: Summary, title: str) -> Table:
    """Visited tiles of every rank; step by step where the steps fit beside each other."""
    steps = range(summary.visited.shape[1])
    steps = steps if len(steps) <= MOST_COLUMNS else range(0)
    table = Table(title=title)
    for column in ("rank", "tokens", *(f"s{step}" for step in steps), "all", "partial", "MB in: fwd", "bwd"):
        table.add_column(column, justify="right")
    for rank, visited in enumerate(summary.visited.tolist()):
        partial = int(summary.partial[rank].sum()) / max(sum(visited), 1)
        received = (f"{int(part[rank]) / 1e6:,.0f}" for part in (summary.forward_bytes, summary.backward_bytes))
        tiles = (f"{visited[step]:,}" for step in steps)
        table.add_row(
            str(rank), f"{int(summary.tokens[rank]):,}", *tiles, f"{sum(visited):,}", f"{partial:.1%}", *received
        )
    return table


def as_record(candidate: Candidate) -> dict[str, object]:
    """A candidate as JSON has it; seconds and bytes."""
    names = ("ulysses", "order", "schedules", "seconds", "compute", "exposed", "fixed", "memory")
    return {name: getattr(candidate, name) for name in names}


def ranking_table(ranked: Sequence[Candidate], title: str) -> Table:
    """The fastest candidates, and why they are: what the busiest rank computes, and what comes on top."""
    table = Table(title=f"{title}: the fastest {min(len(ranked), MOST_ROWS)} of {len(ranked)}, one layer, estimated")
    columns = ("R×U", "order", "schedule", "ms", "compute ms", "longest step", "exposed ms", "fixed ms", "GiB")
    for column in columns:
        table.add_column(column, justify="left" if column in ("order", "schedule") else "right")
    for candidate in ranked[:MOST_ROWS]:
        groups = candidate.ranks // candidate.ulysses
        layer = candidate.layers[0]
        longest = max(float(cost.steps.max()) for cost in (layer.forward, layer.backward))
        table.add_row(
            f"{groups}×{candidate.ulysses}",
            candidate.order,
            layer.schedule,
            *(f"{x * 1e3:.2f}" for x in (candidate.seconds, candidate.compute, longest)),
            *(f"{x * 1e3:.2f}" for x in (candidate.exposed, candidate.fixed)),
            f"{candidate.memory / 2**30:.2f}",
        )
    return table


def step_table(summary: Summary) -> Table:
    """How even every step is: 1 where nobody works."""
    table = Table(title="a step lasts as long as its slowest rank")
    for column in ("step", "slowest rank", "its tiles", "mean tiles", "slowest / mean"):
        table.add_column(column, justify="right")
    for step, visited in enumerate(summary.visited.T.tolist()):
        slowest, mean = max(visited), sum(visited) / len(visited)
        over = slowest / mean if mean else 1.0
        shown = f"{mean:,.0f}" if mean >= 10 else f"{mean:.3g}"
        table.add_row(str(step), str(visited.index(slowest)), f"{slowest:,}", shown, f"{over:.3f}")
    return table


def replay_tables(found: Replay, title: str) -> tuple[Table, Table]:
    """What every replayed rank computes and holds, and what every step takes."""
    layer, balance = found.layer, found.expected.balance
    ranks = Table(title=f"replay of {title}")
    for column in ("rank", "forward ms", "backward ms", "GiB"):
        ranks.add_column(column, justify="right")
    for rank in layer.ranks:
        passes = (sum(step.seconds for step in which) for which in (rank.forward, rank.backward))
        ranks.add_row(str(rank.rank), *(f"{x * 1e3:.3f}" for x in passes), f"{rank.nbytes / 2**30:.3f}")
    steps = Table(title="replay: ranks wait for each other where rows move")
    for column in ("pass", "step", "slowest ms", "/ mean of replayed", "/ mean of all, estimated", "last ends at ms"):
        steps.add_column(column, justify="left" if column == "pass" else "right")
    place = 0
    for name, which in (("forward", layer.forward), ("backward", layer.backward)):
        for number, (slowest, mean, end) in enumerate(zip(which.slowest, which.mean, which.ends, strict=True)):
            over = slowest / mean if mean else 1.0
            figures = f"{slowest * 1e3:.3f}", f"{over:.3f}", f"{balance[place]:.3f}", f"{end * 1e3:.3f}"
            steps.add_row(name, str(number), *figures)
            place += 1
    return ranks, steps


def replay_record(found: Replay) -> dict[str, object]:
    """A replay as JSON has it; seconds and bytes."""
    layer = found.layer
    return {
        "kind": "replay",
        "strategy": str(found.expected.strategy),
        "ranks": [rank.rank for rank in layer.ranks],
        "covered": found.covered,
        "seconds": layer.seconds,
        "forward": layer.forward.seconds,
        "backward": layer.backward.seconds,
        "compute": layer.compute,
        "exposed": layer.exposed,
        "steps": [list(which.slowest) for which in (layer.forward, layer.backward)],
        "balance": found.expected.balance,
        "memory": layer.nbytes,
    }
