"""Measuring a machine: from a dozen timed calls to a profile. What is timed is here, how is `marble.cost.timer`'s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from marble.cost.profile import Profile, ProfileError
from marble.kernels.contract import MAX_BLOCK, TileList, Tiles, Touch

BLOCKS, DOCUMENT = 128, 8
"""Blocks of a call, and of each document in it."""
HEADS, KV_HEADS = 32, 8
LINK_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """A timed call over `BLOCKS` query and key blocks and `HEADS` heads.

    Attributes:
        head_dim: size of a head.
        kind: ``full``, every tile full; ``partial``, every tile partial; or ``documents`` of `DOCUMENT` blocks, full.
        backward: whether it is the backward call.
        carried: whether it takes and leaves the state of every query block.
    """

    head_dim: int
    kind: str = "full"
    backward: bool = False
    carried: bool = False

    def work(self) -> Tiles:
        """The tiles of the call."""
        rows = torch.arange(BLOCKS, dtype=torch.int32) * MAX_BLOCK
        block = torch.arange(BLOCKS + 1, dtype=torch.int32)
        none = torch.zeros(0, 2, dtype=torch.int32)
        ranges, bits = torch.zeros(0, MAX_BLOCK, dtype=torch.int32), torch.zeros(0, MAX_BLOCK, 4, dtype=torch.int32)
        if self.kind == "partial":
            inner = torch.arange(BLOCKS, dtype=torch.int32).repeat(BLOCKS)
            # One predicate: every row sees all columns but the last.
            words = torch.full((1, MAX_BLOCK), (MAX_BLOCK - 1) << 8, dtype=torch.int32)
            parts = torch.stack([inner, torch.zeros_like(inner)], 1)
            tiles = TileList(torch.zeros_like(block), none, block * BLOCKS, parts, words, bits)
        else:
            width = DOCUMENT if self.kind == "documents" else BLOCKS
            runs = torch.stack([block[:-1] // width * width, torch.full((BLOCKS,), width, dtype=torch.int32)], 1)
            tiles = TileList(block, runs, torch.zeros_like(block), none, ranges, bits)
        touch = Touch.CARRY if self.carried else Touch.FIRST | Touch.LAST
        flags = torch.full((BLOCKS,), int(touch), dtype=torch.uint8)
        length: Tensor = torch.full_like(rows, MAX_BLOCK)
        return Tiles(MAX_BLOCK, BLOCKS * MAX_BLOCK, rows, length, tiles, tiles, flags)


class Timer(Protocol):
    """Times calls on a machine."""

    machine: str

    def calls(self, cases: Sequence[Case]) -> list[float]:
        """Seconds of each of some kernel calls, made by turns: a GPU that has only had short ones is faster."""
        ...

    def link(self, nbytes: int) -> float:
        """Seconds that two GPUs of a node take to send each other so many bytes, both ways at once."""
        ...


def fit(
    timer: Timer,
    head_dims: Sequence[int],
    gpus_per_node: int,
    inside: float | None = None,
    across: float | None = None,
    date: str = "",
) -> Profile:
    """Measure a machine.

    A query block with n tiles takes n + u tiles' time, so two calls with blocks of many and of few tiles give the time
    of a tile and u; the difference that carried state makes gives the bandwidth of memory.

    Args:
        timer: times the calls.
        head_dims: sizes of heads to measure; shares and memory are those of the last.
        gpus_per_node: GPUs of a node.
        inside: bytes/s between two of them, each way; by default it is measured, which takes two.
        across: bytes/s between nodes, if it is known; one process cannot measure it.
        date: when, for the sources.

    Raises:
        ProfileError: if a bandwidth that is given is none, before anything is timed; if times contradict each other,
            as when something else used the GPU.
        ValueError: if ``inside`` is to be measured and there is only one GPU, before anything is timed.
    """
    given = {name: value for name, value in (("inside", inside), ("across", across)) if value is not None}
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ProfileError(f"fit: {name}: bytes/s, more than 0, got {value}")
    if inside is None:
        inside = LINK_BYTES / _positive(timer.link(LINK_BYTES), "link", 0)
    kinds = [(kind, backward) for backward in (False, True) for kind in ("documents", "full", "partial")]
    rates: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
    shares: dict[str, float] = {}
    for dim in head_dims:
        cases = [Case(dim, kind, backward) for kind, backward in kinds]
        carried, *times = timer.calls([Case(dim, "documents", carried=True), *cases])
        state = 2 * HEADS * BLOCKS * MAX_BLOCK * 4 * (dim + 2)
        memory = state / _positive(carried - times[0], "carried state", dim)
        for which, (few, many, partial) in zip(rates, (times[:3], times[3:]), strict=True):
            # Backward, key blocks of key/value heads are the units, which also add to gradients in memory.
            backward = which == "backward"
            units = BLOCKS * (KV_HEADS if backward else HEADS)
            beside = units * 2 * 2 * 4 * MAX_BLOCK * dim / memory if backward else 0.0
            tiles = HEADS * BLOCKS * (BLOCKS - DOCUMENT)
            tile = _positive(many - few, f"{which} tiles", dim) / tiles
            unit = max((few - beside - HEADS * BLOCKS * DOCUMENT * tile) / units, 0.0)
            all_tiles = HEADS * BLOCKS**2 * tile
            shares[f"{which}_unit"] = unit / tile
            shares[f"{which}_partial"] = _positive(1 + (partial - many) / all_tiles, f"{which} partial tiles", dim)
            rates[which].append((dim, (10 if backward else 4) * MAX_BLOCK**2 * dim / tile))
    measured = f"marble fit on {timer.machine}{f', {date}' if date else ''}"
    names = [f"{which}_rate.{dim}" for which, found in rates.items() for dim, _ in found]
    names += [*sorted(shares), "memory", "inside", *(["across"] if across is not None else [])]
    sources = [(name, "given to marble fit" if name in given else measured) for name in names]
    return Profile.parse(
        Profile(
            timer.machine,
            gpus_per_node,
            tuple(rates["forward"]),
            tuple(rates["backward"]),
            **shares,
            memory=memory,
            inside=inside,
            across=across,
            sources=tuple(sources),
        ).dump(),
        "fitted",
    )


def _positive(value: float, what: str, head_dim: int) -> float:
    if not value > 0:
        where = f" at head size {head_dim}" if head_dim else ""
        raise ProfileError(f"fit: {what}{where}: times contradict each other; is the GPU in use?")
    return value
