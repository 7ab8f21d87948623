"""The device loop's operators: a plain walk and plain loops == the references."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from dflash_trt.ops import accepted_path
from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.tree import CandidateTree


class Tree(NamedTuple):
    """One row of a batch: nodes in an order where parents come first, then padding."""

    tokens: list[int]
    parents: list[int]
    choices: list[int]

    def visibility(self) -> np.ndarray:
        visible = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                visible[node] |= visible[parent]
        return visible

    def padded(self, size: int) -> Tree:
        missing = size - len(self.tokens)
        return Tree(
            self.tokens + self.tokens[:1] * missing, self.parents + [-1] * missing, self.choices + [0] * missing
        )


@st.composite
def trees(draw: st.DrawFn, siblings_differ: bool) -> Tree:
    """Few tokens, so that choices often follow; chains, bushes and what lies between; some choices are not finite."""
    size = draw(st.integers(1, 24))
    back = draw(st.sampled_from((1, 2, 30)))
    parents = [-1, *(draw(st.integers(max(0, node - back), node - 1)) for node in range(1, size))]
    tokens = [draw(st.integers(0, 2)) for _ in range(size)]
    if siblings_differ:
        for node in range(1, size):
            taken = {tokens[other] for other in range(1, node) if parents[other] == parents[node]}
            tokens[node] = next(token for token in (tokens[node], *range(size)) if token not in taken)
    choices = [draw(st.integers(-1, 2)) for _ in range(size)]
    return Tree(tokens, parents, choices)


def brute_force(tree: Tree) -> list[int]:
    """Every path judged by itself: the longest that follows the choices, of several the one with the lowest id."""
    best: list[int] = []
    for node in range(len(tree.tokens)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        follows = all(tree.choices[a] == tree.tokens[b] >= 0 for a, b in pairwise(path))
        if follows and len(path) > len(best):
            best = path
    return best


def accepted(rows: list[Tree], capacity: int | None = None) -> list[tuple[list[int], int]]:
    """Path and bonus of every row; checks the padding of the path."""
    size = max(len(tree.tokens) for tree in rows)
    padded = [tree.padded(size) for tree in rows]
    tokens, parents, choices = (torch.tensor([getattr(tree, name) for tree in padded]) for name in Tree._fields)
    visibility = torch.from_numpy(np.stack([tree.visibility() for tree in padded]))
    path, path_len, bonus = accepted_path.accept_path(tokens, choices, visibility, parents, capacity or size)
    assert path.shape == (len(rows), capacity or size)
    assert path_len.shape == bonus.shape == (len(rows),)
    assert {path.dtype, path_len.dtype, bonus.dtype} == {torch.int64}
    for nodes, length in zip(path.tolist(), path_len.tolist(), strict=True):
        assert set(nodes[length:]) <= {nodes[length - 1]}
    return [(path[row, : path_len[row]].tolist(), int(bonus[row])) for row in range(len(rows))]


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(trees(siblings_differ=True), min_size=1, max_size=3))
def test_accept_path_is_the_walk(rows: list[Tree]) -> None:
    for tree, (path, bonus) in zip(rows, accepted(rows), strict=True):
        candidates = CandidateTree.from_parents(tree.tokens, tree.parents)
        expected = walk(candidates, lambda node, _, choices=tree.choices: choices[node])
        assert path == expected.path
        assert bonus == expected.tokens[-1]


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(trees(siblings_differ=False), min_size=1, max_size=3))
def test_accept_path_of_equal_siblings_is_the_deepest(rows: list[Tree]) -> None:
    for tree, (path, bonus) in zip(rows, accepted(rows), strict=True):
        assert path == brute_force(tree)
        assert bonus == tree.choices[path[-1]]


def test_a_path_needs_no_more_room_than_the_tree_is_deep() -> None:
    chain = Tree([5, 6, 7], [-1, 0, 1], [6, 7, 8])
    bush = Tree([5, 6, 7, 8], [-1, 0, 0, 0], [8, 1, 1, 9])
    assert accepted([chain, bush], capacity=3) == [([0, 1, 2], 8), ([0, 3], 9)]


def test_choices_that_are_not_finite_match_nothing() -> None:
    assert accepted([Tree([5, -1], [-1, 0], [-1, 7])]) == [([0], -1)]


@st.composite
def paths(draw: st.DrawFn) -> dict[str, Any]:
    """Ascending nodes from the root on, padded with the last; rows of a batch differ in everything."""
    nodes, batch = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    length = draw(st.integers(1, nodes))
    path, path_len = [], []
    for _ in range(batch):
        chosen = [0, *sorted(draw(st.sets(st.integers(1, nodes - 1), max_size=length - 1)) if length > 1 else [])]
        path.append(chosen + chosen[-1:] * (length - len(chosen)))
        path_len.append(len(chosen))
    return {
        "nodes": nodes,
        "path": np.array(path),
        "path_len": np.array(path_len),
        "context_len": np.array(draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))),
        "seed": draw(st.integers(0, 1 << 30)),
    }


@settings(deadline=None, max_examples=100)
@given(case=paths(), slack=st.integers(0, 3), layers=st.integers(1, 3))
def test_move_rows(case: dict[str, Any], slack: int, layers: int) -> None:
    """Only slots of the path change, NaN in others stays, and the padding of a path may reach the cache's end."""
    batch, capacity = len(case["path"]), int(case["context_len"].max()) + case["nodes"] + slack
    rng = np.random.default_rng(case["seed"])
    before = [rng.standard_normal((batch, 2, capacity, 4)).astype(np.float32) for _ in range(2 * layers)]
    for cache in before:
        cache[rng.random(cache.shape[:3]) < 0.2] = np.nan
    buffers = [torch.from_numpy(cache.copy()) for cache in before]
    arguments = [torch.from_numpy(case[name]) for name in ("path", "path_len", "context_len")]
    accepted_path.move_rows_(buffers, accepted_path.addresses(buffers), *arguments)
    for buffer, old in zip(buffers, before, strict=True):
        expected = old.copy()
        for b, i in np.ndindex(case["path"].shape):
            if i < case["path_len"][b]:
                start = case["context_len"][b]
                expected[b, :, start + i] = old[b, :, start + case["path"][b, i]]
        np.testing.assert_array_equal(buffer.numpy(), expected)


