"""Real documents without a network: images and texts that installed packages ship, sized by a model's rule.

The images are scikit-image's bundled data and matplotlib's sample data; Pillow reads their sizes. The texts are the
long descriptions and licences of the installed packages, counted by the tekken tokenizer that mistral-common bundles.
What is found depends on the installed packages, so a layout is reproducible only in the same environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar

from numpy.random import PCG64, Generator

from marble.layout import Layout
from marble.workloads import documents, sizing
from marble.workloads.spans import Part, pack

Item = TypeVar("Item")

_IMAGE_FOLDERS = (
    ("skimage", "data", "scikit-image"),
    ("matplotlib", "mpl-data/sample_data", "matplotlib"),
)
_IMAGE_SUFFIXES = (".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff")
_SHORTEST_SIDE = 150
_LICENCE_NAMES = ("COPYING", "LICENCE", "LICENSE", "NOTICE")
_LICENCE_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class RealImage:
    """An image file and its size in pixels."""

    name: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class RealText:
    """A text and the tokens of each of its paragraphs."""

    source: str
    paragraphs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UsedImage:
    """An image in a pack; ``tokens`` counts all its spans before scaling and before the last sample is cut."""

    name: str
    height: int
    width: int
    tokens: int


@dataclass(frozen=True, slots=True)
class UsedText:
    """A run of paragraphs in a pack; ``tokens`` counts them before scaling and before the last sample is cut."""

    source: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RealPack:
    """A layout of real documents, and what is in it, in order."""

    layout: Layout
    images: tuple[UsedImage, ...]
    texts: tuple[UsedText, ...]


Sized = tuple[list[Part], list[int]]
"""The parts of a document, and the tokens that each of its images takes."""


def _qwen(_rng: Generator, texts: list[int], images: list[sizing.Size]) -> Sized:
    return sizing.qwen_document(texts, images), [sizing.qwen_image(*size) + 2 for size in images]


def _molmo(_rng: Generator, texts: list[int], images: list[sizing.Size]) -> Sized:
    return sizing.molmo_document(texts, images), [sizing.molmo_image(*size) for size in images]


def _gemma(_rng: Generator, texts: list[int], images: list[sizing.Size]) -> Sized:
    return sizing.gemma_document(texts, images), [sum(length for _, length in sizing.GEMMA_IMAGE) for _ in images]


def _bagel(rng: Generator, texts: list[int], images: list[sizing.Size]) -> Sized:
    """Half of the documents are read, the other half generate each image after the text before it."""
    if rng.random() < 0.5:
        return sizing.bagel_understanding(texts, images), [sizing.bagel_read(*size, 980, 378)[1] for size in images]
    parts = [*sizing.bagel_generation(texts[:-1], images), sizing.bagel_text(texts[-1])]
    sizes = [2 * sizing.bagel_clean(*size)[1] + sizing.bagel_read(*size)[1] for size in images[:-1]]
    return parts, [*sizes, sizing.bagel_noised(*images[-1])[1]]


RULES: dict[str, Callable[[Generator, list[int], list[sizing.Size]], Sized]] = {
    "qwen": _qwen,
    "molmo": _molmo,
    "gemma": _gemma,
    "bagel": _bagel,
}
"""How each model lays out a document of text pieces with an image between each two."""


def real_documents(model: str, tokens: int, seed: int = 0, scale: float = 1.0) -> RealPack:
    """Pack documents of real text and real images until there are ``tokens`` tokens.

    A document takes consecutive paragraphs of one text, up to a length and with a number of images drawn from the
    OBELICS statistics; images stand between paragraphs. Texts and images come in shuffled order, over and over.

    Args:
        model: a key of `RULES`.
        tokens: exact length of the layout; the last document is cut to a causal tail.
        seed: of the PCG64 generator.
        scale: below 1 the spans shrink by this factor, as in `marble.workloads.build`.

    Raises:
        ValueError: if the model is unknown, or ``tokens`` or ``scale`` is out of range.
        ImportError: if scikit-image, matplotlib, Pillow or mistral-common is missing.
    """
    if model not in RULES:
        raise ValueError(f"model: {model!r} has no rule; use one of {', '.join(RULES)}")
    rng = Generator(PCG64(seed))
    most_images = sizing.MOLMO_IMAGES if model == "molmo" else None
    used_images: list[UsedImage] = []
    used_texts: list[UsedText] = []

    def samples() -> Iterator[list[Part]]:
        pictures, paragraphs = _forever(rng, find_images()), _passages(rng)
        while True:
            source, passage = next(paragraphs)
            images = [next(pictures) for _ in range(documents.image_count(rng))][:most_images]
            places = sorted(rng.integers(0, len(passage) + 1, len(images)).tolist())
            edges = zip([0, *places], [*places, len(passage)], strict=True)
            texts = [sum(passage[low:high]) for low, high in edges]
            parts, sizes = RULES[model](rng, texts, [(image.height, image.width) for image in images])
            used_texts.append(UsedText(source, sum(passage)))
            used_images.extend(
                UsedImage(image.name, image.height, image.width, size)
                for image, size in zip(images, sizes, strict=True)
            )
            yield parts

    return RealPack(pack(samples(), tokens, scale), tuple(used_images), tuple(used_texts))


@cache
def find_images() -> tuple[RealImage, ...]:
    """All bundled images that Pillow can open and whose short side has 150 pixels or more, as OBELICS keeps them."""
    image_module = _need("PIL.Image", "pillow")
    images = []
    for package, folder, requirement in _IMAGE_FOLDERS:
        root = Path(_need(package, requirement).__path__[0], folder)
        for path in sorted(root.iterdir()):
            if path.suffix.lower() not in _IMAGE_SUFFIXES:
                continue
            try:
                with image_module.open(path) as image:
                    width, height = image.size
            except (OSError, ValueError):
                continue
            if min(height, width) >= _SHORTEST_SIDE:
                images.append(RealImage(f"{package}/{path.name}", height, width))
    return tuple(images)


@cache
def find_texts() -> tuple[RealText, ...]:
    """Descriptions and licences of the installed packages, each text once, as token counts of their paragraphs."""
    encode = _tokenizer()
    seen: set[str] = set()
    texts = []
    for source, text in sorted(_package_texts()):
        paragraphs = [block.strip() + "\n\n" for block in text.split("\n\n") if block.strip()]
        if not paragraphs or text in seen:
            continue
        seen.add(text)
        texts.append(RealText(source, tuple(len(encode(block)) for block in paragraphs)))
    return tuple(texts)


def _package_texts() -> Iterator[tuple[str, str]]:
    """Names and texts, without this project's own, so that its changes do not change the documents."""
    for package in metadata.distributions():
        fields: Any = package.metadata
        if fields["Name"] == "marble-attention":
            continue
        name = f"{fields['Name']} {package.version}"
        yield f"{name} description", fields.get("Description") or str(fields.get_payload() or "")
        for path in package.files or ():
            if ".dist-info" in path.parts[0] and path.stem.upper() in _LICENCE_NAMES:
                file = Path(str(path.locate()))
                if file.is_file() and file.stat().st_size <= _LICENCE_BYTES:
                    yield f"{name} {'/'.join(path.parts[1:])}", file.read_text(encoding="utf-8", errors="replace")


