"""Transports are named or chosen by a rule that is logged, and a setting that spoils them is warned about."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

import marble
from marble import AttentionShape, Layout
from marble.comm import choice, nccl_rma

ONE = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    choice._say.cache_clear()
    choice._warn_of_one_connection.cache_clear()
    yield
    choice._warn_of_one_connection.cache_clear()


@pytest.mark.parametrize(("virtual", "name"), [(True, "local"), (False, "torch_dist")])
def test_the_rule_is_logged_once(virtual: bool, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "marble"):
        assert [choice.choose(None, virtual) for _ in range(3)] == [name] * 3
    assert [record.message.partition(",")[0] for record in caplog.records] == [f"transport: {name!r}"]


def test_a_name_is_taken_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "marble"):
        assert choice.choose("local", True) == "local"
    assert not caplog.records


def test_the_op_refuses_a_transport_that_does_not_fit() -> None:
    plan = marble.plan(Layout.from_cu_seqlens([0, 12]), AttentionShape(2, 1, 8), ranks=2, block=4)
    q, k, v = (torch.zeros(12, heads, 8) for heads in (2, 1, 1))
    for name, message in (
        ("torch_dist", r"^transport: 'torch_dist' carries one rank per process .*use 'local'"),
        ("nvshmem", r"^transport: 'nvshmem' carries one rank per process .* each with a GPU, .*use 'local'"),
        ("smoke", r"^transport: 'smoke' is unknown; use one of 'local', 'torch_dist', 'nvshmem', 'nccl_rma'"),
    ):
        with pytest.raises(ValueError, match=message):
            marble.attention(q, k, v, plan, transport=name)
    with pytest.raises(TypeError, match=r"^transport: expected a name, got int"):
        marble.attention(q, k, v, plan, transport=3)  # type: ignore[call-overload]
    marble.attention(q, k, v, plan, transport="local")


def test_one_connection_is_warned_about_once_and_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv(ONE, "1")
        choice.check_connections(torch.device("cpu"))
        monkeypatch.setenv(ONE, "8")
        choice.check_connections(torch.device("cuda"))
    monkeypatch.setenv(ONE, "1")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            choice.check_connections(torch.device("cuda"))
    assert [str(warning.message).partition("=")[0] for warning in seen] == [f"marble.attention: {ONE}"]


@pytest.mark.parametrize("name", ["nvshmem", "nccl_rma"])
def test_one_sided_transports_want_gpus(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^transport: '{name}' carries tensors on GPUs, got cpu; use 'torch_dist'"):
        choice.connect(name, None, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "fits"), [("2.28.9", False), ("2.29.0", True), ("2.30.7", True), ("3.0.1", True)])
def test_nccl_without_one_sided_transfers_is_refused_by_its_version(
    version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = pytest.importorskip("nccl.core")
    found = core.LibraryInfo(Version(version), None, Path("/lib/libnccl.so.2"))
    monkeypatch.setattr(core, "get_version", lambda: SimpleNamespace(libnccl=found))
    if fits:
        nccl_rma.check_version()
    else:
        with pytest.raises(ValueError, match=r"needs libnccl 2.29 or later, libnccl 2.28.9 is loaded, from /lib/lib"):
            nccl_rma.check_version()
