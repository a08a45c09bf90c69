"""The rules of the house, as tests: sizes, import arrows, names that the executor may not know, and a quiet import."""

import ast
import dataclasses
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import marble
from marble import AttentionShape, Layout
from marble.compose import schedule as language

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("marble", "kernels", "bench", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
LIBRARY = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("marble", "kernels")]
each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
each_library_file = pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    """The name that a library file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("marble", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in LIBRARY}


def imports(path: Path) -> set[str]:
    """Every module that a library file imports, anywhere in it; of a package, the submodules that it names."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inner}
    return found


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


# Sizes


@each_source
def test_files_stay_readable(path: Path) -> None:
    relative = path.relative_to(ROOT)
    limit = 900 if relative.match("kernels/cute/*_sm90.py") else 500
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@each_library_file
def test_functions_take_few_arguments(path: Path) -> None:
    limit = 16 if path.relative_to(ROOT).parts[:2] == ("kernels", "cute") else 12
    for node in ast.walk(parse(path)):
        if isinstance(node, Function):
            a = node.args
            count = len(a.posonlyargs + a.args + a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)
            assert count <= limit, f"{node.name} takes {count} arguments"


# Imports point one way.

LAYOUT = ("marble.layout",)
MASK = (*LAYOUT, "marble.mask", "marble.kernels.contract")
ORDER = (*MASK, "marble.order")
SCHEDULES = (*ORDER, "marble.compose.schedules", "marble.compose.schedule")
PLAN = (*ORDER, "marble.compose.schedule", "marble.compose.shape", "marble.compose.packing")
COST = (*SCHEDULES, "marble.compose.cost", "marble.compose.shape", "marble.compose.builders", "marble.cost")
PLANNER = (
    *COST,
    *PLAN,
    "marble.comm.groups",
    "marble.compose.plan",
    "marble.compose.planner",
    "marble.compose.cost",
)
KERNELS = ("marble.kernels.contract", "marble.kernels.predicates")
MAY_IMPORT = {
    "marble.layout": (),
    "marble.mask": (*MASK, "marble.kernels.triton"),
    "marble.order": ORDER,
    "marble.comm.transport": (),
    "marble.comm": ("marble.comm",),
    "marble.compose.schedule": ("marble.kernels.contract",),
    "marble.compose.schedules": SCHEDULES,
    "marble.compose.shape": LAYOUT,
    "marble.compose.coverage": ("marble.compose.schedule", *KERNELS),
    "marble.compose.check": (*ORDER, "marble.compose.schedule", "marble.compose.coverage", *KERNELS),
    "marble.compose.cost": (*ORDER, "marble.compose.schedule"),
    "marble.compose.packing": (),
    "marble.compose.builders": SCHEDULES,
    "marble.cost.profile": (),
    "marble.cost.fit": ("marble.cost.profile", "marble.kernels.contract"),
    "marble.cost.timer": ("marble.cost.fit", "marble.kernels.contract", "marble.kernels.launch"),
    "marble.cost": COST,
    "marble.compose.plan": (*PLAN, "marble.comm"),
    "marble.compose.planner": PLANNER,
    "marble.compose.executor": ("marble.compose.schedule", "marble.kernels.contract", "marble.comm.transport"),
    "marble.compose.inboxes": ("marble.compose.schedule", "marble.comm.transport"),
    "marble.compose.attention": (
        *PLANNER,
        "marble.compose.executor",
        "marble.compose.inboxes",
        "marble.comm",
        "marble.kernels.launch",
    ),
    "marble.kernels.contract": (),
    "marble.kernels.launch": ("marble.kernels",),
    "marble.kernels.blackwell": (
        *KERNELS,
        "marble.kernels.blackwell",
        "marble.kernels.cute.binding",
        "marble.kernels.cute.delta",
        "marble.kernels.cute.predicates",
        "marble.kernels.cute.worklist",
        "marble.kernels.triton",
    ),
    "marble.kernels.cute": (*KERNELS, "marble.kernels.cute"),
    "marble.kernels.triton": (*KERNELS, "marble.kernels.triton"),
    "marble.kernels": KERNELS,
    "marble": ("marble",),
}
"""What each module or package may import of marble; the longest name that fits counts."""


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_arrows(name: str) -> None:
    rule = max((prefix for prefix in MAY_IMPORT if under(name, (prefix,))), key=len)
    found = {other for other in imports(MODULES[name]) if under(other, ("marble", "kernels"))}
    wrong = {other for other in found if not under(other, MAY_IMPORT[rule])}
    assert not wrong, f"{name} may import {MAY_IMPORT[rule] or 'nothing of marble'}, not {sorted(wrong)}"


