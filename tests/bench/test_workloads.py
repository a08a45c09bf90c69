"""Sizes against published figures, document statistics against published means, packs against their promises."""

import time
from collections import Counter

import numpy as np
import pytest
from numpy.random import PCG64, Generator

from marble.layout import Mode
from marble.workloads import MODELS, WORKLOADS, LayerKind, build, documents, packs, sizing
from marble.workloads.spans import merge, pack, shrink

MODES = {
    "qwen_docs": {"causal"},
    "qwen_video": {"causal"},
    "molmo_docs": {"causal", "group"},
    "molmo_video": {"causal", "group"},
    "gemma_docs": {"causal", "full"},
    "bagel_mix": {"causal", "full", "noise"},
    "bagel_long": {"causal", "full", "noise"},
}


def total(parts):
    return sum(length for _, length in parts)


def draws(function, count=20_000, seed=7):
    rng = Generator(PCG64(seed))
    return [function(rng) for _ in range(count)]


@pytest.mark.parametrize(
    ("size", "tokens"), [((480, 640), 300), ((768, 1024), 768), ((1080, 1920), 2040), ((150, 200), 70)]
)
def test_qwen_image_tokens_without_start_and_end(size, tokens):
    assert sizing.qwen_image(*size) == tokens


def test_qwen_image_is_shrunk_to_the_largest_size():
    assert sizing.qwen_image(8000, 8000) == 16_777_216 // 1024


@pytest.mark.parametrize(("seconds", "video"), [(60, (60, 190)), (180, (180, 66))])
def test_qwen_video_groups_and_tokens_per_group_at_720p(seconds, video):
    assert sizing.qwen_video(seconds, 720, 1280) == video


def test_qwen_video_limits_its_frames_and_counts_timestamps():
    assert sizing.qwen_video(0.5, 360, 640)[0] == 2
    assert sizing.qwen_video(3600, 360, 640)[0] == 384
    assert sizing.qwen_video_tokens(60, 720, 1280) == 60 * (190 + 2) + 10 * 6 + 50 * 7
    assert sizing.qwen_video_tokens(180, 720, 1280) == 180 * (66 + 2) + 10 * 6 + 90 * 7 + 80 * 8


@pytest.mark.parametrize(
    ("size", "tokens"), [((378, 378), 410), ((480, 640), 752), ((768, 1024), 982), ((1080, 1920), 1189)]
)
def test_molmo_image_tokens(size, tokens):
    assert sizing.molmo_image(*size) == tokens


def test_molmo_tiling_uses_more_crops_at_inference():
    assert sizing.molmo_tiling(768, 1024) == (2, 3)
    assert np.prod(sizing.molmo_tiling(1080, 1920, crops=24)) > 8
    assert sizing.molmo_tiling(100, 100) == (1, 1)


@pytest.mark.parametrize(("seconds", "tokens"), [(10, 1849), (30, 5409), (180, 32_270)])
def test_molmo_video_prefix_with_bos(seconds, tokens):
    assert total(sizing.molmo_video(seconds)) == tokens


def test_molmo_video_limits_its_frames():
    for limit in (128, 384):
        groups = [length for mode, length in sizing.molmo_video(600, frames=limit) if mode is Mode.GROUP]
        assert groups == [83] * limit


def test_molmo_document_puts_at_most_five_labelled_images_before_the_text():
    one = merge(sizing.molmo_document([10, 20], [(378, 378)]))
    assert one == [(Mode.CAUSAL, 1), (Mode.GROUP, 410), (Mode.CAUSAL, 30)]
    many = merge(sizing.molmo_document([10] * 8, [(378, 378)] * 7))
    assert many == [
        (Mode.CAUSAL, 4),
        *[(Mode.GROUP, 410), (Mode.CAUSAL, 3)] * 4,
        (Mode.GROUP, 410),
        (Mode.CAUSAL, 80),
    ]


def test_gemma_image_is_256_soft_tokens_in_a_frame_of_four():
    assert total(sizing.GEMMA_IMAGE) == 260
    assert merge(sizing.gemma_document([7, 0, 5], [(1, 1), (1, 1)])) == [
        (Mode.CAUSAL, 9),
        (Mode.FULL, 256),
        (Mode.CAUSAL, 4),
        (Mode.FULL, 256),
        (Mode.CAUSAL, 7),
    ]


