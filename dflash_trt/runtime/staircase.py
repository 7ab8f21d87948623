"""The staircase of D2SD: where the first draft is likely to break, and one prefix tree of all candidates.

Source: arXiv 2606.04446, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt.runtime.tree import CandidateTree

FloatArray = npt.NDArray[np.float64]


def boundary_posterior(confidence: npt.ArrayLike) -> FloatArray:
    """r(i), the probability that exactly the first i drafts are right (eq. 4).

    Args:
        confidence: c_1 .. c_n, the drafter's probability of each draft; [n].

    Returns:
        f64 [n]: r(i) = c_1 * ... * c_i * (1 - c_(i+1)) for i = 0 .. n-1. What is missing to 1 is the probability that
        all n are right.
    """
    right = np.asarray(confidence, np.float64)
    return np.concatenate(([1.0], np.cumprod(right)[:-1])) * (1 - right) if right.size else right


def break_chances(confidence: npt.ArrayLike) -> FloatArray:
    """f64 [n+1]: the probability that exactly i of the n drafts are right, i = 0 .. n: r(i), then that all are."""
    right = np.asarray(confidence, np.float64)
    return np.append(boundary_posterior(right), np.cumprod(right)[-1:] if right.size else 1.0)


def likeliest(posterior: FloatArray, count: int) -> list[int]:
    """The `count` prefixes i of largest r(i) (eq. 5), ascending; of equal ones the shorter; all if there are fewer."""
    return sorted(np.argsort(-posterior, kind="stable")[:count].tolist())


def merge(rows: Sequence[Sequence[int]]) -> tuple[CandidateTree, list[list[int]]]:
    """One tree of all candidates: common prefixes once, equal siblings merged.

    Args:
        rows: token sequences, all beginning with the anchor; those of the first row become nodes 0, 1, 2, ...

    Returns:
        The tree, and for each row the node of each of its tokens.
    """
    tokens, parents = [rows[0][0]], [-1]
    edges: dict[tuple[int, int], int] = {}
    nodes = []
    for row in rows:
        path = [0]
        for token in row[1:]:
            node = edges.setdefault((path[-1], token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(path[-1])
            path.append(node)
        nodes.append(path)
    return CandidateTree.from_parents(tokens, parents), nodes
