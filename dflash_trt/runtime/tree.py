"""Candidate trees: the tokens one target pass verifies, as a prefix tree rooted at the anchor.

DFlash and DFlare propose a chain; D2SD proposes a staircase (a trunk with branches). Both are values of one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import UsageError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class PaddedTree(NamedTuple):
    """A tree at the fixed size of a compiled graph: tokens i64 [S], visibility bool [S,S], depths i64 [S]."""

    tokens: IntArray
    visibility: BoolArray
    depths: IntArray


@dataclass(frozen=True, eq=False)
class CandidateTree:
    """Nodes in an order where parents come first; node 0 is the root and carries the anchor token.

    Args:
        tokens: i64 [Q], the token at each node.
        parents: i64 [Q], the parent's index; -1 for the root, and parents[i] < i for all others.
        depths: i64 [Q], 0 for the root, the parent's depth + 1 elsewhere. A node's position is committed + depth.

    Raises:
        UsageError: wrong shapes, a parent that does not come first, a wrong depth, or two children of one node that
            carry the same token (a walk would follow only one of them and lose acceptance).

    The arrays are copied and read-only.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    _edges: dict[tuple[int, int], int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "parents", "depths"):
            array = np.array(getattr(self, name), dtype=np.int64)
            if array.ndim != 1 or array.shape != np.shape(self.tokens) or array.size == 0:
                raise UsageError(
                    f"shape {array.shape} must be [Q] with Q >= 1, the same as tokens {np.shape(self.tokens)}",
                    where=f"CandidateTree.{name}",
                    mend="give one token, one parent and one depth for each node",
                )
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "_edges", self._validated_edges())

    def _validated_edges(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> child, checking each node's rule on the way."""
        tokens, parents, depths = self.tokens.tolist(), self.parents.tolist(), self.depths.tolist()
        if parents[0] != -1 or depths[0] != 0:
            raise UsageError(
                f"parent {parents[0]} and depth {depths[0]} must be -1 and 0",
                where="CandidateTree node 0 (the root)",
                mend="put the anchor first",
            )
        edges: dict[tuple[int, int], int] = {}
        for node, (token, parent, depth) in enumerate(zip(tokens, parents, depths, strict=True)):
            if node == 0:
                continue
            where = f"CandidateTree node {node}"
            if not 0 <= parent < node:
                raise UsageError(
                    f"parent {parent} must be in 0..{node - 1}", where=where, mend="list parents before their children"
                )
            if depth != depths[parent] + 1:
                raise UsageError(
                    f"depth {depth} must be {depths[parent] + 1}, one more than its parent's",
                    where=where,
                    mend="build the tree with CandidateTree.from_parents, which derives the depths",
                )
            if (parent, token) in edges:
                raise UsageError(
                    f"its parent {parent} has another child, node {edges[parent, token]}, with the same token {token}",
                    where=where,
                    mend="merge equal siblings into one node",
                )
            edges[parent, token] = node
        return edges

    @classmethod
    def from_parents(cls, tokens: Sequence[int] | IntArray, parents: Sequence[int] | IntArray) -> CandidateTree:
        """The tree with depths derived from the parents. Raises UsageError as the constructor does."""
        depths: list[int] = []
        for parent in np.asarray(parents, dtype=np.int64).ravel().tolist():
            # A parent that does not come first has no depth yet; any value does, the constructor rejects the parent.
            depths.append(depths[parent] + 1 if 0 <= parent < len(depths) else 0)
        return cls(np.asarray(tokens, dtype=np.int64), np.asarray(parents, dtype=np.int64), np.asarray(depths))

    @classmethod
    def chain(cls, tokens: Sequence[int] | IntArray) -> CandidateTree:
        """The anchor `tokens[0]` followed by drafts, each the child of the one before."""
        nodes = np.arange(len(tokens), dtype=np.int64)
        return cls(np.asarray(tokens, dtype=np.int64), nodes - 1, nodes)

    def __len__(self) -> int:
        """Number of nodes Q, the root included."""
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, or None."""
        return self._edges.get((node, token))

    def visibility(self) -> BoolArray:
        """bool [Q,Q]: may node i see node j, that is, is j an ancestor of i or i itself."""
        visible = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            visible[node] |= visible[parent]
        return visible

    def padded(self, size: int) -> PaddedTree:
        """The tree at a fixed number of nodes.

        Padding nodes see only themselves and nobody sees them. They carry the root's token and depth 0: valid values
        for any embedding and rotary table, whose results are never read.

        Raises:
            UsageError: the tree has more nodes than `size`.
        """
        missing = size - len(self)
        if missing < 0:
            raise UsageError(
                f"a tree of {len(self)} nodes does not fit the {size} the graph verifies at once",
                where="CandidateTree",
                mend="draft fewer tokens or branches, or build the bundle with a larger tree",
            )
        own = len(self)
        visible = np.eye(size, dtype=np.bool_)
        visible[:own, :own] = self.visibility()
        tokens, depths = np.full(size, self.tokens[0]), np.zeros(size, np.int64)
        tokens[:own], depths[:own] = self.tokens, self.depths
        return PaddedTree(tokens, visible, depths)
