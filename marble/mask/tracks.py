"""The four integers per token that a mask reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from marble.layout import CPU, Layout


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
    def of(cls, layout: Layout, user: Mapping[str, Tensor] | None = None, device: torch.device = CPU) -> Tracks:
        """The tracks of a layout in sequence order.

        Raises:
            TypeError: if ``user`` is not a mapping.
            ValueError: if a user track has a reserved name or does not hold one 32-bit integer per token.
        """
        table = layout.table.to(device)
        sample, seg, noise = (
            torch.repeat_interleave(column.int(), table.length) for column in (table.sample, table.seg, table.noise)
        )
        pos = torch.arange(layout.tokens, dtype=torch.int32, device=device)
        extra = {}
        if user is not None and not isinstance(user, Mapping):
            raise TypeError(f"tracks: expected a mapping of names to tensors, got {type(user).__name__}")
        for name, column in (user or {}).items():
            if name in ("sample", "seg", "noise", "pos"):
                raise ValueError(f"tracks: {name!r} is one of marble's own tracks; choose another name")
            extra[name] = _user_track(column, name, layout.tokens).to(device)
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

    def operand(self, lift: Callable[[Tensor], Any]) -> Operand:
        """A mask's operand: every column lifted into a domain, read as ``q.pos``, ``q.seg`` and so on."""
        return Operand({name: lift(column) for name, column in self.columns.items()})


class Operand:
    """One side of a pair, as a mask sees it: the tracks by name, in whatever domain the mask runs on."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.__dict__.update(columns)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(self.__dict__)
        raise ValueError(f"mask: reads the track {name!r}, but there are only {known}; give it in tracks")


def _user_track(values: Any, name: str, tokens: int) -> Tensor:
    if not isinstance(name, str):
        raise TypeError(f"tracks: names must be strings, got {name!r}")
    problem = f"tracks: {name!r} must hold one integer per token, [{tokens}], within int32"
    try:
        column = torch.as_tensor(values)
    except (TypeError, ValueError):
        raise ValueError(problem) from None
    if column.shape != (tokens,) or column.is_floating_point() or column.is_complex() or column.dtype == torch.uint64:
        raise ValueError(problem)
    column = column.long()
    limits = torch.iinfo(torch.int32)
    if int(column.min()) < limits.min or int(column.max()) > limits.max:
        raise ValueError(problem)
    return column.int()
