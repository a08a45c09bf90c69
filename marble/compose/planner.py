"""From a layout and a model's layers to a plan: one token order, and per layer one schedule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from marble.comm.groups import Group, process_group, sharing_heads
from marble.compose.builders import ORDERS, SCHEDULES, build
from marble.compose.plan import Plan
from marble.compose.schedule import Schedule
from marble.compose.schedules.ulysses import HeadSplit
from marble.compose.shape import AttentionShape
from marble.cost.estimate import Estimate
from marble.cost.profile import Profile
from marble.cost.select import Candidate, candidates
from marble.cost.select import estimates as layer_estimates
from marble.kernels.contract import MAX_BLOCK
from marble.layout import Layout, as_int
from marble.mask.algebra import MaskFn, and_masks
from marble.mask.domains import probe
from marble.mask.lowering import fingerprint
from marble.mask.modes import not_padding, packed_mask
from marble.mask.pieces import NotDenseError
from marble.mask.ranges import VisibleRanges
from marble.mask.storage import Storage
from marble.mask.tiles import StoredMask
from marble.mask.tracks import Tracks
from marble.order.set_apart import set_apart
from marble.order.token_order import TokenOrder

_MOST_TOKENS = 2**31 - 1
"""Positions and rows are int32."""


def plan(
    layout: Layout,
    layers: AttentionShape | Sequence[AttentionShape],
    *,
    ranks: int | None = None,
    rank: int | None = None,
    group: Group | None = None,
    schedule: str | Sequence[str] | Profile = "ring",
    order: str | None = None,
    ulysses: int | None = None,
    block: int = MAX_BLOCK,
    mask: MaskFn | None = None,
    tracks: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Plan:
    """Plan attention over one packed sequence. Every rank plans alone and comes to the same answer.

    Args:
        layout: the packed sequence.
        layers: the attention of each layer, or of the only one. They share one token order.
        ranks: number of ranks. Without ``rank``, this process runs all of them itself (virtual ranks).
        rank: the rank to plan for.
        group: a process group, instead of ``ranks`` and ``rank``; or one dimension of a ``DeviceMesh``; or two, the
            last of which holds the ranks that share heads. Two are flattened: the first time all
            ranks of the whole mesh must come here, as a process group is made.
        schedule: what moves between ranks, for all layers or one name per layer: ``ring`` (every shard visits every
            rank), ``sparse_a2a`` (each rank fetches the key blocks that its queries see; on a window layer, the last
            window), ``chunked`` (a ring of a few dense calls per step, for long bidirectional spans) or ``all_gather``
            (every rank fetches every key; a baseline). Or the profile of a machine
            (`marble.cost.profile.Profile.load`): what it expects to be fastest is taken, one schedule for each kind of
            layer, the order and the Ulysses degree; an order or a degree that is given is kept.
        order: how tokens are dealt to ranks: ``ptrr`` (even work in every ring step), ``chunks`` (large contiguous
            chunks, even work in every step), ``balanced_samples`` (whole samples, even work and even tokens) or
            ``contiguous``. By default ``chunks`` if a layer is chunked, else ``ptrr`` if one is a ring, else
            ``balanced_samples``.
        ulysses: ranks that share the heads of their tokens: groups of so many neighbouring ranks exchange tokens for
            heads before and after attention, and the schedule runs between the groups. It divides the number of ranks
            and every layer's query heads; key/value heads are copied where it does not divide those. By default 1, or
            what a mesh of two dimensions says.
        block: tokens of a tile's block, 1 to 128. Small blocks let short sequences spread over many ranks.
        mask: a mask of one's own, ``mask(q, k)`` over token tracks (see `marble.mask.algebra`), instead of the
            layout's modes. Padding stays invisible.
        tracks: further integer tracks [tokens] by name, for ``mask``.
        device: where to plan, and where the tile lists will lie. The plan is the same; a data loader's worker plans on
            the CPU, and so does every plan with chunks or dense calls, whatever the device.

    Raises:
        TypeError, ValueError: if an argument is not what it must be; the message names it.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: expected marble.Layout, got {type(layout).__name__}")
    if layout.tokens > _MOST_TOKENS:
        raise ValueError(f"layout: {layout.tokens} tokens are more than {_MOST_TOKENS}, which positions are counted to")
    device = _as_device(device)
    # A device context slows every call down, so it is entered only where the caller has another default device. Plans
    # are kept, and one that is made while evaluating may be needed for training.
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with on_cpu, torch.inference_mode(False):
        where, ulysses = _resolve_ranks(ranks, rank, group), _resolve_degree(ulysses, group)
        if isinstance(schedule, Profile):
            wanted = replace(_wanted(layout, layers, where, order, ulysses, block), digest=layout.digest)
            chosen = _chosen(wanted, schedule) if mask is None else _choose(wanted, schedule, mask, tracks)[0]
            schedule, order, ulysses = chosen.schedules, chosen.order, chosen.ulysses
        degree = 1 if ulysses is None else ulysses
        request = _request(layout, layers, where, schedule, order, degree, block, device)
        if mask is None and tracks is None:
            made = _kept(replace(request, digest=layout.digest))
        else:
            made = _make(request, mask, tracks)
    if made.idle:
        warnings.warn(
            f"marble.plan: ranks {list(made.idle)} get no tokens ({made.tokens} tokens in blocks of {made.block} on "
            f"{made.world} ranks)",
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
    ulysses: int
    block: int
    device: torch.device


def _request(
    layout: Layout,
    layers: AttentionShape | Sequence[AttentionShape],
    where: tuple[int, int | None],
    schedule: str | Sequence[str],
    order: str | None,
    ulysses: int,
    block: int,
    device: torch.device,
) -> _Request:
    layers = (layers,) if isinstance(layers, AttentionShape) else _as_layers(layers)
    world, rank = where
    _check_degree(ulysses, world, layers)
    block = as_int(block, "block")
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"block: expected 1 to {MAX_BLOCK} tokens, got {block}")
    names = _resolve_schedules(schedule, len(layers))
    order = usual_order(names) if order is None else order
    if not isinstance(order, str):
        raise TypeError(f"order: expected a name, got {type(order).__name__}")
    if order not in ORDERS:
        raise ValueError(f"order: {order!r} is unknown; use one of {', '.join(map(repr, ORDERS))}")
    return _Request(layout, b"", layers, world, rank, names, order, ulysses, block, device)


