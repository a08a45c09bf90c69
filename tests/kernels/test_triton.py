"""Small Triton kernels against their oracles: natively on a GPU, by Triton's interpreter elsewhere."""

import pickle
from dataclasses import replace
from random import Random

import pytest
import torch

pytest.importorskip("triton")

from marble import Layout, Span
from marble.compose.packing import Packed
from marble.kernels import oracles
from marble.kernels.triton import bitmaps, classify, merge, pack, scans, sights, spans, summaries, tuned, words
from marble.mask.domains import BlockSummaries, dense, summarise
from marble.mask.pairing import Pairing
from marble.mask.pairing import merge as merged
from marble.mask.predicates import pack_bits, predicates
from marble.mask.ranges import VisibleRanges
from marble.mask.shards import Blocks, Shard
from marble.mask.storage import Storage
from marble.mask.tracks import Tracks
from marble.testing.layouts import planned_storage, random_layout, random_storage, random_window, stored_mask

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("heads", "rows", "width"), [(1, 1, 1), (2, 33, 64), (3, 70, 96), (2, 0, 8)])
def test_merged_partials(heads: int, rows: int, width: int) -> None:
    """Against the oracle in float64; rows that one side, the other, or neither saw keys for."""
    generator = torch.Generator().manual_seed(rows)
    out, more = (torch.randn(heads, rows, width, generator=generator) for _ in range(2))
    lse, more_lse = (torch.randn(heads, rows, generator=generator) * 30 for _ in range(2))
    lse[:, ::3], more_lse[:, ::2] = -torch.inf, -torch.inf
    out[:, ::3], more[:, ::2] = 0, 0
    expected = oracles.merge_partials(*(x.double() for x in (out, lse, more, more_lse)))
    found = out.clone().to(DEVICE), lse.clone().to(DEVICE)
    merge.merge_partials(*found, more.to(DEVICE), more_lse.to(DEVICE))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=2e-6, atol=2e-6)
    assert (found[0][:, ::6] == 0).all()
    assert (found[1][:, ::6] == -torch.inf).all()


def test_the_oracle_of_merging_is_one_softmax_over_both() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(*shape, generator=generator).double() for shape in ((2, 5, 9), (2, 9, 4)))
    parts = []
    for keys in (slice(0, 4), slice(4, 9)):
        parts += [scores[..., keys].softmax(-1) @ values[:, keys], scores[..., keys].logsumexp(-1)]
    out, lse = oracles.merge_partials(*parts)
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_added_sums(dtype: torch.dtype) -> None:
    target, more = torch.randn(3, 500), torch.randn(3, 500).to(dtype)
    found = target.clone().to(DEVICE)
    merge.add_sums(found, more.to(DEVICE))
    assert torch.equal(found.cpu(), target + more.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 5, 32])
def test_packed_blocks(block: int, dtype: torch.dtype) -> None:
    """Blocks of any length up to ``block`` anywhere, gathered, and added back where they came from."""
    rng = Random(block)
    order = rng.sample(range(6), 4)
    first = torch.tensor([block * at for at in order], dtype=torch.int32)
    length = torch.tensor([rng.randint(1, block) for _ in order], dtype=torch.int32)
    source = torch.randn(6 * block, 2, 150).to(dtype)
    packed = pack.gather_blocks(source.to(DEVICE), first.to(DEVICE), length.to(DEVICE), block)
    assert torch.equal(packed.cpu(), oracles.gather_blocks(source, first, length, block))
    target = torch.randn(6 * block, 2, 150)
    more = torch.randn(len(packed), 2, 150).to(dtype)
    found = target.clone().to(DEVICE)
    pack.add_blocks(found, first.to(DEVICE), length.to(DEVICE), more.to(DEVICE))
    assert torch.equal(found.cpu(), oracles.add_blocks(target, first, length, more))
    assert not torch.equal(found.cpu(), target)


