"""FlashAttention-4 (flash-attn-4 4.0.0b36, Hopper) as a contender: dense, and block-sparse under a ``mask_mod``.

Its block-sparse kernels take, per query block (backward: per key block), a list of partial tiles that ``mask_mod`` is
evaluated in and a list of full ones; blocks are numbered by the rows that they hold. Only the first partial tile that
the forward pass visits, the last of the list, is cut at the end of the keys, so lists ascend. One list serves all
heads, which is what ``pack_gqa`` needs. 128 × 128 lists fit every kernel at d64 and d128: forward tiles are 128 × 128
(at d64 too: 192 rows, as dense uses, do not divide 128), backward tiles 128 × 128 at d64 and 64 × 128 at d128, where
each listed block is two tiles. At d256 its masked kernels take 64 keys: every tile is listed as two halves, without
those that the predicate leaves empty, and those that it does not cut are full.

``python -m bench.baselines.compile_fa4`` compiles every kernel that the bench asks for, with no GPU.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bench.baselines.calls import BLOCK, MaskedCall
from bench.baselines.systems import Inputs
from marble.kernels.contract import TileList, Tiles
from marble.mask.lowering import cute_mask_mod

MASKS = ("four", "two")
_TRACKS = ("sample", "seg", "noise", "pos")


def key_block_of(head_dim: int) -> int:
    """Keys of a block in the lists for a head dimension."""
    return BLOCK if head_dim <= 128 else BLOCK // 2


def block_lists(tiles: TileList, names: Tensor, outer: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ascending lists of one orientation: partial counts and numbers, full counts and numbers, int32.

    Args:
        tiles: our lists.
        names: int64 [inner blocks, n], the other side's numbers of each inner block, of which it makes n.
        outer: int64 [outer blocks, m], the same for outer blocks.
        blocks: how many outer blocks the other side counts; ours are among them.

    Returns:
        Counts [1, 1, blocks] and numbers [1, 1, blocks, longest list], zero behind a list's end.
    """
    owner = torch.repeat_interleave(torch.arange(tiles.outer), tiles.run_ptr.diff().long())
    first, length = tiles.runs.long().T
    steps = torch.arange(int(length.sum())) - torch.repeat_interleave(length.cumsum(0) - length, length)
    full = torch.repeat_interleave(owner, length), torch.repeat_interleave(first, length) + steps
    part = torch.repeat_interleave(torch.arange(tiles.outer), tiles.part_ptr.diff().long()), tiles.parts[:, 0].long()
    seen = _seen(tiles, outer.shape[1], names.shape[1])[tiles.parts[:, 1].long()]
    whole = seen == (BLOCK // outer.shape[1]) * (BLOCK // names.shape[1])
    every = torch.ones(len(full[0]), *whole.shape[1:], dtype=torch.bool)
    owners, numbers = (
        torch.cat([side[pair[at]].unsqueeze(2 - at).expand_as(some) for pair, some in ((full, every), (part, whole))])
        for at, side in ((0, outer), (1, names))
    )
    filled, cut = torch.cat([every, whole]), torch.cat([~every, (seen > 0) & ~whole])
    return *_table(owners[cut], numbers[cut], blocks), *_table(owners[filled], numbers[filled], blocks)


def _seen(tiles: TileList, down: int, across: int) -> Tensor:
    """Pairs in each part of the predicates, cut into ``down`` × ``across``: int64 [slots, down, across]. Slots below 0
    count from the end, as Python does."""
    words, bits = tiles.ranges.long().unsqueeze(-1), tiles.bits.flip(0).long()
    first, width = torch.arange(0, BLOCK, BLOCK // across), BLOCK // across
    limits = [(words >> shift & 255).clamp(min=first).minimum(first + width) for shift in (0, 8, 16, 24)]
    in_ranges = limits[1] - limits[0] + limits[3] - limits[2]
    in_bits = (bits.unsqueeze(-1) >> torch.arange(32) & 1).flatten(2).unflatten(2, (across, width)).sum(3)
    return torch.cat([in_ranges, in_bits]).unflatten(1, (down, BLOCK // down)).sum(2)


def _table(owner: Tensor, number: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    order = torch.argsort(owner * (int(number.max()) + 1 if len(number) else 1) + number)
    owner, number = owner[order], number[order]
    count = torch.bincount(owner, minlength=blocks)
    table = torch.zeros(blocks, max(int(count.max()), 1), dtype=torch.int32)
    table[owner, torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]] = number.int()
    return count.int().view(1, 1, -1), table.view(1, 1, *table.shape)


def lists_of(
    tiles: Tiles, key_rows: int, *, by_key: bool, key_block: int = BLOCK
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A call's tiles as lists by query block, for the forward pass, or by key block, for the backward pass; a key block
    of them is ``key_block`` rows.

    Raises:
        ValueError: if blocks are not of 128 rows, or a key block does not begin at a multiple of that.
    """
    if tiles.block != BLOCK or bool((tiles.key_row % BLOCK != 0).any()):
        raise ValueError(f"tiles: FlashAttention-4 wants key blocks on a grid of {BLOCK} rows")
    parts = BLOCK // key_block
    keys, queries = tiles.key_row.long() // key_block, torch.arange(len(tiles.touch)).unsqueeze(1)
    keys = keys.unsqueeze(1) + torch.arange(parts)
    if by_key:
        return block_lists(tiles.by_key, queries, keys, -(-key_rows // key_block))
    return block_lists(tiles.by_query, keys, queries, len(queries))


@dataclass(frozen=True, eq=False)
class Masked:
    """A masked call as FlashAttention-4 takes it, on the CPU or on a device.

    Attributes:
        mask_mod: the mask.
        aux: what it reads, int32 tensors padded to whole blocks.
        forward: lists by query block, as in `block_lists`.
        backward: lists by key block.
    """

    mask_mod: Callable[..., Any]
    aux: list[Tensor]
    forward: tuple[Tensor, ...]
    backward: tuple[Tensor, ...]

    @classmethod
    def of(cls, call: MaskedCall, mask: str, device: torch.device) -> Masked:
        """``mask`` is ``four``, the mask over four tracks, or ``two``, two comparisons with a range per key."""
        mask_mod, aux = _four(call) if mask == "four" else _two(call)
        size = key_block_of(call.shape.head_dim)
        lists = (lists_of(call.tiles, len(call.cols), by_key=by_key, key_block=size) for by_key in (False, True))
        forward, backward = (tuple(x.to(device) for x in found) for found in lists)
        return cls(mask_mod, [x.to(device) for x in aux], forward, backward)

    @cached_property
    def options(self) -> dict[str, Any]:
        return {"mask_mod": self.mask_mod, "aux_tensors": self.aux}


def _four(call: MaskedCall) -> tuple[Callable[..., Any], list[Tensor]]:
    tracks = call.stored.tracks
    queries, keys = tracks.take(call.rows).columns, tracks.take(call.cols.clamp(min=0)).columns
    # Rows that hold no token are in a sample that no query is in.
    keys["sample"] = keys["sample"].masked_fill(call.cols < 0, -2)
    aux = [_pad(side[name]) for side in (queries, keys) for name in _TRACKS]
    return cute_mask_mod(call.mask, _TRACKS), aux


def _two(call: MaskedCall) -> tuple[Callable[..., Any], list[Tensor]]:
    if call.stored.ranges is None:
        raise ValueError(f"{call.name}: this mask has no visible ranges")
    keys = call.stored.ranges.keys(call.cols.clamp(min=0))
    if not bool(keys.exact.all()):
        raise ValueError(f"{call.name}: not every key is seen by one range of queries, so two comparisons cannot do")
    lo, hi = (torch.searchsorted(call.rows, bound.contiguous()) for bound in (keys.lo, keys.hi))
    return range_mask_mod(), [_pad(lo), _pad(hi.where(call.cols >= 0, lo))]


def range_mask_mod() -> Callable[..., Any]:
    """``lo[k] <= q < hi[k]`` over the auxiliary tensors lo and hi, int32 [keys] each."""
    from cutlass import Boolean, cute

    @cute.jit
    def mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # noqa: ARG001
        q, k = q_idx[0], kv_idx[0]
        return cute.full((1,), (aux_tensors[0][k] <= q) & (q < aux_tensors[1][k]), Boolean)

    mask_mod.__cute_hash__ = hashlib.sha256(inspect.getsource(range_mask_mod).encode()).hexdigest()
    return mask_mod


def _pad(column: Tensor) -> Tensor:
    """int32, with storage to whole blocks: rows behind the end are read, and what is computed from them is dropped."""
    return torch.nn.functional.pad(column.int(), (0, -len(column) % BLOCK))


class FlashAttention4:
    """Dense (``masked`` is None), or block-sparse under a mask.

    Args:
        inputs: of the call.
        scale: softmax scale.
        masked: the mask and its lists, on the device of the inputs.
        causal: dense only.
        pack_gqa: as FlashAttention takes it; None is its own choice (on for grouped heads).
    """

    def __init__(
        self,
        inputs: Inputs,
        scale: float,
        masked: Masked | None = None,
        *,
        causal: bool = False,
        pack_gqa: bool | None = None,
    ) -> None:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        self.x = [x.unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        rows, heads, head_dim = inputs.q.shape
        self.packing = {"pack_gqa": pack_gqa}
        self.ahead: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
        self.back = dict(self.ahead)
        if masked is not None:
            for options, lists in ((self.ahead, masked.forward), (self.back, masked.backward)):
                sparse = BlockSparseTensorsTorch(*lists, block_size=(BLOCK, key_block_of(head_dim)))
                options |= masked.options | {"block_sparse_tensors": sparse}
        self.results = [torch.empty_like(x) for x in (self.x[0], *self.x[:3])]
        self.log_sums = torch.empty(1, heads, rows, dtype=torch.float32, device=inputs.q.device)

    @property
    def out(self) -> Tensor:
        return self.results[0][0]

    @property
    def lse(self) -> Tensor:
        return self.log_sums[0]

    def forward(self) -> None:
        """One call."""
        from flash_attn.cute.interface import _flash_attn_fwd

        _flash_attn_fwd(*self.x[:3], out=self.results[0], lse=self.log_sums, **self.packing, **self.ahead)

    def backward(self) -> None:
        """One call: preprocess, the kernel, postprocess."""
        from flash_attn.cute.interface import _flash_attn_bwd

        out, dq, dk, dv = self.results
        _flash_attn_bwd(*self.x[:3], out, self.x[3], self.log_sums, dq=dq, dk=dk, dv=dv, **self.back)

    def poison(self) -> None:
        """Fill every result with NaN."""
        for x in (*self.results, self.log_sums):
            x.fill_(float("nan"))

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv."""
        dq, dk, dv = (x[0] for x in self.results[1:])
        return dq, dk, dv
