"""A benchmark in one picture: speed by set, acceptance by position, and where the time of a token goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dflash_trt.evaluation.bench_modes import PLAIN
from dflash_trt.evaluation.bench_report import STEP_STAGES, BenchReport, ModeFigures
from dflash_trt.evaluation.trace_figures import DPI, STYLE

_COLORS = (
    "#8C8C8C", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#882255", "#332288",
    "#44AA99", "#661100",
)  # fmt: skip
_STAGE_COLORS = ("#56B4E9", "#0072B2", "#8C8C8C", "#E69F00", "#D55E00", "#CC79A7", "#D9D9D9")
_MARKERS = "osD^vPX<>"


def write_figure(report: BenchReport, file: Path) -> None:
    """Writes the picture as PNG. Raises OSError where it cannot be written."""
    # A user's matplotlibrc must change nothing here.
    with matplotlib.style.context(["default", STYLE]):
        figure = draw(report)
        FigureCanvasAgg(figure)
        figure.savefig(file, dpi=DPI, format="png")


def draw(report: BenchReport) -> Figure:
    """The three panels."""
    labels = [mode.label for mode in report.sets[0].modes]
    bars = len(report.sets) * len(labels)
    figure = Figure(figsize=(12 + 0.16 * bars, 5), layout="constrained")
    speed, acceptance, time = figure.subplots(1, 3, width_ratios=(4 + 0.16 * bars, 4, 4))
    colors = {label: _COLORS[number % len(_COLORS)] for number, label in enumerate(labels)}
    _draw_speed(speed, report, colors)
    _draw_acceptance(acceptance, report, colors)
    _draw_stages(time, report)
    named = [label for label in labels if label != PLAIN]
    handles = [speed.scatter([], [], color=colors[label], marker="s", label=label) for label in named]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(named)))
    return figure


def _draw_speed(axes: Axes, report: BenchReport, colors: dict[str, str]) -> None:
    """A bar for each mode on each set, its whiskers at the quartiles over the prompts."""
    axes.set_title("Speed against token by token\n(median over the prompts, quartiles)", linespacing=1.4)
    axes.axhline(1, color=colors[PLAIN], linewidth=1, linestyle="--")
    labels = [label for label in colors if label != PLAIN]
    width = 0.8 / max(1, len(labels))
    for place, one in enumerate(report.sets):
        for mode in one.modes:
            if mode.label == PLAIN or mode.ratio is None:
                continue
            x = place - 0.4 + width * (labels.index(mode.label) + 0.5)
            middle = mode.ratio.median
            whiskers = [[middle - mode.ratio.low], [mode.ratio.high - middle]]
            axes.bar(x, middle, 0.92 * width, color=colors[mode.label], yerr=whiskers, ecolor="#222222", capsize=2)
    slant = 20 if len(report.sets) > 3 else 0
    names = [one.name for one in report.sets]
    axes.set_xticks(range(len(names)), names, rotation=slant, ha="right" if slant else "center")
    axes.set(ylabel="times as fast, per token", ylim=(0, None))
    axes.grid(visible=False, axis="x")


def _draw_acceptance(axes: Axes, report: BenchReport, colors: dict[str, str]) -> None:
    """How often the path of a step gets to a position that was verified, all sets together."""
    axes.set_title("Acceptance by position\n(steps that verified a draft there)", linespacing=1.4)
    axes.set(xlabel="position behind the anchor", ylabel="share of steps", ylim=(0, 1.04))
    deepest = 1
    for number, label in enumerate(colors):
        shares = _pooled_positions(_of_mode(report, label))
        if shares:
            deepest = max(deepest, len(shares))
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(range(1, len(shares) + 1), shares, f"{marker}-", color=colors[label], markersize=4)
    axes.set_xlim(0.5, deepest + 0.5)
    axes.set_xticks(range(1, deepest + 1, 1 + deepest // 12))


def _draw_stages(axes: Axes, report: BenchReport) -> None:
    """Milliseconds for a token by stage, all sets together."""
    axes.set_title("Where the time of a token goes\n(behind the first)", linespacing=1.4)
    axes.set_xlabel("milliseconds for a token")
    columns = {mode.label: _ms_per_token(_of_mode(report, mode.label)) for mode in report.sets[0].modes}
    columns = {label: column for label, column in columns.items() if column}
    left = [0.0] * len(columns)
    for stage, color in zip((*STEP_STAGES, "inject"), _STAGE_COLORS, strict=True):
        widths = [column[stage] for column in columns.values()]
        if any(widths):
            axes.barh(range(len(columns)), widths, 0.6, left, color=color, label=stage)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(columns)), list(columns))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    if columns:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, fontsize=8, handlelength=1)


def _of_mode(report: BenchReport, label: str) -> list[ModeFigures]:
    return [mode for one in report.sets for mode in one.modes if mode.label == label]


def _pooled_positions(figures: Sequence[ModeFigures]) -> list[float]:
    """Shares of steps by position over several sets."""
    shares = []
    for number in range(max((len(mode.positions) for mode in figures), default=0)):
        here = [mode.positions[number] for mode in figures if len(mode.positions) > number]
        shares.append(sum(at.steps * at.accepted for at in here) / sum(at.steps for at in here))
    return shares


def _ms_per_token(figures: Sequence[ModeFigures]) -> dict[str, float]:
    """By stage, over several sets; nothing without steps that were timed."""
    timed = [(mode.stages, mode.steps, mode.mean_acceptance_length) for mode in figures if mode.stages is not None]
    tokens = sum((steps or 0) * (tau or 0.0) for _, steps, tau in timed)
    if not tokens:
        return {}
    return {
        stage: sum(getattr(stages, stage) * (steps or 0) for stages, steps, _ in timed) / tokens
        for stage in (*STEP_STAGES, "inject")
    }
