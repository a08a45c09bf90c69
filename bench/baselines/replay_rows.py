"""What replays say (issue 7, C2 and C3), as rows, and which of them miss a bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.baselines.replays import (
    CHUNKED,
    CONTIGUOUS,
    FETCH,
    GATHER,
    MI,
    PICKED,
    PTRR,
    ULYSSES_GATHER,
    WHOLE,
    Answer,
    Case,
)
from bench.harness import Row
from marble.cost.profile import Profile
from marble.replays import Replay

PAPER = {(MI, 32): (407, 4.8), (2 * MI, 32): (1015, 9.0), (4 * MI, 32): (1861, 19.3), (8 * MI, 64): (2190, 18.5)}
"""The seed's milliseconds and GiB of its chunked ring on H100s, by tokens and ranks of its long-video packs."""
LEAST_SHARE = 0.85
"""C2: of the busiest rank's compute what its legal pairs take at the kernels' rates."""
GATHERS = (GATHER, ULYSSES_GATHER)
TAKES, TABLE = {"bagel_long": CHUNKED}, ", as the seed's table"
"""What the seed's table of strategies takes: for long dense generation the chunked ring, else the sparse all-to-all."""
LEAST, SEED, MEMORY = "least", "the seed, H100, a pack of its own", "memory of a rank: picked"


def rows(case: Case, found: Mapping[str, Answer]) -> Iterator[Row]:
    """What a case's replays say."""
    for role, answer in found.items():
        if answer.found is not None:
            yield from _alone(f"{case.title}: {answer.expected.strategy}", f"{role}, replay", answer, answer.found)
    if PICKED in found:
        yield from _beside(case, found[PICKED], found)
    if PTRR in found and CONTIGUOUS in found:
        ptrr, contiguous = found[PTRR], found[CONTIGUOUS]
        yield from _layers("C3", case.title, "layer, replay: ring on ptrr", ptrr, CONTIGUOUS, contiguous)


def rate_rows(rates: Profile, shipped: Profile) -> Iterator[Row]:
    """The rates of full tiles that compute is held to, beside those of a shipped profile."""
    for name in ("forward_rate", "backward_rate"):
        for dim, rate in getattr(rates, name):
            other = dict(getattr(shipped, name))[dim]
            metric = f"{name}.{dim}, by marble fit"
            yield Row("C2", rates.machine, metric, rate / 1e12, "TFLOP/s", shipped.machine, other / 1e12, rate / other)


def _alone(title: str, named: str, answer: Answer, found: Replay) -> Iterator[Row]:
    """A strategy on its own."""
    layer, estimate = found.layer, answer.expected.seconds()
    ms, exposed = layer.seconds * 1e3, layer.exposed * 1e3
    share = "legal pairs at the kernels' rate over the busiest rank's compute"
    yield Row("C2", title, f"{named}: layer", ms, "ms")
    yield Row("C2", title, f"{named}: exposed communication", exposed, "ms", "layer", ms, exposed / ms)
    yield Row("C2", title, f"{named}: {share}", answer.share, "", LEAST, LEAST_SHARE)
    yield Row("C2", title, f"{named}: the replayed ranks' share of the estimated layer", found.covered)
    yield Row("C2", title, f"{named}: estimate over replay", estimate / layer.seconds)


def _beside(case: Case, picked: Answer, found: Mapping[str, Answer]) -> Iterator[Row]:
    """The picked strategy beside the others, and beside the seed's."""
    title, gib = f"{case.title}: {picked.expected.strategy}", picked.nbytes / 2**30
    for role, answer in found.items():
        if role not in (PICKED, *WHOLE):
            bar = "C2" if role in GATHERS else "C3"
            other = f"{role}{TABLE if role == TAKES.get(case.name, FETCH) else ''}: {answer.expected.strategy}"
            yield from _layers(bar, title, "layer, replay: picked", picked, other, answer)
            yield _compared(bar, title, MEMORY, gib, "GiB", other, answer.nbytes / 2**30)
    if case.name == "bagel_long" and (case.tokens, case.ranks) in PAPER and picked.found is not None:
        (ms, memory), over = PAPER[case.tokens, case.ranks], case.over_mean_pack()
        mine = picked.found.layer.seconds * 1e3 / over
        yield Row("C2", title, "legal pairs over the mean of seeds 0 to 7", over)
        yield _compared("C2", title, "layer, replay, scaled to the mean pack: picked", mine, "ms", SEED, ms)
        yield _compared("C2", title, MEMORY, gib, "GiB", SEED, memory)


def _layers(bar: str, case: str, metric: str, one: Answer, name: str, other: Answer) -> Iterator[Row]:
    """One layer beside another, if both were replayed."""
    if one.found is not None and other.found is not None:
        ms, beside = (answer.layer.seconds * 1e3 for answer in (one.found, other.found))
        yield _compared(bar, case, metric, ms, "ms", name, beside)


def _compared(bar: str, case: str, metric: str, value: float, unit: str, baseline: str, other: float) -> Row:
    return Row(bar, case, metric, value, unit, baseline, other, value / other)


def missed(found: Sequence[Row]) -> list[str]:
    """The picked strategies that do not hold C2."""
    return [
        f"{row.case}: {row.metric}: {row.value:.3g}"
        for row in found
        if (row.baseline == LEAST and row.metric.startswith(PICKED) and row.value < LEAST_SHARE)
        or (row.metric == MEMORY and row.baseline.startswith(GATHER) and row.ratio >= 1)
    ]
