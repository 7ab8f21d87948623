"""Pictures of a trace: one step's staircase, acceptance by position, calibration of the confidences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dflash_trt.errors import UsageError
from dflash_trt.evaluation.staircase_figure import ACCEPTED, INK, REJECTED, UNREACHED, draw_staircase
from dflash_trt.evaluation.trace_summary import Calibration, StepView, TraceSummary, summarize
from dflash_trt.runtime.trace import Trace

DPI = 150
_MOST_PIXELS = 2**15  # of a side; the renderer cannot draw 2**16
STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def write_figures(trace: Trace, stem: Path, step: int) -> list[Path]:
    """Writes `<stem>.staircase.png`, `<stem>.acceptance.png` and `<stem>.calibration.png`.

    Args:
        trace: a sound trace.
        stem: path of the pictures without what tells them apart; its folder exists.
        step: the one to draw, from 1 on (see `choose_step`).

    Returns:
        The files.

    Raises:
        OSError: a file cannot be written.
    """
    summary = summarize(trace)
    headline = _headline(summary)
    pictures: dict[str, Callable[[], Figure]] = {
        "staircase": lambda: draw_staircase(trace, step, headline),
        "acceptance": lambda: draw_acceptance(summary),
        "calibration": lambda: draw_calibration(summary),
    }
    files = []
    for name, draw in pictures.items():
        file = stem.with_name(f"{stem.name}.{name}.png")
        # A user's matplotlibrc must change nothing here: its fonts may lack what the labels need.
        with matplotlib.style.context(["default", STYLE]):
            _save(draw(), file)
        files.append(file)
    return files


def choose_step(trace: Trace, step: int | None) -> int | None:
    """The step to draw, from 1 on: `step`, else where branches gained most, of equal ones that of the longest path.

    Returns None for a trace without steps. Raises UsageError where there is no step `step`.
    """
    count = len(trace.steps)
    if step is not None:
        if not 1 <= step <= count:
            rule = f"the trace has {f'steps 1 to {count}' if count else 'no steps'}"
            raise UsageError(f"{step}, but {rule}", where="--step", mend="Give one of them, or leave --step out")
        return step
    views = [StepView(step) for step in trace.steps]
    best = max(range(count), key=lambda n: (views[n].gain, len(views[n].step.path)), default=None)
    return None if best is None else best + 1


def draw_acceptance(summary: TraceSummary) -> Figure:
    """How often the path gets to each position: by the whole tree, by the trunk, and by the trunk's confidences."""
    positions = summary.positions
    figure = Figure(figsize=(max(7.5, 2 + 0.45 * len(positions)), 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{_headline(summary)}\nHow often the accepted path gets to a position", linespacing=1.4)
    axes.set(ylim=(0, 1.04), ylabel="share of steps")
    axes.set_xlabel("position behind the anchor\nbeneath: steps that drafted so far")
    if not positions:
        return _nothing(figure, axes)
    x = [place.position for place in positions]
    only_trunk = summary.branches_per_step == 0
    if not only_trunk:
        axes.plot(x, [p.tree for p in positions], "o-", color=ACCEPTED, label="the whole tree", zorder=3)
    label = "the trunk (all there is)" if only_trunk else "the trunk alone"
    trunk = [place for place in positions if place.position < summary.block_size]
    axes.plot(x[: len(trunk)], [p.trunk for p in trunk], "s-", color=REJECTED, label=label, zorder=2.5)
    axes.plot(x[: len(trunk)], [p.predicted for p in trunk], "k--", label="the trunk, by its confidences", zorder=2.6)
    axes.set_xticks(x, [f"{place.position}\n{place.steps}" for place in positions])
    axes.set_xlim(0.5, x[-1] + 0.5)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def draw_calibration(summary: TraceSummary) -> Figure:
    """Share accepted against confidence, over the judged drafts of trunks and of re-drafted tails; with counts."""
    series = [
        ("first drafts", summary.trunk_calibration, ACCEPTED, "o"),
        ("re-drafted tails", summary.redraft_calibration, REJECTED, "s"),
    ]
    series = [(name, found, color, marker) for name, found, color, marker in series if found.judged]
    figure = Figure(figsize=(7.5, 6.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    errors = ", ".join(f"{name} {found.error:.3f} ({found.judged} judged)" for name, found, _, _ in series)
    title = f"Expected calibration error: {errors}" if series else "Calibration of the confidences"
    upper.set_title(f"{_headline(summary)}\n{title}", linespacing=1.4)
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share accepted")
    lower.set(xlabel="confidence", ylabel="judged drafts")
    if not series:
        lower.set_yticks([])
        return _nothing(figure, upper)
    upper.plot([0, 1], [0, 1], "--", color=UNREACHED, label="as often right as confident")
    for number, (name, found, color, marker) in enumerate(series):
        x = [part.confidence for part in found.bins]
        y = [part.accepted for part in found.bins]
        sizes = [20 + 130 * (part.count / found.judged) ** 0.5 for part in found.bins]
        upper.plot(x, y, color=color, alpha=0.35, linewidth=1)
        upper.scatter(x, y, sizes, color=color, marker=marker, label=name, clip_on=False, zorder=3)
        _bars(lower, found, number, len(series), color)
    upper.legend(loc="lower right", markerscale=0.8)
    return figure


def _bars(axes: Axes, found: Calibration, number: int, among: int, color: str) -> None:
    """One series' counts, its bars beside those of the others, each with its count."""
    part_width = [(part.high - part.low) * 0.9 / among for part in found.bins]
    left = [
        part.low + (part.high - part.low) * 0.05 + number * width
        for part, width in zip(found.bins, part_width, strict=True)
    ]
    bars = axes.bar(left, [part.count for part in found.bins], part_width, align="edge", color=color)
    axes.bar_label(bars, fontsize=7, padding=1)
    axes.margins(y=0.2)


def _nothing(figure: Figure, axes: Axes) -> Figure:
    axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center", color=INK)
    return figure


def _headline(summary: TraceSummary) -> str:
    """tau, steps, system and K in one line."""
    count = f"{summary.steps} step{'s' if summary.steps != 1 else ''}"
    drafting = f"{summary.system}, K = {summary.branches}" if summary.speculation else "token by token"
    text = f"{drafting}: tau {summary.mean_acceptance_length:.2f} over {count}"
    if summary.branches_per_step:
        text += f", the trunk alone {summary.trunk_mean_acceptance_length:.2f}"
    return text


def _save(figure: Figure, file: Path) -> None:
    FigureCanvasAgg(figure)
    longest = max(figure.get_size_inches())
    figure.savefig(file, dpi=min(DPI, _MOST_PIXELS / longest), format="png")
