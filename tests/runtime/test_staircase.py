"""The staircase of D2SD: r(i) and the branches chosen by it, the merged tree, and the sizes reserved for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.hints import chance

from dflash_trt.errors import UsageError
from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.staircase import break_chances, likeliest, merge, prefix_chances

CONFIDENCES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), max_size=20)


@st.composite
def candidates(draw: st.DrawFn) -> list[list[int]]:
    """Rows with one anchor, of few tokens, so that they share much."""
    anchor = draw(st.integers(0, 2))
    tail = st.lists(st.integers(0, 2), max_size=7)
    return [[anchor, *rest] for rest in draw(st.lists(tail, min_size=1, max_size=7))]


@st.composite
def staircases(draw: st.DrawFn) -> tuple[Limits, list[list[int]]]:
    """Sizes, and a trunk with branches as a step may have them: any prefixes, any tokens, also shorter blocks."""
    block = draw(st.integers(2, 12))
    limits = limits_of(block, block + draw(st.integers(0, 4)), draw(st.integers(1, 14)))
    room = draw(st.integers(2, 18))
    size, longest = min(block, room), min(limits.vp_block_size, room)
    count = min(limits.branches, size - 1)
    kept = sorted(draw(st.permutations(range(size - 1)))[:count]) + [size - 1] * (longest > size)
    token = st.integers(0, draw(st.sampled_from([1, 100])))
    trunk = [0, *draw(st.lists(token, min_size=size - 1, max_size=size - 1))]
    rows = [trunk]
    for keep in kept:
        missing = longest - 1 - keep
        rows.append([*trunk[: keep + 1], *draw(st.lists(token, min_size=missing, max_size=missing))])
    return limits, rows


def limits_of(block: int, vp_block: int, branches: int) -> Limits:
    return Limits(
        max_batch_size=1, max_seq_len=64, max_input_len=32, block_size=block, prefill_chunk=8,
        vp_block_size=vp_block, branches=branches,
    )  # fmt: skip


# -- r(i)


def test_the_papers_worked_example() -> None:
    posterior = break_chances([0.95, 0.84, 0.62, 0.70, 0.42])[:-1]
    assert np.round(posterior, 3).tolist() == [0.050, 0.152, 0.303, 0.148, 0.201]
    assert sorted(likeliest(posterior, 4)) == [1, 2, 3, 4]


@given(CONFIDENCES)
def test_break_chances_are_the_formula(confidence: list[float]) -> None:
    """And sum to 1, with that of no break at all."""
    sure = np.array(confidence)
    right = np.concatenate(([1.0], sure.cumprod()))
    breaks = break_chances(confidence)
    np.testing.assert_allclose(prefix_chances(confidence), right, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(breaks, right * [*(1 - sure), 1.0], rtol=1e-12, atol=1e-300)
    assert sum(breaks) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ([], [1.0]),
        ([0.0], [1.0, 0.0]),
        ([1.0], [0.0, 1.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]),
        ([0.0, 1.0, 0.5], [1.0, 0.0, 0.0, 0.0]),  # the first draft is surely wrong: nothing comes after it
        ([1.0, 0.0, 0.5], [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_break_chances_at_the_ends(confidence: list[float], expected: list[float]) -> None:
    assert break_chances(confidence) == expected


@pytest.mark.parametrize(
    ("chances", "count", "expected"),
    [
        ([0.1, 0.4, 0.2, 0.3], 2, [1, 3]),
        ([0.2, 0.3, 0.2, 0.3, 0.2], 3, [1, 3, 0]),  # of three equal ones the first
        ([0.25, 0.25, 0.25, 0.25], 2, [0, 1]),
        ([0.1, 0.2], 5, [1, 0]),
        ([0.1, 0.2], None, [1, 0]),
        ([0.1, 0.2], 0, []),
        ([], 3, []),
        ([0.0, 0.0, 1.0], 2, [2, 0]),
    ],
)
def test_likeliest(chances: list[float], count: int | None, expected: list[int]) -> None:
    assert likeliest(chances, count) == expected


# -- the tree


@given(candidates())
def test_merge_is_the_prefix_tree_of_the_rows(rows: list[list[int]]) -> None:
    staircase = merge(rows)
    tree, nodes = staircase.tree(), staircase.paths
    spelled = {}
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        spelled[node] = (*(() if parent < 0 else spelled[parent]), int(tree.tokens[node]))
    prefixes = {tuple(row[:size]) for row in rows for size in range(1, len(row) + 1)}
    assert len(tree) == len(prefixes)  # each once: equal siblings are merged
    assert set(spelled.values()) == prefixes
    assert nodes[0] == list(range(len(rows[0])))
    for row, path in zip(rows, nodes, strict=True):
        assert [spelled[node] for node in path] == [tuple(row[:size]) for size in range(1, len(row) + 1)]


def test_equal_siblings_are_merged() -> None:
    """The second drafter often drafts again what the first one did."""
    staircase = merge([[9, 1, 2, 3], [9, 1, 2, 4], [9, 5, 6, 7], [9, 1, 2, 3]])
    assert staircase.tokens == [9, 1, 2, 3, 4, 5, 6, 7]
    assert staircase.parents == [-1, 0, 1, 2, 2, 0, 5, 6]
    assert staircase.paths == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7], [0, 1, 2, 3]]


def test_a_part_has_its_own_parents() -> None:
    staircase = merge([[9, 1, 2], [9, 1, 7], [9, 5, 6]])
    assert staircase.parents == [-1, 0, 1, 1, 0, 4]
    part = staircase.part([0, 1, 3, 4])
    assert part.tokens.tolist() == [9, 1, 7, 5]
    assert part.parents.tolist() == [-1, 0, 1, 0]
    assert part.depths.tolist() == [0, 1, 2, 1]
    assert staircase.part(range(6)).parents.tolist() == staircase.parents


@given(candidates(), st.integers(0, 1000))
def test_a_part_spells_the_same_paths(rows: list[list[int]], seed: int) -> None:
    """Of any nodes, with the ancestors of each."""
    staircase = merge(rows)
    whole, kept = staircase.tree(), {0}
    for node, parent in enumerate(staircase.parents[1:], start=1):
        if parent in kept and chance(seed, node) < 0.7:
            kept.add(node)
    nodes = sorted(kept)
    part = staircase.part(nodes)
    assert part.tokens.tolist() == whole.tokens[nodes].tolist()
    assert part.depths.tolist() == whole.depths[nodes].tolist()
    assert part.parents.tolist()[1:] == [nodes.index(int(whole.parents[node])) for node in nodes[1:]]


@pytest.mark.parametrize("nodes", [[0, 2], [1, 2], [0, 2, 1], []], ids=str)
def test_orphans_are_refused(nodes: list[int]) -> None:
    with pytest.raises(UsageError):
        merge([[4, 5, 6]]).part(nodes)


def row_by_row(rows: list[list[int]], choose: Callable[[tuple[int, ...]], int]) -> list[int]:
    """Acceptance as the authors' code has it: candidates side by side, those that disagree drop out."""
    valid, emitted = list(rows), []
    while True:
        emitted.append(choose(tuple(emitted)))
        valid = [row for row in valid if len(row) > len(emitted) and row[len(emitted)] == emitted[-1]]
        if not valid:
            return emitted


