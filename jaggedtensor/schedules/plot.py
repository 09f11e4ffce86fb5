"""Pictures of a batch and its schedules, for people. Needs matplotlib, which nothing else imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jaggedtensor.errors import fail
from jaggedtensor.schedules.simulate import Simulation
from jaggedtensor.schedules.types import ScheduleKind, Tile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

    from jaggedtensor.ops.plan import Plan

INK, GREY, FAINT, WASTE, WAITING = "#24292f", "#6e7781", "#d0d7de", "#f3d9d2", "#f3d9d2"
BUSY = "#3b76b5"
SEQUENCES = ("#1f5a94", "#69a5d6", "#2a8c82", "#8fcabd", "#7a5aa6", "#b9a1d6", "#b8692e", "#e6b478")
SHOWN = (ScheduleKind.CONTIGUOUS, ScheduleKind.ZIGZAG, ScheduleKind.STREAM_K, ScheduleKind.DYNAMIC)
MOST_SEQUENCES = 24  # drawn one by one
MOST_WORKERS = 16  # drawn with their tiles
DASHED = (0, (4, 3))


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("matplotlib", "installed for pictures", "none", "pip install jaggedtensor[plot]", error=ImportError)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.12, h_pad=0.1)  # type: ignore[call-arg]
    return figure


def draw_plan(plan: Plan) -> Figure:
    """Padded and packed, the loads of each worker by four kinds of schedule, and the lengths."""
    figure = new_figure(11, 9)
    parts: Any = figure.subfigures(3, 1, height_ratios=[3.2, 3.4, 2.1])
    top, middle, bottom = parts
    padded, packed = top.subplots(1, 2)
    draw_padding(padded, packed, plan.lengths)
    draw_loads(middle.subplots(1, len(SHOWN), sharey=True), {kind: plan.balance[kind] for kind in SHOWN})
    draw_lengths(bottom.subplots(), plan.lengths)
    size = f"{len(plan.lengths):,} sequences, {plan.tokens:,} tokens, the longest has {plan.longest:,}"
    _headline(top, size)
    _headline(middle, "How long each worker computes (blue), and waits for the slowest one (red)")
    return figure


def _headline(figure: FigureBase, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, color=INK)


def draw_padding(padded: Axes, packed: Axes, lengths: Tensor) -> None:
    """The same sequences as rows of a padded tensor, and one after the other; of a large batch, a sample of lengths."""
    chosen = _sample(lengths, MOST_SEQUENCES)
    longest = max(int(chosen.max()) if len(chosen) else 0, 1)
    tokens, rows = int(chosen.sum()), len(chosen)
    for row, length in enumerate(chosen.tolist()):
        padded.barh(row, longest, 0.86, color=WASTE, linewidth=0)
        padded.barh(row, length, 0.86, color=_color(row), linewidth=0)
    sample = "" if rows == len(lengths) else f": {rows} of the {len(lengths):,} sequences"
    waste = f"{100 * (1 - tokens / (rows * longest)):.0f} % of the rows are padding" if rows else "nothing"
    _say(padded, "Padded" + sample, waste)

    begin = 0
    for row, length in enumerate(chosen.tolist()):
        while length > 0:  # a sequence may go on in the next line of the drawing
            line, column = divmod(begin, longest)
            piece = min(length, longest - column)
            packed.barh(line, piece, 0.86, left=column, color=_color(row), linewidth=0)
            begin, length = begin + piece, length - piece
    _say(packed, "Packed", "the same tokens one after the other; offsets say where each sequence begins")
    lines = -(-tokens // longest)
    if rows - lines > 3:
        text, middle = "nothing here to store or to compute", (lines + rows - 1) / 2
        packed.text(longest / 2, middle, text, ha="center", va="center", fontsize=10, color=GREY, style="italic")
    for axes in (padded, packed):
        axes.set_xlim(0, longest)
        axes.set_ylim(max(rows, 1) - 0.4, -0.6)
        axes.set_yticks([])
        axes.set_xticks([0, longest], ["0", f"{longest:,}"])
        _plain(axes)
        axes.spines[:].set_visible(False)
    padded.set_ylabel("sequences", color=INK, fontsize=9)
    padded.set_xlabel("tokens", color=INK, fontsize=9, labelpad=-8)


def draw_loads(axes: Sequence[Axes], runs: Mapping[ScheduleKind, Simulation]) -> None:
    """One panel a kind: how long each worker is busy, and how long it then waits for the slowest."""
    most = max(1.0, *(run.makespan for run in runs.values()))
    for panel, (kind, run) in zip(axes, runs.items(), strict=True):
        workers = len(run.loads)
        few = workers <= MOST_WORKERS
        if few:
            _draw_tiles(panel, run)
            panel.set_xlim(0, 1.03 * most)
        else:
            edges, loads = range(workers + 1), run.loads.tolist()
            panel.stairs([run.makespan] * workers, edges, fill=True, color=WAITING)
            panel.stairs(loads, edges, fill=True, color=BUSY)
            panel.set_xlim(0, workers)
            panel.set_ylim(0, 1.05 * most)
            panel.set_xticks([0, workers], ["0", f"{workers} workers"])
            panel.set_xlabel("")
        waiting = 100 * (1 - run.mean / run.makespan) if run.makespan else 0
        _say(panel, kind.value, f"{waiting:.{0 if waiting >= 9.95 else 1}f} % of the time is waiting")
        _plain(panel)
    first = axes[0]
    if len(next(iter(runs.values())).loads) > MOST_WORKERS:
        first.set_ylabel("blocks to compute", color=INK, fontsize=9)


def _draw_tiles(panel: Axes, run: Simulation) -> None:
    workers = len(run.loads)
    panel.barh(range(workers), [run.makespan] * workers, 0.82, color=WAITING, linewidth=0)
    spans = zip(run.owner.tolist(), run.begin.tolist(), run.end.tolist(), run.tiles.tolist(), strict=True)
    for owner, begin, end, tile in spans:
        color = _color(tile[Tile.SEQUENCE])
        panel.barh(owner, end - begin, 0.82, left=begin, color=color, edgecolor="white", linewidth=0.8)
    panel.set_ylim(workers - 0.4, -0.6)
    panel.set_yticks(range(workers), [f"worker {w}" for w in range(workers)])
    panel.set_xlabel("time, in blocks", color=INK, fontsize=9)


def draw_lengths(axes: Axes, lengths: Tensor) -> None:
    """How many sequences have which length; from 1 on in equal ratios if a few are much longer than most."""
    values = lengths.tolist()
    longest, mean = max(values, default=0), sum(values) / max(len(values), 1)
    skewed = longest > 8 * max(sorted(values)[len(values) // 2] if values else 0, 1)
    if skewed:
        edges = torch.logspace(0, torch.tensor(float(longest + 1)).log10().item(), 49).tolist()
        axes.hist([max(value, 1) for value in values], bins=edges, color=BUSY, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlim(1, longest + 1)
        axes.xaxis.set_major_formatter(lambda x, position: f"{x:,.0f}")
    else:
        axes.hist(values, bins=min(60, longest + 1), range=(0, longest + 1), color=BUSY, linewidth=0)
        axes.set_xlim(0, longest + 1)
    axes.axvline(mean, color=INK, linewidth=0.9, linestyle=DASHED)
    axes.annotate(f" mean {mean:,.0f}", (mean, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color=INK)
    _say(axes, "Lengths", "number of sequences by length" + (", logarithmic" if skewed else ""))
    _plain(axes)
    axes.set_xlabel("tokens", color=INK, fontsize=9)


def _say(axes: Axes, title: str, text: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, weight="bold", pad=18)
    axes.annotate(text, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=8.5, color=GREY)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def _sample(lengths: Tensor, most: int) -> Tensor:
    """All lengths, or as many as `most` evenly spaced ones of their order by size, in their order in the batch."""
    if len(lengths) <= most:
        return lengths
    ranks = torch.linspace(0, len(lengths) - 1, most).round().to(torch.int64)
    return lengths[lengths.sort(stable=True).indices[ranks].sort().values]


def _color(sequence: int) -> str:
    """Neighbours differ, and a sequence has the same color in every picture."""
    return SEQUENCES[sequence % len(SEQUENCES)]
