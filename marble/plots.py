"""The picture of a plan: the mask, the tiles of every ring step, and the work of every rank and step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from marble.compose.cost import summarise
from marble.compose.plan import Plan
from marble.kernels.contract import Tiles
from marble.layout import Layout, Mode
from marble.mask.domains import dense
from marble.mask.tiles import StoredMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour-blind safe (Okabe and Ito, 2008).
_COLOURS = {
    Mode.CAUSAL: "#0072B2",
    Mode.FULL: "#009E73",
    Mode.NOISE: "#D55E00",
    Mode.GROUP: "#CC79A7",
    Mode.PAD: "#FFFFFF",
}
_EARLIER = "#B8C4CE"
_GRID = 512


def show(plan: Plan, path: str | Path, *, layer: int = 0, title: str = "") -> None:
    """Draw a plan of virtual ranks to a PNG (or whatever format the file name asks for).

    Three panels: the packed mask in sequence order, coloured by the mode of the span that a pair lies in; the tiles
    that each rank computes, rank by rank, coloured by ring step; the visited tiles of every rank in every step.

    Args:
        plan: made without ``rank``.
        path: where to write.
        layer: which layer to draw.
        title: heading of the figure.

    Raises:
        ImportError: if matplotlib is missing; ``pip install 'marble-attention[plots]'`` brings it.
        ValueError: if the plan holds one rank only, or the layer is not a ring.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("marble.plots needs matplotlib: pip install 'marble-attention[plots]'") from None
    if plan.rank is not None or plan.masks is None:
        raise ValueError("plan: a picture shows all ranks; plan with ranks=… and without rank")
    if plan.names[layer] != "ring":
        raise ValueError(f"plan: the picture is of ring steps, and layer {layer} runs {plan.names[layer]}")
    with mpl.rc_context({"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold"}):
        figure = Figure(figsize=(13.5, 4.9), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.05))
        _draw_mask(left, plan.order.storage.layout, plan.masks[layer])
        _draw_tiles(middle, plan, layer)
        _draw_work(right, plan, layer)
        if title:
            figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=200)


def _draw_mask(axes: Axes, layout: Layout, mask: StoredMask) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    # One pixel per token, or an even sample of the tokens of a long layout.
    back = torch.argsort(mask.storage.sequence)
    picked = torch.linspace(0, layout.tokens - 1, min(_GRID, layout.tokens)).long()
    tracks = mask.tracks.take(back[picked])
    legal = dense(mask.mask, tracks, tracks)
    span_of = torch.repeat_interleave(torch.arange(len(layout.table.length)), layout.table.length)[picked]
    modes = [span.mode for sample in layout.samples for span in sample]
    code = torch.tensor([list(_COLOURS).index(mode) for mode in modes])[span_of]
    inside = (span_of[:, None] == span_of) | ((tracks.seg[:, None] == tracks.seg) & (tracks.seg >= 0))
    image = torch.where(inside, 2 + code[:, None], 1) * legal
    used = [mode for mode in _COLOURS if mode in modes and mode is not Mode.PAD]
    colours = ListedColormap(["#FFFFFF", _EARLIER, *_COLOURS.values()])
    extent = (0, layout.tokens, layout.tokens, 0)
    axes.imshow(image, cmap=colours, vmin=0, vmax=len(_COLOURS) + 1, extent=extent, interpolation="nearest")
    axes.set(title="Packed mask", xlabel="key (sequence order)", ylabel="query")
    patches = [Patch(facecolor=_COLOURS[mode], label=mode.value) for mode in used]
    patches.append(Patch(facecolor=_EARLIER, label="earlier span"))
    axes.legend(handles=patches, loc="upper right", fontsize=7.5, framealpha=0.9)


