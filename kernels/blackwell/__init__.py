"""Kernels for Blackwell: FlashAttention-4's, with float32 partial results that Triton merges. Compiled, never run."""