def usual_order(schedules: Sequence[str]) -> str:
    """The token order for some layers' schedules where none is named."""
    return "chunks" if "chunked" in schedules else "ptrr" if "ring" in schedules else "balanced_samples"


@lru_cache(maxsize=8)
def _kept(request: _Request) -> Plan:
    return _make(request, None, None)


def forget() -> None:
    """Forget the kept plans and choices."""
    _kept.cache_clear()
    _chosen.cache_clear()


def ranking(
    layout: Layout,
    layers: AttentionShape | Sequence[AttentionShape],
    ranks: int,
    profile: Profile,
    *,
    order: str | None = None,
    ulysses: int | None = None,
    block: int = MAX_BLOCK,
) -> list[Candidate]:
    """What `plan` chooses among for a profile, the fastest first. Arguments as there."""
    where = _resolve_ranks(ranks, None, None)
    return _choose(_wanted(layout, layers, where, order, _resolve_degree(ulysses, None), block), profile, None, None)


def estimates(
    layout: Layout,
    layer: AttentionShape,
    ranks: int,
    *,
    order: str,
    ulysses: int = 1,
    block: int = MAX_BLOCK,
    gpus_per_node: int,
) -> dict[str, Estimate]:
    """What every rank does in one layer under one token order, by the names of the schedules that it can have there.

    Arguments as for `plan`; neighbouring ranks share a node, ``gpus_per_node`` each. The loads are those of groups of
    ranks that share heads.
    """
    where = _resolve_ranks(ranks, None, None)
    request = _request(layout, layer, where, "ring", order, ulysses, block, torch.device("cpu"))
    masks = _stored_masks(layout, request.layers, None, None, request.device)
    try:
        groups = ORDERS[order](masks, request.world // request.ulysses, request.block)
    except NotDenseError:
        return {}
    return dict(layer_estimates(masks[0], layer, groups, request.ulysses, request.block, gpus_per_node))


def _wanted(
    layout: Layout,
    layers: AttentionShape | Sequence[AttentionShape],
    where: tuple[int, int | None],
    order: str | None,
    ulysses: int | None,
    block: int,
) -> _Request:
    """A request for a choice, all checked: an empty order and a degree of 0 are free."""
    degree = 1 if ulysses is None else ulysses
    request = _request(layout, layers, where, "ring", order, degree, block, torch.device("cpu"))
    return replace(request, order="" if order is None else order, ulysses=0 if ulysses is None else degree)


@lru_cache(maxsize=8)
def _chosen(request: _Request, profile: Profile) -> Candidate:
    return _choose(request, profile, None, None)[0]


def _choose(
    request: _Request, profile: Profile, mask: MaskFn | None, tracks: Mapping[str, Tensor] | None
) -> list[Candidate]:
    """All candidates for a request of `_wanted`."""
    masks = _stored_masks(request.layout, request.layers, mask, tracks, torch.device("cpu"))
    orders = (request.order,) if request.order else tuple(ORDERS)
    shared = gcd(request.world, *(shape.heads for shape in request.layers))
    degrees = [d for d in range(1, shared + 1) if not shared % d and request.ulysses in (0, d)]
    return candidates(masks, request.layers, request.world, request.block, profile, orders, degrees)


def _make(request: _Request, mask: MaskFn | None, tracks: Mapping[str, Tensor] | None) -> Plan:
    layers, names, block, ulysses = request.layers, request.names, request.block, request.ulysses
    # What dense calls can express is looked at span by span, by the host.
    on_host = request.order == "chunks" or "chunked" in names
    where = torch.device("cpu") if on_host else request.device
    _expect_device(where)
    masks = _stored_masks(request.layout, layers, mask, tracks, where)
    try:
        groups = ORDERS[request.order](masks, request.world // ulysses, block)
    except NotDenseError as error:
        if "chunked" in names:
            raise ValueError(f"schedule: layer {names.index('chunked')} cannot be 'chunked': {error}") from None
        raise ValueError(f"order: {request.order!r} needs a mask that dense calls can express, but {error}") from None
    dealt = groups if ulysses == 1 else groups.split(ulysses)
    mine = range(request.world) if request.rank is None else (request.rank,)
    schedules = _build(groups, dealt, layers, names, masks, mine, block)
    said = b"" if mask is None else fingerprint(mask, Tracks.of(request.layout, tracks))
    return Plan(dealt, layers, names, schedules, request.rank, block, ulysses, masks, said)


def _build(
    groups: TokenOrder,
    order: TokenOrder,
    layers: Sequence[AttentionShape],
    names: Sequence[str],
    masks: Sequence[StoredMask],
    ranks: Sequence[int],
    block: int,
) -> tuple[Mapping[int, Schedule], ...]:
    """Per layer the schedules of some ranks; layers that are alike share theirs, and so do the ranks of a group."""
    degree = order.world // groups.world
    built: dict[tuple[str, int, int, int], Mapping[int, Schedule]] = {}
    found: list[Mapping[int, Schedule]] = []
    for shape, mask, name in zip(layers, masks, names, strict=True):
        key = (name, id(mask), shape.heads, shape.kv_heads)
        if key not in built:
            try:
                split = HeadSplit(shape.heads, shape.kv_heads, degree)
                built[key] = build(name, groups, order, mask, block, split, ranks)
            except NotDenseError as error:
                raise ValueError(f"schedule: layer {len(found)} cannot be {name!r}: {error}") from None
        found.append(built[key])
    return tuple(found)


def _as_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        raise ValueError(f"device: expected a device such as 'cpu' or 'cuda', got {device!r}") from None


def _expect_device(device: torch.device) -> None:
    """Refuse a device where nothing can be planned."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: plans are made on 'cpu' or 'cuda', not on {device.type!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device: {str(device)!r} is not here; PyTorch finds {count} GPUs")


def _resolve_degree(ulysses: int | None, group: Group | None) -> int | None:
    said = None if group is None else sharing_heads(group)
    if ulysses is None:
        return said
    ulysses = as_int(ulysses, "ulysses")
    if said not in (None, ulysses):
        raise ValueError(
            f"ulysses: {ulysses} differs from the {said} ranks in the last dimension of the mesh; leave it out, or "
            "give a group or a mesh of one dimension"
        )
    return ulysses


def _check_degree(degree: int, world: int, layers: Sequence[AttentionShape]) -> None:
    if degree < 1:
        raise ValueError(f"ulysses: must be at least 1, got {degree}")
    shared = gcd(world, *(shape.heads for shape in layers))
    fits = [other for other in range(1, shared + 1) if not shared % other]
    nearest = min(fits, key=lambda other: (abs(other - degree), -other))
    if world % degree:
        raise ValueError(f"ulysses: {degree} does not divide {world} ranks; the nearest degree that works is {nearest}")
    for index, shape in enumerate(layers):
        if shape.heads % degree:
            raise ValueError(
                f"ulysses: {degree} ranks cannot share the {shape.heads} query heads of layer {index} evenly; the "
                f"nearest degree that works is {nearest}"
            )


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


def _resolve_ranks(ranks: int | None, rank: int | None, group: Group | None) -> tuple[int, int | None]:
    if group is not None:
        if ranks is not None or rank is not None:
            raise ValueError("group: give either a group or ranks and rank, not both")
        members = process_group(group)
        return members.size(), members.rank()
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
    known = VisibleRanges(storage) if mask is None else None
    for window in windows:
        if window not in built:
            ranges = None if known is None else known.with_window(window)
            pairs = and_masks(packed_mask(window) if mask is None else mask, not_padding)
            built[window] = StoredMask(storage, pairs, ranges, tracks)
    return tuple(built[window] for window in windows)
