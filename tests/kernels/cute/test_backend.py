"""What the Hopper backend refuses before anything is launched, and which GPU gets which backend. What it computes is
tested on a GPU (tests/gpu)."""

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


@pytest.mark.parametrize("chosen", [None, False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_who_asks_for_determinism(chosen: bool | None, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's switch, at the time of the call, unless the backend was told."""
    backend = CuteBackend(lambda _: 1, deterministic=chosen)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: enabled)
    assert backend.deterministic is (enabled if chosen is None else chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_named() -> None:
    with pytest.raises(ValueError, match=r"'cute' runs on Hopper GPUs \(SM 9.0\) .*, found no GPU; 'reference' runs"):
        launch.backend("cute")


CHIPS = {(9, 0): "cute", (10, 0): "blackwell", (10, 3): "blackwell", (11, 0): None, (12, 0): None, (8, 0): None}


@pytest.mark.parametrize(("chip", "name"), CHIPS.items())
def test_the_gpu_decides(chip: tuple[int, int], name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: chip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    if name is None:
        with pytest.raises(ValueError, match=rf"found A GPU \(SM {chip[0]}\.{chip[1]}\); 'reference' runs everywhere"):
            launch.backend("cute")
    else:
        assert launch.backend("cute").name == name