def _draw_tiles(axes: Axes, plan: Plan, layer: int) -> None:
    import matplotlib as mpl
    from matplotlib.patches import Patch

    blocks = [-(-length // plan.block) for length in plan.order.lengths]
    first = torch.tensor([0, *blocks]).cumsum(0)
    image = torch.full((int(first[-1]), int(first[-1]), 4), 1.0)
    colours = torch.tensor(mpl.colormaps["viridis"](torch.linspace(0.05, 0.95, plan.world).tolist()))
    for rank, schedule in plan.schedules[layer].items():
        for number, step in enumerate(schedule.forward.steps):
            for call in step.calls:
                assert isinstance(call.work, Tiles)
                source = (rank - number) % plan.world
                full, partial = _tile_masks(call.work)
                area = image[first[rank] : first[rank + 1], first[source] : first[source + 1]]
                area[full] = colours[number].float()
                area[partial] = 0.5 + 0.5 * colours[number].float()
    total = int(first[-1])
    axes.imshow(image.clamp(max=1), extent=(0, total, total, 0), interpolation="nearest")
    for border in first[1:-1].tolist():
        axes.axhline(border, color="#888888", lw=0.6)
        axes.axvline(border, color="#888888", lw=0.6)
    centres = ((first[1:] + first[:-1]) / 2).tolist()
    labels = [str(rank) for rank in range(plan.world)]
    axes.set(title=f"Tiles by ring step ({plan.order.name} order)", xlabel="keys of rank", ylabel="queries of rank")
    axes.set_xticks(centres, labels)
    axes.set_yticks(centres, labels)
    patches = [Patch(facecolor=tuple(colours[step].tolist()), label=str(step)) for step in range(plan.world)]
    axes.legend(
        handles=patches,
        title="ring step (lighter: partial)",
        ncols=8,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        fontsize=7,
        title_fontsize=7.5,
        frameon=False,
    )


def _draw_work(axes: Axes, plan: Plan, layer: int) -> None:
    import matplotlib as mpl

    schedules = [plan.schedules[layer][rank] for rank in range(plan.world)]
    summary = summarise(schedules, plan.layers[layer].head_dim)
    steps = summary.visited.shape[1]
    width = 0.8 / plan.world
    colours: Any = mpl.colormaps["cividis"](torch.linspace(0.05, 0.9, plan.world).tolist())
    for rank in range(plan.world):
        places = (torch.arange(steps) - 0.4 + (rank + 0.5) * width).tolist()
        axes.bar(places, summary.visited[rank].tolist(), width, color=colours[rank], label=str(rank))
    for step in range(steps):
        mean = summary.visited[:, step].double().mean().item()
        axes.plot([step - 0.42, step + 0.42], [mean, mean], color="black", lw=1)
    axes.set(title="Work per step and rank (line: mean)", xlabel="ring step", ylabel="visited tiles")
    axes.set_xticks(range(steps))
    axes.set_ylim(0, summary.visited.max().item() * 1.3)
    axes.legend(
        title="rank",
        ncols=8,
        fontsize=7,
        title_fontsize=7.5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        frameon=False,
    )
    note = (
        f"busiest rank / mean {summary.total_balance:.3f}\n"
        f"sum of slowest steps / mean {summary.step_balance:.3f}\n"
        f"partial tiles {summary.partial_share:.1%}"
    )
    axes.text(0.02, 0.98, note, transform=axes.transAxes, va="top", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _tile_masks(work: Tiles) -> tuple[Tensor, Tensor]:
    """Which tiles are full and which partial, two bool [query blocks, key blocks]."""
    tiles = work.by_query
    full = torch.zeros(tiles.outer, len(work.key_row), dtype=torch.bool)
    partial = torch.zeros_like(full)
    outer = torch.repeat_interleave(torch.arange(tiles.outer), tiles.run_ptr.diff().long())
    for block, (first, count) in zip(outer.tolist(), tiles.runs.tolist(), strict=True):
        full[block, first : first + count] = True
    outer = torch.repeat_interleave(torch.arange(tiles.outer), tiles.part_ptr.diff().long())
    partial[outer, tiles.parts[:, 0].long()] = True
    return full, partial
