"""Proving schedules right without running them.

The checker walks the schedules of all ranks step by step and keeps, instead of numbers, what every row of every buffer
holds, head by head: which token's and which head's query, key, output or gradient, and which calls' shares have been
added to a gradient. From that it shows that

- every legal pair is computed exactly once for every query head, forward and backward, with the key/value head that
  belongs to it, and no other pair is;
- a query row's state is begun once and finished once, and every output row is written once;
- every call's share of a gradient reaches its home exactly once;
- no row is written while it is in flight, none is read before it arrives, and both ends list the same transfers.

It also reports how many received rows nobody read or forwarded. Cost: one comparison per token pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from marble.compose.coverage import CLEARED, NOTHING, Codes, PairCounts, touched_rows, used_keys
from marble.compose.schedule import Buffer, Call, Kind, Pass, Rows, Schedule, Step, Transfer
from marble.kernels.contract import Tiles, Touch
from marble.mask.domains import dense
from marble.mask.tiles import StoredMask
from marble.order.token_order import TokenOrder

_STRIP = 2048
_FORWARD = {"q": Kind.TOKENS, "kv": Kind.PAIRS, "out": Kind.TOKENS, "lse": Kind.STATISTICS}
_BACKWARD = {"q": Kind.TOKENS, "kv": Kind.PAIRS, "dout": Kind.TOKENS, "lse": Kind.STATISTICS, "delta": Kind.STATISTICS}
_BACKWARD |= {"dq": Kind.TOKEN_SUMS, "dkv": Kind.PAIR_SUMS}
"""The buffers that callers know."""
_SUMS = (Kind.TOKEN_SUMS, Kind.PAIR_SUMS)
_ONCE = (Kind.TOKENS, Kind.STATISTICS)
"""Kinds whose rows are written once in a pass."""


class ScheduleError(ValueError):
    """A schedule that would compute something wrong."""


@dataclass(frozen=True)
class Report:
    """What the checker found about schedules that are right.

    Attributes:
        pairs: legal pairs, each computed once forward and once backward for every query head.
        received_rows: rows of one key/value head that arrived from other ranks, over all ranks, forward.
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
    # Both passes, and ranks that share heads, often make calls over the same tiles: count their pairs once.
    counts = PairCounts({})
    forward = _Walk([schedule.forward for schedule in schedules], shards, mask, "forward", counts)
    forward.run()
    _Walk([schedule.backward for schedule in schedules], shards, mask, "backward", counts).run()
    return Report(forward.pairs, forward.received, forward.unused)


@dataclass(frozen=True, eq=False)
class _Computed:
    """A call that was made: its number, the rows of its query buffer, those that it touches and their tokens and
    heads, and the tokens (−1 for unused rows) and heads of its keys."""

    call: Call
    number: int
    queries: int
    rows: Tensor
    tokens: Tensor
    heads: Tensor
    keys: Tensor
    key_heads: Tensor


class _Rank:
    """What one rank's buffers hold, by row and head."""

    def __init__(self, which: Pass, shares: int) -> None:
        self.kinds = {buffer.name: buffer.kind for buffer in which.buffers}
        sizes = {buffer.name: (buffer.rows, buffer.heads) for buffer in which.buffers}
        self.content = {name: torch.full(size, NOTHING) for name, size in sizes.items()}
        self.ready = {name: torch.zeros(size, dtype=torch.bool) for name, size in sizes.items()}
        self.unread = {name: torch.zeros(size, dtype=torch.bool) for name, size in sizes.items()}
        # Sums also hold whose shares have been added: one column per call (and per replica of a head inside a call).
        sums = [name for name in sizes if self.kinds[name] in _SUMS]
        self.shares = {name: torch.zeros(*sizes[name], shares, dtype=torch.bool) for name in sums}
        # The online softmax belongs to the rows of a query buffer.
        self.begun, self.ended = (
            {name: torch.zeros(size[0], dtype=torch.bool) for name, size in sizes.items()} for _ in range(2)
        )


