"""The verified tree of one step, drawn: the trunk on top, each branch in a row of its own under the node it keeps."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from dflash_trt.evaluation.trace_summary import StepView
from dflash_trt.runtime.trace import Trace

MONOSPACE = "DejaVu Sans Mono"
ACCEPTED, CUT, BONUS, REJECTED, UNREACHED, INK = "#0072B2", "#A6CEE3", "#E69F00", "#D55E00", "#8C8C8C", "#222222"

# All sizes in inches, which are the data units of the drawing.
_COLUMN, _ROW, _BOX_WIDTH, _BOX_HEIGHT = 1.0, 0.56, 0.86, 0.25
_MARGIN, _HEADER, _FOOTER, _LEAST_WIDTH = 0.3, 1.2, 0.75, 7.5
_FONT, _SMALL = 8.0, 6.5  # points
_GLYPH = 0.602 / 72  # width of a monospaced glyph per point of its size
_LABEL = 12  # glyphs

_VISIBLE = {" ": "\u2423", "\n": "\u23ce", "\\": "\\\\"}


def draw_staircase(trace: Trace, number: int, headline: str) -> Figure:
    """The tree of a step.

    Args:
        trace: a sound trace.
        number: of the step, from 1 on.
        headline: what the title says of the whole trace.
    """
    view = StepView(trace.steps[number - 1])
    nodes = _Nodes(view)
    labels = _row_labels(view, nodes.rows)
    width = 2 * _MARGIN + _COLUMN * (max(nodes.depths) + 1)
    width += max((len(text) for text, _ in labels.values()), default=0) * _GLYPH * _FONT + 0.1
    titles = [headline, _step_title(trace, number, view)]
    width = max(width, 2 * _MARGIN + max(map(len, titles)) * _GLYPH * 10, _LEAST_WIDTH)
    height = _HEADER + _ROW * (max(nodes.rows) + 1) + _FOOTER
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(_MARGIN, 0.3, titles[0], fontsize=11, fontweight="bold", va="center")
    axes.text(_MARGIN, 0.56, titles[1], fontsize=9.5, va="center")
    _draw_positions(axes, view, max(nodes.depths))
    _draw_edges(axes, view, nodes)
    _draw_nodes(axes, view, nodes, trace.texts)
    for row, (text, is_winner) in labels.items():
        end = max(nodes.x(node) for node in range(len(nodes.rows)) if nodes.rows[node] == row)
        place = end + _BOX_WIDTH / 2 + 0.12, nodes.y_of_row(row)
        color, weight = (ACCEPTED, "bold") if is_winner else (INK, "normal")
        axes.text(*place, text, fontsize=_FONT, va="center", fontfamily=MONOSPACE, color=color, fontweight=weight)
    _draw_legend(axes, view, height)
    return figure


def token_label(text: str, token: int) -> str:
    """A token's text on one short line: blanks visible, what the font cannot show escaped as in Python.

    A token without text is shown by its id.
    """
    parts = [_VISIBLE.get(character) or _shown(character) for character in text] or [f"#{token}"]
    if sum(map(len, parts)) <= _LABEL:
        return "".join(parts)
    head, tail = "", ""  # long words differ at their ends, too
    for part in parts:
        if len(head) + len(part) > _LABEL - 4:
            break
        head += part
    if len(parts[-1]) <= _LABEL - 1 - len(head):
        tail = parts[-1]
    for part in reversed(parts[:-1]):
        if len(head) + 1 + len(tail) + len(part) > _LABEL or not tail:
            break
        tail = part + tail
    return f"{head}\u2026{tail}"


def _shown(character: str) -> str:
    # Marks would be drawn onto the character before, and of separators only the blank is meant to be seen.
    visible = character.isprintable() and unicodedata.category(character)[0] not in "MZ"
    if visible and ord(character) in _glyphs():
        return character
    return character.encode("unicode_escape").decode("ascii")


@cache
def _glyphs() -> frozenset[int]:
    """Code points the font has."""
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties(family=MONOSPACE)))
    return frozenset(font.get_charmap())


class _Nodes:
    """Where each node stands: those of the tree, then the bonus token, if the step put one out.

    Attributes:
        bonus: its number, else None.
        parents, depths, rows: of each node.
    """

    def __init__(self, view: StepView) -> None:
        step = view.step
        self.bonus = None if view.cut else len(step.tokens)
        self.parents, self.depths = list(step.parents), list(step.depths)
        if self.bonus is not None:
            self.parents.append(step.path[-1])
            self.depths.append(step.depths[step.path[-1]] + 1)
        trunk = [0, *view.nodes(step.draft)]
        self.rows = arrange(self.parents, trunk, trunk_ends=len(trunk) == len(step.draft) + 1)

    def x(self, node: int) -> float:
        return _x(self.depths[node])

    def y(self, node: int) -> float:
        return self.y_of_row(self.rows[node])

    def y_of_row(self, row: int) -> float:
        return _HEADER + _ROW * (row + 0.5)


def _x(depth: int) -> float:
    return _MARGIN + _COLUMN * depth + _BOX_WIDTH / 2


def arrange(parents: Sequence[int], trunk: Sequence[int], *, trunk_ends: bool = True) -> list[int]:
    """The row of each node, so that no edge crosses another.

    A row holds a chain. What hangs off it stands in rows below, from its deepest node to its shallowest: an edge goes
    straight down past rows that begin further right.

    Args:
        parents: of each node; parents come first.
        trunk: the nodes of row 0, from the root on.
        trunk_ends: whether the trunk's last node is also that of its draft, so what follows it may stand in row 0.
    """
    children: list[list[int]] = [[] for _ in parents]
    height = [1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].insert(0, node)
        height[parents[node]] = max(height[parents[node]], height[node] + 1)
    following: dict[int, int | None] = dict(pairwise(trunk))
    if not trunk_ends:
        following[trunk[-1]] = None
    rows = [0] * len(parents)
    waiting, row = [0], 0
    while waiting:
        place: int | None = waiting.pop()
        while place is not None:
            rows[place] = row
            longest = max(children[place], key=lambda child: height[child], default=None)
            after = following.get(place, longest)
            waiting += [child for child in children[place] if child != after]
            place = after
        row += 1
    return rows


def _row_labels(view: StepView, rows: Sequence[int]) -> dict[int, tuple[str, bool]]:
    """For each row that a candidate ends in: which candidates, and whether one of them won."""
    labels: dict[int, tuple[str, bool]] = {}
    trunk = view.nodes(view.step.draft)
    if view.step.draft:
        left_out = len(view.step.draft) - len(trunk)
        extended = any(branch.kept == len(view.step.draft) for branch in view.step.branches)
        text = f"trunk to {len(trunk)}" if extended else "trunk"
        labels[0] = (text + (f", {left_out} more not verified" if left_out else ""), False)
    for branch in sorted(view.step.branches, key=lambda branch: -branch.probability):
        nodes = view.nodes(view.row(branch))
        row = rows[nodes[-1]] if nodes else 0
        text = "extension" if branch.kept == len(view.step.draft) else f"keeps {branch.kept}"
        same = sum(node in trunk for node in nodes)
        if same > branch.kept:
            text += f" (same to {same})"
        text += f", r = {branch.probability:.3f}"
        if len(nodes) <= branch.kept:
            text += " (not verified)"
        before, won = labels.get(row, ("", False))
        labels[row] = (f"{before}; {text}" if before else text, won or branch is view.winner)
    return labels


def _step_title(trace: Trace, number: int, view: StepView) -> str:
    drafts, branches = _counted(len(view.step.draft), "draft"), _counted(len(view.step.branches), "branch")
    chain = f", the trunk alone {view.yielded([])}" if view.step.branches else ""
    cut = ", cut short by a stop token or the length limit" if view.cut else ""
    return (
        f"Step {number} of {len(trace.steps)}: {drafts}, {branches}, {_counted(len(view.tree), 'token')} verified, "
        f"{len(view.step.emitted)} put out{chain}{cut}"
    )


def _counted(count: int, name: str) -> str:
    ending = "" if count == 1 else "es" if name.endswith("ch") else "s"
    return f"{count} {name}{ending}"


def _draw_positions(axes: Axes, view: StepView, deepest: int) -> None:
    """The columns' numbers; 0 is the anchor, named with its place in the sequence."""
    for depth in range(deepest + 1):
        text = f"anchor ({view.step.anchor_position})" if depth == 0 else str(depth)
        axes.text(_x(depth), _HEADER - 0.22, text, fontsize=_FONT, color=UNREACHED, ha="center", va="center")


