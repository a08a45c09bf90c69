"""What a run measures and how, and the contenders that it builds for a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.baselines.calls import MaskedCall
from bench.baselines.fa4 import FlashAttention4, Masked
from bench.baselines.flex import FlexAttention, block_mask, compiler
from bench.baselines.systems import Inputs, Ours, System, key_rows, on_device
from marble.kernels.contract import Backend

OURS, FOUR, TWO, FLEX = "marble", "FA4, 4 tracks", "FA4, 2 compares", "FlexAttention"
DENSE, CAUSAL = "FA4 dense", "FA4 dense causal"
MASKED = {FOUR: "four", TWO: "two"}


@dataclass(frozen=True)
class Settings:
    """One run of the bench.

    Attributes:
        backend: marble's kernels.
        device: where.
        baselines: what they are compared with: some of the names above.
        tokens: length of a pack on one GPU.
        ring_tokens: length of a pack on eight ranks.
        dense_tokens: length of the dense baseline.
        repeats: timed calls of each contender.
        sets: buffer sets that they rotate over.
        scale: of the workloads' spans; below 1 only in tests.
        pack_gqa: as FlashAttention takes it in a forward pass; None is its own choice.
        copy_bytes: size of the copies that the bandwidth is measured with.
    """

    backend: Backend
    device: torch.device
    baselines: tuple[str, ...]
    tokens: int = 64 * 1024
    ring_tokens: int = 256 * 1024
    dense_tokens: int = 16 * 1024
    repeats: int = 15
    sets: int = 2
    scale: float = 1.0
    pack_gqa: bool | None = None
    copy_bytes: int = 1 << 31

    def inputs(self, call: MaskedCall) -> list[Inputs]:
        """One per buffer set."""
        return [Inputs.random(call, seed, self.device) for seed in range(self.sets)]

    def ours(self, calls: list[MaskedCall], inputs: list[Inputs]) -> list[Ours]:
        """Marble's kernels over calls whose keys follow one another; calls without tiles are left out."""
        busy = [(call, keys) for call, keys in zip(calls, key_rows(calls), strict=True) if call.tiles.visited]
        works, keys = on_device([call for call, _ in busy], self.device), [keys for _, keys in busy]
        scale = calls[0].shape.softmax_scale
        return [Ours(works, x, self.backend, scale, keys) for x in inputs]

    def masked(self, name: str, call: MaskedCall, inputs: list[Inputs]) -> list[System]:
        """A baseline by its name over one call."""
        scale = call.shape.softmax_scale
        if name == FLEX:
            mask, compiled = block_mask(call, self.device), compiler()
            return [FlexAttention(x, scale, mask, compiled) for x in inputs]
        lowered = Masked.of(call, MASKED[name], self.device)
        return [FlashAttention4(x, scale, lowered, pack_gqa=self.pack_gqa) for x in inputs]

    def dense(self, call: MaskedCall) -> dict[str, list[System]]:
        """FlashAttention's dense kernels with the heads of a call."""
        shape, found = call.shape, {}
        heads = (shape.heads, shape.kv_heads, shape.head_dim)
        inputs = [Inputs.of(self.dense_tokens, self.dense_tokens, heads, seed, self.device) for seed in range(2)]
        for name in (DENSE, CAUSAL):
            if name in self.baselines:
                found[name] = [FlashAttention4(x, shape.softmax_scale, causal=name == CAUSAL) for x in inputs]
        return found

    def dense_flops(self, call: MaskedCall, name: str, *, backward: bool) -> float:
        """Operations of a dense baseline."""
        n = self.dense_tokens
        return call.flops(n * n if name == DENSE else n * (n + 1) // 2, backward=backward)


def say(text: str) -> None:
    """Progress, at once."""
    print(text, flush=True)
