"""The four integers per token that a mask reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from marble.layout import Layout


@dataclass(frozen=True, eq=False)
class Tracks:
    """Per-token columns, int32 [tokens] each.

    Attributes:
        sample: sample id, −1 for padding.
        seg: id of the bidirectional span or group, −1 for causal tokens and padding.
        noise: id of the noise group, −1 for all other tokens.
        pos: position in the original sequence; it grows across samples, so that block summaries of neighbouring
            documents do not blur.
        user: further columns by name, for masks of one's own.
    """

    sample: Tensor
    seg: Tensor
    noise: Tensor
    pos: Tensor
    user: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout, user: Mapping[str, Tensor] | None = None) -> Tracks:
        """The tracks of a layout in sequence order.

        Raises:
            ValueError: if a user track has a reserved name or does not hold one integer per token.
        """
        table = layout.table
        sample, seg, noise = (
            torch.repeat_interleave(column.int(), table.length) for column in (table.sample, table.seg, table.noise)
        )
        pos = torch.arange(layout.tokens, dtype=torch.int32)
        extra = {}
        for name, column in (user or {}).items():
            if name in ("sample", "seg", "noise", "pos"):
                raise ValueError(f"tracks: {name!r} is one of marble's own tracks; choose another name")
            column = torch.as_tensor(column)
            if column.shape != (layout.tokens,) or column.is_floating_point():
                raise ValueError(f"tracks: {name!r} must hold one integer per token, [{layout.tokens}]")
            extra[name] = column.int()
        return cls(sample, seg, noise, pos, extra)

    def __len__(self) -> int:
        return self.pos.shape[0]

    @property
    def columns(self) -> dict[str, Tensor]:
        """All columns by name, the user's last."""
        return {"sample": self.sample, "seg": self.seg, "noise": self.noise, "pos": self.pos, **self.user}

    def take(self, index: Tensor | slice) -> Tracks:
        """The tracks of some tokens, in the order of ``index``."""
        return Tracks(
            self.sample[index],
            self.seg[index],
            self.noise[index],
            self.pos[index],
            {name: column[index] for name, column in self.user.items()},
        )

    def operand(self, lift: Callable[[Tensor], Any]) -> SimpleNamespace:
        """A mask's operand: every column lifted into a domain, read as ``q.pos``, ``q.seg`` and so on."""
        return SimpleNamespace(**{name: lift(column) for name, column in self.columns.items()})