@given(candidates(), st.integers(0, 1000))
def test_the_walk_accepts_what_the_rows_one_by_one_would(rows: list[list[int]], seed: int) -> None:
    def choose(path: tuple[int, ...]) -> int:
        return int(chance(seed, path) * 3)

    tree = merge(rows).tree()
    assert walk(tree, lambda node, path: choose(tuple(path))).tokens == row_by_row(rows, choose)


# -- sizes


def test_sizes_of_the_papers_setting() -> None:
    limits = limits_of(16, 16, 4)
    assert (limits.tree_size, limits.redraft_rows, limits.longest_path) == (70, 4, 16)
    limits = limits_of(16, 32, 4)  # the authors' script: longer blocks, and so the trunk's extension
    assert (limits.redraft_rows, limits.longest_path) == (5, 32)
    assert limits.tree_size == 32 + 31 + 30 + 29 + 28


@pytest.mark.parametrize(
    ("block", "vp_block", "branches", "rows", "tree"),
    [
        (4, 4, 0, 0, 4),
        (4, 4, 1, 1, 4 + 3),
        (4, 4, 3, 3, 4 + 3 + 2 + 1),
        (4, 4, 9, 3, 4 + 3 + 2 + 1),  # 3 drafts have 3 prefixes
        (4, 6, 2, 3, 6 + 5 + 4),
        (2, 2, 4, 1, 2 + 1),
        (2, 5, 4, 2, 5 + 4),
    ],
)
def test_sizes(block: int, vp_block: int, branches: int, rows: int, tree: int) -> None:
    limits = limits_of(block, vp_block, branches)
    assert (limits.redraft_rows, limits.tree_size) == (rows, tree)


@given(staircases())
def test_no_staircase_is_larger_than_the_sizes_say(staircase: tuple[Limits, list[list[int]]]) -> None:
    limits, rows = staircase
    tree = merge(rows).tree()
    assert len(tree) <= limits.tree_size
    assert max(tree.depths) < limits.longest_path
    assert len(rows) - 1 <= limits.redraft_rows


@pytest.mark.parametrize(("block", "vp_block"), [(2, 2), (8, 8), (8, 11), (16, 16)])
@pytest.mark.parametrize("branches", [1, 4, 7, 20])
def test_the_sizes_are_reached(block: int, vp_block: int, branches: int) -> None:
    """Nothing in common, the shortest prefixes kept: not a slot is reserved in vain."""
    limits = limits_of(block, vp_block, branches)
    kept = [*range(min(branches, block - 1)), *([block - 1] if vp_block > block else [])]
    rows = [list(range(block))]
    for number, keep in enumerate(kept, start=1):
        rows.append([*rows[0][: keep + 1], *(1000 * number + place for place in range(vp_block - 1 - keep))])
    assert len(merge(rows).tokens) == limits.tree_size
    assert len(kept) == limits.redraft_rows
