"""Which work items each thread block computes."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from quack.cute_dsl_utils import ParamsBase


@dataclass
class Deal(ParamsBase):
    """Work items × query heads, dealt in rounds to the thread blocks, every other round in reverse.

    Items come longest first, so rounds in alternating order give every thread block about the same work, as PTRR does
    for ranks. All heads of an item are dealt before the next item, so thread blocks that run together share keys.

    Attributes:
        items: number of work items.
        heads: query heads.
        kv_heads: key/value heads.
        ctas: thread blocks.
    """

    items: Int32
    heads: Int32
    kv_heads: Int32
    ctas: Int32

    @cute.jit
    def total(self) -> Int32:
        """Number of (item, head) pairs."""
        return self.items * self.heads

    @cute.jit
    def at(self, turn: Int32) -> Int32:
        """The number of this thread block's pair in a round; at or above `total` when there is none."""
        cta = cute.arch.block_idx()[0]
        place = cta if turn % 2 == 0 else self.ctas - 1 - cta
        return turn * self.ctas + place

    @cute.jit
    def item(self, work: Int32) -> Int32:
        """The item of a pair."""
        return work // self.heads

    @cute.jit
    def head(self, work: Int32) -> Int32:
        """The query head of a pair."""
        return work % self.heads

    @cute.jit
    def kv_head(self, head: Int32) -> Int32:
        """The key/value head that a query head reads."""
        return head // (self.heads // self.kv_heads)
