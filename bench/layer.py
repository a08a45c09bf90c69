"""One layer, forward and backward, on one GPU and on several: marble's schedules beside the public schemes, in one run.

``torchrun --nproc_per_node 2 -m bench.layer`` writes ``bench/results/layer_<workload>.json``. Every contender computes
the same pack. Before that its error against float64 is set over that of one GPU's call, on a smaller pack, and on the
whole pack all its results are compared with one GPU's. Who refuses a case, or is wrong, is named with the reason. A
time is the median over repetitions of the slower rank's, whose GPUs begin together. The exit code is 1 if a bar is
missed or a case fails. Marble's executor is driven without autograd around it, on one GPU as on several. The layers are
those of the workloads' models, head size 128; Qwen3.8-27B, which would run the Qwen packs with head size 256, is not
among them.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from bench.baselines.calls import DENSE_CAUSAL, cases
from bench.baselines.layer_bars import missed
from bench.baselines.layer_runs import Settings, errors, lines, times, title
from bench.baselines.layers import milliseconds
from bench.harness import Row, command_line, gpu, write
from marble.comm import nvshmem
from marble.kernels.launch import backend
from marble.workloads import WORKLOADS

Result = TypeVar("Result")


def measure(workload: str, tokens: int, settings: Settings) -> tuple[list[Row], list[str], list[str]]:
    """All bars on every layer of a workload; who was left out of what and why; and what failed."""
    rows: list[Row] = []
    left_out, failed = [], []
    for case in cases([workload], [128], tokens):
        begun, name = time.monotonic(), title(case, dist.get_world_size())
        say(name)
        answer = attempt(lambda case=case: (errors(case, settings), times(case, settings)))
        if answer is None:
            failed.append(name)
            continue
        (exact, small_refusals), (timed, refusals) = answer
        reasons = [f"{name}: {who}: {why}" for who, why in (small_refusals | refusals).items()]
        for line in (*lines(exact, timed), *(f"left out: {reason}" for reason in reasons)):
            say(f"  {line}")
        say(f"  {time.monotonic() - begun:.0f} s")
        rows += timed + exact
        left_out += reasons
    return rows, left_out, failed


def attempt(run: Callable[[], Result]) -> Result | None:
    """A case's results, or None if it fails: ranks fail alike, and one case must not cost the others their machines."""
    try:
        return run()
    except Exception:
        traceback.print_exc()
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def say(text: str) -> None:
    """Progress of rank 0, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def join(parser: argparse.ArgumentParser, repeats: int, exact_tokens: int, skip: tuple[str, ...] = ()) -> Settings:
    """Join the other processes, each with its GPU; how layers are measured on them."""
    device = gpu(parser, torchrun=True)
    dist.init_process_group("nccl", timeout=timedelta(minutes=2))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("bench").setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    return Settings(backend("cute"), device, exact_tokens, partial(milliseconds, repeats=repeats), skip)


def leave(short: Sequence[str], failed: Sequence[str]) -> int:
    """Say which bars are missed and which cases failed, and leave the other processes; the exit code."""
    say(f"missed: {short}" if short else "no bar missed")
    say(f"failed: {failed}" if failed else "no case failed")
    nvshmem.disconnect()
    dist.destroy_process_group()
    return 1 if short or failed else 0


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = command_line("layer", __doc__)
    parser.add_argument("--workloads", default=",".join([*WORKLOADS, DENSE_CAUSAL]), help="some, by commas")
    parser.add_argument("--tokens", type=int, default=256 * 1024, help="of the whole pack")
    parser.add_argument("--exact-tokens", type=int, default=8192, help="of the pack that errors are measured on")
    parser.add_argument("--repeats", type=int, default=9, help="timed layers of each contender")
    parser.add_argument("--skip", default="", help="contenders to leave out: beginnings of names, by semicolons")
    given = parser.parse_args(words)
    settings = join(parser, given.repeats, given.exact_tokens, tuple(filter(None, given.skip.split(";"))))
    short, failed = [], []
    for workload in given.workloads.split(","):
        rows, left_out, broken = measure(workload, given.tokens, settings)
        short += missed(rows)
        failed += broken
        if dist.get_rank() == 0:
            write("layer", rows, given.out, part=workload, left_out=left_out)
    return leave(short, failed)


if __name__ == "__main__":
    sys.exit(main())
