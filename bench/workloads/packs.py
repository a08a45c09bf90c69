"""The seven named workloads: how one sample of each is drawn, and the attention layers it runs through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import exp

from numpy.random import PCG64, Generator

from marble.layout import Layout, Mode
from marble.workloads import documents, sizing
from marble.workloads.spans import Part, pack

Sampler = Callable[[Generator, float], list[Part]]
"""One sample at full span lengths. It uses the scale only to shorten chains of frames; `build` shrinks the spans."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """``count`` attention layers of one shape; ``window`` keys at most (the token itself included), None for all."""

    count: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float


MODELS: dict[str, tuple[LayerKind, ...]] = {
    "Qwen3-VL-30B-A3B": (LayerKind(48, 32, 4, 128, None, 128**-0.5),),
    "Qwen3.8-27B": (LayerKind(16, 24, 4, 256, None, 256**-0.5),),
    "Molmo2-8B": (LayerKind(36, 32, 8, 128, None, 128**-0.5),),
    "Gemma 3 27B": (LayerKind(10, 32, 16, 128, None, 168**-0.5), LayerKind(52, 32, 16, 128, 1024, 168**-0.5)),
    "BAGEL-7B": (LayerKind(28, 28, 4, 128, None, 128**-0.5),),
}
"""Softmax attention layers by model, from the public configurations; layers of other kinds are left out."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A distribution of packed samples and the layers that attend over them.

    Attributes:
        name: what `build` takes.
        description: one line.
        model: key of `MODELS`.
        sample: draws one sample.
        demo_scale: ``scale`` at which 4,096 tokens hold several samples and at least two spans of 2 or more tokens of
            each mode of the workload.
    """

    name: str
    description: str
    model: str
    sample: Sampler
    demo_scale: float

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        return MODELS[self.model]


def build(name: str, tokens: int, seed: int = 0, scale: float = 1.0) -> Layout:
    """Pack ``tokens`` tokens of a workload; the same arguments give the same layout.

    Args:
        name: a key of `WORKLOADS`.
        tokens: exact length of the layout, at least 1; the last sample is cut to a causal tail.
        seed: of the PCG64 generator.
        scale: below 1 the spans shrink by this factor (never below 2 tokens, causal ones 1). The workloads made of long
            chains of frames (``molmo_video``, ``bagel_long``) then also have ``scale**2`` times as many frames per
            sample, so that a short demo still holds several samples.

    Raises:
        ValueError: if the name is unknown or ``tokens`` or ``scale`` is out of range.
    """
    if name not in WORKLOADS:
        raise ValueError(f"name: {name!r} is not a workload; use one of {', '.join(WORKLOADS)}")
    return pack(_draw(WORKLOADS[name].sample, Generator(PCG64(seed)), scale), tokens, scale)


def _draw(sample: Sampler, rng: Generator, scale: float) -> Iterator[list[Part]]:
    while True:
        yield sample(rng, scale)


def _qwen_docs(rng: Generator, _scale: float) -> list[Part]:
    return sizing.qwen_document(*documents.document(rng))


def _qwen_video(rng: Generator, _scale: float) -> list[Part]:
    video = sizing.qwen_video_tokens(documents.video_seconds(rng), *documents.video_size(rng))
    return [(Mode.CAUSAL, video + documents.caption_tokens(rng))]


def _molmo_docs(rng: Generator, _scale: float) -> list[Part]:
    return sizing.molmo_document(*documents.document(rng))


def _molmo_video(rng: Generator, scale: float) -> list[Part]:
    """70 % captioned videos, 30 % tracking clips whose answer takes 30 tokens and 8 more per frame (*assumed*)."""
    if rng.random() < 0.7:
        return [
            *sizing.molmo_video(documents.video_seconds(rng) * scale**2),
            (Mode.CAUSAL, documents.caption_tokens(rng)),
        ]
    video = sizing.molmo_video(documents.track_seconds(rng) * scale**2)
    frames = sum(mode is Mode.GROUP for mode, _ in video)
    return [*video, (Mode.CAUSAL, 30 + 8 * frames)]


def _gemma_docs(rng: Generator, _scale: float) -> list[Part]:
    return sizing.gemma_document(*documents.document(rng))


def _bagel_text(rng: Generator) -> list[Part]:
    return [sizing.bagel_text(round(documents.lognormal(rng, 1000 * exp(-(0.72**2) / 2), 0.72, 15, 8192)))]


def _bagel_t2i(rng: Generator) -> list[Part]:
    """Sides of 512 to 768 pixels (*assumed*), which gives the published mean of 1.6k tokens."""
    return [
        sizing.bagel_text(documents.prompt_tokens(rng)),
        sizing.bagel_noised(*documents.image_size(rng), longest=768),
    ]


def _bagel_i2t(rng: Generator) -> list[Part]:
    return [sizing.bagel_read(*documents.image_size(rng)), sizing.bagel_text(documents.prompt_tokens(rng))]


def _bagel_understanding(rng: Generator) -> list[Part]:
    return sizing.bagel_understanding(*documents.document(rng))


def _bagel_video(rng: Generator) -> list[Part]:
    """2 + Poisson(2) frames; the first is given, and a caption tells the way to each next one."""
    size, steps = documents.video_size(rng), 1 + int(rng.poisson(2))
    return sizing.bagel_generation([documents.whole(rng, 10, 30) for _ in range(steps)], [size] * steps, size)


def _bagel_web(rng: Generator) -> list[Part]:
    """2 + Poisson(3) images (*assumed*), each after a caption of 40 tokens and 20 to 300 tokens of the page."""
    images = [documents.image_size(rng) for _ in range(2 + int(rng.poisson(3)))]
    return sizing.bagel_generation([40 + 2 + documents.whole(rng, 20, 300) for _ in images], images)


BAGEL_MIX: dict[str, tuple[float, Callable[[Generator], list[Part]]]] = {
    "text": (0.05, _bagel_text),
    "t2i": (0.4, _bagel_t2i),
    "i2t": (0.1, _bagel_i2t),
    "understanding": (0.15, _bagel_understanding),
    "video": (0.15, _bagel_video),
    "web": (0.15, _bagel_web),
}
"""BAGEL's mix (its paper): sampling ratio and one sample of each kind of data."""

