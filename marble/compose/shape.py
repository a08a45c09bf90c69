"""The attention of one layer: heads, window and softmax scale."""

from __future__ import annotations

from dataclasses import dataclass

from marble.layout import as_int


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer.

    Args:
        heads: query heads.
        kv_heads: key/value heads; they divide ``heads``. Equal numbers are multi-head attention.
        head_dim: size of a head.
        window: last tokens that a query sees, itself included; None for a global layer. Bidirectional spans are seen
            whole whatever the window.
        scale: softmax scale > 0; by default ``head_dim ** -0.5``.

    Raises:
        TypeError, ValueError: if a number is not what it must be.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "window"):
            value = getattr(self, name)
            if value is None and name == "window":
                continue
            value = as_int(value, f"AttentionShape.{name}")
            object.__setattr__(self, name, value)
            if value < 1:
                hint = "; a global layer has window=None" if name == "window" else ""
                raise ValueError(f"AttentionShape.{name}: must be at least 1, got {value}{hint}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"AttentionShape.kv_heads: {self.kv_heads} key/value heads do not divide {self.heads} query heads"
            )
        if self.scale is not None:
            if isinstance(self.scale, bool) or not isinstance(self.scale, int | float):
                raise TypeError(f"AttentionShape.scale: expected a number, got {type(self.scale).__name__}")
            if not 0 < self.scale < float("inf"):
                raise ValueError(f"AttentionShape.scale: must be positive and finite, got {self.scale}")
            object.__setattr__(self, "scale", float(self.scale))

    @property
    def softmax_scale(self) -> float:
        """The scale that multiplies q · k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale
