"""From a layout and a model's layers to a plan: one token order, and per layer one schedule."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from marble.compose.packing import Packed
from marble.compose.schedule import Schedule
from marble.compose.schedules.fetch import all_gather, sparse_a2a
from marble.compose.schedules.ring import ring
from marble.kernels.contract import MAX_BLOCK
from marble.layout import Layout, as_int
from marble.mask.algebra import MaskFn, and_masks
from marble.mask.domains import probe
from marble.mask.modes import not_padding, packed_mask
from marble.mask.ranges import VisibleRanges
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.mask.tracks import Tracks
from marble.order.balanced_samples import balanced_samples
from marble.order.contiguous import contiguous
from marble.order.ptrr import ptrr
from marble.order.set_apart import set_apart
from marble.order.token_order import TokenOrder


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
            if as_int(value, f"AttentionShape.{name}") < 1:
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

    @property
    def softmax_scale(self) -> float:
        """The scale that multiplies q · k."""
        return self.head_dim**-0.5 if self.scale is None else float(self.scale)


@dataclass(frozen=True, eq=False)
class Plan:
    """What `attention` needs to know about one packed batch. Made by `plan`; picklable.

    Attributes:
        order: which rank holds which tokens.
        layers: the layers that it was made for.
        names: the name of each layer's schedule.
        schedules: per layer the schedules of the ranks that this process runs, by rank. Layers that are alike share
            one.
        rank: this process's rank, or None if it runs all ranks (virtual ranks).
        block: rows of a tile's block.
        masks: per layer, the mask over the stored tokens; None once the plan has been pickled.
    """

    order: TokenOrder
    layers: tuple[AttentionShape, ...]
    names: tuple[str, ...]
    schedules: tuple[Mapping[int, Schedule], ...]
    rank: int | None
    block: int
    masks: tuple[StoredMask, ...] | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.order.world

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence."""
        return self.order.storage.layout.tokens

    @property
    def local_tokens(self) -> int:
        """Tokens that this process holds: its rank's, or all of them with virtual ranks."""
        return self.tokens if self.rank is None else self.order.lengths[self.rank]

    @cached_property
    def index(self) -> Tensor:
        """Sequence positions of this process's tokens, int64 [local_tokens]; with virtual ranks, rank after rank."""
        return self._every_index if self.rank is None else self.order.index(self.rank)

    @cached_property
    def _every_index(self) -> Tensor:
        return torch.cat([self.order.index(rank) for rank in range(self.world)])

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This process's tokens of a full-sequence tensor: activations, positions, labels alike.

        Args:
            x: [..., tokens, ...] in sequence order, on any device.
            dim: the token dimension.

        Raises:
            ValueError: if ``x`` has another number of tokens.
        """
        self._expect(x, dim, self.tokens, "shard")
        return x.index_select(dim, self.index.to(x.device))

    def unshard(self, x: Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
        """The inverse of `shard`: the full sequence in sequence order, on every rank.

        Args:
            x: [..., local_tokens, ...].
            dim: the token dimension.
            group: the process group of the plan's ranks; by default the default group. Unused with virtual ranks.

        Raises:
            ValueError: if ``x`` has another number of tokens, or would need gradients through other processes.
        """
        self._expect(x, dim, self.local_tokens, "unshard")
        if self.rank is None:
            gathered = x
        else:
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError("unshard: gradients do not pass between processes; call it on x.detach()")
            gathered = self._gather(x.movedim(dim, 0), self.process_group(group)).movedim(0, dim)
        return gathered.index_select(dim, torch.argsort(self._every_index).to(x.device))

    def process_group(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The group to run this plan in.

        Raises:
            ValueError: if there is none, or it is not the one that the plan was made for.
        """
        if group is None:
            if not dist.is_initialized():
                raise ValueError(
                    f"group: the plan is for rank {self.rank} of {self.world}, but torch.distributed is not "
                    "initialised; initialise it, or plan without rank to run virtual ranks"
                )
            group = dist.group.WORLD
        assert group is not None
        if (group.size(), group.rank()) != (self.world, self.rank):
            raise ValueError(
                f"group: the plan is for rank {self.rank} of {self.world}, the group has this process as rank "
                f"{group.rank()} of {group.size()}; plan for this group"
            )
        return group

    @cached_property
    def digest(self) -> Tensor:
        """A fingerprint of what all ranks must have planned alike, int64 [4]: order, layers and block."""
        described = repr((self.order.name, self.world, self.block, self.layers, self.names)).encode()
        storage = self.order.storage
        parts = (self.order.pieces, storage.span_order.cpu(), *vars(storage.layout.table).values())
        sha = hashlib.sha256(described + b"".join(part.numpy().tobytes() for part in parts))
        return torch.frombuffer(bytearray(sha.digest()), dtype=torch.int64)

    def agree(self, group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        """Make sure, once per plan and group, that all ranks of the group planned the same; returns the group.

        Raises:
            ValueError: on every rank, if the plans differ.
        """
        agreed = self.__dict__.setdefault("_agreed", set())
        if group not in agreed:
            mine = self.digest.to(device)
            digests = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(digests, mine, group=group)
            different = [rank for rank, digest in enumerate(digests) if not torch.equal(digest, mine)]
            if different:
                raise ValueError(
                    f"plan: rank {self.rank} and ranks {different} planned different layouts, layers or orders; every "
                    "rank of a group must plan the same batch"
                )
            agreed.add(group)
        return group

    def _gather(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        most = max(self.order.lengths)
        padded = torch.cat([x, x.new_zeros(most - x.shape[0], *x.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:length] for part, length in zip(parts, self.order.lengths, strict=True)])

    def _expect(self, x: Tensor, dim: int, tokens: int, name: str) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        dim = as_int(dim, f"{name}: dim")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"{name}: dim {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
        if x.shape[dim] != tokens:
            raise ValueError(
                f"{name}: the plan expects {tokens} tokens in dimension {dim}, got {x.shape[dim]}; plan for this layout"
            )

    @cached_property
    def _packed(self) -> Packed:
        return Packed.of(self.schedules)

    def pin_memory(self) -> Plan:
        """The plan with what a GPU needs of it in pinned memory, so that it travels while the GPU works.

        ``DataLoader(..., pin_memory=True)`` calls this for plans that its workers made.
        """
        pinned = replace(self)
        pinned.__dict__["_packed"] = self._packed.map(Tensor.pin_memory)
        return pinned

    def schedules_on(self, device: torch.device) -> tuple[Mapping[int, Schedule], ...]:
        """The schedules with their tile lists on a device: copied once, in one piece, and not waited for."""
        if device == self.order.storage.device:
            return self.schedules
        moved = self.__dict__.setdefault("_moved", {})
        if device not in moved:
            moved[device] = self._packed.map(lambda buffer: buffer.to(device, non_blocking=True)).unpack()
        return moved[device]

    def __getstate__(self) -> dict[str, Any]:
        # Masks may be lambdas, and everything cached derives from the fields.
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__} | {"masks": None}
        return {"packed": Packed.of(fields)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["packed"].unpack())


def plan(
    layout: Layout,
    layers: AttentionShape | Sequence[AttentionShape],
    *,
    ranks: int | None = None,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
    schedule: str | Sequence[str] = "ring",
    order: str | None = None,
    block: int = MAX_BLOCK,
    mask: MaskFn | None = None,
    tracks: Mapping[str, Tensor] | None = None,
    cache: bool = True,
    device: torch.device | str = "cpu",
) -> Plan:
    """Plan attention over one packed sequence. Every rank plans alone and comes to the same answer.

    Args:
        layout: the packed sequence.
        layers: the attention of each layer, or of the only one. They share one token order.
        ranks: number of ranks. Without ``rank``, this process runs all of them itself (virtual ranks).
        rank: the rank to plan for.
        group: a process group, instead of ``ranks`` and ``rank``.
        schedule: what moves between ranks, for all layers or one name per layer: ``ring`` (every shard visits every
            rank), ``sparse_a2a`` (each rank fetches the key blocks that its queries see; on a window layer, the last
            window) or ``all_gather`` (every rank fetches every key; a baseline).
        order: how tokens are dealt to ranks: ``ptrr`` (even work in every ring step), ``balanced_samples`` (whole
            samples, even work and even tokens) or ``contiguous``. By default ``ptrr`` if a layer is a ring, else
            ``balanced_samples``.
        block: tokens of a tile's block, 1 to 128. Small blocks let short sequences spread over many ranks.
        mask: a mask of one's own, ``mask(q, k)`` over token tracks (see `marble.mask.algebra`), instead of the
            layout's modes. Padding stays invisible.
        tracks: further integer tracks [tokens] by name, for ``mask``.
        cache: keep the plan, and answer with a kept one if this process planned the same before; the last
            8 are kept. Plans with a mask of one's own are not.
        device: where to plan, and where the tile lists will lie. The plan is the same; a data loader's worker plans on
            the CPU.

    Raises:
        TypeError, ValueError: if an argument is not what it must be; the message names it.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: expected marble.Layout, got {type(layout).__name__}")
    # A device context slows every call down, so it is entered only where the caller has another default device.
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with on_cpu:
        request = _request(layout, layers, (ranks, rank, group), schedule, order, block, torch.device(device))
        if cache and mask is None and tracks is None:
            made = _kept(replace(request, digest=layout.digest))
        else:
            made = _make(request, mask, tracks)
    idle = [other for other, length in enumerate(made.order.lengths) if length == 0]
    if idle:
        warnings.warn(
            f"marble.plan: ranks {idle} get no tokens ({made.tokens} tokens in blocks of {made.block} on {made.world} "
            "ranks)",
            stacklevel=2,
        )
    return made


@dataclass(frozen=True)
class _Request:
    """What a plan is made from, all checked. Requests are equal if their layouts' digests and all else are."""

    layout: Layout = field(compare=False)
    digest: bytes
    layers: tuple[AttentionShape, ...]
    world: int
    rank: int | None
    names: tuple[str, ...]
    order: str
    block: int
    device: torch.device


def _request(
    layout: Layout,
    layers: AttentionShape | Sequence[AttentionShape],
    where: tuple[int | None, int | None, dist.ProcessGroup | None],
    schedule: str | Sequence[str],
    order: str | None,
    block: int,
    device: torch.device,
) -> _Request:
    layers = (layers,) if isinstance(layers, AttentionShape) else _as_layers(layers)
    world, rank = _resolve_ranks(*where)
    block = as_int(block, "block")
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"block: expected 1 to {MAX_BLOCK} tokens, got {block}")
    names = _resolve_schedules(schedule, len(layers))
    if order is None:
        order = "ptrr" if "ring" in names else "balanced_samples"
    if not isinstance(order, str):
        raise TypeError(f"order: expected a name, got {type(order).__name__}")
    if order not in ORDERS:
        raise ValueError(f"order: {order!r} is unknown; use one of {', '.join(map(repr, ORDERS))}")
    return _Request(layout, b"", layers, world, rank, names, order, block, device)


@lru_cache(maxsize=8)
def _kept(request: _Request) -> Plan:
    return _make(request, None, None)


def _make(request: _Request, mask: MaskFn | None, tracks: Mapping[str, Tensor] | None) -> Plan:
    masks = _stored_masks(request.layout, request.layers, mask, tracks, request.device)
    block = request.block
    dealt = ORDERS[request.order](masks, request.world, block)
    mine = range(request.world) if request.rank is None else (request.rank,)
    built: dict[tuple[str, int, int, int], Mapping[int, Schedule]] = {}
    schedules = []
    for shape, stored, name in zip(request.layers, masks, request.names, strict=True):
        key = (name, id(stored), shape.heads, shape.kv_heads)
        if key not in built:
            build = SCHEDULES[name]
            built[key] = {other: build(dealt, stored, other, block, shape.heads, shape.kv_heads) for other in mine}
        schedules.append(built[key])
    return Plan(dealt, request.layers, request.names, tuple(schedules), request.rank, block, masks)


def _resolve_schedules(schedule: str | Sequence[str], layers: int) -> tuple[str, ...]:
    """One schedule name per layer."""
    if not isinstance(schedule, str | Sequence) or not all(isinstance(name, str) for name in schedule):
        raise TypeError(f"schedule: expected a name or one name per layer, got {schedule!r}")
    names = (schedule,) * layers if isinstance(schedule, str) else tuple(schedule)
    if len(names) != layers:
        raise ValueError(f"schedule: {len(names)} names for {layers} layers; give one name, or one per layer")
    for name in names:
        if name not in SCHEDULES:
            raise ValueError(f"schedule: {name!r} is unknown; use one of {', '.join(map(repr, SCHEDULES))}")
    return names


