"""Compiles every FlashAttention-4 kernel that `bench.kernels` asks for, with no GPU: ``python -m …compile_fa4``.

The target is named in the environment before anything is imported, and tensors are fake ones, so nothing runs.
``--small`` compiles one kernel of each kind.
"""

from __future__ import annotations

import os
import sys
import time

TARGET = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}


def main(*, small: bool) -> int:
    """Compile; the number of kernels added to FlashAttention's cache by each configuration goes to the output."""
    os.environ |= TARGET
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    from bench.baselines.calls import BLOCK
    from bench.baselines.fa4 import FlashAttention4, Masked, key_block_of, range_mask_mod
    from bench.baselines.systems import Inputs
    from marble.mask.lowering import cute_mask_mod
    from marble.mask.modes import packed_mask

    def fake(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def inputs(heads: int, kv_heads: int, dim: int, rows: int, keys: int) -> Inputs:
        shapes = ((rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim), (rows, heads, dim))
        return Inputs(*(fake(*shape, dtype=torch.bfloat16) for shape in shapes))

    def lists(mask: str, window: int | None, rows: int, keys: int, dim: int) -> Masked:
        queries, blocks = rows // BLOCK, keys // key_block_of(dim)
        forward = [fake(1, 1, queries), fake(1, 1, queries, 7)] * 2
        backward = [fake(1, 1, blocks), fake(1, 1, blocks, 9)] * 2
        if mask == "two":
            return Masked(range_mask_mod(), [fake(keys) for _ in range(2)], tuple(forward), tuple(backward))
        aux = [fake(size) for size in (rows, keys) for _ in range(4)]
        return Masked(cute_mask_mod(packed_mask(window)), aux, tuple(forward), tuple(backward))

    caches = [interface._flash_attn_fwd.compile_cache.cache, interface._flash_attn_bwd.compile_cache.cache]
    models = ((32, 4, None), (32, 8, None), (32, 16, None), (32, 16, 1024), (28, 4, None))
    masks: tuple[str | None, ...] = (None, "causal", "four", "two")
    failed = 0
    with FakeTensorMode():
        for heads, kv_heads, window in models[-1:] if small else models:
            for dim in (128,) if small else (128, 64, 256):
                for mask in masks:
                    for pack in (None,) if small else (None, False):
                        before, begun = [len(cache) for cache in caches], time.monotonic()
                        masked = lists(mask, window, 4096, 8192, dim) if mask in ("four", "two") else None
                        x = inputs(heads, kv_heads, dim, 4096, 8192 if masked else 4096)
                        system = FlashAttention4(x, dim**-0.5, masked, causal=mask == "causal", pack_gqa=pack)
                        try:
                            system.forward()
                            system.backward()
                            said = "compiled"
                        except Exception as error:
                            failed += 1
                            said = f"FAILED, {type(error).__name__}: {error}"
                        added = [len(cache) - count for cache, count in zip(caches, before, strict=True)]
                        config = f"{heads}:{kv_heads} d{dim} window {window} {mask or 'full'} pack_gqa {pack}"
                        print(f"{config}: {said}: {added} in {time.monotonic() - begun:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(small="--small" in sys.argv))