def _draw_edges(axes: Axes, view: StepView, nodes: _Nodes) -> None:
    emitted = set(view.shown)
    for node in range(1, len(nodes.rows)):
        parent = nodes.parents[node]
        start = nodes.x(parent) + _BOX_WIDTH / 2, nodes.y(parent)
        end = nodes.x(node) - _BOX_WIDTH / 2, nodes.y(node)
        if nodes.rows[node] == nodes.rows[parent]:
            points = [start, end]
        else:  # straight down from the parent, then to the right
            below = nodes.x(parent), nodes.y(parent) + _BOX_HEIGHT / 2
            points = [below, (below[0], end[1]), end]
        color, width, order = UNREACHED, 0.8, 1.0
        if node in emitted or node == nodes.bonus:
            color, width, order = BONUS if node == nodes.bonus else ACCEPTED, 2.2, 1.5
        axes.plot(*zip(*points, strict=True), color=color, linewidth=width, zorder=order, solid_capstyle="butt")


def _draw_nodes(axes: Axes, view: StepView, nodes: _Nodes, texts: Mapping[int, str]) -> None:
    step, confidence = view.step, _confidences(view)
    for node in range(len(nodes.rows)):
        token = step.emitted[-1] if node == nodes.bonus else step.tokens[node]
        label = token_label(texts.get(token, ""), token)
        face, edge, ink, dashed = _style(view, nodes, node)
        x, y = nodes.x(node), nodes.y(node)
        corner = x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2
        box = FancyBboxPatch(
            corner, _BOX_WIDTH, _BOX_HEIGHT, boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=face, edgecolor=edge, linewidth=1.2, linestyle="--" if dashed else "-", zorder=2,
        )  # fmt: skip
        axes.add_patch(box)
        size = min(_FONT, (_BOX_WIDTH - 0.12) / (_GLYPH * max(1, len(label))))
        axes.text(
            x, y, label, color=ink, fontsize=size, fontfamily=MONOSPACE, ha="center", va="center_baseline", zorder=3,
            parse_math=False,  # a token may be "$x$"
        )  # fmt: skip
        if node in confidence:
            place = x + _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2 - 0.015
            axes.text(*place, f"{confidence[node]:.2f}", fontsize=_SMALL, color=INK, ha="right", va="bottom", zorder=3)


