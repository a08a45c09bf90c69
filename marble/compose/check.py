"""Proving schedules right without running them.

The checker walks the schedules of all ranks step by step and keeps, instead of numbers, what every buffer row holds:
which token's keys, and which ranks' shares of which token's gradients. From that it shows that

- every legal pair is computed exactly once, forward and backward, and no other pair is;
- a query row's state is begun once and finished once, and every output row is written;
- every share of a gradient reaches its home exactly once;
- no row is written while it is in flight, none is read before it arrives, and both ends list the same transfers.

It also reports how many received rows nobody read or forwarded. Cost: one comparison per token pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble.compose.schedule import Call, Kind, Pass, Rows, Schedule, Step, Transfer
from marble.kernels.contract import Band, Tiles, Touch, Varlen
from marble.kernels.predicates import covered
from marble.mask.domains import dense
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder

_NOTHING = -1
_INPUTS = ("kv", "q", "dout", "lse", "delta")
"""What a pass is handed. Content names both the token and which of these it is: token + index · tokens."""
_STRIP = 2048


class ScheduleError(ValueError):
    """A schedule that would compute something wrong."""


@dataclass(frozen=True)
class Report:
    """What the checker found about schedules that are right.

    Attributes:
        pairs: legal pairs, each computed once forward and once backward.
        received_rows: key/value rows that arrived from other ranks, over all ranks, forward.
        unused_rows: those of them that the rank neither read nor forwarded.
    """

    pairs: int
    received_rows: int
    unused_rows: int


def check(schedules: Sequence[Schedule], order: TokenOrder, mask: StoredMask) -> Report:
    """Prove the schedules of all ranks right for a mask, or raise.

    Args:
        schedules: one per rank, by rank.
        order: the token order that they were built for.
        mask: the mask that they were built for.

    Raises:
        ScheduleError: with the rank, the pass, the step and what is wrong.
    """
    world = len(schedules)
    if [schedule.rank for schedule in schedules] != list(range(world)) or order.world != world:
        raise ScheduleError(f"check: expected the schedules of the ranks 0 to {order.world - 1} in order")
    shards = [order.shard(rank) for rank in range(world)]
    if any(schedule.tokens != order.lengths for schedule in schedules):
        raise ScheduleError("check: the schedules were built for another token order")
    forward = _Walk([schedule.forward for schedule in schedules], shards, mask, "forward")
    forward.run()
    _Walk([schedule.backward for schedule in schedules], shards, mask, "backward").run()
    return Report(forward.pairs, forward.received, forward.unused)


class _Rank:
    """What one rank's buffers hold, row by row."""

    def __init__(self, which: Pass, tokens: Tensor, world: int, total: int, inputs: tuple[str, ...]) -> None:
        self.tokens = tokens
        self.total = total
        self.kinds = {buffer.name: buffer.kind for buffer in which.buffers}
        sizes = {buffer.name: buffer.rows for buffer in which.buffers}
        # Pairs: the storage position of the token whose key lies there. Sums: the token, and the ranks added so far.
        self.content = {name: torch.full((size,), _NOTHING) for name, size in sizes.items()}
        self.shares = {name: torch.zeros(size, world, dtype=torch.bool) for name, size in sizes.items()}
        self.ready = {name: torch.zeros(size, dtype=torch.bool) for name, size in sizes.items()}
        self.unread = {name: torch.zeros(size, dtype=torch.bool) for name, size in sizes.items()}
        self.counts = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
        for name in set(inputs) & set(sizes):
            self.content[name][: len(tokens)] = tokens + _INPUTS.index(name) * total
            self.ready[name][: len(tokens)] = True
        self.begun = torch.zeros(len(tokens), dtype=torch.bool)
        self.written = {name: torch.zeros(len(tokens), dtype=torch.int64) for name in ("out", "lse")}
        self.computed: list[tuple[Call, Tensor]] = []


