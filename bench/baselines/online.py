"""K9 to K11, K14 with state, and the second table: what a partial tile costs; calls that carry state, and one call."""

from __future__ import annotations

from functools import partial

from bench.baselines.calls import DENSE_CAUSAL, Case, MaskedCall, state_bytes
from bench.baselines.measure import Run, copy_bandwidth, interleave
from bench.baselines.settings import DENSE, FOUR, MASKED, OURS, TWO, Settings, say
from bench.baselines.synthetic import BLOCK, KINDS, uniform
from bench.baselines.systems import Inputs, Ours, System, key_rows
from bench.baselines.verify import Reference
from bench.harness import Row
from marble.kernels.contract import move

RANKS = 8
ALLOWED_STATE = 1.25
"""K10: how often the state's bytes may be paid at the bandwidth of a copy."""


def tile_costs(dim: int, passes: tuple[str, ...], settings: Settings) -> list[Row]:
    """K9: the same number of tiles, all full, all partial by ranges, all partial by 1000 distinct bit tiles."""
    blocks, heads = settings.dense_tokens // BLOCK, (32, 8, dim)
    rows = blocks * BLOCK
    inputs = [Inputs.of(rows, rows, heads, seed, settings.device) for seed in range(settings.sets)]
    works = {kind: move(uniform(kind, blocks, blocks), settings.device) for kind in KINDS}
    systems = {
        kind: [Ours([work], x, settings.backend, dim**-0.5, [(0, rows)]) for x in inputs]
        for kind, work in works.items()
    }
    for some in systems.values():
        for system in some:
            system.forward()
            system.delta = settings.backend.delta(system.out, system.inputs.dout)
            for total in system.sums:
                total.zero_()
    found = []
    for which in passes:
        runs = {
            kind: [x.forward if which == "fwd" else x.backward_kernels for x in some] for kind, some in systems.items()
        }
        times = interleave(runs, settings.repeats)
        case = f"{blocks}×{blocks} tiles, d{dim}, {which}"
        for kind in KINDS[1:]:
            ratio = times[kind] / times["full"]
            found.append(
                Row("K9", case, f"all {kind} tiles", times[kind], "ms", "all full tiles", times["full"], ratio)
            )
    return found


def online(case: Case, settings: Settings) -> list[Row]:
    """K10, K11 and K14: a rank's calls around the ring against one call over the same keys."""
    calls, joined = case.ring(RANKS)
    inputs = settings.inputs(joined)
    systems: dict[str, list[System]] = {
        OURS: list(settings.ours(calls, inputs)),
        "one call": list(settings.ours([joined], inputs)),
    }
    for name in (FOUR, TWO):
        if name in settings.baselines:
            systems[name] = settings.masked(name, joined, inputs)
    reference = Reference(joined, inputs[0], joined.shape.softmax_scale)
    for name, (first, *_) in systems.items():
        beside = None if name == OURS else systems[OURS][0]
        errors = reference.check(name, first, beside, backward=False)
        say(f"{joined.name}: {name} is right: " + ", ".join(f"{key} {value:.1e}" for key, value in errors.items()))
    del reference
    systems |= {name: some for name, some in settings.dense(joined).items() if name == DENSE}
    times = interleave({name: [x.forward for x in some] for name, some in systems.items()}, settings.repeats)
    taken, one = times[OURS], times["one call"]
    moved, bandwidth = state_bytes(calls), copy_bandwidth(settings.device, settings.copy_bytes)
    allowed = one + ALLOWED_STATE * moved / bandwidth * 1e3
    rows = [
        Row("K10", joined.name, "copy bandwidth", bandwidth / 1e12, "TB/s"),
        Row("K10", joined.name, "state moved", moved / 1e9, "GB"),
        Row("K10", joined.name, f"{RANKS} calls", taken, "ms", _single(case), one, taken / one),
        Row("K10", joined.name, f"{RANKS} calls", taken, "ms", _with_state(case), allowed, taken / allowed),
    ]
    rows += [
        Row("K11", joined.name, f"{RANKS} calls", taken, "ms", name, times[name], taken / times[name])
        for name in (FOUR, TWO)
        if name in times
    ]
    rate = joined.flops(joined.visited_pairs, backward=False) / taken / 1e9
    rated = rate_bar(case), joined.name, "fwd visited-tile rate", rate, "TFLOP/s"
    if DENSE in times:
        dense = settings.dense_flops(joined, DENSE, backward=False) / times[DENSE] / 1e9
        rows.append(Row(*rated, DENSE, dense, rate / dense))
    else:
        rows.append(Row(*rated))
    return rows


def rate_bar(case: Case) -> str:
    """Whose the calls' rate is: K14 holds that of dense causal calls at d256, state included; else it stands beside."""
    return "K14" if case.shape.head_dim == 256 and case.name == DENSE_CAUSAL else "K11"


def _single(case: Case) -> str:
    """The baseline that K10 holds dense causal to; for packs it only stands beside."""
    return "one call" if case.name == DENSE_CAUSAL else "one call, its state not counted"


def _with_state(case: Case) -> str:
    """The baseline that K10 holds packs to; for dense causal it only stands beside."""
    return "one call and 1.25 × state" if case.name != DENSE_CAUSAL else "one call and 1.25 × state, beside"


def steps(case: Case, settings: Settings) -> list[Row]:
    """The second table: each call of a ring and of a sparse all-to-all by FlashAttention-4, against all of ours.

    FlashAttention-4 cannot carry state: its calls are timed one by one as they are, with nothing to merge them. Window
    layers are not measured in a ring, which is not their schedule.
    """
    found, shape = [], case.shape
    schedules = {"sparse all-to-all": case.all_to_all(RANKS)}
    if shape.window is None:
        schedules["ring"] = case.ring(RANKS)[0]
    for schedule, calls in schedules.items():
        rows, keys = len(calls[0].rows), key_rows(calls)
        heads = (shape.heads, shape.kv_heads, shape.head_dim)
        inputs = [Inputs.of(rows, keys[-1][1], heads, seed, settings.device) for seed in range(settings.sets)]
        each: dict[str, list[list[System]]] = {OURS: [[x] for x in settings.ours(calls, inputs)]}
        for name in (name for name in MASKED if name in settings.baselines):
            try:
                each[name] = [list(some) for some in zip(*_one_by_one(name, calls, inputs, settings), strict=True)]
            except ValueError as error:
                say(f"left out: {name}: {error}")
        for which in ("fwd", "bwd"):
            runs = {name: [partial(_all, some, which) for some in sets] for name, sets in each.items()}
            times = interleave(runs, settings.repeats)
            title = f"{case.title}, {schedule}, rank 0 of {RANKS}"
            ours = times[OURS]
            for name, taken in times.items():
                if name != OURS:
                    found.append(Row("steps", title, f"{which} calls", ours, "ms", name, taken, taken / ours))
    return found


def _one_by_one(name: str, calls: list[MaskedCall], inputs: list[Inputs], settings: Settings) -> list[list[System]]:
    """A baseline's systems for each call and buffer set, each call checked on its own."""
    found = []
    for call, (start, stop) in zip(calls, key_rows(calls), strict=True):
        if call.tiles.visited:
            parts = [x.keys(start, stop) for x in inputs]
            systems = settings.masked(name, call, parts)
            Reference(call, parts[0], call.shape.softmax_scale).check(name, systems[0], backward=False)
            found.append(systems)
    return found


def _all(systems: list[System], which: str) -> None:
    runs: list[Run] = [x.forward if which == "fwd" else x.backward for x in systems]
    for run in runs:
        run()
