"""K13: the backward pass with sums in one order, the same bits in every run, against sums in any order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench.baselines.calls import Case
from bench.baselines.measure import interleave
from bench.baselines.settings import OURS, Settings, say
from bench.baselines.systems import Ours
from bench.baselines.verify import Reference
from bench.harness import Row

METRIC, ANY_ORDER, RUNS = "bwd kernels, deterministic", "sums in any order", 3


@contextmanager
def deterministic() -> Iterator[None]:
    """PyTorch's deterministic algorithms, as a user asks for them; new memory is not filled, which would take time."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class Ordered(Ours):
    """Marble's kernels with deterministic backward calls."""

    def backward_kernels(self) -> None:
        """The backward calls alone; gradients are added to what is there."""
        with deterministic():
            super().backward_kernels()

    def repeats_itself(self, runs: int = RUNS) -> bool:
        """Whether every sum has the same bits in all of some runs."""
        self.backward()
        first = [total.clone() for total in self.sums]
        for _ in range(runs - 1):
            self.backward()
            if not all(torch.equal(*pair) for pair in zip(first, self.sums, strict=True)):
                return False
        return True


def measure(case: Case, settings: Settings) -> list[Row]:
    """A layer of a workload, both ways on the same buffers' worth of data; checked before it is timed.

    Raises:
        RuntimeError: if deterministic gradients are wrong, or differ from run to run.
    """
    call = case.whole()
    inputs = settings.inputs(call)
    free = settings.ours([call], inputs)
    ordered = [Ordered([w for w, *_ in x.calls], x.inputs, x.backend, x.scale, [k for _, *k in x.calls]) for x in free]
    reference = Reference(call, inputs[0], call.shape.softmax_scale)
    errors = reference.check("deterministic", ordered[0], None)
    del reference
    if not ordered[0].repeats_itself():
        raise RuntimeError(f"{call.name}: deterministic gradients differ from run to run")
    say(f"{call.name}: deterministic is right: " + ", ".join(f"{key} {value:.1e}" for key, value in errors.items()))
    for system in (*free, *ordered):
        system.forward()
        system.backward()
    rows = []
    for metric, baseline, which in ((METRIC, ANY_ORDER, "backward_kernels"), ("bwd, deterministic", OURS, "backward")):
        runs = {name: [getattr(x, which) for x in some] for name, some in ((baseline, free), (metric, ordered))}
        times = interleave(runs, settings.repeats)
        ratio = times[metric] / times[baseline]
        rows.append(Row("K13", call.name, metric, times[metric], "ms", baseline, times[baseline], ratio))
    return rows
