"""The reference backend: every call of the contract in plain PyTorch, on any device.

It rounds where a flash-attention kernel rounds and nowhere else: for bfloat16 and float16 inputs the scores, the
softmax and all sums are float32, the probabilities (and in the backward pass the score gradients) are rounded to the
input type before a matrix product, and the output is rounded once. Float32 and float64 inputs round nothing, so
float64 gives the truth to compare with. It is written for clarity: one matrix product per query block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from marble.kernels.contract import Band, State, TileList, Tiles, Touch, Varlen, Work, accumulation_dtype
from marble.kernels.predicates import tile_mask


class ReferenceBackend:
    """`marble.kernels.contract.Backend` in PyTorch."""

    name = "reference"
    writes_gradients = False

    def prepare(self, works: Sequence[Work], *, group: int, head_dim: int) -> None:
        """See `Backend.prepare`. Every call reads its tiles as they are."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: Work,
        state: State | None,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
    ) -> None:
        """See `Backend.forward`."""
        for rows, keys, mask, touch in _pieces(work, q.device):
            heads = _heads(k, keys), _heads(v, keys)
            carried = _seen_nothing(q[rows]) if state is None or touch & Touch.FIRST else _take(state, rows)
            updated = attend(_heads(q, rows), *heads, mask, carried, scale=scale, round_to=q.dtype)
            if state is None or touch & Touch.LAST:
                output, log_sum = finish(updated, scale=scale)
                out[rows] = output.transpose(0, 1).to(out.dtype)
                lse[:, rows] = log_sum
            else:
                for target, value in zip((state.acc, state.m, state.l), updated, strict=True):
                    target[:, rows] = value

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """See `Backend.delta`."""
        dtype = accumulation_dtype(out.dtype)
        return (out.to(dtype) * dout.to(dtype)).sum(-1).T.contiguous()

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        work: Work,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        scale: float,
    ) -> None:
        """See `Backend.backward`."""
        for rows, keys, mask, _ in _pieces(work, q.device):
            gradients = differentiate(
                _heads(q, rows),
                _heads(k, keys),
                _heads(v, keys),
                _heads(dout, rows),
                lse[:, rows],
                delta[:, rows],
                mask,
                scale=scale,
                round_to=q.dtype,
            )
            dq[:, rows] += gradients[0]
            dk.index_add_(1, keys, gradients[1])
            dv.index_add_(1, keys, gradients[2])


