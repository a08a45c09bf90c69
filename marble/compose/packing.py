"""Plans as a few large buffers: what is pickled, pinned and sent to a GPU in one piece per type of tensor."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGN = 128
"""Bytes at whose multiples tensors begin."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A value and, apart from it, its tensors: one after the other in one buffer per type.

    Attributes:
        payload: the pickled value, which names its tensors by type, place and shape.
        buffers: one-dimensional tensors, by the name of their type.
    """

    payload: bytes
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, value: Any) -> Packed:
        """Pack a picklable value. Tensors that are one object stay one; equal values give equal bytes."""
        stream = io.BytesIO()
        pickler = _Pickler(stream, protocol=5)
        pickler.dump(value)
        return cls(stream.getvalue(), {name: torch.cat(parts) for name, parts in pickler.parts.items()})

    def unpack(self) -> Any:
        """The value, with tensors that are views of the buffers."""
        return _Unpickler(io.BytesIO(self.payload), self.buffers).load()

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """``change`` applied to every buffer."""
        return Packed(self.payload, {name: change(buffer) for name, buffer in self.buffers.items()})

    def __getstate__(self) -> dict[str, Any]:
        # As NumPy arrays: PyTorch's own pickles hold memory addresses, or file descriptors between processes.
        return {"payload": self.payload, "buffers": {name: buffer.numpy() for name, buffer in self.buffers.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = {name: torch.from_numpy(buffer) for name, buffer in state["buffers"].items()}
        self.__dict__.update(payload=state["payload"], buffers=buffers)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol=protocol)
        self.parts: dict[str, list[Tensor]] = {}
        self._places: dict[int, tuple[str, int, tuple[int, ...]]] = {}
        self._ends: dict[str, int] = {}
        self._alive: list[Tensor] = []  # an id belongs to an object only while it lives

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._places:
            name = str(value.dtype).removeprefix("torch.")
            start, parts = self._ends.get(name, 0), self.parts.setdefault(name, [])
            size, step = value.numel(), _ALIGN // value.element_size()
            parts += [value.detach().cpu().flatten(), value.new_zeros(-size % step, device="cpu")]
            self._ends[name] = start + -(-size // step) * step
            self._places[id(value)] = (name, start, tuple(value.shape))
            self._alive.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: dict[str, Tensor]) -> None:
        super().__init__(stream)
        self._buffers = buffers
        self._views: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}

    def persistent_load(self, place: tuple[str, int, tuple[int, ...]]) -> Tensor:
        if place not in self._views:
            name, start, shape = place
            self._views[place] = self._buffers[name][start : start + torch.Size(shape).numel()].view(shape)
        return self._views[place]
