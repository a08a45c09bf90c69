"""Marble's kernels against FlashAttention-4 and FlexAttention on one GPU, interleaved in one run.

``python -m bench.kernels`` measures everything and writes ``bench/results/kernels.json``; ``--only K1,K3`` measures
what these bars need, ``--only steps`` the calls inside ring and all-to-all steps; ``--part NAME`` gives a run a file of
its own, ``kernels_NAME.json``. Every contender is compared with a float64 reference on sampled rows before it is timed.
The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from rich.console import Console

from bench.baselines import masked, online, ordered
from bench.baselines.bars import BARS, missed, tables
from bench.baselines.calls import DENSE_CAUSAL, cases
from bench.baselines.settings import CAUSAL, DENSE, FLEX, FOUR, TWO, Settings, say
from bench.harness import Row, command_line, gpu, write
from marble.kernels.launch import backend
from marble.workloads import WORKLOADS

ONLY = ("K1", "K2", "K3", "K4", "K5", "K6", "K7", "K8", "K9", "K10", "K11", "K13", "K14", "steps")
BASELINES = {"four": FOUR, "two": TWO, "flex": FLEX, "dense": DENSE, "causal": CAUSAL}


def experiments(
    only: Sequence[str], workloads: Sequence[str], dims: Sequence[int], settings: Settings
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """What some bars need, one by one: a title and how to measure it."""
    packs = [name for name in workloads if name != DENSE_CAUSAL]
    for case in cases(packs, dims, settings.tokens, settings.scale):
        dim = case.shape.head_dim
        bars = {which: {masked.TIME_BAR[dim, which], masked.RATE_BAR[dim, which]} for which in masked.PASSES}
        passes = [which for which in masked.PASSES if bars[which] & set(only)]
        if passes:
            yield f"masked: {case.title}", partial(masked.measure, case, passes, settings)
    if "K9" in only:
        for dim in dims:
            yield f"K9: d{dim}", partial(online.tile_costs, dim, masked.PASSES, settings)
    for case in cases(workloads, dims, settings.tokens, settings.scale):
        if "K13" in only:
            yield f"K13: {case.title}", partial(ordered.measure, case, settings)
    for case in cases(workloads, dims, settings.ring_tokens, settings.scale):
        if {"K10", "K11", online.rate_bar(case)} & set(only) and case.shape.window is None:
            yield f"online: {case.title}", partial(online.online, case, settings)
        if "steps" in only and case.name != DENSE_CAUSAL:
            yield f"steps: {case.title}", partial(online.steps, case, settings)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 if a bar is missed or a case fails."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = command_line("kernels", __doc__)
    parser.add_argument("--only", type=names, default=list(ONLY), help=f"some of {','.join(ONLY)}")
    parser.add_argument("--workloads", type=names, default=[*WORKLOADS, DENSE_CAUSAL], help=f"or {DENSE_CAUSAL}")
    parser.add_argument("--dims", type=names, default=["128", "64"], help="head dims")
    parser.add_argument("--baselines", type=names, default=list(BASELINES), help=f"some of {','.join(BASELINES)}")
    parser.add_argument("--backend", default="cute", help="of marble.kernels.launch")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each contender")
    parser.add_argument(
        "--pack-gqa", choices=("default", "on", "off"), default="default", help="of FA4's masked forward"
    )
    parser.add_argument("--quick", action="store_true", help="5 repeats, no FlexAttention, no causal baseline")
    parser.add_argument("--part", default="", help="write kernels_PART.json")
    given = parser.parse_args(words)
    for option, found, known in (
        ("--only", given.only, ONLY),
        ("--workloads", given.workloads, (*WORKLOADS, DENSE_CAUSAL)),
        ("--dims", given.dims, ("64", "128", "256")),
        ("--baselines", given.baselines, tuple(BASELINES)),
    ):
        if set(found) - set(known):
            parser.error(f"{option}: choose from {','.join(known)}")
    device = gpu(parser)
    skipped = (FLEX, CAUSAL) if given.quick else ()
    settings = Settings(
        backend(given.backend),
        device,
        tuple(BASELINES[name] for name in given.baselines if BASELINES[name] not in skipped),
        repeats=5 if given.quick else given.repeats,
        pack_gqa={"default": None, "on": True, "off": False}[given.pack_gqa],
    )
    rows, failed, begun = [], [], time.monotonic()
    for title, measure in experiments(given.only, given.workloads, [int(dim) for dim in given.dims], settings):
        try:
            rows += measure()
        except Exception:  # one case must not cost the others their machine; it is named below
            traceback.print_exc()
            failed.append(title)
        say(f"{time.monotonic() - begun:.0f} s: {title}: {'FAILED' if title in failed else 'done'}")
        write("kernels", rows, given.out, part=given.part)
        gc.collect()
        torch.cuda.empty_cache()
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(rows):
        console.print(table)
    short = missed(rows)
    console.print(
        f"missed: {[(row.bar, row.case, row.metric, row.ratio) for row in short]}" if short else "no bar missed"
    )
    judged = {row.bar for row in rows if any(bar.covers(row) for bar in BARS)}
    console.print(f"bars that no row was held to: {sorted(set(given.only) - judged - {'steps'}) or 'none'}")
    console.print(f"failed: {failed}" if failed else "no case failed")
    return 1 if short or failed else 0


if __name__ == "__main__":
    sys.exit(main())
