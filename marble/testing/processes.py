"""Running a function on real ranks of this machine: one process each, over gloo on CPUs or NCCL on GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(
    function: Callable[..., Any], world: int, *args: Any, backend: str = "gloo", timeout_s: float = 120
) -> list[Any]:
    """``function(rank, *args)`` in ``world`` new processes that form the default process group.

    Args:
        function: importable by its name; what it returns must be saveable with ``torch.save``.
        world: number of processes.
        args: picklable.
        backend: of ``torch.distributed``; with ``nccl`` each rank has the GPU of its number as current device.
        timeout_s: seconds after which a message that does not come is an error.

    Returns:
        The results by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first process that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (function, world, folder, backend, timeout_s, args), nprocs=world)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False, map_location="cpu") for rank in range(world)]


def _enter(
    rank: int,
    function: Callable[..., Any],
    world: int,
    folder: str,
    backend: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        torch.save(function(rank, *args), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()
