"""The kernel bench without a GPU: what it counts, the calls that it builds, FlashAttention's lists, a tiny run."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bench import kernels
from bench.baselines import fa4, flex, masked, online, ordered
from bench.baselines.bars import BARS, missed, tables
from bench.baselines.calls import BLOCK, DENSE_CAUSAL, ONCE, Case, MaskedCall, cases, state_bytes
from bench.baselines.measure import balanced_order, relative_error
from bench.baselines.settings import DENSE, FOUR, OURS, Settings
from bench.baselines.synthetic import KINDS, uniform
from bench.baselines.systems import Inputs, key_rows
from bench.baselines.verify import Reference
from bench.harness import Row
from marble import AttentionShape
from marble.kernels.contract import Touch
from marble.kernels.launch import backend
from marble.kernels.predicates import covered
from marble.mask.domains import dense
from marble.mask.tracks import Tracks
from marble.workloads import WORKLOADS

CPU = torch.device("cpu")
SHAPE = AttentionShape(2, 1, 16)
RANKS = 4


def case(name: str, tokens: int = 2048, window: int | None = None) -> Case:
    scale = WORKLOADS[name].demo_scale if name in WORKLOADS else 1.0
    return Case(name, replace(SHAPE, window=window), tokens, scale)


CASES = [case(name) for name in (*WORKLOADS, DENSE_CAUSAL)] + [case("gemma_docs", window=200)]
GLOBAL = [each for each in CASES if each.shape.window is None]
each_case = pytest.mark.parametrize("each", CASES, ids=lambda each: each.title)
each_global_case = pytest.mark.parametrize("each", GLOBAL, ids=lambda each: each.title)


def legal(call: MaskedCall) -> torch.Tensor:
    return call.legal(torch.arange(len(call.rows)), torch.arange(len(call.cols)))


def computed(call: MaskedCall) -> torch.Tensor:
    """How often each pair of the call is computed, over key rows as its key blocks hold them."""
    count = torch.zeros(len(call.rows), len(call.cols), dtype=torch.int32)
    tiles = call.tiles
    by_block = covered(tiles.by_query, len(call.rows), len(tiles.key_row) * BLOCK, BLOCK)
    for block, (row, length) in enumerate(zip(tiles.key_row.tolist(), tiles.key_len.tolist(), strict=True)):
        count[:, row : row + length] += by_block[:, block * BLOCK : block * BLOCK + length]
    return count


# What is counted


@each_case
def test_a_whole_call_counts_tiles_and_legal_pairs(each):
    call = each.whole()
    pairs = legal(call)
    assert torch.equal(computed(call), pairs.int())
    assert call.legal_pairs == int(pairs.sum())
    tiles = sum(
        bool(pairs[i : i + BLOCK, j : j + BLOCK].any())
        for i in range(0, len(call.rows), BLOCK)
        for j in range(0, len(call.cols), BLOCK)
    )
    assert call.visited_pairs == tiles * BLOCK**2
    assert call.flops(1, backward=False) == 4 * 2 * 16
    assert call.flops(10, backward=True) == 10 * 10 * 2 * 16


def test_a_ragged_call_counts_pairs():
    call = case("bagel_mix", 1000).whole()
    assert torch.equal(computed(call), legal(call).int())
    assert call.legal_pairs == int(legal(call).sum())


def test_state_bytes_of_three_calls_by_hand():
    calls, _ = case(DENSE_CAUSAL, 3 * BLOCK).ring(ranks=3, rank=2)
    # Dealt 0, 1, 2 or in another order, rank 2 holds one block and sees as many shards as have tiles.
    busy = sum(call.tiles.visited > 0 for call in calls)
    assert state_bytes(calls) == 2 * (busy - 1) * BLOCK * 2 * (16 + 2) * 4


@each_global_case
def test_state_bytes_count_every_carried_row(each):
    calls, _ = each.ring(RANKS)
    total = 0
    for call in calls:
        for count, touch in zip(call.tiles.by_query.counts().tolist(), call.tiles.touch.tolist(), strict=True):
            total += (count > 0) * BLOCK * ((not touch & Touch.FIRST) + (not touch & Touch.LAST))
    assert state_bytes(calls) == total * 2 * (16 + 2) * 4


def test_cases_take_the_models_heads_and_its_scale_at_its_own_head_dim():
    found = cases(["gemma_docs", DENSE_CAUSAL], (128, 64), 4096)
    shapes = [each.shape for each in found]
    assert [(s.heads, s.kv_heads, s.head_dim, s.window, s.scale) for s in shapes] == [
        (32, 16, 128, None, 168**-0.5),
        (32, 16, 64, None, None),
        (32, 16, 128, 1024, 168**-0.5),
        (32, 16, 64, 1024, None),
        (32, 8, 128, None, None),
        (32, 8, 64, None, None),
    ]


# The calls of rings and all-to-alls


@each_global_case
def test_ring_calls_and_the_joined_call_compute_the_same_pairs_once(each):
    calls, joined = each.ring(RANKS, rank=1)
    assert torch.equal(torch.cat([computed(call) for call in calls], 1), legal(joined).int())
    assert torch.equal(computed(joined), legal(joined).int())
    assert set(joined.tiles.touch.tolist()) == {ONCE}
    assert sum(call.tiles.visited for call in calls) == joined.tiles.visited
    for block in range(len(joined.tiles.touch)):
        touches = [call.tiles.touch[block].item() for call in calls if call.tiles.by_query.counts()[block]]
        assert [bool(touch & Touch.FIRST) for touch in touches] == [True] + [False] * (len(touches) - 1)
        assert [bool(touch & Touch.LAST) for touch in touches] == [False] * (len(touches) - 1) + [True]


@each_case
@pytest.mark.parametrize("tokens", [2048, 2000])
def test_all_to_all_calls_compute_every_pair_once(each, tokens):
    each = replace(each, tokens=tokens)
    seen = 0
    for rank in range(RANKS):
        calls = each.all_to_all(RANKS, rank)
        for call in calls:
            assert torch.equal(computed(call), legal(call).int())
            assert len(call.tiles.key_len) == -(-len(call.cols) // BLOCK)
        seen += sum(call.legal_pairs for call in calls)
    assert seen == each.whole().legal_pairs


# Tiles that are all alike


@pytest.mark.parametrize("kind", KINDS)
def test_uniform_tiles_cover_alike_in_both_orientations(kind):
    tiles = uniform(kind, 3, 5, slots=4)
    rows, cols = 3 * BLOCK, 5 * BLOCK
    count = covered(tiles.by_query, rows, cols, BLOCK)
    assert torch.equal(count, covered(tiles.by_key, cols, rows, BLOCK).T)
    assert count.max() == 1
    assert tiles.visited == 15
    assert (tiles.by_query.full, tiles.by_query.partial) == ((15, 0) if kind == "full" else (0, 15))
    assert bool((count.sum(1) > 0).all())
    if kind != "full":
        blocks = count.view(3, BLOCK, 5, BLOCK).transpose(1, 2).flatten(0, 1)
        assert len(torch.unique(blocks.flatten(1), dim=0)) == 4
        assert 0.4 < count.float().mean() < 0.9


def test_bit_tiles_are_a_thousand_distinct_ones():
    tiles = uniform("bit", 40, 40)
    assert len(torch.unique(tiles.by_query.bits.flatten(1), dim=0)) == 1000
    assert len(torch.unique(tiles.by_query.parts[:, 1])) == 1000


def test_an_unknown_kind_of_tile_is_refused():
    with pytest.raises(ValueError, match="none of full, range, bit"):
        uniform("holes", 1, 1)


# FlashAttention-4's lists


def listed(count: torch.Tensor, number: torch.Tensor) -> set[tuple[int, int]]:
    """The (outer, inner) pairs of one list; they ascend in each row."""
    found = set()
    for outer, (length, row) in enumerate(zip(count[0, 0].tolist(), number[0, 0].tolist(), strict=True)):
        chosen = row[:length]
        assert chosen == sorted(set(chosen))
        found |= {(outer, inner) for inner in chosen}
    return found


def expected(call: MaskedCall, key_block: int, *, full: bool) -> set[tuple[int, int]]:
    """Block pairs by the mask, over blocks of the key rows as they lie."""
    pairs, found = legal(call), set()
    for i in range(0, len(call.rows), BLOCK):
        for j in range(0, len(call.cols), key_block):
            tile = pairs[i : i + BLOCK, j : j + key_block]
            whole = tile.shape == (BLOCK, key_block) and bool(tile.all())
            if whole if full else (bool(tile.any()) and not whole):
                found.add((i // BLOCK, j // key_block))
    return found


@each_case
@pytest.mark.parametrize("key_block", [BLOCK, BLOCK // 2])
def test_lists_hold_the_tiles_of_a_call_in_both_directions(each, key_block):
    calls = [each.whole(), replace(each, tokens=1999).whole(), *replace(each, tokens=2000).all_to_all(RANKS, 1)]
    for call in calls:
        partial, full = (expected(call, key_block, full=full) for full in (False, True))
        tables = fa4.lists_of(call.tiles, len(call.cols), by_key=False, key_block=key_block)
        assert [table.dtype for table in tables] == [torch.int32] * 4
        assert tables[0].shape == (1, 1, -(-len(call.rows) // BLOCK))
        assert listed(*tables[:2]) == partial
        assert listed(*tables[2:]) == full
        tables = fa4.lists_of(call.tiles, len(call.cols), by_key=True, key_block=key_block)
        assert tables[0].shape == (1, 1, -(-len(call.cols) // key_block))
        assert {(i, j) for j, i in listed(*tables[:2])} == partial
        assert {(i, j) for j, i in listed(*tables[2:])} == full


def test_lists_refuse_key_blocks_off_the_grid():
    tiles = case("bagel_mix").whole().tiles
    with pytest.raises(ValueError, match="grid of 128"):
        fa4.lists_of(replace(tiles, key_row=tiles.key_row + 1), 4096, by_key=False)


@each_case
def test_the_baselines_masks_are_the_calls_mask(each, monkeypatch):
    monkeypatch.setattr(fa4, "cute_mask_mod", lambda mask, _tracks: mask)
    monkeypatch.setattr(fa4, "range_mask_mod", lambda: None)
    calls = [each.whole(), *replace(each, tokens=2000).all_to_all(RANKS, 1)]
    if each.shape.window is None:
        calls += each.ring(RANKS)[0][1:3]
    for call in calls:
        pairs = legal(call)
        mask, aux = fa4._four(call)
        assert all(column.dtype == torch.int32 and len(column) % BLOCK == 0 for column in aux)
        q = Tracks(*(column[: len(call.rows)] for column in aux[:4]))
        k = Tracks(*(column[: len(call.cols)] for column in aux[4:]))
        assert torch.equal(dense(mask, q, k), pairs)
        if not call.stored.ranges.keys(call.cols.clamp(min=0)).exact.all():
            with pytest.raises(ValueError, match="not every key is seen by one range"):
                fa4._two(call)
            continue
        _, (lo, hi) = fa4._two(call)
        query, keys = torch.arange(len(call.rows)).unsqueeze(1), len(call.cols)
        assert torch.equal((lo[:keys] <= query) & (query < hi[:keys]), pairs)


@each_case
def test_flex_attention_gets_the_same_tiles_and_mask(each):
    call = replace(each, tokens=1999).whole()
    mask = flex.block_mask(call, CPU)
    tiles = expected(call, BLOCK, full=False) | expected(call, BLOCK, full=True)
    assert {tuple(pair) for pair in mask.to_dense()[0, 0].nonzero().tolist()} == tiles
    rows, cols = torch.arange(len(call.rows)).unsqueeze(1), torch.arange(len(call.cols))
    assert torch.equal(mask.mask_mod(0, 0, rows, cols), legal(call))


# Checks and a tiny run


def tiny(**changes) -> Settings:
    settings = Settings(
        backend("reference"), CPU, (), tokens=1024, ring_tokens=2048, dense_tokens=256, repeats=1, sets=1
    )
    return replace(settings, copy_bytes=1 << 16, **changes)


def test_the_check_passes_the_reference_and_fails_a_missing_tile():
    call = case("bagel_mix", 1000).whole()
    inputs = Inputs.random(call, 0, CPU)
    settings = tiny()
    (ours,) = settings.ours([call], [inputs])
    reference = Reference(call, inputs, SHAPE.softmax_scale)
    errors = reference.check(OURS, ours)
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"}
    full = call.tiles.by_query
    fewer = replace(full, part_ptr=torch.cat([full.part_ptr[:1], full.part_ptr[1:].clamp(max=full.partial - 1)]))
    broken = replace(call, tiles=replace(call.tiles, by_query=fewer))
    (ours,) = settings.ours([broken], [inputs])
    with pytest.raises(RuntimeError, match="marble is wrong"):
        reference.check(OURS, ours)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_passes_the_check():
    from torch.nn.attention.flex_attention import flex_attention

    call = case("bagel_mix", 384).whole()
    inputs = Inputs.random(call, 0, CPU)
    (ours,) = tiny().ours([call], [inputs])
    reference = Reference(call, inputs, SHAPE.softmax_scale)
    reference.check(OURS, ours)
    contender = flex.FlexAttention(inputs, SHAPE.softmax_scale, flex.block_mask(call, CPU), flex_attention)
    contender.x = [x.detach() for x in contender.x]  # it has no backward pass on a CPU
    assert set(reference.check("FlexAttention", contender, ours, backward=False)) == {"out", "all rows, out"}


def test_errors_see_nan_and_wrong_infinities():
    x = torch.tensor([1.0, 2.0, -torch.inf])
    assert relative_error(x, x) == 0
    assert relative_error(torch.tensor([1.0, torch.nan, -torch.inf]), x) == float("inf")
    assert relative_error(torch.tensor([1.0, 2.0, 0.0]), x) == float("inf")


@pytest.mark.parametrize("count", range(1, 9))
def test_contenders_stand_everywhere_and_behind_each_other_equally_often(count):
    orders = [balanced_order(count, turn) for turn in range(2 * count)]
    places = Counter((place, each) for order in orders for place, each in enumerate(order))
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert places == {(place, each): 2 for place in range(count) for each in range(count)}
    assert pairs == {(one, other): 2 for one in range(count) for other in range(count) if one != other}


def test_every_experiment_runs_on_the_reference():
    shape = AttentionShape(2, 1, 64)
    settings = tiny(scale=WORKLOADS["bagel_mix"].demo_scale)
    one = Case("bagel_mix", shape, settings.tokens, settings.scale)
    rows = masked.measure(one, masked.PASSES, settings)
    assert {row.bar for row in rows} == {"K5", "K6"}
    ring = replace(one, tokens=settings.ring_tokens)
    rows += online.online(ring, settings)
    rows += online.online(replace(ring, name=DENSE_CAUSAL), settings)
    rows += online.tile_costs(64, masked.PASSES, settings)
    assert online.steps(ring, settings) == []  # nothing to compare with
    judged = [(row.bar, row.baseline) for row in rows for bar in BARS if bar.covers(row)]
    assert judged == [("K10", "one call and 1.25 × state"), ("K10", "one call")] + [("K9", "all full tiles")] * 4
    assert all(row.value > 0 for row in rows)
    assert len(tables(rows)) == 2


def test_both_orders_of_sums_are_compared_and_differing_runs_are_refused(monkeypatch):
    case = Case("bagel_mix", AttentionShape(2, 1, 64), 1000, WORKLOADS["bagel_mix"].demo_scale)
    rows = ordered.measure(case, tiny())
    assert [(row.bar, row.metric) for row in rows if any(bar.covers(row) for bar in BARS)] == [("K13", ordered.METRIC)]
    assert len(rows) == 2
    assert not torch.are_deterministic_algorithms_enabled()
    judged = replace(rows[0], ratio=1.2)
    assert missed([judged, replace(judged, ratio=1.3)]) == [replace(judged, ratio=1.3)]
    enabled, backward = [], ordered.Ours.backward_kernels

    def drifting(system):
        enabled.append(torch.are_deterministic_algorithms_enabled())
        backward(system)
        if len(enabled) > 2:
            system.sums[1][0] += 1e-3

    monkeypatch.setattr(ordered.Ours, "backward_kernels", drifting)
    with pytest.raises(RuntimeError, match="differ from run to run"):
        ordered.measure(case, tiny())
    assert enabled[0]


def test_experiments_are_chosen_by_the_bars_that_need_them():
    def titles(only, dims=(128,)):
        return [title for title, _ in kernels.experiments(only, ["gemma_docs", DENSE_CAUSAL], dims, tiny())]

    window, whole, ring = (
        "gemma_docs, window 1024, 1,024 tokens",
        "gemma_docs, 1,024 tokens",
        "gemma_docs, 2,048 tokens",
    )
    assert titles(["K3"]) == [f"masked: {whole}, d128", f"masked: {window}, d128"]
    assert titles(["K5"]) == []
    assert titles(["K7"], (128, 256)) == [f"masked: {whole}, d256", f"masked: {window}, d256"]
    assert titles(["K9"], (64, 128)) == ["K9: d64", "K9: d128"]
    assert titles(["K13"]) == [f"K13: {each}, d128" for each in (whole, window, "dense_causal, 1,024 tokens")]
    assert titles(["K11"]) == [f"online: {ring}, d128", "online: dense_causal, 2,048 tokens, d128"]
    assert titles(["K14"], (128, 256))[2:] == ["online: dense_causal, 2,048 tokens, d256"]
    assert titles(["steps"]) == [f"steps: {ring}, d128", "steps: gemma_docs, window 1024, 2,048 tokens, d128"]


def test_bars_look_at_the_ratio_of_their_own_rows():
    fast = Row("K1", "some", "fwd time", 1.0, "ms", FOUR, 1.3, 1.3)
    slow = replace(fast, ratio=1.1)
    beside = replace(slow, baseline=DENSE)
    online_rows = [Row("K11", "some", "8 calls", 1.0, "ms", FOUR, 2.0, ratio) for ratio in (0.9, 1.1)]
    assert missed([fast, slow, beside, *online_rows]) == [slow, online_rows[1]]


@pytest.mark.parametrize("words", [["--only", "K12"], ["--dims", "96"], ["--workloads", "x"], ["--baselines", "fa3"]])
def test_unknown_choices_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        kernels.main(words)
    assert f"{words[0]}: choose from" in capsys.readouterr().err


def test_a_failing_case_costs_the_others_nothing(monkeypatch, tmp_path, capsys):
    good, bad = (Row("K1", "some", "fwd time", 1.0, "ms", FOUR, ratio, ratio) for ratio in (1.4, 1.0))

    def results(*cases):
        monkeypatch.setattr(kernels, "experiments", lambda *_: [(title, measure) for title, measure in cases])
        code = kernels.main(["--backend", "reference", "--quick", "--out", str(tmp_path)])
        return code, json.loads((tmp_path / "kernels.json").read_text())["rows"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    assert results(("one", lambda: [good]))[0] == 0
    assert "1.400" in capsys.readouterr().out
    assert results(("one", lambda: [bad]))[0] == 1
    assert "MISSED" in capsys.readouterr().out
    code, rows = results(("broken", lambda: 1 // 0), ("one", lambda: [good]))
    assert (code, len(rows)) == (1, 1)
    said = capsys.readouterr()
    assert "failed: ['broken']" in said.out
    assert "ZeroDivisionError" in said.err


def test_key_rows_follow_one_another():
    calls, joined = case("bagel_mix").ring(RANKS)
    assert key_rows(calls)[-1][1] == len(joined.cols)
    assert key_rows(calls)[0] == (0, len(calls[0].cols))
