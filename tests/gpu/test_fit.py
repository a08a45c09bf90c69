"""A profile of the GPU that there is."""

import pytest
import torch

from marble.cost.fit import fit
from marble.cost.timer import CudaTimer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def test_times_are_of_kernels_alone() -> None:
    """The time that the host takes to ask for a short call would be several tiles for each of its units."""
    profile = fit(CudaTimer(), (128,), 8, inside=1e9)
    assert profile.forward_unit < 1.5
    assert profile.backward_unit < 1.5
    assert 0.9 < profile.forward_partial < 1.5
    assert 0.9 < profile.backward_partial < 1.5
    peak = 4096 * torch.cuda.get_device_properties(0).multi_processor_count * 2e9  # FLOP/s, at most
    assert all(0.2 * peak < rate < peak for rate in profile.rates(128))
