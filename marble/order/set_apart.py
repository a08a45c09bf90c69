"""Which spans are stored behind the rest of their sample, so that visible tokens form ranges."""

from __future__ import annotations

import numpy as np
import torch

from marble.layout import CPU, Layout
from marble.mask.storage import Storage


def set_apart(layout: Layout, device: torch.device = CPU) -> Storage:
    """Text and clean spans first, then the spans set apart, the last of them first.

    In a sample with group spans these are set apart; in a sample without groups, noise spans are, if each stands
    alone. The queries that see one key, and the keys that one query sees, then become ranges (`marble.mask.ranges`).
    A sliding window counts in sequence order, so a model with window layers must keep `Storage.natural`.

    Source: MARBLE, section 04, "Layout transforms" (Luma AI, October 2026), for groups; noise spans are ours.

    Example:
        ``text₀ noise₁ clean₂ text₃ noise₄ clean₅`` is stored as ``text₀ clean₂ text₃ clean₅ noise₄ noise₁``.
    """
    # On the host, whatever the device: it takes a few steps over the spans, and a GPU would be waited for.
    table = layout.table
    linked, noise, seg = table.linked.numpy() > 0, table.noise.numpy() >= 0, table.seg.numpy()
    first = np.flatnonzero(np.append(True, np.diff(table.sample.numpy()) != 0))
    counts = np.diff(first, append=len(seg))
    joined = noise.copy()
    joined[noise] = np.bincount(seg[noise])[seg[noise]] > 1
    stays = np.logical_or.reduceat(linked | joined, first)  # samples whose noise is not set apart
    apart = linked | (noise & ~np.repeat(stays, counts))
    before = apart.cumsum() - apart
    before -= np.repeat(before[first], counts)
    front = np.repeat(first, counts)
    span = np.arange(len(seg))
    order = np.empty_like(span)
    order[np.where(apart, front + np.repeat(counts, counts) - 1 - before, span - before)] = span
    moved = (torch.from_numpy(column).to(device, non_blocking=True) for column in (order, apart))
    return Storage(layout, *moved)
