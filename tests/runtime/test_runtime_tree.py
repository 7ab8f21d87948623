"""CandidateTree: structure, visibility, padding, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.errors import UsageError
from dflash_trt.runtime.tree import CandidateTree


@st.composite
def trees(draw: st.DrawFn, vocabulary: int = 4, max_nodes: int = 24) -> CandidateTree:
    """Random trees, deep and bushy, without equal siblings."""
    tokens, parents, taken = [draw(st.integers(0, vocabulary - 1))], [-1], set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        # Favour the newest node, so that deep trees occur too.
        parent = draw(st.one_of(st.just(len(tokens) - 1), st.integers(0, len(tokens) - 1)))
        token = draw(st.integers(0, vocabulary - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return CandidateTree.from_parents(tokens, parents)


def test_chain() -> None:
    tree = CandidateTree.chain([7, 8, 9])
    assert len(tree) == 3
    assert tree.tokens.tolist() == [7, 8, 9]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.depths.tolist() == [0, 1, 2]
    assert np.array_equal(tree.visibility(), np.tri(3, dtype=bool))
    assert [array.dtype for array in (tree.tokens, tree.parents, tree.depths)] == [np.int64] * 3


def test_staircase() -> None:
    # trunk 0-1-2, a branch 3-4 at the anchor, a branch 5 at node 1
    tree = CandidateTree.from_parents([9, 1, 2, 5, 6, 7], [-1, 0, 1, 0, 3, 1])
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
    assert tree.child(0, 5) == 3
    assert tree.child(0, 2) is None
    assert np.flatnonzero(tree.visibility()[4]).tolist() == [0, 3, 4]


@given(trees())
def test_visibility_is_the_ancestor_relation(tree: CandidateTree) -> None:
    visible = tree.visibility()
    for node in range(len(tree)):
        ancestors, at = set(), node
        while at != -1:
            ancestors.add(at)
            at = int(tree.parents[at])
        assert set(np.flatnonzero(visible[node])) == ancestors
        assert len(ancestors) == tree.depths[node] + 1


@given(trees(), st.integers(0, 5))
def test_padding_is_inert(tree: CandidateTree, more: int) -> None:
    size = len(tree)
    tokens, visible, depths = tree.padded(size + more)
    assert tokens.shape == depths.shape == (size + more,)
    assert (tokens.dtype, visible.dtype, depths.dtype) == (np.int64, np.bool_, np.int64)
    assert np.array_equal(tokens[:size], tree.tokens)
    assert np.array_equal(depths[:size], tree.depths)
    assert np.array_equal(visible[:size, :size], tree.visibility())
    assert not visible[:size, size:].any()
    assert np.array_equal(visible[size:], np.eye(size + more, dtype=bool)[size:])


def test_padding_that_does_not_fit() -> None:
    with pytest.raises(UsageError, match="3 nodes does not fit the 2"):
        CandidateTree.chain([1, 2, 3]).padded(2)


@pytest.mark.parametrize(
    ("tokens", "parents", "depths", "message"),
    [
        ([1, 2], [-1, 1], [0, 1], "node 1: parent 1 must be in 0..0"),
        ([1, 2, 3], [-1, 2, 0], [0, 1, 1], "node 1: parent 2 must be"),
        ([1, 2], [-1, -1], [0, 0], "node 1: parent -1 must be"),
        ([1, 2], [0, 0], [0, 1], "root.*parent 0"),
        ([1, 2], [-1, 0], [0, 2], "depth 2 must be 1"),
        ([1, 5, 5], [-1, 0, 0], [0, 1, 1], "node 2: its parent 0 has another child, node 1, with the same token 5"),
        ([1, 2], [-1], [0, 1], "parents: shape"),
        ([], [], [], "Q >= 1"),
        ([[1]], [[-1]], [[0]], "tokens: shape"),
    ],
)
def test_what_is_refused(tokens: list, parents: list, depths: list, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CandidateTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(depths, np.int64))


def test_it_is_a_value() -> None:
    tokens = np.array([1, 2], np.int64)
    tree = CandidateTree.chain(tokens)
    tokens[0] = 99
    assert tree.tokens[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        tree.parents[1] = 1
