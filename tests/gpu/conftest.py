"""Backends of the GPU that there is, and fresh data for every test."""

import time

import pytest
import torch

from marble.kernels import launch
from marble.kernels.contract import Backend


@pytest.fixture
def cute() -> Backend:
    return launch.backend("cute")


@pytest.fixture
def in_order(cute: Backend) -> Backend:
    """The backend with deterministic backward calls."""
    if cute.name != "cute":
        pytest.skip("needs a Hopper GPU")
    from marble.kernels.cute.backend import CuteBackend

    return CuteBackend(cute.multiprocessors, deterministic=True)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def fresh_data() -> None:
    torch.manual_seed(seed := time.time_ns() % 2**31)
    print(f"seed {seed}")
