"""A plan: which rank holds which tokens, and per layer what it does with them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from marble.comm import torch_dist
from marble.comm.choice import choose, connect
from marble.comm.groups import Group, process_group, sharing_heads
from marble.comm.transport import check_timeout
from marble.compose.packing import Packed
from marble.compose.schedule import Schedule
from marble.compose.shape import AttentionShape
from marble.layout import as_int
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder


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
        ulysses: how many neighbouring ranks share the heads of their tokens; 1 if none do.
        masks: per layer, the mask over the stored tokens; None once the plan has been pickled.
        mask: what a mask of the user's own computes, with its tracks, as a fingerprint; empty for the layout's modes.
    """

    order: TokenOrder
    layers: tuple[AttentionShape, ...]
    names: tuple[str, ...]
    schedules: tuple[Mapping[int, Schedule], ...]
    rank: int | None
    block: int
    ulysses: int = 1
    masks: tuple[StoredMask, ...] | None = None
    mask: bytes = b""

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

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks without work: none of the ranks that they share heads with has a token."""
        groups = [sum(self.order.lengths[rank : rank + self.ulysses]) for rank in range(0, self.world, self.ulysses)]
        return tuple(rank for rank in range(self.world) if not groups[rank // self.ulysses])

    def __str__(self) -> str:
        """One line: tokens, ranks, order and schedules, and who stays idle."""
        ranks = f"{self.world} ranks" if self.ulysses == 1 else f"{self.world // self.ulysses} × {self.ulysses} ranks"
        kinds = Counter(self.names)
        layers = ", ".join(name if len(kinds) == 1 else f"{name} × {count}" for name, count in kinds.items())
        idle = f"; ranks {list(self.idle)} have no work" if self.idle else ""
        return f"plan of {self.tokens} tokens on {ranks}, order {self.order.name}, schedule {layers}{idle}"

    @cached_property
    def index(self) -> Tensor:
        """Sequence positions of this process's tokens, int64 [local_tokens]; with virtual ranks, rank after rank."""
        if self.rank is None:
            return self._every_index
        with torch.inference_mode(False):  # it is kept, and may be needed for training later
            return self.order.index(self.rank)

    @cached_property
    def _every_index(self) -> Tensor:
        with torch.inference_mode(False):
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

    def unshard(self, x: Tensor, dim: int = 0, group: Group | None = None, timeout: timedelta | None = None) -> Tensor:
        """The inverse of `shard`: the full sequence in sequence order, on every rank.

        Args:
            x: [..., local_tokens, ...].
            dim: the token dimension.
            group: the plan's ranks, as for `marble.plan`; by default the default group. Unused with virtual ranks.
            timeout: how long to wait for other ranks; by default the group's own timeout.

        Raises:
            TypeError, ValueError: if ``x`` has another number of tokens, or would need gradients through other
                processes, or ``timeout`` is not a positive time.
            TransportError: if another rank fails, does not answer in time, or has rows of another type or size.
        """
        self._expect(x, dim, self.local_tokens, "unshard")
        check_timeout(timeout)
        if self.rank is None:
            gathered = x
        else:
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError("unshard: gradients do not pass between processes; call it on x.detach()")
            parts = torch_dist.gather(
                x.movedim(dim, 0), self.order.lengths, self.process_group(group), "tokens to unshard", timeout
            )
            gathered = torch.cat(parts).movedim(0, dim)
        return gathered.index_select(dim, torch.argsort(self._every_index).to(x.device))

    def synchronize(
        self,
        device: torch.device | str,
        group: Group | None = None,
        transport: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Wait on the host for this process's attention so far, and learn whether its results are to be trusted.

        Args:
            device: where it runs.
            group: as for `marble.attention`; so is ``transport``. Unused with virtual ranks.
            timeout: how long a CUDA graph may take that holds attention by ``nvshmem``; by default for ever. Calls
                outside of graphs have their own timeouts.

        Raises:
            TypeError, ValueError: if ``timeout`` is not a positive time.
            TransportError: if another rank failed.
        """
        check_timeout(timeout)
        device = torch.device(device)
        if self.rank is None:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            return
        name = choose(transport, virtual=False)
        connect(name, self.process_group(group), device).synchronize(timeout)

    def process_group(self, group: Group | None) -> dist.ProcessGroup:
        """The group to run this plan in; a group or a mesh, by default the default group.

        Raises:
            TypeError, ValueError: if there is none, or it is not the one that the plan was made for.
        """
        if group is None:
            if not dist.is_initialized():
                raise ValueError(
                    f"group: the plan is for rank {self.rank} of {self.world}, but torch.distributed is not "
                    "initialised; initialise it, or plan without rank to run virtual ranks"
                )
            group = dist.group.WORLD
        assert group is not None
        degree = sharing_heads(group)
        if degree not in (None, self.ulysses):
            raise ValueError(
                f"group: the plan has {self.ulysses} ranks share heads, the mesh has {degree} in its last dimension; "
                "plan for this mesh"
            )
        group = process_group(group)
        if (group.size(), group.rank()) != (self.world, self.rank):
            raise ValueError(
                f"group: the plan is for rank {self.rank} of {self.world}, the group has this process as rank "
                f"{group.rank()} of {group.size()}; plan for this group"
            )
        return group

    @cached_property
    def digest(self) -> Tensor:
        """A fingerprint of what all ranks must have planned alike, int64 [4]: order, layers, block and mask."""
        described = repr((self.order.name, self.world, self.ulysses, self.block, self.layers, self.names)).encode()
        storage = self.order.storage
        parts = (self.order.pieces, storage.span_order.cpu(), storage.layout.table.columns)
        return _sha(described, self.mask, *(part.numpy().tobytes() for part in parts))

    def digest_of(self, dtype: torch.dtype) -> Tensor:
        """The same, int64 [4], with the type of the inputs."""
        return _sha(self.digest.numpy().tobytes(), str(dtype).encode())

    def agree(
        self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, timeout: timedelta | None = None
    ) -> None:
        """Make sure that all ranks of a group planned the same. Costs messages once per digest, type and group.

        Args:
            group: the plan's ranks.
            device: where the group communicates from.
            dtype: of this rank's inputs, which must be everywhere the same.
            timeout: how long to wait for other ranks; by default the group's own timeout.

        Raises:
            ValueError: on every rank, if the plans or the types differ.
            TransportError: if another rank fails, or does not answer in time.
        """
        different = torch_dist.disagreeing(self.digest_of(dtype), device, group, timeout)
        if different:
            raise ValueError(
                f"plan: rank {self.rank} and ranks {different} planned different layouts, layers, orders or masks, or "
                f"have inputs of another type than {dtype}; every rank of a group must plan the same batch"
            )

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


def _sha(*parts: bytes) -> Tensor:
    """Their SHA-256, int64 [4]."""
    sha = hashlib.sha256(b"".join(parts))
    return torch.frombuffer(bytearray(sha.digest()), dtype=torch.int64)
