"""Hopper kernels in CuTe DSL."""
