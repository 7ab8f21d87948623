"""Acceptance: the walk that turns a verified candidate tree into emitted tokens.

Lossless for any tree: each emitted token is the target's own choice after the tokens emitted before it. The tree only
decides how many such choices one target pass can answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.runtime.tree import CandidateTree

Choose = Callable[[int, tuple[int, ...]], int]
"""choose(node, path_tokens): the target's next token after `node`, whose path below the root is `path_tokens`
(the root's own token, the anchor, is committed already and not among them)."""


@dataclass(frozen=True)
class Acceptance:
    """One step's outcome.

    Attributes:
        path: visited nodes from the root (0) on; their K/V rows and features are kept.
        tokens: emitted tokens: those of path[1:], then the bonus. len(tokens) == len(path).
    """

    path: list[int]
    tokens: list[int]


def walk(tree: CandidateTree, choose: Choose) -> Acceptance:
    """Follow the target's choices down the tree until one is in no child; that one is the bonus token.

    `choose` is called once for each node on the path and for no other.
    """
    path, tokens = [0], [choose(0, ())]
    while (child := tree.child(path[-1], tokens[-1])) is not None:
        path.append(child)
        tokens.append(choose(child, tuple(tokens)))
    return Acceptance(path, tokens)
