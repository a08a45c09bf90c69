"""Picks against measurements (issue 7, C1): constants fitted to one half of the cases, picks of the other half judged.

Every case has the milliseconds of all its strategies. The constants of a profile are fitted to them by least squares of
the relative error, so that short and long layers count alike; a layer's loads are those that choosing goes by
(`marble.compose.planner.estimates`). No case is judged by constants that it was fitted to: each half is judged with
those of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from bench.baselines.choices import digest, key, of_record
from bench.baselines.fitting import FEWEST_CANDIDATES, LEAST_SPREAD, SCALARS, START, Judged, fitted
from bench.harness import Row
from marble.cost.profile import Profile
from marble.replays import Strategy

FEWEST_CASES = 60
"""C1: how many cases are judged at least."""
WITHIN = {1.10: 0.95, 1.05: 0.88}
"""C1: over the fastest, and the least share of picks so close."""
CLOSE, CLOSE_RUNS = 0.03, 8
"""τ: relative error of C, and the least number of runs so close."""
LEAST, ALWAYS, PICK = "least", "always", "picked"


def judged(raw: Mapping[str, Any]) -> list[Row]:
    """All rows of a file of measurements."""
    cases = [Judged.of(record, raw["ranks"]) for record in raw["cases"]]
    cases = sorted((each for each in cases if each.ms), key=lambda each: digest(each.case))
    halves = cases[::2], cases[1::2]
    if not all(halves):
        return [*_picks([]), *_chunked(raw["chunked"]), *_replays(raw)]
    profiles = [fitted(half) for half in halves]
    others = [(each, profile) for half, profile in zip(halves, profiles[::-1], strict=True) for each in half]
    errors = [
        abs(found / each.ms[strategy] - 1)
        for each, profile in others
        for strategy, found in each.predicted(profile).items()
    ]
    return [
        *_picks([(each, each.picked(profile)) for each, profile in others]),
        Row("C1", "all strategies", "relative error of the estimate, median", median(errors)),
        *_constants(profiles),
        *_chunked(raw["chunked"]),
        *_replays(raw),
    ]


def _picks(picks: Sequence[tuple[Judged, Strategy]]) -> Iterator[Row]:
    """How close the picks are, beside every rule that always takes one strategy."""
    some = [(each, pick) for each, pick in picks if each.counts]
    title = f"two ranks, cases with {FEWEST_CANDIDATES} strategies and a worst over best of {LEAST_SPREAD} at least"
    yield _least("C1", title, "cases", len(some), FEWEST_CASES)
    if not some:
        return
    for bound, least in WITHIN.items():
        share = sum(each.over(pick) <= bound for each, pick in some) / len(some)
        yield _least("C1", title, f"picks within {bound - 1:.0%} of the fastest", share, least)
    shipped = sum(each.over(each.picked(START)) <= 1.1 for each, _ in some) / len(some)
    yield Row("C1", title, "picks within 10% of the fastest, by the shipped profile", shipped)
    for rule in dict.fromkeys(strategy for each, _ in some for strategy in each.ms):
        where = [(each, pick) for each, pick in some if rule in each.ms]
        mine = geometric_mean(each.over(pick) for each, pick in where)
        always = geometric_mean(each.over(rule) for each, _ in where)
        case, metric = f"{len(where)} of these cases, where it can run", "picks over the fastest, geometric mean"
        yield Row("C1", case, metric, mine, "", f"{ALWAYS} {rule}", always, mine / always)
    for each, pick in some:
        fastest = min(each.ms, key=lambda strategy: each.ms[strategy])
        case, other = f"{key(each.case)}: {pick}", str(fastest)
        yield Row("C1", case, PICK, each.ms[pick], "ms", other, each.best, each.over(pick))
        if each.over(pick) > min(WITHIN):
            mine, least = each.pieces[pick], each.pieces[fastest]
            yield Row("C1", case, "transfers and sums of a pick that is farther off", mine, "", other, least)


def _constants(profiles: Sequence[Profile]) -> Iterator[Row]:
    """What was fitted to either half."""
    for name in ("forward_rate", "backward_rate"):
        for (dim, one), (_, other) in zip(*(getattr(profile, name) for profile in profiles), strict=True):
            yield Row("constants", f"{name}.{dim}", "fitted to one half", one, "", "to the other", other, one / other)
    for name in SCALARS:
        one, other = (getattr(profile, name) for profile in profiles)
        yield Row("constants", name, "fitted to one half", one, "", "to the other", other, one / other)


def _chunked(runs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """τ and how well C predicts: fitted to all runs, as the seed's is, and to all but the one that is predicted."""
    title, metric = f"{len(runs)} chunked rings of two ranks", f"runs within {CLOSE:.0%} of C"
    if len(runs) < 3:
        yield _least("tau", title, metric, 0, CLOSE_RUNS)
        return
    pairs, ranges, ms = (np.array([run[name] for run in runs], dtype=float) for name in ("pairs", "ranges", "ms"))
    a, b = _line(pairs, ranges, ms)
    whole, alone = a * pairs + b * ranges, []
    for run in range(len(runs)):
        one, other = _line(*(np.delete(column, run) for column in (pairs, ranges, ms)))
        alone.append(one * pairs[run] + other * ranges[run])
    close, of_others = (int((np.abs(found / ms - 1) <= CLOSE).sum()) for found in (whole, np.array(alone)))
    yield Row("tau", title, "τ", b / a, "pairs")
    yield _least("tau", title, metric, close, CLOSE_RUNS)
    yield Row("tau", title, f"{metric}, fitted to the others", of_others)
    for run, found in zip(runs, whole, strict=True):
        case = f"{run['name']}, {run['tokens']:,} tokens, {run['chunks']} chunks of each rank"
        yield Row("tau", case, "layer", run["ms"], "ms", "by C", float(found), run["ms"] / float(found))


