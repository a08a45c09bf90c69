"""What `bench.kernels` measures: the calls, marble's kernels and the ones that they are compared with."""
