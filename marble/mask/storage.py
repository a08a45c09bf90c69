"""The storage order: the order of the tokens before they are dealt to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from marble.layout import Layout


@dataclass(frozen=True, eq=False)
class Storage:
    """A permutation of the spans inside each sample; tokens inside a span keep their order.

    Attributes:
        layout: the layout whose spans are permuted.
        span_order: int64 [spans], the spans as they are stored. A sample keeps its place in the sequence.
        apart: bool [spans], which spans (by sequence order) are stored behind the others of their sample.
    """

    layout: Layout
    span_order: Tensor
    apart: Tensor

    @classmethod
    def natural(cls, layout: Layout) -> Storage:
        """The order of the sequence."""
        spans = len(layout.table.start)
        return cls(layout, torch.arange(spans), torch.zeros(spans, dtype=torch.bool))

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "span_order": self.span_order, "apart": self.apart}

    @cached_property
    def offset(self) -> Tensor:
        """First storage position of each span, int64 [spans], by sequence order of the spans."""
        length = self.layout.table.length[self.span_order]
        offset = torch.empty_like(length)
        offset[self.span_order] = length.cumsum(0) - length
        return offset

    @cached_property
    def span(self) -> Tensor:
        """The span of each stored token, int64 [tokens]."""
        return torch.repeat_interleave(self.span_order, self.layout.table.length[self.span_order])

    @cached_property
    def within(self) -> Tensor:
        """Each stored token's place inside its span, int64 [tokens]."""
        return torch.arange(self.layout.tokens) - self.offset[self.span]

    @cached_property
    def sequence(self) -> Tensor:
        """Each stored token's position in the sequence, int64 [tokens]."""
        return self.layout.table.start[self.span] + self.within

    def sequence_of(self, tokens: Tensor) -> Tensor:
        """The same for some stored tokens, int64 [...], without looking at all others."""
        starts = self.offset[self.span_order]
        span = self.span_order[torch.searchsorted(starts, tokens, right=True) - 1]
        return self.layout.table.start[span] + tokens - self.offset[span]