def test_bagel_sizes_count_start_and_end():
    assert sizing.bagel_vae(1024, 1024) == 4096 + 2
    assert sizing.bagel_vae(288, 512) == 576 + 2
    assert sizing.bagel_vae(576, 1024) == 2304 + 2
    assert sizing.bagel_vit(980, 980) == 4900 + 2
    assert sizing.bagel_text(30) == (Mode.CAUSAL, 32)
    assert sizing.bagel_clean(720, 1280) == (Mode.FULL, 2306)
    assert sizing.bagel_noised(720, 1280) == (Mode.NOISE, 2306)


def test_bagel_orders():
    size, text = (1024, 1024), Mode.CAUSAL
    t2i = [mode for mode, _ in sizing.bagel_generation([5], [size])]
    edit = [mode for mode, _ in sizing.bagel_generation([5], [size], size)]
    chain = [mode for mode, _ in sizing.bagel_generation([5, 5], [size] * 2)]
    read = [mode for mode, _ in sizing.bagel_understanding([5, 5], [size])]
    assert t2i == [text, Mode.NOISE]
    assert edit == [Mode.FULL, Mode.FULL, text, Mode.NOISE]
    assert chain == [text, Mode.NOISE, Mode.FULL, Mode.FULL, text, Mode.NOISE]
    assert read == [text, Mode.FULL, text]


def test_obelics_documents_have_the_published_means_and_medians():
    drawn = draws(documents.document)
    images = [len(sizes) for _, sizes in drawn]
    tokens = [sum(texts) for texts, _ in drawn]
    assert np.mean(images) == pytest.approx(2.50, rel=0.03)
    assert np.median(images) == 1
    assert (min(images), max(images)) == (1, 30)
    assert np.mean(tokens) == pytest.approx(816, rel=0.02)
    assert np.median(tokens) == pytest.approx(677, rel=0.03)
    assert 15 <= min(tokens) <= max(tokens) <= 2700
    assert all(len(texts) == len(sizes) + 1 and min(texts) >= 0 for texts, sizes in drawn)


def test_image_sides_and_aspects():
    sizes = np.array(draws(documents.image_size))
    aspects = sizes[:, 1] / sizes[:, 0]
    assert sizes.min() >= 150
    assert sizes.max() <= 20_000
    assert np.all((aspects > 0.5) & (aspects < 2))
    assert np.mean(aspects == 1) == pytest.approx(0.2, abs=0.02)


def test_videos_and_captions():
    seconds, tracks, captions = (
        draws(function) for function in (documents.video_seconds, documents.track_seconds, documents.caption_tokens)
    )
    assert 10 <= min(seconds) <= max(seconds) <= 180
    assert np.median(seconds) == pytest.approx(65, rel=0.05)
    assert 3 <= min(tracks) <= max(tracks) <= 120
    assert np.mean(captions) == pytest.approx(1155, rel=0.02)
    assert max(captions) <= 4500


@pytest.mark.parametrize(
    ("kind", "mean"),
    [
        ("text", 1_000),
        ("t2i", 1_600),
        ("i2t", 1_000),
        ("understanding", 5_000),
        ("video", 15_600),
        ("web", 20_000),
    ],
)
def test_bagel_samples_have_about_the_published_mean(kind, mean):
    sample = packs.BAGEL_MIX[kind][1]
    assert np.mean([total(parts) for parts in draws(sample, 4000)]) == pytest.approx(mean, rel=0.08)


def test_bagel_mix_ratios_sum_to_one_and_respect_the_context():
    assert sum(ratio for ratio, _ in packs.BAGEL_MIX.values()) == pytest.approx(1)
    layout = build("bagel_mix", 1 << 20)
    assert max(sum(span.length for span in sample) for sample in layout.samples) <= 40_000


