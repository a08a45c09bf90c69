"""The Triton kernels launched in other ways: which tile sizes and warps are fastest.

``python -m bench.tuning`` writes ``bench/results/tuning.json``: for every kernel of ``kernels/triton/tuned.toml`` the
time of each way to launch it, over that of the way in the file. ``--keep`` writes the fastest to the file, where it is
faster by more than 3 %. The planner's own kernels get what they get for a pack of 4M tokens (Molmo video, the plan of
one rank of USP 8×4), the others random data of a large layer. Whether results are right is for the tests to say.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

import marble
from bench.baselines.measure import interleave
from bench.harness import Row, command_line, gpu, write
from marble.compose import planner
from marble.kernels.triton import bitmaps, classify, merge, pack, scans, sights, spans, summaries, tuned, words
from marble.workloads import WORKLOADS, build

MI, BLOCK = 1024 * 1024, 128
BETTER = 0.97
"""Time over that of the way in the file from which on another is kept."""
SIZES = {"BLOCK": (16, 32, 64), "COLUMNS": (64, 128, 256, 512), "CHUNK": (1024, 2048, 4096), "SPANS": (64, 128, 256)}
OTHER_SIZES = {("add_sums", "BLOCK"): (512, 1024, 2048, 4096)}
WARPS = (1, 2, 4, 8, 16)

Run = Callable[[], object]


def ways(kernel: str) -> list[tuned.Choice]:
    """All ways to launch a kernel that are tried, the file's among them."""
    names = [name for name in tuned.tuned(kernel) if name != "num_warps"]
    sizes = [OTHER_SIZES.get((kernel, name), SIZES[name]) for name in names]
    found: list[tuned.Choice] = [
        {**dict(zip(names, some, strict=True)), "num_warps": warps} for *some, warps in itertools.product(*sizes, WARPS)
    ]
    return found if tuned.tuned(kernel) in found else [tuned.tuned(kernel), *found]


