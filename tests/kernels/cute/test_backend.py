"""What the Hopper backend refuses, before anything is launched. What it computes is tested on a GPU (tests/gpu)."""

import pytest
import torch

from marble.kernels import launch
from marble.kernels.contract import Band, Touch, Varlen

pytest.importorskip("cutlass")

from marble.kernels.cute.backend import CuteBackend

WORK = Varlen.from_cu_seqlens(torch.tensor([0, 8]), torch.tensor([0, 8]), Band.FULL, Touch.FIRST | Touch.LAST)


def call(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, scale: float = 0.1) -> None:
    q = torch.zeros(8, 2, head_dim, dtype=dtype)
    backend = CuteBackend(lambda _: 1)
    backend.forward(q, q, q, WORK, None, q.clone(), torch.zeros(2, 8), scale=scale)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 96}, "head dimension 64, 128 or 256, got torch.bfloat16 with 96"),
        ({"scale": 0.0}, "scale: must be > 0"),
        ({"scale": float("nan")}, "scale: must be > 0"),
        ({}, "computes on GPUs, got tensors on cpu"),
    ],
)
def test_refusals(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"'cute' runs on Hopper GPUs \(SM 9.0\), found no GPU; 'reference' runs everywhere"
    ):
        launch.backend("cute")
