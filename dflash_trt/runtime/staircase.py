"""The staircase of D2SD: where the first draft is likely to break, and one prefix tree of all candidates.

Source: arXiv 2606.04446, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from dflash_trt.runtime.tree import CandidateTree


def prefix_chances(confidence: Iterable[float]) -> list[float]:
    """[n+1]: the probability that the first 0, 1, ... n drafts are right: c_1 * ... * c_i.

    Args:
        confidence: c_1 .. c_n, the drafter's probability of each draft where those before it are right.
    """
    return list(accumulate(confidence, mul, initial=1.0))


def break_chances(confidence: Sequence[float]) -> list[float]:
    """[n+1]: the probability that exactly i of the n drafts are right.

    For i = 0 .. n-1 it is r(i) = c_1 * ... * c_i * (1 - c_(i+1)) (eq. 4), for i = n that all are.
    """
    right = prefix_chances(confidence)
    return [*(chance * (1 - one) for chance, one in zip(right, confidence, strict=False)), right[-1]]


def likeliest(chances: Sequence[float], count: int | None = None) -> list[int]:
    """The `count` places of the largest chance, the largest first, of equal ones the first; None for all."""
    return sorted(range(len(chances)), key=lambda place: -chances[place])[:count]


class Staircase(NamedTuple):
    """All candidates of a step as one prefix tree: common prefixes once, equal siblings merged.

    Attributes:
        tokens, parents: of each node, as of `CandidateTree`; those of the trunk are the first.
        paths: of each candidate, the trunk first, the nodes of its tokens.
    """

    tokens: list[int]
    parents: list[int]
    paths: list[list[int]]

    def tree(self) -> CandidateTree:
        """With all nodes."""
        return CandidateTree.from_parents(self.tokens, self.parents)

    def part(self, nodes: Sequence[int]) -> CandidateTree:
        """The tree of some nodes, ascending, with the parent of each. Raises UsageError where one is missing."""
        place = {-1: -1} | {node: number for number, node in enumerate(nodes)}
        parents = [place.get(self.parents[node], len(nodes)) for node in nodes]
        return CandidateTree.from_parents([self.tokens[node] for node in nodes], parents)


def merge(rows: Sequence[Sequence[int]]) -> Staircase:
    """The staircase of some token sequences, all beginning with the anchor; the first is the trunk."""
    tokens, parents = [rows[0][0]], [-1]
    edges: dict[tuple[int, int], int] = {}
    paths = []
    for row in rows:
        path = [0]
        for token in row[1:]:
            node = edges.setdefault((path[-1], token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(path[-1])
            path.append(node)
        paths.append(path)
    return Staircase(tokens, parents, paths)
