"""Document statistics to sample from. All draws come from the generator that is passed in.

OBELICS (its paper) gives the means and medians of text and images; Molmo2 (its paper) those of videos and captions;
BAGEL (its paper) the mix and the mean sample lengths. The shapes of the distributions are *assumed*.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate, pairwise
from math import exp, log

from numpy.random import Generator

Size = tuple[int, int]

IMAGE_COUNTS = tuple(accumulate(count**-1.99 for count in range(1, 31)))
"""Cumulative weights of 1 to 30 images: Zipf, s = 1.99, mean 2.50 as in OBELICS."""

ASPECTS = ((1.0, 0.2), (4 / 3, 0.4), (3 / 2, 0.3), (16 / 9, 0.1))
VIDEO_SIZES = (((720, 1280), 0.7), ((360, 640), 0.2), ((1080, 1920), 0.1))

_ASPECT_SUMS = tuple(accumulate(weight for _, weight in ASPECTS))
_VIDEO_SUMS = tuple(accumulate(weight for _, weight in VIDEO_SIZES))


def pick(rng: Generator, sums: tuple[float, ...]) -> int:
    """Index drawn with the given cumulative weights."""
    return min(bisect(sums, rng.random() * sums[-1]), len(sums) - 1)


def lognormal(rng: Generator, median: float, sigma: float, low: float = 0, high: float = float("inf")) -> float:
    """Lognormal draw, drawn again until it lies in [low, high]."""
    while True:
        value = median * exp(sigma * rng.standard_normal())
        if low <= value <= high:
            return value


def whole(rng: Generator, low: int, high: int) -> int:
    """Uniform integer in [low, high]."""
    return int(rng.integers(low, high + 1))


def document_tokens(rng: Generator) -> int:
    """Text tokens of an OBELICS document: mean 816, median 677."""
    return round(lognormal(rng, 696, 0.72, 15, 2700))


def image_count(rng: Generator) -> int:
    """Images of an OBELICS document: mean 2.50, median 1."""
    return 1 + pick(rng, IMAGE_COUNTS)


def image_size(rng: Generator) -> Size:
    """(height, width) of a web image; 70 % landscape, short side 150 pixels at least."""
    aspect = ASPECTS[pick(rng, _ASPECT_SUMS)][0]
    long = round(lognormal(rng, 534, 0.554, 150 * aspect, 20_000))
    short = max(150, round(long / aspect))
    return (short, long) if rng.random() < 0.7 else (long, short)


def cuts(rng: Generator, tokens: int, pieces: int) -> list[int]:
    """Lengths of ``pieces`` parts of a text of ``tokens`` tokens, cut at uniform places; parts may be empty."""
    edges = [0, *sorted(rng.integers(0, tokens + 1, pieces - 1).tolist()), tokens]
    return [high - low for low, high in pairwise(edges)]


def document(rng: Generator) -> tuple[list[int], list[Size]]:
    """An OBELICS document: the lengths of its text pieces and the images between them."""
    images = [image_size(rng) for _ in range(image_count(rng))]
    return cuts(rng, document_tokens(rng), len(images) + 1), images


def video_seconds(rng: Generator) -> float:
    """Duration of a captioned video (Molmo2: below 3 minutes)."""
    return lognormal(rng, 65, 0.55, 10, 180)


def track_seconds(rng: Generator) -> float:
    """Duration of a tracking clip (Molmo2 VideoTrack: mostly 10 to 30 s, 2 minutes at most)."""
    return lognormal(rng, 17, 0.6, 3, 120)


def video_size(rng: Generator) -> Size:
    """720p, 360p or 1080p."""
    return VIDEO_SIZES[pick(rng, _VIDEO_SUMS)][0]


def caption_tokens(rng: Generator) -> int:
    """Dense video caption (Molmo2: 924 words): mean 1,155 tokens, 4,500 at most."""
    return min(4500, round(lognormal(rng, 1155 * exp(-(0.45**2) / 2), 0.45, 1)))


def prompt_tokens(rng: Generator) -> int:
    """Text-to-image caption: median 80 tokens, 512 at most."""
    return min(512, round(lognormal(rng, 80, 0.7, 1)))


def log_uniform(rng: Generator, low: float, high: float) -> float:
    """Draw whose logarithm is uniform."""
    return exp(rng.uniform(log(low), log(high)))
