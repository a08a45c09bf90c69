"""Every shipped configuration of the Hopper kernels compiles for SM 9.0 without a GPU, and spills no register."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from marble.kernels.cute.backward_config import BackwardConfig
from marble.kernels.cute.backward_split_sm90 import PASSES, SplitConfig
from marble.kernels.cute.binding import SHARED_BYTES, fitting
from marble.kernels.cute.forward_config import ForwardConfig

triton = pytest.importorskip("triton")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COMPILE = {
    "forward": "forward.compile_forward({})",
    "backward": "backward.compile_backward({})",
    "delta": "delta.compile_delta({})",
    "deterministic": "backward.compile_backward({}, deterministic=True)",
    "written": "backward.compile_backward({}, rounds=True)",
} | {gradient: f"backward.compile_pass({{}}, '{gradient}')" for gradient in PASSES}
CONFIGURATIONS = [
    (kind, dtype, dim)
    for kind, dtype, dim in product(COMPILE, ("bfloat16", "float16"), (64, 128, 256))
    # A pass is for 256, where it replaces the other backward kernel. Of what differs from another kernel by a few
    # instructions, one type is enough to see them.
    if (kind in PASSES) <= (dim == 256) and (dim == 256) <= (kind not in ("backward", "deterministic", "written"))
    if dtype == "bfloat16" or kind not in ("delta", "deterministic", "written")
]


def test_few_configurations_ship() -> None:
    assert len(CONFIGURATIONS) <= 23


@pytest.mark.parametrize("bytes_over", [0, 1])
def test_shared_memory_that_is_too_much_is_refused_before_a_launch(bytes_over: int) -> None:
    class Storage:
        @staticmethod
        def size_in_bytes() -> int:
            return SHARED_BYTES + bytes_over

    if bytes_over:
        with pytest.raises(ValueError, match=f"shared memory: a thread block has {SHARED_BYTES} bytes, got 232449"):
            fitting(Storage)
    else:
        assert fitting(Storage) is Storage


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_dim": 96}, "compute 64, 128 and 256, got 96"),
        ({"keys": 96}, "got 96"),
        ({"q_columns": 160}, "q_columns: all, or all but 128 of 256, got 160"),
        ({"head_dim": 128, "q_columns": 0}, "q_columns: all, or all but 128 of 128, got 0"),
        (
            {"keys": 128},
            "q_columns: query tiles that are not all in registers go with tiles of 64 keys .* got 128 in 1",
        ),
        ({"pieces": 2}, "got 64 in 2"),
        ({"k_stages": 8, "v_stages": 8}, "stages: fewer than 8 of keys or of values, got 8 and 8"),
        ({"math_registers": 248}, "registers: the kernel begins with 168"),
    ],
)
def test_impossible_choices_are_refused(wrong: dict[str, int], message: str) -> None:
    fine = {"head_dim": 256, "keys": 64, "q_columns": 128, "k_stages": 2, "v_stages": 2, "pieces": 1}
    with pytest.raises(ValueError, match=message):
        ForwardConfig(**fine | wrong)


CONFIGS = [
    *(BackwardConfig(head_dim, deterministic) for head_dim in (64, 128) for deterministic in (False, True)),
    *(SplitConfig(256, gradient=each) for each in PASSES),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_backward_registers_are_those_of_a_multiprocessor(config: BackwardConfig) -> None:
    total = config.load_registers + config.groups * config.math_registers
    assert total <= config.threads // 128 * (64 * 1024 // config.threads // 8 * 8)


def test_gradients_that_are_written_have_no_turns() -> None:
    with pytest.raises(ValueError, match="rounds: units add to the same keys by turns"):
        BackwardConfig(128, deterministic=True, rounds=True)


@pytest.mark.parametrize(("wrong", "message"), [((128, "dq"), "head_dim: 128"), ((256, "do"), "gradient: 'do'")])
def test_impossible_passes_are_refused(wrong: tuple[int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitConfig(wrong[0], gradient=wrong[1])


@pytest.mark.parametrize(("kind", "dtype", "head_dim"), CONFIGURATIONS)
def test_compiles_without_spills(kind: str, dtype: str, head_dim: int, tmp_path: Path) -> None:
    call = COMPILE[kind].format(f"torch.{dtype}, {head_dim}")
    code = f"import torch; from marble.kernels.cute import {call.split('.')[0]}; {call}"
    settings = {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    settings |= {"FLASH_ATTENTION_ARCH": "sm_90", "FLASH_ATTENTION_NUM_SMS": "132"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stderr, "ptxas serialised the matrix products"
    (cubin,) = tmp_path.glob("*.cubin")
    usage = subprocess.run(
        [TOOLS / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    assert re.search(r"STACK:0 .*LOCAL:0 ", usage.stdout), usage.stdout
    code = subprocess.run([TOOLS / "nvdisasm", cubin], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(LDL|STL)\b", code), "registers were spilled"
    if kind != "delta":
        assert "HGMMA" in code
        fences, products = code.count("WARPGROUP.ARRIVE"), code.count("HGMMA")
        assert fences < products / 3, "every product waits for the one before it"
    if kind in ("forward", *PASSES):
        # Arrivals that wait for what was read (`ordering.arrive_behind`): ptxas has not found out that they always do.
        assert re.search(r"ISETP\.NE\.OR P\d, PT, R\d+, -0x1", code)
    # A wait for the copy engine's sums, not only for its reads; fences for counters.
    assert ("MEMBAR.ALL.GPU" in code) == (kind == "deterministic")
