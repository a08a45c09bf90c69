"""Packed layouts of five public models, drawn from published document statistics.

Example:
    >>> layout = build("gemma_docs", 4096, seed=0, scale=WORKLOADS["gemma_docs"].demo_scale)
    >>> layout.tokens, WORKLOADS["gemma_docs"].layers[1].window
    (4096, 1024)
"""

from marble.workloads.packs import MODELS, WORKLOADS, LayerKind, Workload, build

__all__ = ["MODELS", "WORKLOADS", "LayerKind", "Workload", "build"]
