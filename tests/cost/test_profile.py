"""Profiles of machines: what is shipped, what is refused, and measuring one with a clock that is told what to say."""

import re
import tomllib
from collections.abc import Sequence
from importlib import resources

import pytest

from marble.cost.fit import BLOCKS, DOCUMENT, HEADS, KV_HEADS, LINK_BYTES, Case, fit
from marble.cost.profile import SHIPPED, Profile, ProfileError

H200 = (resources.files("marble.cost") / "profiles" / "h200.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_name_a_source_for_every_figure(name: str) -> None:
    profile = Profile.load(name)
    entries = tomllib.loads((resources.files("marble.cost") / "profiles" / f"{name}.toml").read_text(encoding="utf-8"))
    assert len(profile.sources) == sum(
        len(x) if "value" not in x else 1 for x in entries.values() if isinstance(x, dict)
    )
    assumed = [source.startswith("assumed") for _, source in profile.sources]
    assert all(assumed) if name == "h100-cluster" else not any(assumed)
    assert Profile.parse(profile.dump(), "again") == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("version = 1", "version = 2"), "version 1 is expected, found 2"),
        (("version = 1", "version 1"), "not TOML"),
        (('machine = "NVIDIA H200, one node"', ""), "missing: machine"),
        (("gpus_per_node = 8", "gpus_per_node = 0"), "gpus_per_node: expected a whole number above 0, found 0"),
        (("[memory]", "[memroy]"), "unknown: memroy"),
        (("value = 379e9", "value = -1"), "inside: expected a number that is not negative, found -1"),
        (("value = 379e9", "value = nan"), "inside: expected a number"),
        (("value = 379e9", "value = 0"), "inside: must be above 0"),
        (("value = 379e9", 'value = "fast"'), "inside: expected a number"),
        (("value = 379e9", "bytes = 1"), "inside: expected value and source, found bytes, source"),
        (("[forward_rate.64]", "[forward_rate.sixty]"), "'sixty' is not a head size"),
        (("[forward_rate.64]", "[forward_rate.32]"), "different head sizes"),
    ],
)
def test_bad_profiles_are_refused(change: tuple[str, str], message: str) -> None:
    assert change[0] in H200
    with pytest.raises(ProfileError, match=re.escape(message)):
        Profile.parse(H200.replace(*change), "mine")


def test_a_figure_without_a_source_is_refused() -> None:
    with pytest.raises(ProfileError, match="says no source"):
        Profile.parse(re.sub(r"(\[inside\]\nvalue = 379e9\nsource = ).*", r'\1" "', H200), "mine")


def test_a_profile_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ProfileError, match="neither a file nor one of h200, h100-cluster"):
        Profile.load("h300")
    path = tmp_path / "mine.toml"
    path.write_text(H200, encoding="utf-8")
    assert Profile.load(path) == Profile.load("h200")


def test_a_head_size_without_rates() -> None:
    with pytest.raises(ProfileError, match="no rates for head size 96, only for 64, 128, 256"):
        Profile.load("h200").rates(96)


class Clock:
    """A machine with these constants, and how long it takes."""

    machine = "a clock"

    def __init__(self, tile: float = 1e-6, unit: float = 0.5, partial: float = 1.2, memory: float = 3e12) -> None:
        self.tile, self.unit, self.partial, self.memory = tile, unit, partial, memory

    def calls(self, cases: Sequence[Case]) -> list[float]:
        return [self.call(case) for case in cases]

    def call(self, case: Case) -> float:
        work = case.work()
        assert work.visited == BLOCKS * (DOCUMENT if case.kind == "documents" else BLOCKS)
        tiles, partial = HEADS * work.visited, HEADS * work.by_query.partial
        units = BLOCKS * (KV_HEADS if case.backward else HEADS)
        tile = self.tile * case.head_dim / 128 * (2 if case.backward else 1)
        state = 2 * HEADS * BLOCKS * 128 * 4 * (case.head_dim + 2) if case.carried else 0
        sums = units * 2 * 2 * 4 * 128 * case.head_dim if case.backward else 0
        return tile * (tiles + (self.partial - 1) * partial + self.unit * units) + (state + sums) / self.memory

    def link(self, nbytes: int) -> float:
        return nbytes / 300e9


def test_fit_finds_the_constants() -> None:
    profile = fit(Clock(), (64, 128), 4, across=25e9, date="today")
    assert profile.rates(128) == pytest.approx((4 * 128**3 / 1e-6, 5 * 128**3 / 1e-6))
    assert profile.rates(64) == pytest.approx((4 * 128**3 / 1e-6, 5 * 128**3 / 1e-6))
    assert (profile.forward_unit, profile.backward_unit) == pytest.approx((0.5, 0.5))
    assert (profile.forward_partial, profile.backward_partial) == pytest.approx((1.2, 1.2))
    assert (profile.memory, profile.inside, profile.across) == pytest.approx((3e12, 300e9, 25e9))
    assert dict(profile.sources)["memory"] == "marble fit on a clock, today"
    assert dict(profile.sources)["across"] == "given to marble fit"
    assert profile.gpus_per_node == 4
    assert LINK_BYTES > 0


def test_fit_on_one_gpu_is_told_the_bandwidth() -> None:
    class Alone(Clock):
        def link(self, nbytes: int) -> float:
            raise ValueError(f"fit: {nbytes} bytes between two GPUs")

    profile = fit(Alone(), (128,), 8, inside=400e9)
    assert profile.inside == 400e9
    assert dict(profile.sources)["inside"] == "given to marble fit"
    assert profile.across is None
    with pytest.raises(ValueError, match="two GPUs"):
        fit(Alone(), (128,), 8)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["inside", "across"])
def test_fit_refuses_a_bandwidth_that_is_none(name: str, value: float) -> None:
    with pytest.raises(ProfileError, match=f"fit: {name}: bytes/s, more than 0, got {value}"):
        fit(Clock(), (128,), 8, **{name: value})


@pytest.mark.parametrize("broken", [{"memory": -3e12}, {"tile": -1e-6}, {"partial": -1.0}])
def test_fit_refuses_times_that_contradict_each_other(broken: dict[str, float]) -> None:
    with pytest.raises(ProfileError, match="contradict each other"):
        fit(Clock(**broken), (128,), 8)


@pytest.mark.parametrize(("kind", "pairs"), [("full", 128 * 128), ("partial", 128 * 127), ("documents", 128 * 128)])
def test_fit_times_what_it_says(kind: str, pairs: int) -> None:
    work = Case(64, kind).work()
    legal = work.by_query.full * 128**2
    words = work.by_query.ranges.long()
    legal += work.by_query.partial * (int(((words >> 8 & 255) - (words & 255)).sum()) if len(words) else 0)
    assert legal == work.visited * pairs


def test_fit_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from marble.cost.timer import CudaTimer

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="found no GPU"):
        CudaTimer()