class _Walk:
    def __init__(self, passes: list[Pass], shards: list[Tensor], mask: StoredMask, name: str) -> None:
        self.passes, self.shards, self.mask, self.name = passes, shards, mask, name
        inputs = ("q", "kv") if name == "forward" else _INPUTS
        total = sum(map(len, shards))
        self.ranks = [
            _Rank(which, shard, len(passes), total, inputs) for which, shard in zip(passes, shards, strict=True)
        ]
        self.touches = torch.zeros(total, dtype=torch.int64)
        self.received = self.unused = self.pairs = 0
        self.where = ""

    def run(self) -> None:
        steps = {len(which.steps) for which in self.passes}
        if len(steps) != 1:
            raise ScheduleError(f"{self.name}: ranks have different numbers of steps, {sorted(steps)}")
        for number in range(steps.pop()):
            current = [which.steps[number] for which in self.passes]
            self.where = f"{self.name}, step {number}"
            self.meet(current)
            for rank, step in enumerate(current):
                self.hazards(rank, step)
            arriving = [
                self.load(transfer)
                for rank, step in enumerate(current)
                for transfer in step.transfers
                if transfer.target == rank
            ]
            for rank, step in enumerate(current):
                self.compute(rank, step)
            for store in arriving:
                store()
            for rank, step in enumerate(current):
                self.add(rank, step)
        self.where = f"{self.name}, at the end"
        for rank, state in enumerate(self.ranks):
            self.unused += sum(int(unread.sum()) for unread in state.unread.values())
            self.settle(rank)
            self.pairs += self.cover(rank)

    def fail(self, rank: int, problem: str) -> None:
        raise ScheduleError(f"{self.where}, rank {rank}: {problem}")

    def meet(self, current: list[Step]) -> None:
        """Both ends of every transfer list it, in the same order."""
        for rank, step in enumerate(current):
            for other in range(len(current)):
                if other == rank:
                    continue
                mine, theirs = (
                    [t for t in s.transfers if {t.source, t.target} == {rank, other}] for s in (step, current[other])
                )
                if mine != theirs:
                    self.fail(rank, f"transfers with rank {other} are not the same on both sides")

    def hazards(self, rank: int, step: Step) -> None:
        """Nothing in flight is written, and nothing that arrives is touched, before the transfers are waited on."""
        leaving = [t.src for t in step.transfers if t.source == rank]
        arriving = [t.dst for t in step.transfers if t.target == rank]
        written = list(step.clears) + [call.dkv for call in step.calls if call.dkv is not None]
        read = [call.kv for call in step.calls]
        for call in step.calls:
            outputs = (call.out, call.lse) if self.name == "forward" else (call.dq,)
            inputs = (call.q,) if self.name == "forward" else (call.q, call.dout, call.lse, call.delta)
            written += [Rows(name, 0, self.size(rank, name)) for name in outputs]
            read += [Rows(name, 0, self.size(rank, name)) for name in inputs]
        for index, rows in enumerate(arriving):
            others = leaving + arriving[:index] + written + read
            if any(rows.overlaps(other) for other in others):
                self.fail(rank, f"{rows} is used while a transfer fills it")
        for rows in leaving:
            if any(rows.overlaps(other) for other in written):
                self.fail(rank, f"{rows} is written while it is being sent")

    def size(self, rank: int, name: str) -> int:
        """Rows of a buffer; 0 for one that is not declared, which `fits` reports."""
        return len(self.ranks[rank].content.get(name, ()))

    def load(self, transfer: Transfer) -> Callable[[], None]:
        """Read a transfer's source as it is now; the answer stores it at the target."""
        source, target = self.ranks[transfer.source], self.ranks[transfer.target]
        src, dst = transfer.src, transfer.dst
        for rank, state, rows in ((transfer.source, source, src), (transfer.target, target, dst)):
            if rows.buffer not in state.content or not 0 <= rows.start <= rows.stop <= len(state.content[rows.buffer]):
                self.fail(rank, f"{rows} does not exist")
            if rows.heads is not None:
                self.fail(rank, f"{rows}: parts of heads are not followed yet")
        if source.kinds[src.buffer] is not target.kinds[dst.buffer]:
            self.fail(transfer.source, f"{src} and {dst} hold different things")
        if not self.part(source.ready, src).all():
            self.fail(transfer.source, f"{src} is sent before it holds anything")
        self.part(source.unread, src).fill_(False)
        content, shares = self.part(source.content, src).clone(), self.part(source.shares, src).clone()
        counts = self.part(source.counts, src).clone()
        remote = transfer.source != transfer.target and source.kinds[src.buffer] is Kind.PAIRS
        self.received += len(src) * remote

        def store() -> None:
            if remote:
                self.unused += int(self.part(target.unread, dst).sum())
            self.part(target.content, dst).copy_(content)
            self.part(target.shares, dst).copy_(shares)
            self.part(target.counts, dst).copy_(counts)
            self.part(target.ready, dst).fill_(True)
            self.part(target.unread, dst).fill_(remote)

        return store

    def compute(self, rank: int, step: Step) -> None:
        state = self.ranks[rank]
        for rows in step.clears:
            self.part(state.content, rows).fill_(_NOTHING)
            self.part(state.shares, rows).fill_(False)
            self.part(state.counts, rows).fill_(0)
            self.part(state.ready, rows).fill_(True)
            if self.name == "forward" and rows.buffer in state.written:
                state.written[rows.buffer][rows.start : rows.stop] += 1
        for call in step.calls:
            self.fits(rank, call)
            keys = self.part(state.content, call.kv).clone()
            used = _used_keys(call, len(call.kv))
            held = self.part(state.ready, call.kv) & (keys >= 0) & (keys < state.total)
            if not held[used].all():
                self.fail(rank, f"{call.kv} is read where it holds no keys")
            touched = _touched_rows(call)[0]
            inputs = {"q": call.q}
            if self.name == "backward":
                inputs |= {"dout": call.dout, "lse": call.lse, "delta": call.delta}
            for what, name in inputs.items():
                expected = state.tokens[touched] + _INPUTS.index(what) * state.total
                if (state.content[name][touched] != expected).any():
                    self.fail(rank, f"a call takes {what} from {name!r}, which holds something else")
            self.part(state.unread, call.kv).fill_(False)
            state.computed.append((call, keys))
            if self.name == "forward":
                self.touch(rank, call)
            else:
                self.accumulate(rank, call, keys)

    def fits(self, rank: int, call: Call) -> None:
        """A call's buffers are of the right kinds, and its work lies inside their rows."""
        state = self.ranks[rank]
        kinds = {call.q: Kind.TOKENS, call.kv.buffer: Kind.PAIRS, call.lse: Kind.STATISTICS}
        if call.dkv is None:
            kinds |= {call.out: Kind.TOKENS}
        else:
            kinds |= {call.dkv.buffer: Kind.PAIR_SUMS, call.dq: Kind.TOKEN_SUMS}
            kinds |= {call.dout: Kind.TOKENS, call.delta: Kind.STATISTICS}
        for name, kind in kinds.items():
            if state.kinds.get(name) is not kind:
                self.fail(rank, f"a call needs {kind} in {name!r}, not {state.kinds.get(name)}")
        if isinstance(call.work, Tiles):
            work = call.work
            if work.query_rows != len(state.tokens):
                self.fail(rank, f"a call has {work.query_rows} query rows, the rank {len(state.tokens)}")
            if len(work.key_row) and not 0 <= int(work.key_row.min()) <= int(
                (work.key_row + work.key_len).max()
            ) <= len(call.kv):
                self.fail(rank, f"a call's key blocks leave {call.kv}")

    def touch(self, rank: int, call: Call) -> None:
        """A row's first touch begins its state, its last ends it, and touches in between find it begun."""
        state = self.ranks[rank]
        rows, flags = _touched_rows(call)
        first, last = (flags & int(Touch.FIRST)).bool(), (flags & int(Touch.LAST)).bool()
        if not call.carries and not (first & last).all():
            self.fail(rank, "a call that carries no state has touches that are not the first and the last")
        if (state.written["out"][rows] > 0).any():
            self.fail(rank, "a call touches query rows after their last touch")
        if (state.begun[rows] == first).any():
            self.fail(rank, "query rows must be begun by their first touch, and by no other")
        state.begun[rows] = True
        for written in state.written.values():
            written[rows[last]] += 1

    def accumulate(self, rank: int, call: Call, keys: Tensor) -> None:
        """A backward call adds this rank's share to the gradients of the keys that it reads."""
        state = self.ranks[rank]
        if call.dkv is None or len(call.dkv) != len(call.kv):
            self.fail(rank, "a backward call needs as many gradient rows as key rows")
            return
        if not self.part(state.ready, call.dkv).all() or not state.ready[call.dq].all():
            self.fail(rank, f"{call.dkv} or {call.dq} is added to before it was cleared")
        content, shares = self.part(state.content, call.dkv), self.part(state.shares, call.dkv)
        used = _used_keys(call, len(call.kv))
        if ((content != _NOTHING) & (content != keys))[used].any():
            self.fail(rank, f"{call.dkv} mixes the gradients of different tokens")
        content[used] = keys[used]
        if call.dkv.heads is None and shares[used, rank].any() and isinstance(call.work, Tiles):
            self.fail(rank, f"{call.dkv} gets this rank's share twice")
        shares[used, rank] = True
        rows = _touched_rows(call)[0]
        if ((state.content[call.dq] != _NOTHING)[rows] & (state.content[call.dq][rows] != state.tokens[rows])).any():
            self.fail(rank, f"{call.dq} mixes the gradients of different tokens")
        state.content[call.dq][rows] = state.tokens[rows]
        state.counts[call.dq][rows] += 1
        self.touches[state.tokens[rows]] += 1

    def add(self, rank: int, step: Step) -> None:
        state = self.ranks[rank]
        for add in step.adds:
            if add.src.overlaps(add.dst):
                self.fail(rank, f"{add} adds rows to themselves")
            kinds = {state.kinds[rows.buffer] for rows in (add.src, add.dst)}
            if len(kinds) > 1 or not kinds <= {Kind.TOKEN_SUMS, Kind.PAIR_SUMS}:
                self.fail(rank, f"{add} adds {', '.join(sorted(kinds))}")
            if not (self.part(state.ready, add.src).all() and self.part(state.ready, add.dst).all()):
                self.fail(rank, f"{add} uses rows that hold nothing")
            src, dst = (self.part(state.content, rows) for rows in (add.src, add.dst))
            if ((src != _NOTHING) & (dst != _NOTHING) & (src != dst)).any():
                self.fail(rank, f"{add} mixes the gradients of different tokens")
            dst.copy_(torch.where(dst == _NOTHING, src, dst))
            shares, more = self.part(state.shares, add.dst), self.part(state.shares, add.src)
            if (shares & more).any():
                self.fail(rank, f"{add} adds a rank's share twice")
            shares |= more
            self.part(state.counts, add.dst).add_(self.part(state.counts, add.src))

    def settle(self, rank: int) -> None:
        """Results are complete: outputs written once, gradients at home with every share."""
        state = self.ranks[rank]
        for name in ("q", "dout", "lse", "delta") if self.name == "backward" else ("q",):
            expected = state.tokens + _INPUTS.index(name) * state.total
            if (state.content[name][: len(state.tokens)] != expected).any():
                self.fail(rank, f"the pass changes its input {name!r}, which is its caller's")
        if self.name == "forward":
            for name, written in state.written.items():
                if (written != 1).any():
                    self.fail(rank, f"{int((written != 1).sum())} rows of {name!r} are not written exactly once")
            return
        count = len(state.tokens)
        if not (state.ready["dq"].all() and state.ready["dkv"][:count].all()):
            self.fail(rank, "gradients were never cleared")
        if (state.counts["dq"][:count] != self.touches[state.tokens]).any():
            self.fail(rank, "shares of query gradients are lost")
        for name in ("dq", "dkv"):
            content = state.content[name][:count]
            if ((content != _NOTHING) & (content != state.tokens)).any():
                self.fail(rank, f"gradients of other tokens came home in {name!r}")
        expected = torch.zeros(len(self.mask.tracks), len(self.ranks), dtype=torch.bool)
        for other, there in enumerate(self.ranks):
            for call, keys in there.computed:
                used = _used_keys(call, len(keys))
                expected[keys[used], other] = True
        if (state.shares["dkv"][:count] != expected[state.tokens]).any():
            self.fail(rank, "shares of key and value gradients did not come home")

    def cover(self, rank: int) -> int:
        """Every legal pair of this rank's queries exactly once. Returns their number."""
        state, tracks = self.ranks[rank], self.mask.tracks
        total = 0
        counts = [(_covered(call, len(keys), self.name, len(state.tokens)), keys) for call, keys in state.computed]
        for low in range(0, len(state.tokens), _STRIP):
            rows = slice(low, low + _STRIP)
            legal = dense(self.mask.mask, tracks.take(state.tokens[rows]), tracks)
            found = torch.zeros(legal.shape, dtype=torch.int32)
            for count, keys in counts:
                used = count[rows].any(0)
                found.index_add_(1, keys[used], count[rows][:, used])
            if (found > 1).any():
                self.fail(rank, f"{int((found > 1).sum())} pairs are computed more than once")
            if (found != legal.int()).any():
                missing, extra = int((legal & (found == 0)).sum()), int((~legal & (found > 0)).sum())
                self.fail(rank, f"{missing} legal pairs are not computed, {extra} illegal ones are")
            total += int(legal.sum())
        return total

    @staticmethod
    def part(columns: dict[str, Tensor], rows: Rows) -> Tensor:
        return columns[rows.buffer][rows.start : rows.stop]


