"""K1 to K8, K14: a whole pack as one masked call, forward and backward, against FlashAttention-4 and FlexAttention."""

from __future__ import annotations

from collections.abc import Sequence

from bench.baselines.calls import Case, MaskedCall
from bench.baselines.measure import interleave
from bench.baselines.settings import CAUSAL, DENSE, OURS, Settings, say
from bench.baselines.systems import System
from bench.baselines.verify import Reference
from bench.harness import Row

PASSES = ("fwd", "bwd")
TIME_BAR = {(128, "fwd"): "K1", (128, "bwd"): "K2", (64, "fwd"): "K5", (64, "bwd"): "K6"}
TIME_BAR |= {(256, "fwd"): "K14", (256, "bwd"): "K7"}
RATE_BAR = TIME_BAR | {(128, "fwd"): "K3", (128, "bwd"): "K4", (256, "bwd"): "K8"}
KERNELS = f"{OURS}, kernels alone"


def measure(case: Case, passes: Sequence[str], settings: Settings) -> list[Row]:
    """All contenders on one layer of one workload; each is checked before it is timed."""
    call = case.whole()
    inputs = settings.inputs(call)
    systems: dict[str, list[System]] = {OURS: list(settings.ours([call], inputs))}
    for name in settings.baselines:
        if name not in (DENSE, CAUSAL):
            try:
                systems[name] = settings.masked(name, call, inputs)
            except ValueError as error:
                say(f"left out: {name}: {error}")
    reference = Reference(call, inputs[0], call.shape.softmax_scale)
    for name, (first, *_) in systems.items():
        beside = None if name == OURS else systems[OURS][0]
        errors = reference.check(name, first, beside, backward="bwd" in passes)
        say(f"{case.title}: {name} is right: " + ", ".join(f"{key} {value:.1e}" for key, value in errors.items()))
    del reference
    systems |= settings.dense(call)
    times = {"fwd": interleave({name: [x.forward for x in some] for name, some in systems.items()}, settings.repeats)}
    if "bwd" in passes:
        runs = {name: [x.backward for x in some] for name, some in systems.items()}
        runs[KERNELS] = [x.backward_kernels for x in systems[OURS]]  # type: ignore[attr-defined]
        times["bwd"] = interleave(runs, settings.repeats)
    return [row for which in passes for row in _rows(call, which, times[which], settings)]


def _rows(call: MaskedCall, which: str, times: dict[str, float], settings: Settings) -> list[Row]:
    backward, dim, ours = which == "bwd", call.shape.head_dim, times[OURS]
    bar, rate_bar = TIME_BAR[dim, which], RATE_BAR[dim, which]
    dense = {}
    for name in (DENSE, CAUSAL):
        if name in times:
            dense[name] = settings.dense_flops(call, name, backward=backward) / times[name] / 1e9
    rows = []
    for name, taken in times.items():
        if name not in (OURS, *dense):
            rows.append(Row(bar, call.name, f"{which} time", ours, "ms", name, taken, taken / ours))
    for kind, pairs in (("visited-tile", call.visited_pairs), ("legal-pair", call.legal_pairs)):
        flops = call.flops(pairs, backward=backward)
        for name, taken in times.items():
            if name not in dense:
                whose = "" if name == OURS else f" of {name}"
                rate = flops / taken / 1e9
                for base in dense or (None,):
                    against = (base, dense[base], rate / dense[base]) if base else (None, None, None)
                    rows.append(Row(rate_bar, call.name, f"{which} {kind} rate{whose}", rate, "TFLOP/s", *against))
    share = call.tiles.by_query.partial / call.tiles.visited
    rows.append(Row(rate_bar, call.name, "partial tiles/visited tiles", share))
    return rows