def planned(device: torch.device, tokens: int) -> dict[str, Run]:
    """The planner's kernels, with the arguments of their largest calls while a rank is planned."""
    calls: dict[str, tuple[int, Run]] = {}

    def listening(kernel: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            size = sum(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
            if kernel not in calls or size >= calls[kernel][0]:
                calls[kernel] = size, partial(function, *args, **options)
            return function(*args, **options)

        return call

    shapes = [marble.AttentionShape(k.heads, k.kv_heads, k.head_dim, k.window) for k in WORKLOADS["molmo_video"].layers]
    neighbours = spans.Neighbours
    with (
        mock.patch.object(words, "range_words", listening("words", words.range_words)),
        mock.patch.object(sights, "sights", listening("sights", sights.sights)),
        mock.patch.object(scans, "running_max", listening("running_max", scans.running_max)),
        mock.patch.object(neighbours, "of", listening("hulls", neighbours.of)),
        mock.patch.object(neighbours, "visible", listening("visible", neighbours.visible)),
    ):
        planner.forget()
        marble.plan(build("molmo_video", tokens), shapes, ranks=32, rank=5, ulysses=4, device=device)
    return {kernel: run for kernel, (_, run) in calls.items()}


def others(device: torch.device, tokens: int) -> Iterator[tuple[str, Run]]:
    """The other kernels on random data, for a layer of so many tokens or, in pairs of blocks, for a part of it."""
    make = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=make, device=device)
    integers = partial(torch.randint, generator=make, device=device)
    heads, rows, width = 8, tokens // 64, 128
    out, lse = normal(2, heads, rows, width), normal(2, heads, rows)
    yield "merge", lambda: merge.merge_partials(out[0], lse[0], out[1], lse[1])
    yield "add_sums", lambda: merge.add_sums(out[0], out[1])
    keys = normal(rows, 2, heads, width).bfloat16()
    first = torch.arange(0, rows - BLOCK + 1, BLOCK, dtype=torch.int32, device=device)
    yield "pack", lambda: pack.gather_blocks(keys, first, torch.full_like(first, BLOCK), BLOCK)
    tracks = integers(0, 64, (4, tokens), dtype=torch.int32)
    yield "summaries", lambda: summaries.summaries(tracks, BLOCK)
    some = [part[:, : tokens // BLOCK // 4].contiguous() for part in summaries.summaries(tracks, BLOCK)]
    side = (some[0], some[1], some[2])
    yield "classify", lambda: classify.classify(side, side)
    at = integers(0, tokens, (2, max(tokens // 1024, 1), BLOCK), dtype=torch.int64)
    yield "bitmaps", lambda: bitmaps.packed_bits(tracks, at[0], at[1])


def measured(kernel: str, run: Run, repeats: int) -> list[Row]:
    """A row for every way to launch a kernel; ways that cannot be launched are left out."""
    runs: dict[str, list[Run]] = {}
    for way in ways(kernel):

        def launched(way: tuned.Choice = way) -> None:
            with tuned.trying(kernel, way):
                run()

        try:
            launched()
        except Exception as error:  # more shared memory or registers than there are
            print(f"{kernel}: {said(way)}: {type(error).__name__}", flush=True)
            continue
        runs[said(way)] = [launched]
    usual = said(tuned.tuned(kernel))
    times = {way: 1e3 * ms for way, ms in interleave(runs, repeats).items()}
    return [Row("tuned", kernel, way, us, "us", usual, times[usual], us / times[usual]) for way, us in times.items()]


def said(way: tuned.Choice) -> str:
    """A way in a few words."""
    return ", ".join(f"{name} {value}" for name, value in way.items())


def kept(rows: list[Row]) -> dict[str, tuned.Choice]:
    """For every kernel the way to launch it from now on."""
    found: dict[str, tuned.Choice] = {}
    for kernel in tuned.kernels():
        best = min((row for row in rows if row.case == kernel), key=lambda row: row.value, default=None)
        way = tuned.tuned(kernel)
        if best is not None and best.ratio is not None and best.ratio < BETTER:
            way = next(each for each in ways(kernel) if said(each) == best.metric)
        found[kernel] = way
    return found


def as_toml(choices: Mapping[str, tuned.Choice], head: str) -> str:
    """The file of choices, under the comment that it begins with."""
    tables = ("\n".join([f"[{kernel}]", *(f"{k} = {v}" for k, v in way.items())]) for kernel, way in choices.items())
    return "\n\n".join([head, *tables]) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = command_line("tuning", __doc__)
    parser.add_argument("--keep", action="store_true", help="write the fastest ways to kernels/triton/tuned.toml")
    parser.add_argument("--only", default=",".join(tuned.kernels()), help="some kernels, by commas")
    parser.add_argument("--tokens", type=int, default=4 * MI, help="of the packs")
    parser.add_argument("--repeats", type=int, default=20, help="timed launches of each way")
    given = parser.parse_args(words)
    only = given.only.split(",")
    if unknown := set(only) - set(tuned.kernels()):
        parser.error(f"--only: {', '.join(sorted(unknown))} not among {', '.join(tuned.kernels())}")
    device = gpu(parser)
    rows: list[Row] = []
    for kernel, run in (*planned(device, given.tokens).items(), *others(device, given.tokens)):
        if kernel not in only:
            continue
        rows += measured(kernel, run, given.repeats)
        best = min((row for row in rows if row.case == kernel), key=lambda row: row.value)
        print(f"{kernel}: {best.baseline} {best.baseline_value:.1f} us, {best.metric} {best.value:.1f} us", flush=True)
    write("tuning", rows, given.out)
    if given.keep:
        head = tuned.FILE.read_text().splitlines()[0]
        tuned.FILE.write_text(as_toml(kept(rows), head))
    return 0


if __name__ == "__main__":
    sys.exit(main())
