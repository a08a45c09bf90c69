"""The benches' command lines: what they refuse before anything runs, and what of them is recorded."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import balance, chunks, fetch, selection
from bench.harness import command_line, gpu, head
from marble.workloads import WORKLOADS

BENCHES = ["balance", "choices", "chunks", "demo", "fetch", "kernels", "layer", "node", "planning", "replay"]
BENCHES += ["selection", "tuning"]
OF_TORCHRUN = {"LOCAL_RANK": "2", "RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def bench(name: str) -> Any:
    """The bench's module, if what it imports is installed."""
    if name == "demo":
        for package in ("matplotlib", "mistral_common", "PIL", "skimage"):
            pytest.importorskip(package)
    return importlib.import_module(f"bench.{name}")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that torchrun did not start, on a machine with two GPUs."""
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def refusal(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line that a bench prints before it ends."""
    with pytest.raises(SystemExit) as end:
        bench(name).main(words)
    assert end.value.code == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1
    return told.err.rstrip("\n")


@pytest.mark.parametrize("name", BENCHES)
def test_help_describes_and_runs_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = bench(name)
    with pytest.raises(SystemExit) as end:
        module.main(["--help"])
    assert end.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert module.__doc__.splitlines()[0] in told
    assert "--out OUT folder of the results" in told


@pytest.mark.parametrize("name", BENCHES)
@pytest.mark.parametrize("words", [["--unheard-of"], ["unheard-of"], ["--ou", "folder"]])
def test_unknown_arguments_are_refused(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench(name).main(words)
    assert end.value.code == 2
    assert f"unrecognized arguments: {' '.join(words)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (balance, {"TOKENS": 8192, "RANKS": 2}),
        (chunks, {"PLANNED": (65536, 2), "EVEN": {(65536, 2): 1.03}, "REPEATS": 1}),
        (fetch, {"TOKENS": 65536, "WINDOW_RANKS": (2,)}),
        (selection, {"TOKENS": 65536, "RANKS": (4,), "REPEATS": 1, "CASES": ((65536, 4),)}),
    ],
)
def test_results_are_written_to_the_folder(
    module: Any, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    if module is not chunks:
        monkeypatch.setattr(module, "WORKLOADS", {"gemma_docs": WORKLOADS["gemma_docs"]})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    name = module.__name__.removeprefix("bench.")
    words = ["--out", str(tmp_path / "new")]
    monkeypatch.setattr(sys, "argv", [name, *words])
    assert module.main(words) in (0, 1)
    record = json.loads((tmp_path / "new" / f"{name}.json").read_text())
    assert record["rows"]
    assert record["command"] == f"python -m bench.{name}"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--out /home/me", ""),
        ("--out=/home/me --repeats 3", "--repeats 3"),
        ("--cases 2 --out=/home/me", "--cases 2"),
        ("--out a --repeats=3 --out b", "--repeats=3"),
        ("--outer 1", "--outer 1"),
    ],
)
def test_the_folder_is_not_recorded(words: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["layer.py", *words.split()])
    assert head("layer")["command"] == f"python -m bench.layer {kept}".rstrip()


@pytest.mark.parametrize(
    ("name", "words"),
    [("kernels", []), ("replay", []), ("tuning", []), ("planning", ["--gpu"])],
)
def test_without_a_gpu_one_line_says_so(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = " ".join(["python -m", f"bench.{name}", *words])
    assert refusal(name, words, capsys) == f"bench.{name}: no GPU; run it where there is one: {command}"


@pytest.mark.parametrize("name", ["choices", "layer", "node"])
def test_benches_of_several_gpus_say_how_they_are_run(
    name: str, capsys: pytest.CaptureFixture[str], alone: pytest.MonkeyPatch
) -> None:
    command = f"torchrun --nproc_per_node N -m bench.{name}"
    every = ", ".join(OF_TORCHRUN)
    expected = f"bench.{name}: {every} not set; run it by torchrun, on N GPUs: {command}"
    assert refusal(name, [], capsys) == expected
    for variable, value in OF_TORCHRUN.items():
        alone.setenv(variable, value)
    expected = f"bench.{name}: no GPU for process 2 of this host, which has 2; run it with N at most 2: {command}"
    assert refusal(name, [], capsys) == expected
    alone.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(name, [], capsys) == f"bench.{name}: no GPU; run it where there are N: {command}"


def test_a_process_gets_its_own_gpu(alone: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    alone.setattr(torch.cuda, "set_device", chosen.append)
    parser = command_line("any", None)
    assert gpu(parser) == torch.device("cuda", 0)
    assert chosen == []
    for variable, value in (OF_TORCHRUN | {"LOCAL_RANK": "1"}).items():
        alone.setenv(variable, value)
    assert gpu(parser, torchrun=True) == torch.device("cuda", 1)
    assert chosen == [1]
