"""Which transport carries a plan's transfers: the one that the caller names, or by a rule that is logged."""

from __future__ import annotations

import logging
import os
import warnings
from functools import cache

import torch
import torch.distributed as dist

from marble.comm.torch_dist import Messages
from marble.comm.transport import Connection

TRANSPORTS = {
    "local": "the virtual ranks of one process",
    "torch_dist": "one rank per process of a process group",
    "nvshmem": "one rank per process of a process group, each with a GPU",
    "nccl_rma": "one rank per process of a process group, each with a GPU",
}
_log = logging.getLogger("marble")


def choose(name: str | None, virtual: bool) -> str:
    """The transport's name: the caller's, or ``local`` for virtual ranks and ``torch_dist`` for real ones.

    What the rule gives is logged, once, at level INFO of the logger ``marble``.

    Raises:
        TypeError, ValueError: if there is no such transport, or it cannot carry this plan; another is never taken.
    """
    fits = "local" if virtual else "torch_dist"
    if name is None:
        _say(f"transport: {fits!r}, as it carries {TRANSPORTS[fits]}; none was named")
        return fits
    if not isinstance(name, str):
        raise TypeError(f"transport: expected a name, got {type(name).__name__}")
    if name not in TRANSPORTS:
        raise ValueError(f"transport: {name!r} is unknown; use one of {', '.join(map(repr, TRANSPORTS))}")
    if (name == "local") != virtual:
        raise ValueError(
            f"transport: {name!r} carries {TRANSPORTS[name]}, but the plan is for {TRANSPORTS[fits]}; use {fits!r}, or "
            "plan with other ranks"
        )
    return name


def connect(name: str, group: dist.ProcessGroup, device: torch.device) -> Connection:
    """What carries transfers between the ranks of a group by a transport other than ``local``.

    The first time with a transport and a group, all ranks must come here.

    Raises:
        ValueError: if the transport cannot carry tensors of this device, or is not installed.
        TransportError: if another rank does not come.
    """
    if name == "nvshmem":
        from marble.comm import nvshmem

        return nvshmem.connect(group, device)
    if name == "nccl_rma":
        from marble.comm import nccl_rma

        return nccl_rma.connect(group, device)
    return Messages(group, device)


@cache
def _say(text: str) -> None:
    _log.info(text)


def check_connections(device: torch.device) -> None:
    """Warn, once, if CUDA has one connection only: transfers then queue behind kernels."""
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        _warn_of_one_connection()


@cache
def _warn_of_one_connection() -> None:
    warnings.warn(
        "marble.attention: CUDA_DEVICE_MAX_CONNECTIONS=1 makes transfers wait for kernels; results stay right, but "
        "nothing overlaps. Unset it, or set it to 8 or more, before CUDA starts",
        stacklevel=4,
    )
