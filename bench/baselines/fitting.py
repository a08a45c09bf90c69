"""The constants of a profile from measured layers: a case with its milliseconds, its estimates, and the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench.baselines.calls import Case
from bench.baselines.choices import BLOCK, of_record, strategies
from marble.compose import planner
from marble.cost.estimate import Estimate
from marble.cost.profile import Profile
from marble.cost.select import priced
from marble.replays import Strategy

FEWEST_CANDIDATES, LEAST_SPREAD = 4, 1.2
"""C1: which cases count: those with so many strategies and such a worst over best."""
START = Profile.load("h200")
STEP = 20e-6
"""Where the fit begins: the shipped profile, and a guess of a step's fixed time."""
SCALARS = ("forward_partial", "backward_partial", "forward_unit", "backward_unit", "memory", "inside", "step")
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
        pieces: their transfers and sums.
    """

    case: Case
    ms: Mapping[Strategy, float]
    loads: Mapping[Strategy, Estimate]
    pieces: Mapping[Strategy, int]

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
        ms, pieces = ({each: record[name][str(each)] for each in loads} for name in ("ms", "pieces"))
        return cls(case, ms, loads, pieces)

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

    count = 2 * len(dims) + len(SCALARS)
    found = least_squares(wrong, np.zeros(count), bounds=(-_FARTHEST, _FARTHEST), diff_step=1e-3, xtol=1e-5, ftol=1e-5)
    fitted_to = f"fitted to {len(cases)} layers of two ranks"
    rates = [f"{name}.{dim}" for name in ("forward_rate", "backward_rate") for dim in dims]
    sources = dict(start.sources) | dict.fromkeys(
        (*rates, *SCALARS), f"{fitted_to}, least squares of the relative error"
    )
    return replace(_scaled(start, dims, np.exp(found.x)), machine=fitted_to, sources=tuple(sources.items()))


def _scaled(start: Profile, dims: Sequence[int], factors: np.ndarray) -> Profile:
    """A profile with its rates of some head sizes, forward and backward, and then its other constants multiplied."""
    ahead, back, others = np.split(factors, [len(dims), 2 * len(dims)])
    rates = {
        name: tuple(
            (dim, rate * float(dict(zip(dims, by, strict=True)).get(dim, 1.0))) for dim, rate in getattr(start, name)
        )
        for name, by in (("forward_rate", ahead), ("backward_rate", back))
    }
    scalars = {name: getattr(start, name) * float(by) for name, by in zip(SCALARS, others, strict=True)}
    return replace(start, **rates, **scalars)