def test_move_rows_with_a_path_padded_beyond_the_cache() -> None:
    buffer = torch.arange(6.0).reshape(1, 1, 6, 1)
    path = torch.tensor([[0, 2, 2, 2]])
    accepted_path.move_rows_([buffer], accepted_path.addresses([buffer]), path, torch.tensor([2]), torch.tensor([3]))
    assert buffer.flatten().tolist() == [0, 1, 2, 3, 5, 5]


@settings(deadline=None, max_examples=100)
@given(case=paths(), out_rows=st.integers(1, 15))
def test_gather_features(case: dict[str, Any], out_rows: int) -> None:
    batch = len(case["path"])
    features = np.random.default_rng(case["seed"]).standard_normal((batch, case["nodes"], 5)).astype(np.float32)
    unused = np.ones((batch, case["nodes"]), bool)
    expected = np.zeros((batch, out_rows, 5), np.float32)
    for b, i in np.ndindex(batch, out_rows):
        if i < case["path_len"][b]:
            expected[b, i] = features[b, case["path"][b, i]]
            unused[b, case["path"][b, i]] = False
    features[unused] = np.nan
    arguments = (torch.from_numpy(case[name]) for name in ("path", "path_len"))
    found = accepted_path.gather_features(torch.from_numpy(features), *arguments, out_rows)
    np.testing.assert_array_equal(found.numpy(), expected)


def arguments(name: str) -> tuple[Any, ...]:
    path, path_len = torch.tensor([[0, 2, 2], [0, 1, 2]]), torch.tensor([2, 3])
    if name == "accept_path":
        tokens = torch.tensor([[3, 4, 5], [3, 4, 5]])
        visibility = torch.ones(3, 3, dtype=torch.bool).tril().expand(2, -1, -1)
        return tokens, tokens + 1, visibility, torch.tensor([[-1, 0, 1]]).expand(2, -1), 3
    if name == "move_rows_":
        buffers = [torch.randn(2, 2, 8, 4) for _ in range(4)]
        return buffers, accepted_path.addresses(buffers), path, path_len, torch.tensor([3, 5])
    return torch.randn(2, 3, 6), path, path_len, 5


@pytest.mark.parametrize("name", ["accept_path", "move_rows_", "gather_features"])
def test_proper_custom_ops(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.dflash_trt, name).default, arguments(name))


@pytest.mark.parametrize("name", ["accept_path", "move_rows_", "gather_features"])
def test_references_read_nothing_on_the_host(name: str) -> None:
    """Nor have they shapes that depend on data: tensors without data do not stop them, so a CUDA graph takes them."""
    reference = getattr(accepted_path, f"{name.rstrip('_')}_reference{'_' * name.endswith('_')}")
    real = arguments(name)
    with FakeTensorMode() as mode:
        reference(*tree_map_only(torch.Tensor, mode.from_tensor, real))
