"""All GPUs of one host: how exact a layer is on them, and how its time scales.

``torchrun --nproc_per_node N -m bench.node``, for any N, writes ``bench/results/node_N.json``:

* N1, on packs of 32,768 tokens with every mode and 4 key/value heads: the errors of marble's schedules, rings of N/2
  ranks that pairs share heads in (of two ranks, on two GPUs), over those of one GPU, and those of per-step merging and
  of an all-gather that sums key gradients across ranks in bfloat16. Errors are distances to a float64 reference.
* N2, one layer of each workload, forward and backward, at 65,536 tokens a GPU and at 1,048,576 tokens in all: what the
  estimate picks and every alternative, over each transport, as the share of N times as fast as one GPU.

The exit code is 1 if a bar is missed or a case fails. Contenders, times and correctness are those of ``bench.layer``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from bench.baselines import exchanged
from bench.baselines.calls import Case, cases
from bench.baselines.layer_bars import ours
from bench.baselines.layer_runs import Settings, errors, times, title
from bench.baselines.layers import PER_STEP, SCHEDULES, TRANSPORTS, Inputs, Offer, of_group
from bench.harness import Row, command_line, write
from bench.layer import attempt, join, leave, say
from marble import AttentionShape
from marble.compose.planner import ranking
from marble.cost.profile import Profile
from marble.kernels.contract import Backend
from marble.kernels.rounded import PerStepRounding
from marble.testing.exactness import GATE
from marble.workloads import WORKLOADS

KI = 1024
EXACT_TOKENS, EACH, ALL = 32 * KI, 64 * KI, 1024 * KI
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
"""Of the layers whose errors are measured."""
IDEAL = 0.95
"""N2: the share of N times as fast that the pick must reach; held on eight GPUs."""
PICKED = "picked"


def exact_offers(case: Case, inputs: Inputs, kernels: Backend) -> Iterator[Offer]:
    """N1's contenders."""
    world = dist.get_world_size()
    degree = 2 if world > 2 and world % 2 == 0 else 1
    make = partial(of_group, case, inputs)
    for schedule in ("ring", "sparse_a2a"):
        for transport in TRANSPORTS:
            name = f"{schedule} {world // degree}×{degree}, {transport}"
            yield Offer(name, partial(make, kernels, schedule, transport, ulysses=degree))
    yield Offer(PER_STEP, partial(make, PerStepRounding(kernels), "ring", "torch_dist", ulysses=degree))
    yield from (offer for offer in exchanged.offers(case, inputs) if offer.name.startswith("all-gather"))


def scaling_offers(case: Case, inputs: Inputs, kernels: Backend) -> Iterator[Offer]:
    """N2's contenders: the pick, and every schedule at every Ulysses degree."""
    world = dist.get_world_size()
    best = ranking(case.layout, case.shape, world, Profile.load("h200"))[0]
    make = partial(of_group, case, inputs, kernels)
    for transport in TRANSPORTS:
        how = {"ulysses": best.ulysses, "order": best.order}
        name = f"{PICKED}: {best.schedules[0]} {world // best.ulysses}×{best.ulysses} on {best.order}, {transport}"
        yield Offer(name, partial(make, best.schedules[0], transport, **how))
        for degree in (degree for degree in range(1, world + 1) if world % degree == 0 == case.shape.heads % degree):
            for schedule in SCHEDULES if degree < world else ("ring",):
                name = f"{schedule} {world // degree}×{degree}, {transport}"
                yield Offer(name, partial(make, schedule, transport, ulysses=degree))


def exactness(case: Case, settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """N1 of one layer, and who refuses."""
    rows, refusals = errors(case, replace(settings, offers=exact_offers))
    heads, small = f"{case.shape.heads}:{case.shape.kv_heads} heads", replace(case, tokens=settings.exact_tokens)
    said = f"{small.title}, {heads}, {dist.get_world_size()} ranks"
    return [replace(row, bar="N1", case=said) for row in rows], refusals


def scaling(case: Case, settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """N2 of one layer, and who refuses or is wrong."""
    world = dist.get_world_size()
    rows, refusals = times(case, replace(settings, offers=scaling_offers))
    found = []
    for row in rows:
        if row.bar == "T3" and row.ratio is not None:
            share = row.ratio / world
            found += [replace(row, bar="N2"), Row("N2", row.case, f"{row.metric}: share of ideal", share)]
    return found, refusals


def missed(rows: Sequence[Row], world: int) -> list[str]:
    """The cases whose bar is not reached: N1 by every schedule of marble's, N2 on eight GPUs by the faster pick."""
    wrong = [row for row in rows if row.bar == "N1" and ours(row.metric.rpartition(": ")[0]) and not within(row)]
    picked: dict[str, float] = {}
    for row in rows:
        if row.bar == "N2" and row.metric.startswith(PICKED) and row.metric.endswith("share of ideal"):
            picked[row.case] = max(row.value, picked.get(row.case, 0.0))
    slow = {case: share for case, share in picked.items() if world == 8 and share < IDEAL}
    return [f"N1 {row.case}, {row.metric}: {row.ratio}" for row in wrong] + [
        f"N2 {c}: {s:.3f}" for c, s in slow.items()
    ]


def within(row: Row) -> bool:
    """Whether an error is as small as one GPU's; NaN is not."""
    return row.ratio is not None and row.ratio <= GATE


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = command_line("node", __doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some, by commas")
    parser.add_argument("--each", type=int, default=EACH, help="tokens a GPU of the first packs; 0 for none of them")
    parser.add_argument("--all", type=int, default=ALL, help="tokens of the others; 0 for none of them")
    parser.add_argument("--repeats", type=int, default=5, help="timed layers of each contender")
    given = parser.parse_args(words)
    settings = join(parser, given.repeats, EXACT_TOKENS)
    world = dist.get_world_size()
    rows: list[Row] = []
    left_out, failed = [], []
    todo = []
    for name in given.workloads.split(","):
        for kind in WORKLOADS[name].layers:
            shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, kind.window)
            todo.append((exactness, Case(name, shape, EXACT_TOKENS)))
        for tokens in (given.each * world, given.all):
            todo += [(scaling, case) for case in (cases([name], [HEAD_DIM], tokens) if tokens else [])]
    for run, case in todo:
        name = title(case, world)
        say(f"{run.__name__}: {name}")
        answer = attempt(partial(run, case, settings))
        if answer is None:
            failed.append(name)
            continue
        found, refusals = answer
        rows += found
        left_out += [f"{name}: {who}: {why}" for who, why in refusals.items()]
        for row in found:
            over = "" if row.ratio is None else f" ({row.ratio:.4f} of {row.baseline})"
            say(f"  {row.bar} {row.metric}: {row.value:.4g} {row.unit}{over}")
    short = missed(rows, world)
    if dist.get_rank() == 0:
        write("node", rows, given.out, part=str(world), left_out=left_out)
    return leave(short, failed)


if __name__ == "__main__":
    sys.exit(main())