class _Walk:
    def __init__(
        self, passes: list[Pass], shards: list[Tensor], mask: StoredMask, name: str, counts: PairCounts
    ) -> None:
        self.passes, self.shards, self.mask, self.name, self.counts = passes, shards, mask, name, counts
        self.heads, self.kv_heads = self.at_the_callers(shards)
        self.group = self.heads // self.kv_heads
        self.codes = Codes(sum(map(len, shards)), self.heads)
        calls = [(which, call) for which in passes for step in which.steps for call in step.calls]
        # A call may hold a key/value head several times, for different query heads.
        self.replicas = max((-(-self.group // max(self.share(*each), 1)) for each in calls), default=1)
        self.ranks = [_Rank(which, len(calls) * self.replicas) for which in passes]
        self.computed: list[_Computed] = []
        self.received = self.unused = self.pairs = 0
        self.where = ""
        for state, shard in zip(self.ranks, shards, strict=True):
            for what in ("q", "kv") if name == "forward" else ("kv", "q", "dout", "lse", "delta"):
                heads = torch.arange(self.kv_heads if what == "kv" else self.heads)
                state.content[what][: len(shard)] = self.codes.of(what, shard, heads)
                state.ready[what][: len(shard)] = True

    def at_the_callers(self, shards: list[Tensor]) -> tuple[int, int]:
        """The buffers that a pass is handed or leaves its results in are of one shape; returns the heads."""
        first = self.passes[0].buffers_by_name
        heads, kv_heads = (first[name].heads if name in first else 0 for name in ("q", "kv"))
        for rank, (which, shard) in enumerate(zip(self.passes, shards, strict=True)):
            for name, kind in (_FORWARD if self.name == "forward" else _BACKWARD).items():
                pairs = kind in (Kind.PAIRS, Kind.PAIR_SUMS)
                found, expected = which.buffers_by_name.get(name), Buffer(name, kind, len(shard), heads)
                if pairs:  # more rows may follow the caller's
                    rows = max(len(shard), found.rows if found else 0)
                    expected = replace(expected, rows=rows, heads=kv_heads)
                if found is None or replace(found, whole=0, split=0) != expected:
                    raise ScheduleError(f"{self.name}, rank {rank}: the caller expects {expected}, not {found}")
        moving = [[replace(b, rows=0) for b in which.buffers if b.whole or b.split] for which in self.passes]
        if any(other != moving[0] for other in moving):
            raise ScheduleError(f"{self.name}: ranks declare different buffers, or room, for rows that move")
        if not kv_heads or heads % kv_heads:
            raise ScheduleError(f"{self.name}: {kv_heads} key/value heads do not divide {heads} query heads")
        return heads, kv_heads

    @staticmethod
    def share(which: Pass, call: Call) -> int:
        """Query heads of a call that read one of its key/value heads."""
        sizes = which.buffers_by_name
        low, high = call.kv.heads or (0, sizes[call.kv.buffer].heads)
        return sizes[call.q].heads // (high - low)

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
        legal = [self.cover(rank) for rank in range(len(self.ranks))]
        for rank, state in enumerate(self.ranks):
            self.unused += sum(int(unread.sum()) for unread in state.unread.values())
            if self.name == "forward":
                self.written(rank, legal[rank])
            else:
                self.at_home(rank)

    def fail(self, rank: int, problem: str) -> NoReturn:
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
            written += [Rows(name, 0, self.size(rank, name)[0]) for name in outputs]
            read += [Rows(name, 0, self.size(rank, name)[0]) for name in inputs]
        for index, rows in enumerate(arriving):
            others = leaving + arriving[:index] + written + read
            if any(rows.overlaps(other) for other in others):
                self.fail(rank, f"{rows} is used while a transfer fills it")
        for rows in leaving:
            if any(rows.overlaps(other) for other in written):
                self.fail(rank, f"{rows} is written while it is being sent")

    def size(self, rank: int, name: str) -> tuple[int, int]:
        """Rows and heads of a buffer; (0, 0) for one that is not declared, which `fits` reports."""
        content = self.ranks[rank].content.get(name)
        return (0, 0) if content is None else (content.shape[0], content.shape[1])

    def load(self, transfer: Transfer) -> Callable[[], None]:
        """Read a transfer's source as it is now; the answer stores it at the target."""
        source, target = self.ranks[transfer.source], self.ranks[transfer.target]
        src, dst = transfer.src, transfer.dst
        for rank, rows in ((transfer.source, src), (transfer.target, dst)):
            count, heads = self.size(rank, rows.buffer)
            low, high = rows.heads or (0, heads)
            if not (0 <= rows.start <= rows.stop <= count and 0 <= low < high <= heads):
                self.fail(rank, f"{rows} does not exist")
        if source.kinds[src.buffer] is not target.kinds[dst.buffer]:
            self.fail(transfer.source, f"{src} and {dst} hold different things")
        content = self.part(source.content, src).clone()
        if content.shape != self.part(target.content, dst).shape:
            self.fail(transfer.source, f"{src} and {dst} have different numbers of heads")
        if not self.part(source.ready, src).all():
            self.fail(transfer.source, f"{src} is sent before it holds anything")
        self.part(source.unread, src).fill_(False)
        kind = source.kinds[src.buffer]
        shares = self.part(source.shares, src).clone() if kind in _SUMS else None
        remote = transfer.source != transfer.target and kind is Kind.PAIRS
        self.received += content.numel() * remote

        def store() -> None:
            self.writes(transfer.target, dst)
            if remote:
                self.unused += int(self.part(target.unread, dst).sum())
            self.part(target.content, dst).copy_(content)
            if shares is not None:
                self.part(target.shares, dst).copy_(shares)
            self.part(target.ready, dst).fill_(True)
            self.part(target.unread, dst).fill_(remote)

        return store

    def writes(self, rank: int, rows: Rows) -> None:
        """Rows of inputs and outputs are written once."""
        state = self.ranks[rank]
        if state.kinds[rows.buffer] in _ONCE and self.part(state.ready, rows).any():
            self.fail(rank, f"{rows} is written a second time")

    def compute(self, rank: int, step: Step) -> None:
        state = self.ranks[rank]
        for rows in step.clears:
            self.writes(rank, rows)
            once = state.kinds[rows.buffer] in _ONCE
            self.part(state.content, rows).fill_(CLEARED if once else NOTHING)
            if rows.buffer in state.shares:
                self.part(state.shares, rows).fill_(False)
            self.part(state.ready, rows).fill_(True)
        for call in step.calls:
            self.fits(rank, call)
            made = self.look(rank, call)
            self.part(state.unread, call.kv).fill_(False)
            if made is None:
                continue
            self.computed.append(made)
            if self.name == "forward":
                self.touch(rank, made)
            else:
                self.accumulate(rank, made)

    def fits(self, rank: int, call: Call) -> None:
        """A call's buffers are of the right kinds and sizes, and its work lies inside their rows."""
        state = self.ranks[rank]
        by_query = {call.q: Kind.TOKENS, call.lse: Kind.STATISTICS}
        by_query |= {call.out: Kind.TOKENS} if call.dkv is None else {call.dout: Kind.TOKENS, call.dq: Kind.TOKEN_SUMS}
        by_key = {call.kv.buffer: Kind.PAIRS}
        if call.dkv is not None:
            by_query |= {call.delta: Kind.STATISTICS}
            by_key |= {call.dkv.buffer: Kind.PAIR_SUMS}
        for name, kind in (by_query | by_key).items():
            if state.kinds.get(name) is not kind:
                self.fail(rank, f"a call needs {kind} in {name!r}, not {state.kinds.get(name)}")
        queries, heads = self.size(rank, call.q)
        if any(self.size(rank, name) != (queries, heads) for name in by_query):
            self.fail(rank, f"the buffers {', '.join(map(repr, by_query))} of a call differ in rows or heads")
        work = call.work
        if isinstance(work, Tiles):
            if work.query_rows != queries:
                self.fail(rank, f"a call has {work.query_rows} query rows, its buffer {queries}")
            bounds = torch.stack([work.key_row, work.key_row + work.key_len], 1)
        else:
            bounds = work.keys
            ranges = work.queries[torch.argsort(work.queries[:, 0], stable=True)]
            if (ranges < 0).any() or (ranges > queries).any() or (ranges[1:, 0] < ranges[:-1, 1]).any():
                self.fail(rank, "the query rows of a call's sequences overlap, or leave their buffer")
        if len(bounds) and not 0 <= int(bounds.min()) <= int(bounds.max()) <= len(call.kv):
            self.fail(rank, f"a call's keys leave {call.kv}")

    def look(self, rank: int, call: Call) -> _Computed | None:
        """Which tokens and heads a call computes; None for a call without query rows."""
        state = self.ranks[rank]
        rows, used = touched_rows(call)[0], used_keys(call, len(call.kv))
        if not len(rows):
            return None
        content = state.content[call.q][rows]
        found = self.codes.read(content, "q")
        if found is None:
            self.fail(rank, f"a call takes queries from {call.q!r}, which holds something else")
        tokens, heads = found
        if len(heads.unique()) < len(heads):
            self.fail(rank, f"{call.q!r} holds the heads {heads.tolist()}, one of them twice")
        if self.name == "backward":
            for what, name in {"dout": call.dout, "lse": call.lse, "delta": call.delta}.items():
                if (state.content[name][rows] != self.codes.of(what, tokens, heads)).any():
                    self.fail(rank, f"a call takes {what} from {name!r}, which holds something else")
        keys = self.part(state.content, call.kv).clone()
        read = self.codes.read(keys[used], "kv") if self.part(state.ready, call.kv)[used].all() else None
        if read is None:
            self.fail(rank, f"{call.kv} is read where it holds no keys")
        key_tokens = torch.full((len(used),), NOTHING)
        key_tokens[used] = read[0]
        share, rest = divmod(len(heads), len(read[1]))
        if rest or (used.any() and (read[1].repeat_interleave(share) != heads // self.group).any()):
            self.fail(rank, f"the query heads {heads.tolist()} of a call read the key/value heads {read[1].tolist()}")
        return _Computed(call, len(self.computed), len(state.content[call.q]), rows, tokens, heads, key_tokens, read[1])

    def touch(self, rank: int, made: _Computed) -> None:
        """A row's first touch begins its state, its last ends it, and touches in between find it begun."""
        state, call = self.ranks[rank], made.call
        rows, flags = touched_rows(call)
        first, last = (flags & int(Touch.FIRST)).bool(), (flags & int(Touch.LAST)).bool()
        begun, ended = state.begun[call.q], state.ended[call.q]
        if not call.carries and not (first & last).all():
            self.fail(rank, "a call that carries no state has touches that are not the first and the last")
        if ended[rows].any():
            self.fail(rank, "a call touches query rows after their last touch")
        if (begun[rows] == first).any():
            self.fail(rank, "query rows must be begun by their first touch, and by no other")
        begun[rows] = True
        ended[rows[last]] = True
        for what, name in (("out", call.out), ("lse", call.lse)):
            if state.ready[name][rows[last]].any():
                self.fail(rank, f"rows of {name!r} are not written exactly once")
            state.content[name][rows[last]] = self.codes.of(what, made.tokens[last], made.heads)
            state.ready[name][rows[last]] = True

    def accumulate(self, rank: int, made: _Computed) -> None:
        """A backward call adds its share to the gradients of the queries and of the keys that it reads."""
        state, call, rows = self.ranks[rank], made.call, made.rows
        if call.dkv is None or len(call.dkv) != len(call.kv):
            self.fail(rank, "a backward call needs as many gradient rows as key rows")
        content, shares = self.part(state.content, call.dkv), self.part(state.shares, call.dkv)
        if content.shape[1] != len(made.key_heads):
            self.fail(rank, "a backward call needs as many gradient heads as key/value heads")
        if not self.part(state.ready, call.dkv).all() or not state.ready[call.dq].all():
            self.fail(rank, f"{call.dkv} or {call.dq} is added to before it was cleared")
        used = used_keys(call, len(call.kv))
        expected = self.codes.of("kv", made.keys[used], made.key_heads)
        if ((content[used] != NOTHING) & (content[used] != expected)).any():
            self.fail(rank, f"{call.dkv} mixes the gradients of different tokens or heads")
        content[used] = expected
        for head, column in enumerate(self.columns(made)):
            shares[used, head, column] = True
        expected, found = self.codes.of("q", made.tokens, made.heads), state.content[call.dq][rows]
        if ((found != NOTHING) & (found != expected)).any():
            self.fail(rank, f"{call.dq} mixes the gradients of different tokens or heads")
        state.content[call.dq][rows] = expected
        state.shares[call.dq][rows, :, made.number * self.replicas] = True

    def columns(self, made: _Computed) -> list[int]:
        """The column of `_Rank.shares` for each of a call's key/value heads: replicas of a head have their own."""
        heads = made.key_heads.tolist()
        return [made.number * self.replicas + heads[:at].count(head) for at, head in enumerate(heads)]

    def add(self, rank: int, step: Step) -> None:
        state = self.ranks[rank]
        for add in step.adds:
            if add.src.overlaps(add.dst):
                self.fail(rank, f"{add} adds rows to themselves")
            kinds = {state.kinds[rows.buffer] for rows in (add.src, add.dst)}
            if len(kinds) > 1 or not kinds <= set(_SUMS):
                self.fail(rank, f"{add} adds {', '.join(sorted(kinds))}")
            src, dst = (self.part(state.content, rows) for rows in (add.src, add.dst))
            if src.shape != dst.shape:
                self.fail(rank, f"{add} adds different numbers of heads")
            if not (self.part(state.ready, add.src).all() and self.part(state.ready, add.dst).all()):
                self.fail(rank, f"{add} uses rows that hold nothing")
            if ((src != NOTHING) & (dst != NOTHING) & (src != dst)).any():
                self.fail(rank, f"{add} mixes the gradients of different tokens or heads")
            dst.copy_(torch.where(dst == NOTHING, src, dst))
            shares, more = self.part(state.shares, add.dst), self.part(state.shares, add.src)
            if (shares & more).any():
                self.fail(rank, f"{add} adds a share twice")
            shares |= more

    def written(self, rank: int, seen: Tensor) -> None:
        """Outputs are at home: computed, or cleared where a token sees nothing."""
        state, shard = self.ranks[rank], self.shards[rank]
        for name in ("out", "lse"):
            content = state.content[name][: len(shard)]
            right = content == self.codes.of(name, shard, torch.arange(self.heads))
            right |= (content == CLEARED) & ~seen.unsqueeze(1)
            if not right.all():
                self.fail(rank, f"{int((~right.all(1)).sum())} rows of {name!r} are not written exactly once")

    def at_home(self, rank: int) -> None:
        """Gradients are at home, with the shares of all calls that belong to them, and no others."""
        state, shard = self.ranks[rank], self.shards[rank]
        place = torch.full((self.codes.tokens,), NOTHING)
        place[shard] = torch.arange(len(shard))
        for name, what, heads in (("dq", "q", self.heads), ("dkv", "kv", self.kv_heads)):
            if not state.ready[name][: len(shard)].all():
                self.fail(rank, "gradients were never cleared")
            content = state.content[name][: len(shard)]
            if ((content != NOTHING) & (content != self.codes.of(what, shard, torch.arange(heads)))).any():
                self.fail(rank, f"gradients of other tokens or heads came home in {name!r}")
            expected = torch.zeros(len(shard), heads, state.shares[name].shape[2], dtype=torch.bool)
            for made in self.computed:
                tokens = made.tokens if name == "dq" else made.keys[made.keys != NOTHING]
                rows = place[tokens]
                rows = rows[rows != NOTHING]
                if name == "dq":
                    expected[rows.unsqueeze(1), made.heads, made.number * self.replicas] = True
                else:
                    for head, column in zip(made.key_heads.tolist(), self.columns(made), strict=True):
                        expected[rows, head, column] = True
            if (state.shares[name][: len(shard)] != expected).any():
                self.fail(rank, f"shares of the gradients in {name!r} did not come home")

    def cover(self, rank: int) -> Tensor:
        """Every legal pair of this rank's tokens exactly once for every query head. Returns which tokens see a key."""
        shard = self.shards[rank]
        place = torch.full((self.codes.tokens,), NOTHING)
        place[shard] = torch.arange(len(shard))
        parts = []
        for made in self.computed:
            here = place[made.tokens] != NOTHING
            if here.any():
                try:
                    count = self.counts.of(made.call, made.queries, len(made.keys))[made.rows[here]]
                except ValueError as error:
                    self.fail(rank, str(error))
                used = count.any(0)
                parts.append((made.heads.tolist(), place[made.tokens[here]], made.keys[used], count[:, used]))
        seen = torch.zeros(len(shard), dtype=torch.bool)
        for low in range(0, len(shard), _STRIP):
            legal = dense(self.mask.mask, self.mask.tracks.take(shard[low : low + _STRIP]), self.mask.tracks)
            seen[low : low + _STRIP] = legal.any(1)
            self.pairs += int(legal.sum())
            for chosen in {tuple(head in heads for heads, *_ in parts) for head in range(self.heads)}:
                found = torch.zeros(legal.shape, dtype=torch.int32)
                for (_, rows, keys, count), wanted in zip(parts, chosen, strict=True):
                    inside = (rows >= low) & (rows < low + _STRIP)
                    if wanted and inside.any():
                        wide = torch.zeros(int(inside.sum()), found.shape[1], dtype=torch.int32)
                        found.index_add_(0, rows[inside] - low, wide.index_add_(1, keys, count[inside]))
                if (found > 1).any():
                    self.fail(rank, f"{int((found > 1).sum())} pairs are computed more than once")
                if (found != legal.int()).any():
                    missing, extra = int((legal & (found == 0)).sum()), int((~legal & (found > 0)).sum())
                    self.fail(rank, f"{missing} legal pairs are not computed, {extra} illegal ones are")
        return seen

    @staticmethod
    def part(columns: dict[str, Tensor], rows: Rows) -> Tensor:
        """The rows and heads of a buffer."""
        found = columns[rows.buffer][rows.start : rows.stop]
        return found if rows.heads is None else found[:, rows.heads[0] : rows.heads[1]]