def test_bagel_long_samples_are_chains_of_caption_noise_and_clean():
    samples = build("bagel_long", 1 << 21).samples[:-1]
    assert samples
    for sample in samples:
        assert 125_000 <= sum(span.length for span in sample) <= 1_060_000
        assert [span.mode for span in sample[:3]] * (len(sample) // 3) == [span.mode for span in sample]
        assert {span.length for span in sample if span.mode is Mode.NOISE} <= {578, 2306}
        assert all(12 <= span.length <= 32 for span in sample[::3])


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("tokens", [1, 257, 4097, 100_003])
def test_length_is_exact_and_the_seed_decides(name, tokens):
    layout = build(name, tokens, seed=3)
    assert layout.tokens == tokens
    assert layout == build(name, tokens, seed=3)
    assert build(name, tokens, seed=3, scale=0.1).tokens == tokens
    if tokens > 100_000:
        assert layout != build(name, tokens, seed=4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_full_scale_has_every_mode(name):
    layout = build(name, 1 << 20)
    assert {span.mode.value for sample in layout.samples for span in sample} == MODES[name]
    assert all(span.group is None for sample in layout.samples for span in sample)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("seed", range(5))
def test_demo_has_several_samples_and_every_mode_twice(name, seed):
    layout = build(name, 4096, seed, WORKLOADS[name].demo_scale)
    counts = Counter(span.mode.value for sample in layout.samples for span in sample if span.length > 1)
    assert len(layout.samples) >= 3
    assert set(counts) == MODES[name]
    assert min(counts.values()) >= 2
    assert all(span.length > 1 for sample in layout.samples for span in sample if span.mode is not Mode.CAUSAL)
    if name == "bagel_long":
        assert all(sum(span.mode is Mode.NOISE for span in sample) >= 2 for sample in layout.samples[:-1])


@pytest.mark.parametrize("name", ["molmo_docs", "molmo_video"])
def test_molmo_samples_end_with_their_only_text(name):
    for sample in build(name, 1 << 18).samples[:-1]:
        longest_label = 8
        assert sample[-1].mode is Mode.CAUSAL
        assert all(span.length <= longest_label for span in sample[:-1] if span.mode is Mode.CAUSAL)


def test_layers_match_the_published_models():
    assert {name: sum(layer.count for layer in layers) for name, layers in MODELS.items()} == {
        "Qwen3-VL-30B-A3B": 48,
        "Qwen3.8-27B": 16,
        "Molmo2-8B": 36,
        "Gemma 3 27B": 62,
        "BAGEL-7B": 28,
    }
    assert WORKLOADS["gemma_docs"].layers == (
        LayerKind(10, 32, 16, 128, None, 168**-0.5),
        LayerKind(52, 32, 16, 128, 1024, 168**-0.5),
    )


def test_merge_and_shrink():
    parts = [(Mode.CAUSAL, 3), (Mode.CAUSAL, 0), (Mode.CAUSAL, 4), (Mode.FULL, 5), (Mode.FULL, 6)]
    assert merge(parts) == [(Mode.CAUSAL, 7), (Mode.FULL, 5), (Mode.FULL, 6)]
    assert shrink([(Mode.CAUSAL, 3), (Mode.FULL, 3), (Mode.NOISE, 400)], 0.01) == [
        (Mode.CAUSAL, 1),
        (Mode.FULL, 2),
        (Mode.NOISE, 4),
    ]


def test_a_cut_span_becomes_a_causal_tail():
    sample = [(Mode.CAUSAL, 2), (Mode.NOISE, 5), (Mode.FULL, 5)]
    spans = pack([sample], 9).samples[0]
    assert [(span.mode, span.length) for span in spans] == [(Mode.CAUSAL, 2), (Mode.NOISE, 5), (Mode.CAUSAL, 2)]
    assert [(span.mode, span.length) for span in pack([sample], 4).samples[0]] == [(Mode.CAUSAL, 4)]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="name: 'nope'"):
        build("nope", 10)
    with pytest.raises(ValueError, match="tokens:"):
        build("qwen_docs", 0)
    for scale in (0, 1.5):
        with pytest.raises(ValueError, match="scale:"):
            build("molmo_video", 10, scale=scale)
    with pytest.raises(ValueError, match="samples: ended 3 tokens"):
        pack([[(Mode.CAUSAL, 2)]], 5)


def test_millions_of_tokens_are_quick():
    began = time.perf_counter()
    assert build("molmo_video", 8 << 20).tokens == 8 << 20
    assert time.perf_counter() - began < 10
