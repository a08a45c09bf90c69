"""Blackwell's kernels compile for SM 10.0 without a GPU, and are called with arguments that they were compiled for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("cutlass")

HERE = Path(__file__).parent
TARGET = {"CUTE_DSL_ARCH": "sm_100a", "FLASH_ATTENTION_ARCH": "sm_100", "FLASH_ATTENTION_NUM_SMS": "148"}


def run(script: str, *args: str) -> str:
    """What a script of this folder says, with the target named before anything is imported."""
    done = subprocess.run(
        [sys.executable, HERE / script, *args],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | TARGET,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", "64"), ("bfloat16", "128")])
def test_flash_attention_kernels(dtype: str, head_dim: str) -> None:
    """Up to the launch, which a machine without a GPU refuses: the kernels take the arguments that they are called
    with."""
    assert run("compile_and_call.py", dtype, head_dim).split() == ["forward", "backward"]


def test_triton_kernels() -> None:
    assert run("compile_triton.py").split() == ["_fold", "_fold", "_add"]
