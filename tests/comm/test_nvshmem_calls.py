"""What the NVSHMEM wires ask of NVSHMEM, on memory that plays the symmetric heaps of three ranks: no GPU is needed."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_wires import SharedWires
from test_one_sided import LAYOUTS, layer, plan_of, virtually
from test_one_sided import inputs as inputs_of

from marble.comm.nvshmem import NvshmemWires
from marble.comm.one_sided import OneSided, Piece, Signal
from marble.comm.transport import Operation

SET, EQUAL = 9, 0


class Calls:
    """NVSHMEM's calls on streams, done by `SharedWires` of the same rank: addresses become bytes of shared memory."""

    def __init__(self, shared: SharedWires, heap: int, flags: int) -> None:
        self.shared, self.heap, self.flags = shared, heap, flags

    def ptr(self, address: int, peer: int) -> int:
        del peer
        return address

    def signal_op_on_stream(self, address: int, value: int, operation: int, peer: int, stream: int) -> None:
        assert (operation, stream) == (SET, 7)
        flag = self.shared.flags[peer].view(-1)
        at, odd = divmod(address - self.flags, 8)
        assert not odd
        self.shared.lane.enqueue(lambda: flag.__setitem__(at, value))

    def signal_wait_until_on_stream(self, address: int, comparison: int, value: int, stream: int) -> None:
        assert (comparison, stream) == (EQUAL, 7)
        signal, peer = divmod((address - self.flags) // 8, len(self.shared.flags))
        self.shared.wait(peer, Signal(signal), value, 1)

    def putmem_on_stream(self, target: int, source: int, nbytes: int, peer: int, stream: int) -> None:
        assert stream == 7
        here = self.shared.memories[self.shared.rank][source - self.heap :][:nbytes]
        there = self.shared.memories[peer][target - self.heap :][:nbytes]
        self.shared.lane.enqueue(lambda: there.copy_(here))

    def putmem_signal_on_stream(self, target: int, source: int, nbytes: int, *rest: int) -> None:
        address, value, operation, peer, stream = rest
        self.putmem_on_stream(target, source, nbytes, peer, stream)
        self.signal_op_on_stream(address, value, operation, peer, stream)


def wires_of(folder: Path, rank: int, world: int) -> NvshmemWires:
    """Wires as after their start. Heaps and flags have other addresses on every rank, as real ones do."""
    shared = SharedWires(folder, rank, world)
    memory = torch.empty(8 * (2 * world + rank), dtype=torch.uint8)[8 * rank :]
    wires: Any = object.__new__(NvshmemWires)
    wires.rank, wires.timeout, wires.watchdog = rank, timedelta(seconds=30), shared.watchdog
    wires.lane = shared.lane
    wires.lane.stream = SimpleNamespace(cuda_stream=7)
    wires._rescue = SimpleNamespace(cuda_stream=7)
    wires._group = lambda: SimpleNamespace(size=lambda: world)
    wires._arena, wires._flags = SimpleNamespace(reserve=shared.reserve), memory
    wires._set, wires._equal = SET, EQUAL
    wires._calls = Calls(shared, shared.reserve(0).data_ptr(), memory.data_ptr())
    wires.global_rank = lambda peer: peer
    return wires


@pytest.mark.parametrize(("schedule", "ulysses"), [("ring", 1), ("sparse_a2a", 2)])
def test_bits_of_virtual_ranks(schedule: str, ulysses: int, tmp_path: Path) -> None:
    plan = plan_of(LAYOUTS[0], schedule, ulysses, 3)
    answers: dict[int, list[torch.Tensor]] = {}

    def work(rank: int) -> None:
        connection = OneSided(wires_of(tmp_path, rank, plan.world))
        for _ in range(2):
            answers[rank] = layer(
                plan.schedules[0][rank],
                inputs_of(plan, torch.float32)[rank],
                lambda program, name: connection.run(program, Operation(name)),
                reserve=connection.reserve,
            )

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(plan.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank, expected in enumerate(virtually(plan, torch.float32)):
        assert all(map(torch.equal, answers[rank], expected)), rank


def test_a_wait_is_released_by_its_own_value(tmp_path: Path) -> None:
    wires = wires_of(tmp_path, 1, 3)
    wires.wait(2, Signal.FREE, 12345, 1)
    done = wires.lane.mark()
    assert not done.query()
    # The rescue stream is not held up by the lane.
    rescued = wires_of(tmp_path, 1, 3)
    rescued.release(2, Signal.FREE, 12345)
    assert done.happened.wait(5)  # type: ignore[attr-defined]


def test_several_pieces_are_signalled_once(tmp_path: Path) -> None:
    wires = wires_of(tmp_path, 0, 2)
    memory = wires.reserve(0)
    memory[:9] = torch.arange(1, 10)
    wires.send(1, [Piece(0, 100, 4), Piece(4, 200, 5)], 77)
    wires.lane.join()
    shared = SharedWires(tmp_path, 1, 2)
    assert shared.memories[1][100:104].tolist() == [1, 2, 3, 4]
    assert shared.memories[1][200:205].tolist() == [5, 6, 7, 8, 9]
    assert shared.flags[1].tolist() == [[0, 0], [77, 0]]
