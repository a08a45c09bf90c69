"""The contenders of `bench.layer` on two gloo processes: right as they are, wrong without their transfers, and named
where they refuse."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather
from torch.nn.attention import SDPBackend

from bench.baselines import systems, usp
from bench.baselines.calls import DENSE_CAUSAL, Case, MaskedCall, cases
from bench.baselines.context_parallel import FlexAllGather, SdpaRing
from bench.baselines.exchanged import Gathered, Ulysses
from bench.baselines.layer_bars import SILENT, missed, time_rows
from bench.baselines.layer_runs import DIFFERENT, Settings, lines, title
from bench.baselines.layers import ONE, PER_STEP, Inputs, Layer, Ours, alone, differences, of_ranks, whole
from bench.harness import Row, write
from bench.layer import measure
from marble import AttentionShape
from marble.kernels.launch import backend
from marble.testing.exactness import GATE, RESULTS
from marble.testing.processes import run_processes

CPU = torch.device("cpu")
SDPA = torch.ops.aten.scaled_dot_product_attention
CASES = [
    Case("bagel_mix", AttentionShape(4, 2, 16), 768, 0.05),
    Case("gemma_docs", AttentionShape(4, 2, 16, 96), 512),
    Case(DENSE_CAUSAL, AttentionShape(4, 2, 16), 512),
]
SCHEDULES = ("ring", "sparse_a2a", "chunked", "ulysses")


def kernels(call: MaskedCall, inputs: systems.Inputs) -> systems.Ours:
    """In the place of FlashAttention-4."""
    works = systems.on_device([call], CPU)
    return systems.Ours(works, inputs, backend("reference"), call.shape.softmax_scale, systems.key_rows([call]))


def flex(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool) -> Tensor:
    """In the place of FlexAttention, which has no backward pass on CPUs."""
    mask = block_mask.mask_mod(0, 0, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
    return SDPA(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)


def scaled_dot_product_attention(q: Any, k: Any, v: Any, *, is_causal: bool, scale: float, enable_gqa: bool) -> Any:
    """In the place of PyTorch's ring, which has no CPU kernel: exact for tokens that are dealt head to tail."""
    assert is_causal
    if not isinstance(q, DTensor):  # outside of the ring
        return SDPA(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    group, quarters = dist.group.WORLD, torch.arange(2 * k.to_local().shape[2]).chunk(4)
    assert group is not None
    places = [torch.cat([quarters[rank], quarters[3 - rank]]) for rank in range(2)]
    every = flex_cp_allgather(k.to_local(), v.to_local(), 2, group.group_name)
    mask = places[dist.get_rank()][:, None] >= torch.cat(places)
    out = SDPA(q.to_local(), *every, mask, scale=scale, enable_gqa=enable_gqa)
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


@dataclass
class Turned:
    """A layer at one of its turns."""

    layer: Layer
    turn: int

    @property
    def index(self) -> Tensor:
        return self.layer.index

    def __call__(self, turn: int = 0) -> tuple[Tensor, ...]:
        return self.layer(turn + self.turn)

    def synchronize(self) -> None:
        self.layer.synchronize()


def worker(_rank: int) -> dict[str, Any]:
    """All that two processes do together."""
    found: dict[str, Any] = {"ours": {}, "public": {}, "yunchang": {}}
    for case in CASES:
        inputs = Inputs.random(case, CPU)
        single = alone(case, inputs, backend("reference"))
        expected = [whole(Turned(single, turn), case.tokens) for turn in range(2)]
        found["ours"] |= {(case.name, *key): answer for key, answer in our_answers(case, inputs, expected)}
        for name, layer in public_schemes(case, inputs):
            for turn in range(2):
                found["public"][case.name, name, turn] = differences(Turned(layer, turn), expected[turn])
    if find_spec("yunchang") is not None:
        for offer in usp.offers(case, inputs):
            layer = offer.accepted()
            found["yunchang"][offer.name] = layer if isinstance(layer, str) else differences(layer, expected[0])
    return found | {"bench": whole_bench()}


def our_answers(case: Case, inputs: Inputs, expected: list[dict[str, Tensor]]) -> Iterator[tuple[Any, Any]]:
    """Differences to one rank, by contender and whether its transfers are left out, then on the inputs that they were
    kept of and on others; or why it refuses."""
    for offer in of_ranks(case, inputs, backend("reference"), ["torch_dist", "nvshmem"]):
        layer = offer.accepted()
        if isinstance(layer, str):
            yield (offer.name, "refused"), layer
        else:
            assert isinstance(layer, Ours)
            yield (offer.name, "whole"), differences(layer, expected[0])
            silent = layer.silent()
            for turn, name in enumerate(("kept", "silent")):
                yield (offer.name, name), differences(Turned(silent, turn), expected[turn])


def public_schemes(case: Case, inputs: Inputs) -> Iterator[tuple[str, Layer]]:
    """On kernels that a CPU has."""
    yield "all-gather", Gathered(case, inputs, kernels)
    yield "Ulysses", Ulysses(case, inputs, kernels)
    yield "flex", FlexAllGather(case, inputs, flex)
    if case.name == DENSE_CAUSAL:
        with mock.patch("torch.nn.functional.scaled_dot_product_attention", scaled_dot_product_attention):
            yield "ring", SdpaRing(case, inputs, SDPBackend.MATH)


def whole_bench() -> Any:
    """A small pack, and one that cannot be built, with a clock that stands still."""
    settings = Settings(backend("reference"), CPU, 512, lambda layers: dict.fromkeys(layers, 1.0), ("Ulysses",))
    some = [replace(CASES[0], name="nothing"), replace(CASES[0], tokens=512)]
    with mock.patch("bench.layer.cases", return_value=some):
        return measure("bagel_mix", 512, settings)


@pytest.fixture(scope="module")
def answers() -> Any:
    first, second = run_processes(worker, 2)
    assert {key: first[key] for key in ("ours", "public")} == {key: second[key] for key in ("ours", "public")}
    return first


def test_every_schedule_agrees_with_one_rank_and_needs_its_transfers(answers: Any) -> None:
    for case in CASES:
        for name in (*(f"{schedule}, torch_dist" for schedule in SCHEDULES), PER_STEP):
            if name == "chunked, torch_dist" and case.shape.window:
                assert "layer 0 cannot be 'chunked'" in answers["ours"][case.name, name, "refused"]
            else:
                assert tuple(answers["ours"][case.name, name, "whole"]) == RESULTS
                assert max(answers["ours"][case.name, name, "whole"].values()) <= DIFFERENT
                assert max(answers["ours"][case.name, name, "kept"].values()) <= DIFFERENT
                assert max(answers["ours"][case.name, name, "silent"].values()) > DIFFERENT


def test_transports_that_refuse_are_named(answers: Any) -> None:
    for schedule in SCHEDULES:
        told = answers["ours"]["bagel_mix", f"{schedule}, nvshmem", "refused"]
        assert told.startswith("ValueError: transport: 'nvshmem'")


def test_public_schemes_agree_with_one_rank(answers: Any) -> None:
    """On both of the input sets that they take by turns."""
    assert len(answers["public"]) == 2 * (3 + 3 + 4)
    for key, found in answers["public"].items():
        assert max(found.values()) <= DIFFERENT, (key, found)


def test_yunchang_agrees_with_one_rank(answers: Any) -> None:
    pytest.importorskip("yunchang")
    assert set(answers["yunchang"]) == {"yunchang, zigzag ring", "yunchang, Ulysses"}
    for found in answers["yunchang"].values():
        assert max(found.values()) <= DIFFERENT


def test_the_bench_measures_and_names_all(answers: Any) -> None:
    rows, left_out, failed = answers["bench"]
    assert failed == ["nothing, 768 tokens, d16, 2 ranks"]
    ran = [f"{schedule}, torch_dist" for schedule in SCHEDULES]
    exact, timed = ([row for row in rows if (row.bar == "T5") is which] for which in (True, False))
    assert {row.metric for row in exact} == {f"{name}: {result}" for name in (*ran, PER_STEP) for result in RESULTS}
    assert max(row.ratio for row in exact if not row.metric.startswith(PER_STEP)) <= GATE
    assert max(row.ratio for row in exact if row.metric.startswith(PER_STEP)) > GATE
    assert {(row.bar, row.metric, row.baseline) for row in timed} == {
        *(("T3", name, ONE) for name in ran),
        ("T2", ran[0], SILENT),
        ("T2", f"{ran[0]}: exposed", None),
        ("T4", ran[0], PER_STEP),
    }
    for line in lines(exact, timed):
        assert "exposed: 0.00 ms" in line or "ratio 1.000; errors of " in line
    for why in (
        "Ulysses, FA4 mask_mod: left out by --skip",
        "all-gather, FA4 mask_mod: ValueError: FlashAttention-4 needs a GPU",
        "PyTorch CP, SDPA ring, cuDNN: ValueError: it computes one causal sample and nothing else",
        "PyTorch CP, Flex all-gather: NotImplementedError: FlexAttention does not support backward on CPU",
        "yunchang, zigzag ring: ValueError: it computes one causal sample and nothing else",
        "ring, nccl_rma: ValueError: transport: 'nccl_rma'",
    ):
        assert sum(why in reason for reason in left_out) == 1, (why, left_out)


def test_what_of_marble_neither_runs_nor_refuses_is_an_error() -> None:
    public = ("all-gather", "Ulysses", "PyTorch", "yunchang")
    settings, inputs = Settings(backend("reference"), CPU, 512, dict.fromkeys, public), Inputs.random(CASES[0], CPU)

    def accepted(reason: str) -> Any:
        ring = mock.Mock(accepted=lambda: reason)
        ring.name = "ring, nvshmem"
        with mock.patch("bench.baselines.layer_runs.of_ranks", return_value=[ring]):
            return settings.accepted(CASES[0], inputs)

    layers, refusals = accepted("ValueError: it has windows")
    assert layers == {}
    assert refusals.pop("ring, nvshmem") == "ValueError: it has windows"
    assert set(refusals.values()) == {"left out by --skip"}
    with pytest.raises(RuntimeError, match="ring, nvshmem: TransportError: rank 1 died"):
        accepted("TransportError: rank 1 died")


def test_the_model_of_the_layers_is_said() -> None:
    said = [title(case, 2) for case in cases(["qwen_video", DENSE_CAUSAL], [128], 2048)]
    assert said == [
        "qwen_video, 2,048 tokens, d128, 2 ranks, heads of Qwen3-VL-30B-A3B",
        "dense_causal, 2,048 tokens, d128, 2 ranks",
    ]


def test_what_was_left_out_is_in_the_results(tmp_path: Path) -> None:
    path = write("layer", [Row("T3", "case", "ring, nvshmem", 1.0)], tmp_path, part="bagel_mix", left_out=["why"])
    assert path.name == "layer_bagel_mix.json"
    assert json.loads(path.read_text())["left_out"] == ["why"]


def test_bars_are_held() -> None:
    milliseconds = {ONE: 19.0, "ring, nvshmem": 10.0, "ring, torch_dist": 12.0, "all-gather, FA4 mask_mod": 12.0}

    def found(case: str, **changed: float) -> list[str]:
        named = {"ring": "ring, nvshmem", "one": ONE, "silent": f"ring, nvshmem, {SILENT}", "step": PER_STEP}
        return missed(time_rows(case, milliseconds | {named[key]: value for key, value in changed.items()}))

    assert found("qwen_video, long", silent=10.0, step=1.0) == []
    assert found("qwen_video, long") == ["T2 qwen_video, long: not measured"]
    assert found("qwen_video, long", silent=9.7) == ["T2 qwen_video, long: 1.031"]
    assert found("molmo_docs, long", silent=9.0) == []
    assert found("molmo_docs, long", one=18.9) == ["T3 molmo_docs, long: 1.890"]
    assert found("molmo_docs, long", ring=11.0, one=22) == ["T4 molmo_docs, long: 1.091"]
    assert found(f"{DENSE_CAUSAL}, long", ring=11.0, one=22) == []

    def exact(name: str, ratio: float) -> list[str]:
        return missed([Row("T5", "case", f"{name}: dq", 1e-3, ratio=ratio)])

    assert exact("ring, nvshmem", 1.02) == exact("yunchang, Ulysses", 1.2) == []
    assert exact("ring, nvshmem", 1.03) == ["T5 case, ring, nvshmem: dq: 1.030"]
