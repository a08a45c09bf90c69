"""Picks against measurements (issue 7, C1): constants fitted to one half of the cases, picks of the other half judged.

Every case has the milliseconds of all its strategies. The constants of a profile are fitted to them by least squares of
the relative error, so that short and long layers count alike; a layer's loads are those that choosing goes by
(`marble.compose.planner.estimates`). No case is judged by constants that it was fitted to: each half is judged with
those of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench.baselines.calls import Case
from bench.baselines.choices import BLOCK, digest, key, of_record, strategies
from bench.harness import Row
from marble.compose import planner
from marble.cost.estimate import Estimate
from marble.cost.profile import Profile
from marble.cost.select import priced
from marble.replays import Strategy

FEWEST_CASES, FEWEST_CANDIDATES, LEAST_SPREAD = 60, 4, 1.2
"""C1: how many cases are judged at least, and which: those with so many strategies and such a worst over best."""
WITHIN = {1.10: 0.95, 1.05: 0.88}
"""C1: over the fastest, and the least share of picks so close."""
CLOSE, CLOSE_RUNS = 0.03, 8
"""τ: relative error of C, and the least number of runs so close."""
LEAST, ALWAYS, PICK = "least", "always", "picked"
START = Profile.load("h200")
STEP = 20e-6
"""Where the fit begins: the shipped profile, and a guess of a step's fixed time."""
_SCALARS = ("forward_partial", "backward_partial", "forward_unit", "backward_unit", "memory", "inside", "step")
_FARTHEST = np.log(4.0)
"""No constant leaves where it began by more than a factor of four."""
_PULL = 0.05
"""What a constant costs that leaves where it began by a factor of e, as a relative error: what the cases say nothing
about stays. They say little of forward apart from backward, as layers are timed whole."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A case with what was measured and what the estimate needs.

    Attributes:
        case: the layer.
        ms: measured milliseconds of its strategies.
        loads: the estimates of these.
    """

    case: Case
    ms: Mapping[Strategy, float]
    loads: Mapping[Strategy, Estimate]

    @classmethod
    def of(cls, record: Mapping[str, Any], ranks: int) -> Judged:
        """A case of a file of measurements; strategies without an estimate are left out."""
        case = of_record(record)
        measured = [each for each in strategies(ranks, case.shape.heads) if str(each) in record["ms"]]
        found = {
            (order, degree): planner.estimates(
                case.layout, case.shape, ranks, order=order, ulysses=degree, gpus_per_node=START.gpus_per_node
            )
            for order, degree in {(each.order, each.ulysses) for each in measured}
        }
        of = {each: found[each.order, each.ulysses].get(each.schedule) for each in measured}
        loads = {each: estimate for each, estimate in of.items() if estimate is not None}
        return cls(case, {strategy: record["ms"][str(strategy)] for strategy in loads}, loads)

    @property
    def best(self) -> float:
        """Milliseconds of the fastest."""
        return min(self.ms.values())

    @property
    def counts(self) -> bool:
        """Whether there is something to choose."""
        return len(self.ms) >= FEWEST_CANDIDATES and max(self.ms.values()) >= LEAST_SPREAD * self.best

    @cached_property
    def beside(self) -> dict[Strategy, float]:
        """Bytes that every strategy reads and writes and the estimate leaves out, as all have them alike: delta, keys
        and values copied to where they travel from, twice, and gradients rounded."""
        shape = self.case.shape
        queries, pairs = (2 + 2 + 4 + 2) * shape.heads, (2 * (2 + 2) + 4 + 2) * 2 * shape.kv_heads
        return {each: self.case.tokens / each.ranks * shape.head_dim * (queries + pairs) for each in self.ms}

    def predicted(self, profile: Profile) -> dict[Strategy, float]:
        """Milliseconds by the estimate."""
        dim = self.case.shape.head_dim
        passes = {each: priced(found, profile, dim, BLOCK) for each, found in self.loads.items()}
        beside = {each: nbytes / profile.memory for each, nbytes in self.beside.items()}
        return {each: 1e3 * (sum(cost.seconds for cost in costs) + beside[each]) for each, costs in passes.items()}

    def picked(self, profile: Profile) -> Strategy:
        """What the estimate expects to be fastest."""
        found = self.predicted(profile)
        return min(found, key=lambda each: found[each])

    def over(self, strategy: Strategy) -> float:
        """A strategy's time over the fastest's."""
        return self.ms[strategy] / self.best


def fitted(cases: Sequence[Judged]) -> Profile:
    """The constants that make the estimate of all strategies of some cases least wrong, in squares of the relative
    error. Rates are fitted for the head sizes of the cases."""
    start = replace(START, step=STEP)
    dims = sorted({judged.case.shape.head_dim for judged in cases})

    def wrong(logs: np.ndarray) -> np.ndarray:
        profile = _scaled(start, dims, np.exp(logs))
        pairs = ((judged.predicted(profile), judged.ms) for judged in cases)
        errors = [found[each] / ms[each] - 1 for found, ms in pairs for each in ms]
        return np.concatenate([errors, _PULL * logs])

    count = 2 * len(dims) + len(_SCALARS)
    found = least_squares(wrong, np.zeros(count), bounds=(-_FARTHEST, _FARTHEST), diff_step=1e-3, xtol=1e-5, ftol=1e-5)
    profile = _scaled(start, dims, np.exp(found.x))
    return replace(profile, machine=f"fitted to {len(cases)} layers of two ranks", sources=())


def _scaled(start: Profile, dims: Sequence[int], factors: np.ndarray) -> Profile:
    """A profile with its rates of some head sizes, forward and backward, and then its other constants multiplied."""
    ahead, back, others = np.split(factors, [len(dims), 2 * len(dims)])
    rates = {
        name: tuple(
            (dim, rate * float(dict(zip(dims, by, strict=True)).get(dim, 1.0))) for dim, rate in getattr(start, name)
        )
        for name, by in (("forward_rate", ahead), ("backward_rate", back))
    }
    scalars = {name: getattr(start, name) * float(by) for name, by in zip(_SCALARS, others, strict=True)}
    return replace(start, **rates, **scalars)


def judged(raw: Mapping[str, Any]) -> list[Row]:
    """All rows of a file of measurements."""
    cases = [Judged.of(record, raw["ranks"]) for record in raw["cases"]]
    cases = sorted((each for each in cases if each.ms), key=lambda each: digest(each.case))
    halves = cases[::2], cases[1::2]
    if not all(halves):
        return [*_picks([]), *_chunked(raw["chunked"])]
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
        yield Row(
            "C1", f"{key(each.case)}: {pick}", PICK, each.ms[pick], "ms", str(fastest), each.best, each.over(pick)
        )


def _constants(profiles: Sequence[Profile]) -> Iterator[Row]:
    """What was fitted to either half."""
    for name in ("forward_rate", "backward_rate"):
        for (dim, one), (_, other) in zip(*(getattr(profile, name) for profile in profiles), strict=True):
            yield Row("constants", f"{name}.{dim}", "fitted to one half", one, "", "to the other", other, one / other)
    for name in _SCALARS:
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
