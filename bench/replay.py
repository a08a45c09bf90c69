"""Layers on 32 to 128 ranks, replayed on one GPU: the picked strategy beside others, and beside the seed's (C2, C3).

``python -m bench.replay --part long`` writes ``bench/results/replay_long.json``, and with ``--cases`` a file for these
alone, so that runs add up. **Every time here is a replay**: the calls of a few ranks, timed on this GPU one rank after
the other, with transfers priced by the assumed profile ``h100-cluster``; no layer ran on so many GPUs. Packs and seeds
are declared below. Ranks are those that the layer waits for most by the estimate, and what they make up of the
estimated layer stands beside every result. The exit code is 1 if C2 is missed: the busiest rank computes at 85 % of the
kernels' rate on legal pairs or more, by what `marble fit` says of this GPU before the replays, and holds less than
under the all-gather, whose memory has an inbox for every other rank's gradients.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence

from bench.baselines.replay_rows import GATHERS, PAPER, missed, rate_rows, rows
from bench.baselines.replays import CHUNKED, CONTIGUOUS, FETCH, MI, PICKED, PTRR, RING, Case, Settings, answers
from bench.harness import Row, command_line, gpu, write
from marble.compose import planner
from marble.cost.fit import fit
from marble.cost.profile import Profile
from marble.cost.timer import CudaTimer
from marble.kernels.launch import backend
from marble.workloads import WORKLOADS

SEED = 0
SIZES = ((MI, 32), (2 * MI, 64), (4 * MI, 128))
KINDS = [(name, kind) for name in WORKLOADS for kind in range(len(WORKLOADS[name].layers))]
PARTS: dict[str, list[Case]] = {
    "long": [Case("bagel_long", 0, *size, (PICKED, RING, CHUNKED, *GATHERS), SEED) for size in PAPER],
    "models": [Case(*kind, *size, (PICKED, *GATHERS), SEED) for size in SIZES for kind in KINDS],
    "wide": [
        Case(name, 0, *size, (PICKED, *GATHERS), SEED, model="Qwen3.8-27B")
        for size in SIZES
        for name in ("qwen_docs", "qwen_video")
    ],
    "choice": [Case(*kind, *SIZES[0], (PICKED, RING, CHUNKED, FETCH, PTRR, CONTIGUOUS), SEED) for kind in KINDS],
}


def measure(cases: Sequence[Case], settings: Settings, keep: Callable[[list[Row], list[str]], object]) -> list[Row]:
    """All rows of some cases; after each, ``keep`` gets the rows so far, and what was left out and why."""
    found: list[Row] = []
    left_out: list[str] = []
    for case in cases:
        begun, replayed = time.monotonic(), {}
        try:
            for role, answer in answers(case, settings):
                replayed[role] = answer
                if answer.found is None:
                    memory = answer.expected.memory / 2**30
                    left_out.append(f"{case.title}: {role}: {memory:.3g} GiB by the estimate do not fit on one GPU")
        except Exception as error:  # one case must not cost the others their machine
            traceback.print_exc()
            left_out.append(f"{case.title}: failed: {type(error).__name__}: {error}")
        said = list(rows(case, replayed))
        planner.forget()
        print(f"{case.key}: {time.monotonic() - begun:.0f} s", *map(line, said), sep="\n", flush=True)
        found += said
        keep(found, left_out)
    return found


def line(row: Row) -> str:
    """A row as one line of text."""
    beside = "" if row.baseline_value is None else f" ({row.baseline}: {row.baseline_value:.4g})"
    return f"  {row.metric}: {row.value:.4g} {row.unit}{beside}"


def main(words: Sequence[str] | None = None) -> int:
    """Replay, print, write."""
    parser = command_line("replay", __doc__)
    parser.add_argument("--part", choices=PARTS, default="long", help="which of the declared cases")
    parser.add_argument("--cases", help="some of them, by commas: " + ", ".join(case.key for case in PARTS["long"]))
    parser.add_argument("--budget", type=float, default=2.5, help="seconds of GPU time of a strategy, estimated")
    given = parser.parse_args(words)
    every = {case.key: case for case in PARTS[given.part]}
    unknown = set(given.cases.split(",") if given.cases else ()) - set(every)
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))} not among {', '.join(every)}")
    cases = [every[key] for key in given.cases.split(",")] if given.cases else list(every.values())
    device, shipped = gpu(parser), Profile.load("h200")
    rates = fit(CudaTimer(), sorted({case.shape.head_dim for case in cases}), shipped.gpus_per_node, shipped.inside)
    settings = Settings(backend("cute"), device, Profile.load("h100-cluster"), rates, given.budget)
    held_to = list(rate_rows(rates, shipped))
    print(*map(line, held_to), sep="\n", flush=True)
    part = "_".join([given.part, *(given.cases.split(",") if given.cases else ())])

    def keep(rows: list[Row], left_out: list[str]) -> None:
        write("replay", [*held_to, *rows], given.out, part=part, left_out=left_out)

    found = measure(cases, settings, keep)
    short = missed(found)
    print(f"missed: {short}" if short else "no bar missed")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