def _passages(rng: Generator) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Runs of paragraphs, each about as long as an OBELICS document, from texts in shuffled order.

    A text goes on where its last run ended.
    """
    places: dict[str, int] = {}
    for text in _forever(rng, find_texts()):
        start = places.get(text.source, 0)
        wanted, stop = documents.document_tokens(rng), start + 1
        while stop < len(text.paragraphs) and sum(text.paragraphs[start:stop]) < wanted:
            stop += 1
        yield text.source, text.paragraphs[start:stop]
        places[text.source] = stop % len(text.paragraphs)


def _forever(rng: Generator, items: Sequence[Item]) -> Iterator[Item]:
    if not items:
        raise RuntimeError("real documents: the installed packages ship no usable text or image")
    while True:
        for index in rng.permutation(len(items)).tolist():
            yield items[index]


def _tokenizer() -> Callable[[str], list[int]]:
    """The tekken tokenizer that mistral-common bundles, without begin and end tokens."""
    module = _need("mistral_common.tokens.tokenizers.mistral", "mistral-common")
    tokenizer = module.MistralTokenizer.v3(is_tekken=True).instruct_tokenizer.tokenizer
    return lambda text: tokenizer.encode(text, bos=False, eos=False)


def _need(module: str, requirement: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"real documents need {module} ({error}); pip install {requirement}") from error
