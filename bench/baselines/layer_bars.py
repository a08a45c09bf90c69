"""What a layer must show (issue 6, T2 to T5), and the rows that say whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.baselines.calls import DENSE_CAUSAL
from bench.baselines.layers import ONE, PER_STEP, TRANSPORTS
from bench.harness import Row
from marble.testing.exactness import GATE

OVERLAPPED, SCALING = 1.02, 1.9
"""T2: a ring layer over the same without its transfers. T3: one GPU's time over that of all ranks."""
FASTER, FASTER_CAUSAL = 1.2, 1.0
"""T4: the fastest baseline's time over marble's; the second on a plain causal sample."""
LONG = ("qwen_video", "bagel_long")
"""Workloads that T2 is held on; the others are reported."""
SILENT = "no transfers"


def ours(name: str) -> bool:
    """Whether a contender is one of marble's schedules: its name ends in a transport."""
    return name.rpartition(", ")[2] in TRANSPORTS


def time_rows(case: str, times: Mapping[str, float]) -> list[Row]:
    """T2, T3 and T4 of one layer, from milliseconds by contender; silent rings are called ``<ring>, no transfers``."""
    rows = []
    for name in filter(ours, times):
        mine = times[name]
        rows.append(Row("T3", case, name, mine, "ms", ONE, times[ONE], times[ONE] / mine))
        if (silent := times.get(f"{name}, {SILENT}")) is not None:
            rows.append(Row("T2", case, name, mine, "ms", SILENT, silent, mine / silent))
            rows.append(Row("T2", case, f"{name}: exposed", mine - silent, "ms"))
    best = min(filter(ours, times), key=lambda name: times[name], default=None)
    for name, theirs in times.items():
        if best is not None and name != ONE and not ours(name) and not name.endswith(SILENT):
            rows.append(Row("T4", case, best, times[best], "ms", name, theirs, theirs / times[best]))
    return rows


def missed(rows: Sequence[Row]) -> list[str]:
    """The cases whose bar is not reached: T2 by NVSHMEM, T3 by the best contender, T4 against the fastest baseline,
    T5 by every contender of marble's."""
    found = []
    for case in dict.fromkeys(row.case for row in rows if row.bar != "T5"):
        named = case.split(",")[0]
        ratios: dict[str, list[float]] = {"T2": [], "T3": [], "T4": []}
        for row in rows:
            held = {
                "T2": row.metric == "ring, nvshmem" and named in LONG,
                "T3": True,
                "T4": row.baseline != PER_STEP,
            }.get(row.bar, False)
            if row.case == case and held and row.ratio is not None:
                ratios[row.bar].append(row.ratio)
        if named in LONG and not ratios["T2"]:
            found.append(f"T2 {case}: not measured")
        found += [f"T2 {case}: {ratio:.3f}" for ratio in ratios["T2"] if ratio > OVERLAPPED]
        if ratios["T3"] and max(ratios["T3"]) < SCALING:
            found.append(f"T3 {case}: {max(ratios['T3']):.3f}")
        if ratios["T4"] and min(ratios["T4"]) < (FASTER_CAUSAL if named == DENSE_CAUSAL else FASTER):
            found.append(f"T4 {case}: {min(ratios['T4']):.3f}")
    for row in rows:
        name = row.metric.rpartition(": ")[0]
        if row.bar == "T5" and ours(name) and not (row.ratio or 0) <= GATE:
            found.append(f"T5 {row.case}, {row.metric}: {row.ratio:.3f}")
    return found
