"""One case of `bench.layer`: who runs it, how exact everyone is, and how long they take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from bench.baselines import context_parallel, exchanged, usp
from bench.baselines.calls import Case
from bench.baselines.layer_bars import SILENT, ours, time_rows
from bench.baselines.layers import ONE, Inputs, Layer, Offer, Ours, alone, differences, of_ranks, whole
from bench.baselines.measure import relative_error
from bench.harness import Row
from marble.kernels.contract import Backend
from marble.testing.exactness import Problem, error_ratios, reference
from marble.workloads import WORKLOADS

_log = logging.getLogger(__name__)

DIFFERENT = 1e-2
"""Largest relative difference to one GPU's results; other roundings of bfloat16 are far below it."""


def everyone(case: Case, inputs: Inputs, kernels: Backend) -> Iterator[Offer]:
    """Marble's schedules, and the public schemes."""
    yield from of_ranks(case, inputs, kernels)
    for each in (exchanged, context_parallel, usp):
        yield from each.offers(case, inputs)


@dataclass(frozen=True)
class Settings:
    """How layers are measured.

    Attributes:
        kernels: marble's.
        device: this rank's.
        exact_tokens: length of the packs that errors are measured on.
        clock: milliseconds of each of some contenders.
        skip: how the names of contenders begin that are left out.
        offers: the contenders.
    """

    kernels: Backend
    device: torch.device
    exact_tokens: int
    clock: Callable[[Mapping[str, Layer]], dict[str, float]]
    skip: tuple[str, ...] = ()
    offers: Callable[[Case, Inputs, Backend], Iterable[Offer]] = everyone

    def accepted(self, case: Case, inputs: Inputs) -> tuple[dict[str, Layer], dict[str, str]]:
        """The contenders that run a case, and why the others do not.

        Raises:
            RuntimeError: if one of marble's neither runs nor refuses.
        """
        layers: dict[str, Layer] = {}
        refusals: dict[str, str] = {}
        for offer in self.offers(case, inputs, self.kernels):
            _log.info("%s: %s", case.title, offer.name)
            answer = "left out by --skip" if offer.name.startswith(self.skip or ("\0",)) else offer.accepted()
            if isinstance(answer, str):
                if ours(offer.name) and not answer.startswith(("ValueError:", "left out")):
                    raise RuntimeError(f"{case.title}: {offer.name}: {answer}")
                refusals[offer.name] = answer
            else:
                layers[offer.name] = answer
        return layers, refusals


def title(case: Case, ranks: int) -> str:
    """The case, how many ranks share it, and the model whose heads the layer has."""
    model = f", heads of {WORKLOADS[case.name].model}" if case.name in WORKLOADS else ""
    return f"{case.title}, {ranks} ranks{model}"


def errors(case: Case, settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """T5: relative errors against float64 of everyone on a smaller pack, over those of one GPU's call; and refusals."""
    scale = WORKLOADS[case.name].demo_scale if case.name in WORKLOADS else 1.0
    small = replace(case, tokens=settings.exact_tokens, scale=scale)
    problem = Problem.random(small.layout, small.shape, device=settings.device)
    inputs, truth = Inputs.of_problem(problem), reference(problem)
    single = whole(alone(small, inputs, settings.kernels), small.tokens)
    layers, refusals = settings.accepted(small, inputs)
    rows = []
    for name, layer in layers.items():
        results = whole(layer, small.tokens)
        for result, ratio in error_ratios(results, single, truth).items():
            mine, base = (relative_error(x[result], truth[result]) for x in (results, single))
            rows.append(Row("T5", title(small, dist.get_world_size()), f"{name}: {result}", mine, "", ONE, base, ratio))
    return rows, refusals


def times(case: Case, settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """T2, T3 and T4 on the whole pack: times of everyone whose results are those of one GPU; and refusals.

    Raises:
        RuntimeError: if a layer of marble's is wrong, or neither runs nor refuses.
    """
    inputs = Inputs.random(case, settings.device)
    single = alone(case, inputs, settings.kernels)
    expected = whole(single, case.tokens)
    layers, refusals = settings.accepted(case, inputs)
    right: dict[str, Layer] = {ONE: single}
    for name, layer in layers.items():
        found = differences(layer, expected)
        if max(found.values()) <= DIFFERENT:
            right[name] = layer
            if isinstance(layer, Ours) and ours(name) and name.startswith("ring,"):
                right[f"{name}, {SILENT}"] = layer.silent()
        elif ours(name):
            raise RuntimeError(f"{case.title}: {name} differs from one GPU by {found}")
        else:
            refusals[name] = f"wrong: it differs from one GPU by {found}"
    del inputs, expected  # what the layers need of them, they have
    return time_rows(title(case, dist.get_world_size()), settings.clock(right)), refusals


def lines(exact: list[Row], timed: list[Row]) -> list[str]:
    """What was found, a line per contender: its time beside one GPU's or marble's best, and its error ratios."""
    ratios: dict[str, list[str]] = {}
    for row in exact:
        name, _, result = row.metric.rpartition(": ")
        ratios.setdefault(name, []).append(f"{result} {row.ratio:.3f}")
    found = []
    for row in timed:
        if row.baseline is None:
            found.append(f"{row.bar} {row.metric}: {row.value:.2f} {row.unit}")
            continue
        name = (row.baseline if row.bar == "T4" else row.metric) or ""
        pair = f"{row.metric} {row.value:.2f} ms, {row.baseline} {row.baseline_value:.2f} ms, ratio {row.ratio:.3f}"
        found.append(f"{row.bar} {pair}; errors of {name}: {', '.join(ratios.get(name, ['not measured']))}")
    return found
