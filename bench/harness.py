"""One form for all results: ``bench/results/<bench>.json`` with where, when and how beside the rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
_PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "nvshmem4py-cu13", "yunchang", "numpy")
_OF_TORCHRUN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        bar: the id of the claim that the row answers.
        case: what was measured.
        metric: name of ``value``.
        value: the figure.
        unit: its unit; empty for ratios.
        baseline: what it is compared with.
        baseline_value: the baseline's figure, from the same run.
        ratio: between the two.
    """

    bar: str
    case: str
    metric: str
    value: float
    unit: str = ""
    baseline: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None


def command_line(bench: str, description: str | None, out: Path = RESULTS) -> argparse.ArgumentParser:
    """A bench's command line, to be added to: ``--out``, and nothing abbreviated, since `head` records the words."""
    parser = argparse.ArgumentParser(prog=f"bench.{bench}", description=description, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=out, help="folder of the results")
    return parser


def gpu(parser: argparse.ArgumentParser, options: str = "", *, torchrun: bool = False) -> torch.device:
    """This process's GPU; where there is none, one line says what the bench needs, and the exit code is 2.

    Args:
        parser: of the bench.
        options: with which it needs a GPU.
        torchrun: whether torchrun must start it, on all GPUs that it measures.
    """
    starter = "torchrun --nproc_per_node N" if torchrun else "python"
    command = " ".join(filter(None, (starter, "-m", parser.prog, options)))

    def refuse(why: str) -> None:
        parser.exit(2, f"{parser.prog}: {why}: {command}\n")

    if not torch.cuda.is_available():
        refuse(f"no GPU; run it where there {'are N' if torchrun else 'is one'}")
    if not torchrun:
        return torch.device("cuda", 0)
    if missing := [name for name in _OF_TORCHRUN if name not in os.environ]:
        refuse(f"{', '.join(missing)} not set; run it by torchrun, on N GPUs")
    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if rank >= gpus:
        refuse(f"no GPU for process {rank} of this host, which has {gpus}; run it with N at most {gpus}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def write(
    bench: str, rows: list[Row], folder: Path = RESULTS, *, part: str = "", left_out: Sequence[str] | None = None
) -> Path:
    """Write a bench's rows, replacing those of its last run.

    Args:
        bench: name of the file.
        rows: one per case.
        folder: where; by default the folder of committed results.
        part: what of the bench was run, for a file of its own.
        left_out: what was not measured, and why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = head(bench) | {"rows": [asdict(row) for row in rows]}
    if left_out is not None:
        record["left_out"] = [reason.replace(sys.prefix, "…") for reason in left_out]
    path = folder / f"{'_'.join(filter(None, (bench, part)))}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def head(bench: str) -> dict[str, Any]:
    """Where, when and how a bench runs."""
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", "-m", f"bench.{bench}", *_arguments()]),
    }


def _arguments() -> list[str]:
    """The command's arguments but the folder that it writes to, which is a matter of the machine."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return kept


def _commit() -> str | None:
    """The commit that was measured, marked if code differs from it; None outside a checkout. ``MARBLE_COMMIT`` says
    it where the files were copied without their history."""
    if told := os.environ.get("MARBLE_COMMIT"):
        return told

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()

    changed = git("status", "--porcelain", "--", "marble", "kernels", "bench", ":!bench/results")
    commit = git("describe", "--always")
    return f"{commit}-changed" if commit and changed else commit or None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
