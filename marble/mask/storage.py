"""The storage order: the order of the tokens before they are dealt to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from marble.layout import CPU, Layout, SpanTable


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
    def natural(cls, layout: Layout, device: torch.device = CPU) -> Storage:
        """The order of the sequence."""
        spans = len(layout.table.start)
        return cls(layout, torch.arange(spans, device=device), torch.zeros(spans, dtype=torch.bool, device=device))

    @property
    def device(self) -> torch.device:
        """Where the order lies, and all that is planned from it."""
        return self.span_order.device

    @cached_property
    def table(self) -> SpanTable:
        """The layout's spans, on the device of the order."""
        return self.layout.table.to(self.device)

    @cached_property
    def last_cut(self) -> dict[Any, Any]:
        """What shards of this order were last cut into; `marble.mask.shards` keeps it here."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "span_order": self.span_order, "apart": self.apart}

    @cached_property
    def offset(self) -> Tensor:
        """First storage position of each span, int64 [spans], by sequence order of the spans."""
        return torch.empty_like(self.span_order).index_copy_(0, self.span_order, self.stored_start)

    @cached_property
    def stored_start(self) -> Tensor:
        """First storage position of each span as it is stored, int64 [spans], rising from 0."""
        return self.stored_stop - self._stored_length

    @cached_property
    def stored_stop(self) -> Tensor:
        """One past the last storage position of each span as it is stored, int64 [spans]."""
        return self._stored_length.cumsum(0)

    @cached_property
    def _stored_length(self) -> Tensor:
        return self.table.length[self.span_order]

    @cached_property
    def span(self) -> Tensor:
        """The span of each stored token, int64 [tokens]."""
        return torch.repeat_interleave(self.span_order, self._stored_length)

    @cached_property
    def within(self) -> Tensor:
        """Each stored token's place inside its span, int64 [tokens]."""
        return torch.arange(self.layout.tokens, device=self.device) - self.offset[self.span]

    @cached_property
    def sequence(self) -> Tensor:
        """Each stored token's position in the sequence, int64 [tokens]."""
        return self.table.start[self.span] + self.within

    def sequence_of(self, tokens: Tensor) -> Tensor:
        """The same for some stored tokens, int64 [...], without looking at all others."""
        starts = self.offset[self.span_order]
        span = self.span_order[torch.searchsorted(starts, tokens, right=True) - 1]
        return self.table.start[span] + tokens - self.offset[span]