def _as_layers(layers: Sequence[AttentionShape]) -> tuple[AttentionShape, ...]:
    if not isinstance(layers, Sequence) or not all(isinstance(shape, AttentionShape) for shape in layers):
        raise TypeError("layers: expected an AttentionShape or a sequence of them")
    if not layers:
        raise ValueError("layers: a plan needs at least one layer")
    return tuple(layers)


def _resolve_ranks(ranks: int | None, rank: int | None, group: dist.ProcessGroup | None) -> tuple[int, int | None]:
    if group is not None:
        if ranks is not None or rank is not None:
            raise ValueError("group: give either a group or ranks and rank, not both")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: expected a process group that this process is in, got {type(group).__name__}")
        return group.size(), group.rank()
    if ranks is None:
        raise ValueError("ranks: say how many ranks share the sequence, or give their process group")
    world = as_int(ranks, "ranks")
    if world < 1:
        raise ValueError(f"ranks: must be at least 1, got {world}")
    if rank is not None:
        rank = as_int(rank, "rank")
        if not 0 <= rank < world:
            raise ValueError(f"rank: must be 0 to {world - 1}, got {rank}")
    return world, rank


def _stored_masks(
    layout: Layout,
    layers: Sequence[AttentionShape],
    mask: MaskFn | None,
    tracks: Mapping[str, Tensor] | None,
    device: torch.device,
) -> tuple[StoredMask, ...]:
    """Each layer's mask over one storage order; equal masks are one object."""
    if mask is not None and not callable(mask):
        raise TypeError(f"mask: expected a function of (q, k), got {type(mask).__name__}")
    if mask is None and tracks is not None:
        raise ValueError("tracks: only a mask of one's own reads them; give mask too, or leave tracks out")
    windows = [shape.window for shape in layers]
    if mask is not None and any(window is not None for window in windows):
        raise ValueError("mask: a mask of one's own replaces the window too; put the window into the mask")
    natural = mask is not None or any(window is not None for window in windows)
    storage = Storage.natural(layout, device) if natural else set_apart(layout, device)
    if mask is not None:
        probe(mask, Tracks.of(layout, tracks))
    built: dict[int | None, StoredMask] = {}
    for window in windows:
        if window not in built:
            ranges = VisibleRanges(storage, window) if mask is None else None
            pairs = and_masks(packed_mask(window) if mask is None else mask, not_padding)
            built[window] = StoredMask(storage, pairs, ranges, tracks)
    return tuple(built[window] for window in windows)