@pytest.mark.parametrize("block", [1, 3, 16, 33])
def test_summaries_of_blocks(block: int) -> None:
    for seed in range(2):
        tracks = Tracks.of(random_layout(Random(seed), samples=4))
        expected = BlockSummaries.of(tracks, block).columns
        found = summaries.summaries(torch.stack(list(tracks.columns.values())).to(DEVICE), block)
        for number, name in enumerate(tracks.columns):
            for mine, theirs in zip(found, vars(expected[name]).values(), strict=True):
                assert torch.equal(mine[number].cpu().long(), theirs)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block", [2, 5, 16])
def test_classified_block_pairs(block: int, window: int | None) -> None:
    found = set()
    for seed in range(4):
        layout = random_layout(Random(seed), samples=4, length=12)
        mask = stored_mask(planned_storage(layout, window), window)
        expected = BlockSummaries.of(mask.tracks, block)
        full, maybe = summarise(mask.mask, expected, expected)
        columns = torch.stack(list(mask.tracks.columns.values())[:4]).to(DEVICE)
        parts = summaries.summaries(columns, block)
        state = classify.classify(parts, parts, window).cpu()
        assert torch.equal(state == classify.FULL, full)
        assert torch.equal(state != classify.EMPTY, maybe)
        found |= set(state.unique().tolist())
    assert found >= {classify.EMPTY, classify.OPEN}
    assert classify.FULL in found or block == 16


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("block", [1, 5, 33, 64])
def test_bit_tiles_of_the_packed_mask(block: int, window: int | None) -> None:
    """Any tokens as queries and keys, some of them missing, against the mask pair by pair."""
    some = False
    for seed in range(3):
        layout = random_layout(Random(seed), samples=4, length=20)
        mask = stored_mask(planned_storage(layout, window), window)
        generator = torch.Generator().manual_seed(seed)
        q_at, k_at = (torch.randint(-1, layout.tokens, (3, block), generator=generator) for _ in range(2))
        legal = dense(mask.mask, mask.tracks.take(q_at.clamp(min=0)), mask.tracks.take(k_at.clamp(min=0)))
        legal &= (q_at >= 0).unsqueeze(2) & (k_at >= 0).unsqueeze(1)
        columns = torch.stack(list(mask.tracks.columns.values())[:4]).to(DEVICE)
        by_query, by_key = bitmaps.packed_bits(columns, q_at.to(DEVICE), k_at.to(DEVICE), window)
        assert torch.equal(by_query.cpu(), pack_bits(legal))
        assert torch.equal(by_key.cpu(), pack_bits(legal.transpose(1, 2)))
        some |= bool(legal.any())
    assert some or block == 1


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("block", [1, 5, 33])
def test_range_words_of_tiles(block: int, window: int | None) -> None:
    """Every tile of two shards with gaps in both orientations, against the ranges that the planner writes on a CPU."""
    several = False
    for seed in range(5):
        rng = Random(seed)
        layout = random_layout(rng, samples=4, length=20)
        mask = stored_mask(planned_storage(layout, window), window)
        mine, other = (sorted(rng.sample(range(layout.tokens), -(-layout.tokens // 2))) for _ in range(2))
        queries, keys = (
            mask._side([Shard.of(torch.tensor(tokens))], block, keys=side)
            for tokens, side in ((mine, False), (other, True))
        )
        pairing = Pairing(mask.mask, lambda tracks=mask.tracks: tracks, queries, keys)
        _, parts = pairing.classify()
        for outer, inner, tiles in (
            (keys, queries, parts),
            (queries, keys, parts.flip(0)),
        ):
            if not outer.complete or not parts.shape[1]:
                continue
            assert outer.ranges is not None
            found, label = words.range_words(
                *(_moved(side.blocks) for side in (outer, inner)),
                outer.ranges.table.to(DEVICE),
                tiles.to(DEVICE),
            )
            slots, ranges, _ = predicates(outer, inner, tiles, pairing.legal)
            assert torch.equal(found.cpu(), ranges[slots])
            assert len(label.unique()) == len(ranges)
            several |= len(ranges) > 1
    assert several or block == 1


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("block", [4, 16])
def test_query_blocks_that_see_keys(block: int, window: int | None) -> None:
    """Of two shards with gaps or without, and of one without tokens, against what the planner computes on a CPU."""
    several = set()
    for seed in range(8):
        rng = Random(seed)
        layout = random_layout(rng, samples=4, length=20)
        mask = stored_mask(planned_storage(layout, window) if seed % 2 else random_storage(rng, layout), window)
        some = [0, layout.tokens, layout.tokens // 2][seed % 3]
        mine, other = (
            Shard.of(torch.tensor(sorted(rng.sample(range(layout.tokens), count)), dtype=torch.int64))
            for count in (some, some or 9)
        )
        queries, keys = mask._side([mine], block, keys=False), mask._side([other], block, keys=True)
        pairing = Pairing(mask.mask, lambda tracks=mask.tracks: tracks, queries, keys)
        assert keys.ranges is not None
        touched, inside = sights.sights(
            _moved(keys.blocks),
            *(each.to(DEVICE) for each in (keys.ranges.table, keys.ranges.exact)),
            Shard(*(each.to(DEVICE) for each in (mine.start, mine.stop, mine.row)), mine.rows),
        )
        assert torch.equal(inside.cpu(), torch.stack(pairing.inside()))
        found = torch.stack(merged(keys.blocks.of, *touched.cpu()))
        assert torch.equal(found[:, found[1] < found[2]], torch.stack(pairing.touched()))
        several |= {keys.complete, found.shape[1] > 1, bool((inside[0] < inside[1]).any())}
    assert several == {False, True}


@pytest.mark.parametrize("chunk", [8, 32])
def test_visible_ranges_of_spans(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any storage order, with and without a window, against what the planner computes on a CPU."""
    monkeypatch.setitem(tuned._choices, "hulls", {"CHUNK": chunk, "num_warps": 4})  # the interpreter scans slowly
    monkeypatch.setitem(tuned._choices, "visible", {"SPANS": chunk, "num_warps": 4})
    seen = set()
    for seed in range(12):
        rng = Random(seed)
        layout, window = random_layout(rng, spans=10, length=6), random_window(rng)
        seen |= check_spans(random_storage(rng, layout) if seed % 2 else planned_storage(layout, window), window)
    assert seen == {(windowed, exact) for windowed in (False, True) for exact in (False, True)}


@pytest.mark.parametrize("window", [None, 3, 1 << 31])
def test_visible_ranges_of_long_spans(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions beyond 32 bits, and a single span."""
    monkeypatch.setitem(tuned._choices, "hulls", {"CHUNK": 4, "num_warps": 4})
    modes = ("full", "noise", "causal", "group", "noise", "causal", "full")
    layout = Layout([[Span(mode, (1 << 30) + at) for at, mode in enumerate(modes)], [Span("pad", 3)]])
    assert layout.tokens > 1 << 32
    check_spans(planned_storage(layout, window), window)
    check_spans(planned_storage(Layout([[Span("causal", 1)]]), window), window)


def check_spans(storage: Storage, window: int | None) -> set[tuple[bool, bool]]:
    """The ranges by kernel are those of the CPU. Returns whether there is a window, and which flags spans have."""
    layout = storage.table
    neighbours = spans.Neighbours.of(
        *(each.to(DEVICE) for each in (layout.columns, storage.offset, storage.apart)),
        torch.argsort(layout.seg, stable=True).to(DEVICE),
    )
    ranges = VisibleRanges(storage, window)
    for expected, keys in ((ranges.key_spans, True), (ranges.query_spans, False)):
        table, exact = neighbours.visible(window, keys=keys)
        assert torch.equal(exact.cpu(), expected.exact)
        assert torch.equal(table.cpu(), expected.table)
    return {(window is not None, flag) for flag in exact.tolist()}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu compares whole plans")
def test_plans_by_kernel_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the kernels interpreted."""
    monkeypatch.setitem(tuned._choices, "hulls", {"CHUNK": 16, "num_warps": 4})
    monkeypatch.setitem(tuned._choices, "visible", {"SPANS": 16, "num_warps": 4})
    for seed in range(8):
        layout = random_layout(Random(seed), samples=4, length=20)
        tokens = torch.arange(layout.tokens)
        rows, cols = tokens[tokens // 8 % 2 == 0], [tokens[tokens // 8 % 2 == turn] for turn in (0, 1)]
        found = []
        for by_kernel in (False, True):
            for module in ("pairing", "predicates", "ranges"):
                monkeypatch.setattr(f"marble.mask.{module}.by_kernel", lambda _, chosen=by_kernel: chosen)
            mask = stored_mask(planned_storage(layout, None), None)
            found.append(mask.tiles_of(Shard.of(rows), [Shard.of(each) for each in cols], 8))
        assert pickle.dumps(Packed.of(found[0])) == pickle.dumps(Packed.of(found[1]))


@pytest.mark.parametrize("shape", [(1,), (65,), (3, 40), (2, 2, 150), (0,)])
def test_running_maxima(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tuned._choices, "running_max", {"CHUNK": 64, "num_warps": 4})  # the interpreter scans slowly
    values = torch.randint(-(1 << 61), 1 << 61, shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scans.running_max(values.to(DEVICE)).cpu(), values.cummax(-1).values)
    turned = values.movedim(0, -1)
    assert torch.equal(scans.running_max(turned.to(DEVICE)).cpu(), turned.cummax(-1).values)


def _moved(blocks: Blocks) -> Blocks:
    """Blocks on the device of the kernels."""
    columns = {name: column.to(DEVICE) for name, column in vars(blocks).items() if isinstance(column, torch.Tensor)}
    return replace(
        blocks, **{name: columns[name] for name in ("length", "span", "within", "start", "row", "rows", "of")}
    )


def test_wrong_inputs_are_refused() -> None:
    half, whole = torch.zeros(1, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 2, 4)
    lse, first = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="float32"):
        merge.merge_partials(half, lse, half, lse)
    with pytest.raises(ValueError, match="shapes differ"):
        merge.merge_partials(whole, lse, whole, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="cannot add"):
        merge.add_sums(whole, torch.zeros(1, 2, 5))
    with pytest.raises(ValueError, match="float32"):
        pack.add_blocks(half, first, first, half)
    with pytest.raises(ValueError, match="contiguous"):
        pack.gather_blocks(torch.zeros(4, 6).T, first, first, 2)
    with pytest.raises(ValueError, match="int32"):
        summaries.summaries(torch.zeros(2, 5), 2)
    with pytest.raises(ValueError, match="4 tracks"):
        classify.classify((lse, lse, lse), (lse, lse, lse))
    with pytest.raises(ValueError, match="int32 tracks"):
        bitmaps.packed_bits(torch.zeros(4, 5), first.long(), first.long())
    blocks = Blocks.cut([Shard.of(torch.arange(3))], Storage.natural(Layout.from_cu_seqlens([0, 3])), 2)
    with pytest.raises(ValueError, match="int64 bounds"):
        words.range_words(blocks, blocks, torch.zeros(3, 3, 1).long(), torch.zeros(2, 4).long())
    with pytest.raises(ValueError, match="int64 table"):
        sights.sights(blocks, torch.zeros(4, 3, 1).long(), first.bool(), blocks.shards[0])
    with pytest.raises(ValueError, match="int64 tiles"):
        words.range_words(blocks, blocks, torch.zeros(2, 3, 1).long(), torch.zeros(4, 2).long().T)
    with pytest.raises(ValueError, match="int64 columns"):
        spans.Neighbours.of(torch.zeros(6, 2), first.long(), first.bool(), first.long())
    with pytest.raises(ValueError, match="int64 values"):
        scans.running_max(first)
    with pytest.raises(ValueError, match="one shape"):
        bitmaps.packed_bits(torch.zeros(4, 5).int(), torch.zeros(1, 2).long(), torch.zeros(1, 3).long())