def test_the_kernel_contract_needs_only_torch() -> None:
    roots = {name.partition(".")[0] for name in imports(MODULES["marble.kernels.contract"])}
    assert roots <= {"torch"} | set(sys.stdlib_module_names)


def test_one_file_knows_the_architecture_of_the_device() -> None:
    asks = re.compile(r"get_device_capability|get_device_properties|get_arch_list|gcnArchName")
    found = [name for name, path in MODULES.items() if asks.search(path.read_text(encoding="utf-8"))]
    assert set(found) <= {"marble.kernels.launch"}


def test_the_arrows_are_seen() -> None:
    assert "marble.compose.schedules.ring" in imports(MODULES["marble.compose.builders"])
    assert "marble.comm.local" in imports(MODULES["marble.compose.attention"])
    assert not under("marble.order.ptrr", MAY_IMPORT["marble.mask"])
    assert not under("marble.compose.schedules.ring", MAY_IMPORT["marble.compose.executor"])


# The executor knows no names.

SCHEDULE_WORDS = "ring chunked zigzag ulysses sparse a2a alltoall allgather ptrr balanced packed cp usp"
MASK_WORDS = "mask masks causal window noise document documents image text span spans sample samples pad padding"
MASK_WORDS += " tile tiles varlen band"
TRANSPORT_WORDS = "nccl gloo nvshmem rma mpi distributed dist isend irecv local virtual stream process"
BACKEND_WORDS = "reference rounded triton cute cutlass flash fa2 fa3 fa4 sm90 hopper cuda gpu launch"
FORBIDDEN = frozenset(f"{SCHEDULE_WORDS} {MASK_WORDS} {TRANSPORT_WORDS} {BACKEND_WORDS}".split())


def words(text: str) -> set[str]:
    """The words of identifiers, in snake or camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|\d+", text)}


def docstrings(tree: ast.Module) -> set[int]:
    """The nodes that are docstrings, of definitions and of what stands above them."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    lines = [line for body in bodies for line in body if isinstance(line, ast.Expr)]
    return {id(line.value) for line in lines if isinstance(line.value, ast.Constant)}


def names(tree: ast.Module) -> Iterator[str]:
    """Identifiers and strings that are not docstrings."""
    skip = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            yield node.value
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def test_the_executor_names_no_schedule_mask_transport_or_backend() -> None:
    found = {word for name in names(parse(MODULES["marble.compose.executor"])) for word in words(name)}
    assert {"schedule", "backend", "transport"} <= found, "the search is broken"
    assert not found & FORBIDDEN


def test_the_search_for_names_sees_them() -> None:
    tree = ast.parse(
        '"""ring"""\nimport torch.nccl as t\ndef is_causal(RingStep): return x.gloo_group or "a reference"\n'
    )
    found = {word for name in names(tree) for word in words(name)}
    assert {"nccl", "causal", "ring", "gloo", "reference"} <= found
    assert "ring" not in {word for name in names(ast.parse('"""ring"""')) for word in words(name)}


# Nothing is configured behind the caller's back.


@each_library_file
def test_no_environment_variables(path: Path) -> None:
    """None, but one setting of CUDA's that is warned about."""
    if path == MODULES["marble.comm.choice"]:
        asked = re.findall(r"environ\S*", path.read_text(encoding="utf-8"))
        assert asked == ['environ.get("CUDA_DEVICE_MAX_CONNECTIONS")']
        return
    for node in ast.walk(parse(path)):
        used = [getattr(node, "attr", None), getattr(node, "id", None)]
        used += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        assert not {"environ", "environb", "getenv", "putenv", "setdefaultenv"} & {name for name in used if name}


def test_public_names_are_pinned() -> None:
    assert marble.__all__ == ["AttentionShape", "Layout", "Mode", "Plan", "Span", "TransportError", "attention", "plan"]
    assert len(marble.__all__) <= 8
    assert all(hasattr(marble, name) for name in marble.__all__)


def python(code: str, folder: Path, **environment: str) -> str:
    """Run code in a fresh process in an empty folder."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSTARTUP")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


QUIET = """
import logging, os, random, signal, sys, threading, warnings
import numpy
import torch
import torch.distributed as dist