def _touched_rows(call: Call) -> tuple[Tensor, Tensor]:
    """The query rows of a call and their flags; rows of untouched blocks are left out."""
    work = call.work
    if isinstance(work, Tiles):
        busy = (work.by_query.counts() > 0).repeat_interleave(work.block)[: work.query_rows]
        rows = busy.nonzero().flatten()
        return rows, work.touch.repeat_interleave(work.block)[rows]
    rows = torch.cat([torch.arange(start, stop) for start, stop in work.queries.tolist()] or [torch.arange(0)])
    lengths = work.queries[:, 1] - work.queries[:, 0]
    return rows, work.touch.repeat_interleave(lengths)


def _used_keys(call: Call, rows: int) -> Tensor:
    """Which key rows a call reads, bool [rows]."""
    used = torch.zeros(rows, dtype=torch.bool)
    work = call.work
    if isinstance(work, Tiles):
        busy = (work.by_key.counts() > 0).nonzero().flatten()
        for start, length in zip(work.key_row[busy].tolist(), work.key_len[busy].tolist(), strict=True):
            used[start : start + length] = True
    else:
        for start, stop in work.keys.tolist():
            used[start:stop] = True
    return used


def _covered(call: Call, rows: int, name: str, queries: int) -> Tensor:
    """How often a call computes each pair, int32 [queries, key rows]."""
    work = call.work
    if not isinstance(work, Tiles):
        return _covered_varlen(work, queries, rows)
    # Key block j in columns of its own, then moved to the rows where it lies.
    place = work.key_row.long().unsqueeze(1) + torch.arange(work.block)
    real = (torch.arange(work.block) < work.key_len.unsqueeze(1)).flatten()
    width = len(work.key_row) * work.block
    found = covered(work.by_query, queries, width, work.block)
    if (found != covered(work.by_key, width, queries, work.block).T).any():
        raise ScheduleError(f"{name}: the tiles of a call by query and by key are not the same")
    if found[:, ~real].any():
        raise ScheduleError(f"{name}: a call computes pairs behind the end of a key block")
    count = torch.zeros(queries, rows, dtype=torch.int32)
    return count.index_add_(1, place.flatten()[real], found[:, real])


def _covered_varlen(work: Varlen, queries: int, rows: int) -> Tensor:
    count = torch.zeros(queries, rows, dtype=torch.int32)
    for (q0, q1), (k0, k1) in zip(work.queries.tolist(), work.keys.tolist(), strict=True):
        part = torch.ones(q1 - q0, k1 - k0, dtype=torch.int32)
        causal = part.tril((k1 - k0) - (q1 - q0))
        count[q0:q1, k0:k1] += {Band.FULL: part, Band.CAUSAL: causal, Band.REVERSE_CAUSAL: part - causal}[work.band]
    return count
