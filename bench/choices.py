"""Choosing against measuring (C1): whether the strategy that the estimate picks is the fastest, or close to it.

Two steps. ``torchrun --nproc_per_node 2 -m bench.choices`` measures every strategy of many layers, forward and
backward, and the chunked ring in nine sizes, and writes ``bench/results/raw/choices.json`` after each case.
``python -m bench.choices --judge bench/results/raw/choices.json`` needs no GPU: it fits the constants of a profile to
one half of the cases and judges the picks of the other half, both ways round, and writes
``bench/results/choices.json``. A time is the median over repetitions of the slower rank's, whose GPUs begin together.
One GPU has no choice to make: a layer on one rank has two ways to run, so all cases are of two. Whether results are
exact is for ``bench.layer`` to say. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.baselines.calls import Case
from bench.baselines.choices import CHUNKED, Settings, cases, key
from bench.baselines.layers import milliseconds
from bench.harness import RESULTS, command_line, gpu, head, write
from marble import AttentionShape
from marble.comm import nvshmem
from marble.comm.choice import connect
from marble.kernels.launch import backend

RAW = RESULTS / "raw" / "choices.json"
VIDEO = AttentionShape(28, 4, 128)
"""The layer of the chunked rings: BAGEL's."""


def measure(
    some: Sequence[Case],
    chunked: Sequence[tuple[Case, int]],
    settings: Settings,
    seconds: float,
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Measure, as long as time allows; ``keep`` gets what there is after each case.

    Args:
        some: layers whose strategies are measured.
        chunked: layers of chunked rings, and chunks of each rank.
        settings: how.
        seconds: after which no further case begins; all ranks go by the first one's clock.
        keep: takes the results so far; the chunked rings come first.
    """
    raw: dict[str, Any] = {"cases": [], "chunked": [], "left_out": []}
    todo = [("chunked", case, partial(settings.chunked, case, count)) for case, count in chunked]
    todo += [("cases", case, partial(settings.measured, case)) for case in some]
    begun = time.monotonic()
    for which, case, run in todo:
        over = [time.monotonic() - begun > seconds]
        dist.broadcast_object_list(over)
        if over[0]:
            raw["left_out"].append(f"{key(case)}: no time left")
            continue
        try:
            raw[which].append(run())
            said = told(raw[which][-1])
        except Exception as error:  # ranks fail alike; one case must not cost the others their machines
            traceback.print_exc()
            said = f"failed: {type(error).__name__}: {error}"
            raw["left_out"].append(f"{key(case)}: {said}")
        say(f"{time.monotonic() - begun:.0f} s: {key(case)}: {said}")
        if dist.get_rank() == 0:
            keep(raw)
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
    return raw


def told(record: dict[str, Any]) -> str:
    """What was measured, in one line."""
    if "chunks" in record:
        return f"{record['chunks']} chunks of each rank, {record['ms']:.2f} ms"
    ms, refused = record["ms"], record["refused"]
    broken = {name: why for name, why in refused.items() if not why.startswith("ValueError")}
    said = f"{len(ms)} strategies, {len(refused)} refused{f', some by accident: {broken}' if broken else ''}"
    if not ms:
        return said
    best, worst = (which(ms, key=ms.__getitem__) for which in (min, max))
    return f"{said}, {best} {ms[best]:.2f} ms to {worst} {ms[worst]:.2f} ms"


def say(text: str) -> None:
    """Progress of rank 0, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def on_gpus(given: argparse.Namespace, device: torch.device) -> int:
    """Measure on this process's GPU and the others'."""
    dist.init_process_group("nccl", timeout=timedelta(minutes=2))
    group = dist.group.WORLD
    assert group is not None
    connection = connect(given.transport, group, device)
    settings = Settings(backend("cute"), device, connection, partial(milliseconds, repeats=given.repeats, warmup=0))
    path = given.out / "raw" / "choices.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    where = head("choices") | {"transport": given.transport, "ranks": group.size()}
    chunked = [(Case("bagel_long", VIDEO, tokens), count) for tokens, count in CHUNKED]
    measure(
        cases()[: given.cases], chunked, settings, given.seconds, lambda raw: path.write_text(json.dumps(where | raw))
    )
    nvshmem.disconnect()
    dist.destroy_process_group()
    return 0


def judge(path: Path, out: Path, profile: Path | None = None) -> int:
    """Fit, judge, print, write; and write a profile of what fits all cases, if a file for it is named."""
    # They need SciPy, which machines that measure need not have.
    from bench.baselines.fitting import Judged, fitted
    from bench.baselines.judging import judged, missed

    raw = json.loads(path.read_text())
    rows = judged(raw)
    for row in rows:
        beside = "" if row.baseline_value is None else f" ({row.baseline}: {row.baseline_value:.4g})"
        print(f"{row.bar} {row.case}: {row.metric}: {row.value:.4g} {row.unit}{beside}")
    measured = f"measured on {raw['gpu']}, {raw['ranks']} ranks over {raw['transport']}, {raw['date']}, {raw['commit']}"
    write("choices", rows, out, left_out=[measured, *raw["left_out"]])
    if profile is not None:
        profile.write_text(fitted([Judged.of(record, raw["ranks"]) for record in raw["cases"]]).dump())
    short = missed(rows)
    print(f"missed: {short}" if short else "no bar missed")
    return 1 if short else 0


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or judge what was measured."""
    parser = command_line("choices", __doc__)
    parser.add_argument("--judge", type=Path, help="judge this file of measurements instead of measuring")
    parser.add_argument("--profile", type=Path, help="with --judge: write a profile fitted to all cases to this file")
    parser.add_argument("--cases", type=int, help="at most so many; any beginning is a sample of all")
    parser.add_argument("--repeats", type=int, default=3, help="timed layers of each strategy")
    parser.add_argument("--transport", default="nvshmem", help="what carries the transfers")
    parser.add_argument("--seconds", type=float, default=420, help="after which no further case begins")
    given = parser.parse_args(words)
    if given.judge:
        return judge(given.judge, given.out, given.profile)
    return on_gpus(given, gpu(parser, torchrun=True))


if __name__ == "__main__":
    sys.exit(main())
