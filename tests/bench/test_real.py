"""Real documents: what is found, how it is packed, and the message when a package is missing."""

import sys

import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("mistral_common")

from marble.workloads import real, sizing

MODES = {
    "qwen": {"causal"},
    "molmo": {"causal", "group"},
    "gemma": {"causal", "full"},
    "bagel": {"causal", "full", "noise"},
}


def test_bundled_images_have_their_true_sizes():
    sizes = {image.name: (image.height, image.width) for image in real.find_images()}
    assert sizes["skimage/astronaut.png"] == (512, 512)
    assert sizes["skimage/coffee.png"] == (400, 600)
    assert sizes["matplotlib/grace_hopper.jpg"] == (600, 512)
    assert min(min(size) for size in sizes.values()) >= 150


def test_texts_are_long_and_named_once():
    texts = real.find_texts()
    assert any(text.source.startswith("torch ") for text in texts)
    assert len({text.source for text in texts}) == len(texts)
    assert sum(sum(text.paragraphs) for text in texts) > 50_000


def test_the_tokenizer_adds_no_frame_and_reads_special_names_as_text():
    encode = real._tokenizer()
    assert encode("") == []
    assert 2 <= len(encode("Hello world")) <= 3
    assert len(encode("<s>")) > 1


@pytest.mark.parametrize("model", real.RULES)
def test_pack_is_exact_reproducible_and_documented(model):
    pack = real.real_documents(model, 50_001, seed=5)
    assert pack.layout.tokens == 50_001
    assert pack == real.real_documents(model, 50_001, seed=5)
    assert pack != real.real_documents(model, 50_001, seed=6)
    assert {span.mode.value for sample in pack.layout.samples for span in sample} == MODES[model]
    assert len(pack.texts) == len(pack.layout.samples)
    assert sum(text.tokens for text in pack.texts) + sum(image.tokens for image in pack.images) >= 49_000


@pytest.mark.parametrize("model", real.RULES)
def test_small_demo_keeps_every_mode(model):
    pack = real.real_documents(model, 4096, scale=1 / 16)
    assert pack.layout.tokens == 4096
    assert len(pack.layout.samples) >= 3
    assert {span.mode.value for sample in pack.layout.samples for span in sample} == MODES[model]


def test_provenance_gives_the_tokens_of_the_rule():
    pack = real.real_documents("qwen", 20_000)
    assert all(image.tokens == sizing.qwen_image(image.height, image.width) + 2 for image in pack.images)
    documents = sum(text.tokens for text in pack.texts) + sum(image.tokens for image in pack.images)
    kept = sum(span.length for sample in pack.layout.samples[:-1] for span in sample)
    assert kept <= 20_000 <= documents


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match="model: 'nope'"):
        real.real_documents("nope", 10)


@pytest.mark.parametrize(("module", "requirement"), [("PIL.Image", "pillow"), ("skimage", "scikit-image")])
def test_a_missing_package_says_what_to_install(monkeypatch, module, requirement):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {requirement}"):
        real.find_images.__wrapped__()


def test_a_missing_tokenizer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(ImportError, match="pip install mistral-common"):
        real._tokenizer()