def _replays(raw: Mapping[str, Any]) -> Iterator[Row]:
    """Replays of both ranks beside the layers that they stand for: how far what is said of more ranks can be off."""
    ratios = []
    for record in (*raw["cases"], *raw["chunked"]):
        if "replay" in record:
            name, found = record["replay"]["strategy"], record["replay"]["ms"]
            chunks = f", {record['chunks']} chunks of each rank" if "chunks" in record else ""
            ms = record["ms"] if chunks else record["ms"][name]
            ratios.append(found / ms)
            case = f"{key(of_record(record))}: {name}{chunks}"
            yield Row("replay", case, "layer, replay", found, "ms", "measured", ms, found / ms)
    if ratios:
        case = f"{len(ratios)} layers of two ranks"
        yield Row("replay", case, "replay over measured, median", median(ratios))
        yield Row("replay", case, "replay over measured, least", min(ratios))
        yield Row("replay", case, "replay over measured, most", max(ratios))


def _line(pairs: np.ndarray, ranges: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """Milliseconds of a pair and of a range, by least squares of the relative error; a range's is not below 0."""
    columns = np.stack([pairs, ranges], 1) / ms[:, None]
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(columns)), rcond=None)
    if b < 0:
        (a,), *_ = np.linalg.lstsq(columns[:, :1], np.ones(len(columns)), rcond=None)
        b = 0.0
    return float(a), float(b)


def _least(bar: str, case: str, metric: str, value: float, least: float) -> Row:
    return Row(bar, case, metric, value, "", LEAST, least, value / least)


def missed(rows: Iterable[Row]) -> list[str]:
    """The bars that are not held: too few cases, picks too far off, a rule that does better, or C too far off."""
    return [
        f"{row.bar} {row.metric}: {row.value:.3g}, {row.baseline}: {row.baseline_value:.3g}"
        for row in rows
        if row.bar in ("C1", "tau")
        and row.baseline is not None
        and row.baseline_value is not None
        and (
            (row.baseline == LEAST and row.value < row.baseline_value)
            or (row.baseline.startswith(ALWAYS) and row.value > row.baseline_value)
        )
    ]
