"""How many tokens an image, a video or a document takes in each model, and with which attention modes.

Pure functions of pixel sizes, seconds and text lengths. Sizes are (height, width) in pixels. Each rule names its public
source; what is not public is marked *assumed*.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, floor, sqrt

from marble.layout import Mode
from marble.workloads.spans import Part

Size = tuple[int, int]

GEMMA_IMAGE: tuple[Part, ...] = ((Mode.CAUSAL, 2), (Mode.FULL, 256), (Mode.CAUSAL, 2))
r"""Gemma 3 (its technical report and processor): ``\n\n``, start, 256 soft tokens, end, ``\n\n``; pan-and-scan off."""

MOLMO_FRAME = 83
"""Tokens of a Molmo2 video frame: 9 × 9 pooled patches, start and end."""

MOLMO_IMAGES = 5
"""Images of a Molmo2 document at most."""

_QWEN_SIDE = 32
_QWEN_IMAGE_PIXELS = (65_536, 16_777_216)
_QWEN_VIDEO_PIXELS = (4_096, 25_165_824)


def _qwen_sides(height: int, width: int, frames: int, limits: tuple[int, int]) -> Size:
    side, (low, high) = _QWEN_SIDE, limits
    rows, columns = max(1, round(height / side)), max(1, round(width / side))
    pixels = frames * rows * columns * side * side
    if pixels > high:
        shrink = sqrt(frames * height * width / high)
        rows, columns = max(1, floor(height / shrink / side)), max(1, floor(width / shrink / side))
    elif pixels < low:
        grow = sqrt(low / (frames * height * width))
        rows, columns = ceil(height * grow / side), ceil(width * grow / side)
    return rows, columns


@lru_cache(maxsize=1 << 16)
def qwen_image(height: int, width: int) -> int:
    """Tokens of an image without its start and end token (``smart_resize`` of the Qwen-VL processors).

    >>> qwen_image(480, 640), qwen_image(1080, 1920)
    (300, 2040)
    """
    rows, columns = _qwen_sides(height, width, 1, _QWEN_IMAGE_PIXELS)
    return rows * columns


def qwen_video(seconds: float, height: int, width: int) -> tuple[int, int]:
    """Frame groups and tokens per group, without timestamps, start and end (Qwen3-VL video processor, 2 frames/s).

    >>> qwen_video(60, 720, 1280)
    (60, 190)
    """
    frames = min(max(int(2 * seconds), 4), 768)
    rows, columns = _qwen_sides(height, width, frames, _QWEN_VIDEO_PIXELS)
    return ceil(frames / 2), rows * columns


def qwen_video_tokens(seconds: float, height: int, width: int) -> int:
    """All tokens of a video: each group has a timestamp (6 tokens below 10 s, then 7, 8, 9), start, tokens, end.

    The time of a group is the mean of its two frames, which lie evenly over the video.
    """
    groups, tokens = qwen_video(seconds, height, width)
    times = ((index + 0.25) * seconds / groups for index in range(groups))
    return sum(6 + _digits(time) + 2 + tokens for time in times)


def qwen_document(texts: Sequence[int], images: Sequence[Size]) -> list[Part]:
    """One causal run: the images of Qwen3-VL only set its length."""
    return [(Mode.CAUSAL, sum(texts) + sum(qwen_image(*size) + 2 for size in images))]


def molmo_tiling(height: int, width: int, crops: int = 8) -> Size:
    """Rows and columns of high-resolution crops (``select_tiling`` of the Molmo repositories).

    A crop of 378² pixels adds 266 to a side beyond the common margin of 112. The least upscaling wins; if all tilings
    are too small, the least downscaling; on a tie the fewer crops.
    """
    inner = max(1, height - 112), max(1, width - 112)
    tilings = [(i, j) for i in range(1, crops + 1) for j in range(1, crops // i + 1)]
    tilings.sort(key=lambda tiling: (tiling[0] * tiling[1], tiling[0]))
    zooms = [min(266 * i / inner[0], 266 * j / inner[1]) for i, j in tilings]
    fitting = [zoom for zoom in zooms if zoom >= 1]
    return tilings[zooms.index(min(fitting) if fitting else max(zooms))]


@lru_cache(maxsize=1 << 16)
def molmo_image(height: int, width: int, crops: int = 8) -> int:
    """Tokens of an image: 198 of the low-resolution view, then the crops at half of the 14-pixel patches.

    >>> molmo_image(378, 378), molmo_image(1080, 1920)
    (410, 1189)
    """
    rows, columns = molmo_tiling(height, width, crops)
    return 198 + ceil((19 * rows + 8) / 2) * (ceil((19 * columns + 8) / 2) + 1) + 2


def molmo_times(seconds: float, frames: int = 384) -> list[float]:
    """Times of the sampled frames: every half second and the end, or ``frames`` even steps if those are fewer."""
    count = ceil(2 * seconds)
    if count + 1 <= frames:
        return [index / 2 for index in range(count)] + [seconds]
    return [seconds * index / (frames - 1) for index in range(frames)]


def molmo_video(seconds: float, frames: int = 384) -> list[Part]:
    """BOS and the frames of a video, each after a causal timestamp (4 tokens for the first, then 5 to 7)."""
    parts: list[Part] = [(Mode.CAUSAL, 1)]
    for index, time in enumerate(molmo_times(seconds, frames)):
        parts += [(Mode.CAUSAL, 5 + _digits(time) if index else 4), (Mode.GROUP, MOLMO_FRAME)]
    return parts


def molmo_document(texts: Sequence[int], images: Sequence[Size], crops: int = 8) -> list[Part]:
    """BOS, all images (at most 5), then the text; several images each follow a label of 3 tokens (4 from the tenth)."""
    parts: list[Part] = [(Mode.CAUSAL, 1)]
    images = images[:MOLMO_IMAGES]
    for number, size in enumerate(images, start=1):
        label = 0 if len(images) == 1 else 3 if number < 10 else 4
        parts += [(Mode.CAUSAL, label), (Mode.GROUP, molmo_image(*size, crops))]
    return [*parts, (Mode.CAUSAL, sum(texts))]


def gemma_document(texts: Sequence[int], images: Sequence[Size]) -> list[Part]:
    """Text pieces with a Gemma 3 image between each two; there is one text piece (maybe empty) more than images."""
    parts: list[Part] = []
    for text, _ in zip(texts, images, strict=False):
        parts += [(Mode.CAUSAL, text), *GEMMA_IMAGE]
    return [*parts, (Mode.CAUSAL, texts[-1])]


@lru_cache(maxsize=1 << 16)
def bagel_fit(height: int, width: int, stride: int, longest: int, shortest: int) -> Size:
    """Resize to a multiple of ``stride``: the long side at most ``longest``, but the short side at least ``shortest``.

    The rule and its limits for the two encoders follow the public data configuration of the BAGEL repository as we know
    it; WORKLOADS.md does not list them, so count them as *assumed*.
    """
    scale = max(min(longest / max(height, width), 1), shortest / min(height, width))
    rows, columns = (max(1, round(round(side * scale) / stride)) for side in (height, width))
    return rows * stride, columns * stride


def bagel_vit(height: int, width: int) -> int:
    """Tokens of an image for BAGEL's ViT, start and end included; the sides are final."""
    return (height // 14) * (width // 14) + 2


def bagel_vae(height: int, width: int) -> int:
    """Tokens of an image for BAGEL's VAE, start and end included; the sides are final.

    >>> bagel_vae(1024, 1024)
    4098
    """
    return (height // 16) * (width // 16) + 2


def bagel_text(tokens: int) -> Part:
    """A piece of text with its start and end token; an empty piece has none."""
    return Mode.CAUSAL, tokens + 2 if tokens else 0


def bagel_read(height: int, width: int, longest: int = 518, shortest: int = 224) -> Part:
    """An image to understand."""
    return Mode.FULL, bagel_vit(*bagel_fit(height, width, 14, longest, shortest))


def bagel_clean(height: int, width: int, longest: int = 1024, shortest: int = 512) -> Part:
    """An image to edit or to continue from, as VAE latents."""
    return Mode.FULL, bagel_vae(*bagel_fit(height, width, 16, longest, shortest))


def bagel_noised(height: int, width: int, longest: int = 1024, shortest: int = 512) -> Part:
    """An image to generate."""
    return Mode.NOISE, bagel_clean(height, width, longest, shortest)[1]


def bagel_understanding(texts: Sequence[int], images: Sequence[Size]) -> list[Part]:
    """Text pieces with a ViT image (980 pixels at most, 378 at least) between each two: the BAGEL paper's VLM data."""
    parts: list[Part] = []
    for text, size in zip(texts, images, strict=False):
        parts += [bagel_text(text), bagel_read(*size, 980, 378)]
    return [*parts, bagel_text(texts[-1])]


def bagel_generation(texts: Sequence[int], images: Sequence[Size], source: Size | None = None) -> list[Part]:
    """Images that are generated one after the other, each after its text (BAGEL paper, interleaved generation).

    One image is text-to-image: text, noise. With a ``source`` it is an edit: clean, ViT, text, noise. All images but
    the last are noise, clean, ViT, because the next ones read them.
    """
    parts = [] if source is None else [bagel_clean(*source), bagel_read(*source)]
    for index, (text, size) in enumerate(zip(texts, images, strict=True)):
        parts += [bagel_text(text), bagel_noised(*size)]
        if index < len(images) - 1:
            parts += [bagel_clean(*size), bagel_read(*size)]
    return parts


def _digits(seconds: float) -> int:
    """Digits before the point of a time that is printed with one decimal, less one."""
    return len(str(int(round(seconds, 1)))) - 1
