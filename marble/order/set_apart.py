"""Which spans are stored behind the rest of their sample, so that visible tokens form ranges."""

from __future__ import annotations

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
    table = layout.table.to(device)
    spans = len(table.start)
    ordinal = table.ordinal
    samples = int(ordinal[-1]) + 1
    linked, noise = table.linked.bool(), table.noise >= 0
    uses = torch.bincount(table.seg.clamp(min=0), weights=(table.seg >= 0).double())
    joined = noise & (uses[table.seg.clamp(min=0)] > 1)
    has_groups, has_joined = (torch.zeros(samples, dtype=torch.bool, device=device) for _ in range(2))
    has_groups[ordinal[linked]] = True
    has_joined[ordinal[joined]] = True
    apart = linked | (noise & ~has_groups[ordinal] & ~has_joined[ordinal])
    place = torch.arange(spans, device=device)
    key = (ordinal * 2 + apart) * 2 * spans + torch.where(apart, spans - place, place)
    return Storage(layout, torch.argsort(key), apart)
