"""One layer, forward and backward, on two GPUs: what its transfers cost, and what the second GPU gives.

``torchrun --nproc_per_node 2 -m bench.layer`` writes ``bench/results/layer.json``. Every contender computes the same
pack; before it is timed, all its results are compared with those of one GPU, and the difference is printed. A time is
the median over repetitions of the slower rank's, whose GPUs begin together. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from bench.baselines.calls import DENSE_CAUSAL, Case, cases
from bench.baselines.layers import Contender, Inputs, alone, differences, milliseconds, of_ranks
from bench.harness import Row, write
from marble.comm import nvshmem
from marble.kernels.launch import backend
from marble.workloads import WORKLOADS

OVERLAPPED, SCALING = 1.02, 1.9
"""T2: a ring layer over the same without its transfers. T3: one GPU's time over two's."""
DIFFERENT = 1e-2
"""Largest relative difference to one GPU's results; other roundings of bfloat16 are far below it."""


def measure(case: Case, repeats: int) -> list[Row]:
    """T2 and T3 of one layer of a workload."""
    say(case.title)
    kernels, inputs = backend("cute"), Inputs.random(case, torch.device("cuda", torch.cuda.current_device()))
    single = alone(case, inputs, kernels)
    right: dict[str, Contender] = {}
    for contender in of_ranks(case, inputs, kernels):
        found = differences(contender, single)
        say(
            f"  {contender.name}: relative difference to one GPU: {', '.join(f'{k} {x:.1e}' for k, x in found.items())}"
        )
        if not max(found.values()) <= DIFFERENT:
            raise RuntimeError(f"{case.title}: {contender.name} is wrong: {found}")
        right[contender.name] = contender
    silent = {f"{name}, no transfers": one.silent() for name, one in right.items() if name.startswith("ring,")}
    times = milliseconds({"one GPU": single} | right | silent, repeats)
    rows = []
    for name, one in right.items():
        rows.append(
            Row("T3", case.title, name, times[name], "ms", "one GPU", times["one GPU"], times["one GPU"] / times[name])
        )
        if one.name.startswith("ring,"):
            without = times[f"{name}, no transfers"]
            rows.append(Row("T2", case.title, name, times[name], "ms", "no transfers", without, times[name] / without))
    for row in rows:
        beside = f"{row.baseline} {row.baseline_value:.2f} ms"
        say(f"  {row.bar} {row.metric}: {row.value:.2f} ms, {beside}, ratio {row.ratio:.3f}")
    return rows


def missed(rows: Sequence[Row]) -> list[str]:
    """The cases whose bar is not reached: T2 by NVSHMEM, T3 by the best contender."""
    found = [
        f"T2 {row.case}: {row.ratio:.3f}"
        for row in rows
        if row.bar == "T2" and row.metric == "ring, nvshmem" and (row.ratio or 0) > OVERLAPPED
    ]
    for title in dict.fromkeys(row.case for row in rows if row.bar == "T3"):
        best = max(row.ratio or 0 for row in rows if row.bar == "T3" and row.case == title)
        found += [f"T3 {title}: {best:.3f}"] if best < SCALING else []
    return found


def say(text: str) -> None:
    """Progress of rank 0, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.layer", description=__doc__)
    parser.add_argument("--workloads", default=",".join([*WORKLOADS, DENSE_CAUSAL]), help="some, by commas")
    parser.add_argument("--tokens", type=int, default=256 * 1024, help="of the whole pack")
    parser.add_argument("--repeats", type=int, default=9, help="timed layers of each contender")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(minutes=2))
    rows: list[Row] = []
    for case in cases(given.workloads.split(","), [128], given.tokens):
        rows += measure(case, given.repeats)
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            write("layer", rows)
    short = missed(rows)
    say(f"missed: {short}" if short else "no bar missed")
    nvshmem.disconnect()
    dist.destroy_process_group()
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