written = []
def watch(event, details):
    if event == "open" and details[1] is not None and set(details[1]) & set("wax+"):
        written.append(details[0])
    if event in ("os.mkdir", "os.remove", "os.rename", "subprocess.Popen", "socket.connect", "socket.bind"):
        written.append((event, details))

def state():
    return {
        "torch": torch.random.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "distributed": (dist.is_initialized(), dist.GroupMember.WORLD),
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT)],
        "logging": (list(logging.root.handlers), logging.root.level),
        "warnings": list(warnings.filters),
        "hooks": (sys.excepthook, sys.displayhook, list(sys.meta_path)),
        "grad": torch.is_grad_enabled(),
    }

torch.manual_seed(3)
before = state()
sys.addaudithook(watch)
import marble
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
assert not written, written
assert not os.listdir("."), os.listdir(".")
"""


def test_importing_has_no_side_effects(tmp_path: Path) -> None:
    assert python(QUIET, tmp_path) == ""


BLOCKED = ("triton", "cutlass", "flash_attn", "quack", "matplotlib", "nvshmem", "nccl", "tvm_ffi", "typer", "rich")
WITHOUT = f"""
import sys
import torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
import marble
from marble.kernels import reference
layout = marble.Layout([[marble.Span("causal", 9), marble.Span("full", 6), marble.Span("noise", 5)]])
plan = marble.plan(layout, marble.AttentionShape(2, 1, 8), ranks=2, block=4)
q, k, v = (torch.randn(20, heads, 8, requires_grad=True) for heads in (2, 1, 1))
out = marble.attention(*map(plan.shard, (q, k, v)), plan, backend="reference")
plan.unshard(out).sum().backward()
assert all(x.grad.isfinite().all() for x in (q, k, v))
loaded = {{name.partition(".")[0] for name in sys.modules}} & set({BLOCKED})
assert not loaded, loaded
"""


def test_planner_and_reference_run_without_kernel_packages(tmp_path: Path) -> None:
    python(WITHOUT, tmp_path)


# Schedules are data.


def test_schedules_are_frozen_and_picklable() -> None:
    plan = marble.plan(Layout.from_cu_seqlens([0, 20]), AttentionShape(2, 1, 8), ranks=2, block=4)
    schedule = plan.schedules[0][1]
    step = schedule.backward.steps[2]
    parts = [schedule, schedule.forward, step, step.transfers[0], step.calls[0], step.adds[0], step.calls[0].kv]
    parts += [schedule.forward.buffers[0], step.calls[0].work]
    for part in parts:
        for field in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, field.name, getattr(part, field.name))
        assert type(pickle.loads(pickle.dumps(part))) is type(part)
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy.tokens == schedule.tokens
    assert copy.forward.buffers == schedule.forward.buffers
    assert [step.transfers for step in copy.backward.steps] == [step.transfers for step in schedule.backward.steps]


def test_every_part_of_the_schedule_language_is_frozen() -> None:
    classes = [value for value in vars(language).values() if dataclasses.is_dataclass(value)]
    assert {"Schedule", "Step", "Pass"} <= {value.__name__ for value in classes}
    assert all(value.__dataclass_params__.frozen for value in classes)


# Everything public says what it is.


def undocumented(body: list[ast.stmt], owner: str) -> Iterator[str]:
    """Public functions, classes and methods without a docstring, outside private classes."""
    for node in body:
        overload = any(
            isinstance(mark, ast.Name) and mark.id == "overload" for mark in getattr(node, "decorator_list", ())
        )
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not overload:
            if ast.get_docstring(node) is None:
                yield owner + node.name
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node.body, f"{owner}{node.name}.")


@each_library_file
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = parse(path)
    assert not tree.body or ast.get_docstring(tree), "the module"
    assert not list(undocumented(tree.body, ""))


# Installed names.


def test_kernels_install_as_a_part_of_marble(tmp_path: Path) -> None:
    code = "from importlib.util import find_spec as f; print(f('kernels'), f('marble.kernels').origin)"
    assert python(code, tmp_path).split() == ["None", str(ROOT / "kernels" / "__init__.py")]


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert settings["package-dir"].items() >= {"marble": "marble", "marble.kernels": "kernels"}.items()
    assert all(name.partition(".")[0] == "marble" for name in [*settings["package-dir"], *settings["packages"]])
    folders = {module_name(path.parent / "__init__.py") for path in LIBRARY}
    assert folders <= set(settings["packages"])
    assert all((path.parent / "__init__.py").exists() for path in LIBRARY)