BAGEL_CONTEXT = 40_000
"""Tokens of the longest public BAGEL sample; longer ones are drawn again."""

_MIX_KINDS = tuple(kind for _, kind in BAGEL_MIX.values())
_MIX_SUMS = tuple(accumulate(ratio for ratio, _ in BAGEL_MIX.values()))


def _bagel_mix(rng: Generator, _scale: float) -> list[Part]:
    kind = _MIX_KINDS[documents.pick(rng, _MIX_SUMS)]
    while True:
        parts = kind(rng)
        if sum(length for _, length in parts) <= BAGEL_CONTEXT:
            return parts


def _bagel_long(rng: Generator, scale: float) -> list[Part]:
    """Log-uniform length of 128k to 1M tokens (*assumed*), in frames of one resolution per sample."""
    length = documents.log_uniform(rng, 128 * 1024, 1024 * 1024)
    latents = sizing.bagel_vae(*((288, 512) if rng.random() < 0.5 else (576, 1024)))
    pairs = max(2, round(length * scale**2 / (22 + 2 * latents)))
    frame = [(Mode.NOISE, latents), (Mode.FULL, latents)]
    parts: list[Part] = []
    for caption in rng.integers(10, 31, pairs).tolist():
        parts += [sizing.bagel_text(caption), *frame]
    return parts


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("qwen_docs", "web documents with images, all causal", "Qwen3-VL-30B-A3B", _qwen_docs, 1 / 4),
        Workload("qwen_video", "captioned videos, all causal", "Qwen3-VL-30B-A3B", _qwen_video, 1 / 24),
        Workload("molmo_docs", "up to 5 images as one group, then text", "Molmo2-8B", _molmo_docs, 1 / 4),
        Workload("molmo_video", "videos whose frames form one group, then text", "Molmo2-8B", _molmo_video, 1 / 3),
        Workload("gemma_docs", "text with bidirectional images, global and window", "Gemma 3 27B", _gemma_docs, 1 / 4),
        Workload("bagel_mix", "text, images to read, to edit and to generate", "BAGEL-7B", _bagel_mix, 1 / 16),
        Workload("bagel_long", "long videos as pairs of noised and clean frames", "BAGEL-7B", _bagel_long, 1 / 12),
    )
}
"""All workloads by name. The layouts of the Qwen workloads also hold for ``MODELS["Qwen3.8-27B"]``."""