Carried = tuple[Tensor, Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, carried: Carried, *, scale: float, round_to: torch.dtype
) -> Carried:
    """One step of the online softmax (Milakov and Gimelshein, 2018; FlashAttention-2, algorithm 1).

    Args:
        q: [heads, queries, head_dim] in the accumulation type, like everything else.
        k: [kv_heads, keys, head_dim].
        v: [kv_heads, keys, head_dim].
        mask: bool [queries, keys], or None for all pairs.
        carried: (acc, m, l) as in `State`, of these queries.
        scale: softmax scale.
        round_to: type that the probabilities are rounded to before they meet ``v``.
    """
    acc, m, l = carried  # noqa: E741
    scores = _grouped(q, k) @ k.transpose(1, 2)
    scores = scores.view(*q.shape[:2], k.shape[1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    m_new = torch.maximum(m, scores.amax(-1)) if scores.shape[-1] else m
    # A row that has seen nothing yet has m = −inf; any finite reference gives weights of 0 there, never −inf − −inf.
    reference = torch.where(m_new == -torch.inf, 0, m_new)
    weights = torch.exp(scale * (scores - reference.unsqueeze(-1)))
    decay = torch.exp(scale * (m - reference))
    l_new = l * decay + weights.sum(-1)
    product = (_grouped(weights.to(round_to).to(q.dtype), k) @ v).view(q.shape)
    return acc * decay.unsqueeze(-1) + product, m_new, l_new


def finish(carried: Carried, *, scale: float) -> tuple[Tensor, Tensor]:
    """The normalised output and the log-sum-exp of a finished online softmax; 0 and −inf for rows without keys."""
    acc, m, l = carried  # noqa: E741
    seen = l > 0
    output = torch.where(seen.unsqueeze(-1), acc / l.unsqueeze(-1), 0)
    return output, torch.where(seen, scale * m + torch.log(torch.where(seen, l, 1)), -torch.inf)


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    round_to: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of some pairs against the final log-sum-exp (FlashAttention-2, algorithm 2).

    Shapes as in `attend`; ``lse`` and ``delta`` are [heads, queries].
    """
    scores = (_grouped(q, k) @ k.transpose(1, 2)).view(*q.shape[:2], k.shape[1])
    seen = (lse > -torch.inf).unsqueeze(-1)
    weights = torch.exp(scale * scores - torch.where(seen, lse.unsqueeze(-1), 0))
    allowed = seen if mask is None else seen & mask
    weights = torch.where(allowed, weights, 0)
    dweights = (_grouped(dout, k) @ v.transpose(1, 2)).view_as(weights)
    # Where the scale goes in matters to rounding, as it is no power of two. As in the kernels: before it, except that
    # float16 would lose small gradients.
    early, late = (1.0, scale) if round_to == torch.float16 else (scale, 1.0)
    dscores = weights * (dweights - delta.unsqueeze(-1)) * early
    weights, dscores = (_grouped(value.to(round_to).to(q.dtype), k) for value in (weights, dscores))
    dq = (dscores @ k).view(q.shape) * late
    dk = dscores.transpose(1, 2) @ _grouped(q, k) * late
    dv = weights.transpose(1, 2) @ _grouped(dout, k)
    return dq, dk, dv


def _pieces(work: Work, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor | None, int]]:
    """A call as (query rows, key rows, mask, touch) per query block or sequence; untouched ones are left out."""
    if isinstance(work, Varlen):
        for (q0, q1), (k0, k1), touch in zip(
            work.queries.tolist(), work.keys.tolist(), work.touch.tolist(), strict=True
        ):
            if q0 < q1:
                band = _band(work.band, q1 - q0, k1 - k0, device)
                yield slice(q0, q1), torch.arange(k0, k1, device=device), band, touch
        return
    tiles: Tiles = work
    lengths, starts = tiles.key_len.tolist(), tiles.key_row.tolist()
    for block, touch in enumerate(tiles.touch.tolist()):
        low = block * tiles.block
        rows = slice(low, min(low + tiles.block, tiles.query_rows))
        keys, masks = [], []
        for inner, mask in _row_of_tiles(tiles.by_query, block, lengths):
            keys.append(torch.arange(starts[inner], starts[inner] + lengths[inner], device=device))
            full = torch.ones(rows.stop - rows.start, lengths[inner], dtype=torch.bool, device=device)
            masks.append(full if mask is None else mask[: rows.stop - rows.start])
        if keys:
            yield rows, torch.cat(keys), torch.cat(masks, 1), touch


def _row_of_tiles(tiles: TileList, outer: int, lengths: list[int]) -> Iterator[tuple[int, Tensor | None]]:
    low, high = tiles.run_ptr[outer : outer + 2].tolist()
    for first, blocks in tiles.runs[low:high].tolist():
        yield from ((inner, None) for inner in range(first, first + blocks))
    low, high = tiles.part_ptr[outer : outer + 2].tolist()
    for inner, slot in tiles.parts[low:high].tolist():
        yield inner, tile_mask(tiles, slot, lengths[inner])


def _band(band: Band, queries: int, keys: int, device: torch.device) -> Tensor | None:
    if band == Band.FULL:
        return None
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return causal if band == Band.CAUSAL else ~causal


def _heads(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows].to(accumulation_dtype(x.dtype)).transpose(0, 1)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, n] as [kv_heads, heads / kv_heads · rows, n]: the queries that share a key/value head."""
    return x.reshape(k.shape[0], x.shape[0] // k.shape[0] * x.shape[1], x.shape[2])


def _take(state: State, rows: slice) -> Carried:
    return state.acc[:, rows], state.m[:, rows], state.l[:, rows]


def _seen_nothing(q: Tensor) -> Carried:
    rows, heads, head_dim = q.shape
    zeros = torch.zeros(heads, rows, head_dim + 1, dtype=accumulation_dtype(q.dtype), device=q.device)
    return zeros[..., :-1], torch.full_like(zeros[..., 0], -torch.inf), zeros[..., -1]
