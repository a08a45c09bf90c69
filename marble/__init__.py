"""marble: exact sequence-parallel attention over packed multimodal sequences."""

from marble.compose.attention import attention
from marble.compose.planner import AttentionShape, Plan, plan
from marble.layout import Layout, Mode, Span

__all__ = ["AttentionShape", "Layout", "Mode", "Plan", "Span", "attention", "plan"]
