"""One thread, and one fixed set of random cases: every run tests the same."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Without a GPU Triton's interpreter runs its kernels. Triton reads this once, whoever imports it first.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
settings.register_profile(
    "marble",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.load_profile("marble")