def _confidences(view: StepView) -> dict[int, float]:
    """Each node's: the trunk's where it is of the trunk, else the likeliest branch's that has it in its tail."""
    found = dict(zip(view.nodes(view.step.draft), view.step.confidence, strict=False))
    for branch in sorted(view.step.branches, key=lambda branch: -branch.probability):
        tail = view.nodes(view.row(branch))[branch.kept :]
        for node, confidence in zip(tail, branch.confidence, strict=False):
            found.setdefault(node, confidence)
    return found


def _style(view: StepView, nodes: _Nodes, node: int) -> tuple[str, str, str, bool]:
    """Face, edge and text colour of a node, and whether its edge is dashed."""
    if node == nodes.bonus:
        return BONUS, BONUS, INK, False
    if node == 0 or node in view.shown:
        return ACCEPTED, ACCEPTED, "white", False
    if node in view.step.path:
        return CUT, ACCEPTED, INK, False
    # The target chose at every node it accepted; where the step was cut its last choices are not shown.
    if nodes.parents[node] in (0, *view.shown) and view.knows(nodes.depths[node]):
        return "white", REJECTED, INK, False
    return "white", UNREACHED, INK, True


def _draw_legend(axes: Axes, view: StepView, height: float) -> None:
    entries = [
        Patch(facecolor=ACCEPTED, edgecolor=ACCEPTED, label="accepted"),
        Patch(facecolor="white", edgecolor=REJECTED, label="rejected by the target"),
        Patch(facecolor="white", edgecolor=UNREACHED, linestyle="--", label="not reached"),
    ]
    if view.cut:
        entries.append(Patch(facecolor=CUT, edgecolor=ACCEPTED, label="accepted, then cut off"))
    else:
        entries.append(Patch(facecolor=BONUS, edgecolor=BONUS, label="bonus token"))
    axes.legend(
        handles=entries, ncols=len(entries), frameon=False, fontsize=_FONT, borderpad=0,
        loc="center left", bbox_to_anchor=(_MARGIN, height - 0.5), bbox_transform=axes.transData,
    )  # fmt: skip
    text = "Above a node: the drafter's confidence."
    if view.step.branches:
        text += " r: the probability that the trunk is right for what the branch keeps and no further."
    axes.text(_MARGIN, height - 0.25, text, fontsize=_FONT, color=INK, va="center")
