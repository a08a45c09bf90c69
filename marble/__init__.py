"""marble: exact sequence-parallel attention over packed multimodal sequences."""

from marble.comm.transport import TransportError
from marble.compose.attention import attention
from marble.compose.plan import Plan
from marble.compose.planner import plan
from marble.compose.shape import AttentionShape
from marble.layout import Layout, Mode, Span

__all__ = ["AttentionShape", "Layout", "Mode", "Plan", "Span", "TransportError", "attention", "plan"]