def _block_costs(masks: Sequence[StoredMask], block: int) -> Tensor:
    """Visited tiles of each stored query block for each distinct mask, int64 [masks, blocks]."""
    return torch.stack([mask.work(block) for mask in {id(mask): mask for mask in masks}.values()])


def _deal_contiguous(masks: Sequence[StoredMask], world: int, block: int) -> TokenOrder:
    storage = masks[0].storage
    ranks = contiguous(-(-storage.layout.tokens // block), world)
    return TokenOrder.of_blocks("contiguous", storage, world, ranks, block)


def _deal_ptrr(masks: Sequence[StoredMask], world: int, block: int) -> TokenOrder:
    ranks = ptrr(_block_costs(masks, block), world)
    return TokenOrder.of_blocks("ptrr", masks[0].storage, world, ranks, block)


def _deal_balanced_samples(masks: Sequence[StoredMask], world: int, block: int) -> TokenOrder:
    storage = masks[0].storage
    work = _block_costs(masks, block).cpu().repeat_interleave(block, 1)[:, : storage.layout.tokens]
    pieces = balanced_samples(storage.layout.sample_bounds, work, world, block)
    return TokenOrder("balanced_samples", storage, world, pieces)


ORDERS: Mapping[str, Callable[[Sequence[StoredMask], int, int], TokenOrder]] = {
    "ptrr": _deal_ptrr,
    "balanced_samples": _deal_balanced_samples,
    "contiguous": _deal_contiguous,
}

SCHEDULES: Mapping[str, Callable[[TokenOrder, StoredMask, int, int, int, int], Schedule]] = {
    "ring": ring,
    "sparse_a2a": sparse_a2a,
    "all_gather": all_gather,
}
