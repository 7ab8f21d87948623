"""Pictures of traces: written, of a sensible size, nothing outside or on top of another, and without warnings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from traces import ANCHOR, make_branch, make_step, make_trace, simulated_trace

from dflash_trt.errors import UsageError
from dflash_trt.evaluation import trace_figures
from dflash_trt.evaluation.staircase_figure import arrange, draw_staircase, token_label
from dflash_trt.evaluation.trace_figures import choose_step, write_figures
from dflash_trt.runtime.trace import Trace
from dflash_trt.runtime.tree import CandidateTree

pytestmark = pytest.mark.filterwarnings("error")

ODD_TEXTS = (
    "\U0001f600", "\U0001f468\u200d\U0001f469", "\U0001f600" * 20, "\u4f60\u597d", "\u3042", "\u05e9\u05dc",
    "\u0645\u0631\u062d\u0628\u0627", "e\u0301", "\u0301", "\ufffd", "\u00a0", "\u200b", "\u2028", "\ufeff", "\ue000",
    "", " ", " " * 20, "\n", "\n" * 16, "\t", "\x00", "\x1b[0m", "\x7f", "\\", "\\n", "$x$", "$", "a$b$c",
    "$\\frac{1}{2}$", "{", "%", "_^", "<b>&amp;", " antidisestablishmentarianism",
)  # fmt: skip


def _staircase_of_70() -> Trace:
    """The largest tree of blocks of 16 and four branches: 16 + 15 + 14 + 13 + 12 nodes."""
    branches = [make_branch(kept, [100 * (kept + 1) + n for n in range(15 - kept)], 0.1) for kept in range(4)]
    trace = make_trace([make_step(range(2, 17), (2, 3, 300, 301, 302, 9), branches)])
    assert len(trace.steps[0].tokens) == 70
    return trace


def _general() -> Trace:
    """A tree of no branches: nodes hang off nodes that hang off the trunk, and the trunk is verified in part."""
    tree = CandidateTree.from_parents([ANCHOR, 2, 3, 4, 5, 6, 7, 8, 9], [-1, 0, 1, 0, 3, 3, 5, 5, 2])
    return make_trace([make_step((2, 3, 60, 61), (4, 6, 8, 30), tree=tree)])


TRACES = {
    "staircase of 70": _staircase_of_70,
    "extended": lambda: simulated_trace(2, block_size=8, vp_block_size=16, branches=3),
    "chain": lambda: simulated_trace(3, branches=0),
    "token by token": lambda: make_trace([make_step((), (9,))] * 3),
    "cut": lambda: make_trace([make_step((2, 3, 4), (2, 3, 4, 5), [make_branch(1, (8, 9))], limit=2)]),
    "general": _general,
    "not verified": lambda: make_trace(
        [make_step((2, 3), (2, 9), [make_branch(1, (8,))], tree=CandidateTree.chain([ANCHOR, 2]))]
    ),
    "one branch twice": lambda: make_trace([make_step((2, 3), (7, 9), [make_branch(0, (2, 3)), make_branch(1, (3,))])]),
    "odd texts": lambda: simulated_trace(4, texts=ODD_TEXTS * 6),
    "no texts": lambda: replace(simulated_trace(5), texts={}),
    "certain": lambda: make_trace([make_step((2, 3), (2, 3, 4), confidence=(1.0, 1.0005))]),
}


@pytest.mark.parametrize("name", ["staircase of 70", "extended", "chain", "token by token", "odd texts", "certain"])
def test_pictures_are_written(name, tmp_path):
    before = dict(matplotlib.rcParams)
    files = write_figures(TRACES[name](), tmp_path / "out.1", 1)
    assert [file.name for file in files] == [
        "out.1.staircase.png", "out.1.acceptance.png", "out.1.calibration.png"
    ]  # fmt: skip
    for file in files:
        height, width = imread(file).shape[:2]
        assert 300 <= height <= 3000
        assert 1000 <= width <= 6000
        assert _ink(file) > 0.002
    assert dict(matplotlib.rcParams) == before


def _ink(file: Path) -> float:
    """Share of pixels that are not white."""
    return float(np.mean(imread(file)[:, :, :3].min(axis=2) < 1))


def test_the_staircase_grows_with_its_tree():
    names = ("staircase of 70", "token by token")
    large, small = (draw_staircase(TRACES[name](), 1, "").get_size_inches() for name in names)
    assert large[0] > 2 * small[0]
    assert large[1] > 1.3 * small[1]


def test_a_tree_too_large_for_the_renderer_is_drawn_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_figures, "_MOST_PIXELS", 700)
    for file in write_figures(TRACES["cut"](), tmp_path / "x", 1):
        assert max(imread(file).shape) in (699, 700)


@pytest.mark.parametrize("name", TRACES)
def test_texts_stay_in_the_picture_and_labels_in_their_nodes(name):
    trace = TRACES[name]()
    figure = draw_staircase(trace, 1, "headline")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    axes = figure.axes[0]
    texts = [text for text in axes.findobj(Text) if text.get_text()]
    places = [text.get_window_extent(renderer) for text in texts]
    for place in places:
        assert place.x0 >= 0
        assert place.y0 >= 0
        assert place.x1 <= figure.bbox.width
        assert place.y1 <= figure.bbox.height
    boxes = [patch.get_window_extent(renderer) for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    step = trace.steps[0]
    assert len(boxes) == len(step.tokens) + (len(step.emitted) == len(step.path))
    for number, box in enumerate(boxes):
        assert sum(box.overlaps(other) for other in boxes) == 1, number
        inside = [place for place in places if box.contains((place.x0 + place.x1) / 2, (place.y0 + place.y1) / 2)]
        assert len(inside) == 1, number  # the label
        assert inside[0].x0 >= box.x0
        assert inside[0].x1 <= box.x1


# -- labels


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("return", "return"),
        (" return", "\u2423return"),
        ("\n", "\u23ce"),
        ("\t\\n", "\\t\\\\n"),
        ("\x00", "\\x00"),
        ("\U0001f600", "\\U0001f600"),
        ("\u4f60", "\\u4f60"),
        ("e\u0301", "e\\u0301"),
        ("\u00a0", "\\xa0"),
        ("$x$", "$x$"),
        ("\u00e9\u03c4", "\u00e9\u03c4"),
        ("", "#77"),
        ("twelve chars", "twelve\u2423chars"),
        (" implementation", "\u2423impleme\u2026ion"),
        ("\U0001f600\U0001f600", "\u2026\\U0001f600"),
    ],
)
def test_a_label_shows_the_text(text, label):
    assert token_label(text, 77) == label


@given(st.text(st.characters(codec="utf-8"), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_label_is_one_short_line(text):
    label = token_label(text, 1)
    assert 1 <= len(label) <= 12
    assert label.isprintable()


# -- layout


def test_branches_stand_under_what_they_keep_without_crossings():
    trunk = [0, 1, 2, 3]
    #          trunk         off node 1   off node 0  off a branch
    parents = [-1, 0, 1, 2, 1, 4, 0, 6, 4]
    assert arrange(parents, trunk) == [0, 0, 0, 0, 1, 1, 3, 3, 2]


def test_what_follows_the_trunk_stands_in_its_row_only_if_it_is_whole():
    assert arrange([-1, 0, 1, 2], [0, 1], trunk_ends=True) == [0, 0, 0, 0]
    assert arrange([-1, 0, 1, 2], [0, 1], trunk_ends=False) == [0, 0, 1, 1]


@given(st.lists(st.integers(0, 10**6), max_size=25))
@settings(max_examples=100, deadline=None)
def test_no_node_stands_on_an_edge(choices):
    parents = [-1, *(choice % (index + 1) for index, choice in enumerate(choices))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    rows = arrange(parents, [0])
    places = list(zip(rows, depths, strict=True))
    assert len(set(places)) == len(places)
    assert set(rows) == set(range(max(rows) + 1))
    for node, parent in enumerate(parents[1:], start=1):
        if rows[node] != rows[parent]:  # straight down in the parent's column
            assert rows[node] > rows[parent]
            assert not any((row, depths[parent]) in places for row in range(rows[parent] + 1, rows[node] + 1))


# -- which step


def test_the_step_where_branches_gained_most_is_drawn():
    gained = make_step((2, 3), (5, 6, 7), [make_branch(0, (5, 6))])  # 3 tokens, the trunk alone 1
    longer = make_step((2, 3, 4, 5), (2, 3, 4, 5, 6))
    assert choose_step(make_trace([longer, gained, gained]), None) == 2
    assert choose_step(make_trace([make_step((2,), (9,)), longer, longer]), None) == 2
    assert choose_step(make_trace([longer, gained]), 1) == 1
    assert choose_step(make_trace([]), None) is None


@pytest.mark.parametrize(("count", "step", "rule"), [(2, 3, "steps 1 to 2"), (2, 0, "steps 1 to 2"), (0, 1, "no ste")])
def test_a_step_that_is_not_there_is_refused(count, step, rule):
    with pytest.raises(UsageError, match=rf"--step: {step}, but the trace has {rule}"):
        choose_step(make_trace([make_step((2,), (9,))] * count), step)


def test_a_users_style_changes_nothing(tmp_path):
    trace = TRACES["cut"]()
    expected = [imread(file) for file in write_figures(trace, tmp_path / "a", 1)]
    with matplotlib.rc_context({"font.family": ["serif"], "axes.facecolor": "black", "savefig.dpi": 20}):
        found = [imread(file) for file in write_figures(trace, tmp_path / "b", 1)]
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one, other)
