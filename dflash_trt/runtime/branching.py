"""Which prefixes of the first draft a step of D2SD branches from, and which candidates it verifies.

`FixedBranches` is the paper's rule (arXiv 2606.04446, section 3.1). `AdaptiveBranches` weighs what a step may gain
against what its passes cost. Neither changes an output token: the target decides those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflash_trt.checkpoint.spec import Frozen
from dflash_trt.errors import UsageError
from dflash_trt.runtime.staircase import FloatArray, boundary_posterior, break_chances, likeliest
from dflash_trt.runtime.trace import Branches, Drafts
from dflash_trt.runtime.tree import CandidateTree

_MEMORY = 0.1  # weight of the newest step in what AdaptiveBranches remembers of re-drafts


@dataclass(frozen=True)
class Branch:
    """A re-drafted candidate.

    Attributes:
        kept: drafts of the trunk it keeps; all of them where it extends the trunk.
        probability: that the trunk is right so far and no further.
        tokens, confidence: of the tail behind what it keeps.
    """

    kept: int
    probability: float
    tokens: list[int]
    confidence: list[float]


class BranchPolicy(Protocol):
    """Chooses before the re-draft, and again after it."""

    def chances(self, confidence: FloatArray) -> FloatArray:
        """f64 [n]: that each of the trunk's drafts is right where those before it are."""

    def choose(self, confidence: FloatArray, size: int) -> list[int]:
        """How many drafts each branch keeps, ascending.

        Args:
            confidence: f64 [n], of the trunk's drafts.
            size: tokens of a branch with its anchor, at least n + 1. Where it is more, keeping all n extends the trunk.
        """

    def prune(
        self, tree: CandidateTree, reach: FloatArray, confidence: FloatArray, branches: Sequence[Branch]
    ) -> CandidateTree:
        """The part of the merged tree worth verifying.

        Args:
            reach: f64 [Q], the chance that the walk comes to each node; a child's is no larger than its parent's.
            confidence: of the trunk's drafts.
        """


class FixedBranches:
    """The `count` likeliest prefixes, and the extension of the trunk where VP blocks are longer than first blocks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def chances(self, confidence: FloatArray) -> FloatArray:
        return confidence

    def choose(self, confidence: FloatArray, size: int) -> list[int]:
        return _prefixes(boundary_posterior(confidence), size, self._count)

    def prune(
        self, tree: CandidateTree, reach: FloatArray, confidence: FloatArray, branches: Sequence[Branch]
    ) -> CandidateTree:
        return tree


@dataclass(frozen=True, kw_only=True)
class PassCosts(Frozen):
    """Seconds of one pass by the number of its new tokens, one sequence at a time: ascending (tokens, seconds)."""

    draft: tuple[tuple[int, float], ...]
    redraft: tuple[tuple[int, float], ...]
    verify: tuple[tuple[int, float], ...]


def chosen_branches(
    asked: Branches | None, built: int, *, speculation: bool, vp_drafter: bool, costs: PassCosts | None
) -> Branches:
    """The branches a request's steps have.

    Args:
        asked: None for as many as there can be.
        built: the most that the bundle was built for.
        speculation, vp_drafter: whether there is any, and whether the bundle has one.

    Raises:
        UsageError: the bundle cannot have these.
    """
    if asked is None:
        return built if speculation else 0
    if not speculation:
        mend = "Leave it out, or leave out --no-speculation (of a server: --speculation off)"
        raise UsageError("there are none in token-by-token decoding", where="--branches", mend=mend)
    if not vp_drafter:
        mend = "Build it with --vp-drafter, or leave --branches out"
        raise UsageError("needs a VP drafter, which this bundle does not have", where="--branches", mend=mend)
    if asked == "auto":
        if built and costs is None:
            mend = "Build it without --no-verify, or give a number"
            raise UsageError("auto needs the cost table, which --no-verify left out", where="--branches", mend=mend)
        return "auto" if built else 0
    if type(asked) is not int or not 0 <= asked <= built:
        what = f"{asked} must be auto or 0 to {built}, which the bundle was built for"
        raise UsageError(what, where="--branches", mend="Use fewer, or build with a larger --branches")
    return asked


def chosen_drafts(
    asked: Drafts | None, block_size: int, *, speculation: bool, branches: Branches, costs: PassCosts | None
) -> Drafts:
    """The drafts of a trunk that a request's steps verify.

    Args:
        asked: None for all of a block.
        branches: what `chosen_branches` gave.

    Raises:
        UsageError: the bundle cannot have these.
    """
    if asked is None:
        return block_size - 1 if speculation else 0
    if not speculation:
        mend = "Leave it out, or leave out --no-speculation"
        raise UsageError("there are none in token-by-token decoding", where="--drafts", mend=mend)
    if asked == "auto":
        if costs is None:
            mend = "Build it without --no-verify, or give a number"
            raise UsageError("auto needs the cost table, which --no-verify left out", where="--drafts", mend=mend)
        if branches not in (0, "auto"):
            mend = "Give --branches auto too, or --branches 0"
            raise UsageError(f"auto does not go with {branches} branches in every step", where="--drafts", mend=mend)
        return "auto"
    if type(asked) is not int or not 1 <= asked < block_size:
        what = f"{asked} must be auto or 1 to {block_size - 1}, as many as a block has behind its anchor"
        raise UsageError(what, where="--drafts", mend="Use one of these, or --no-speculation for none")
    return asked


class AdaptiveBranches:
    """The number of branches, and the part of the tree, with the most expected tokens per second of the step.

    A verified node that the walk comes to yields one token, so a tree yields the sum of its nodes' reach. Nodes are
    taken in the order of their reach, which keeps prefixes whole. Before the re-draft its confidences are not known:
    a mean of those of past steps stands in for them, at first that of the trunk.
    """

    def __init__(self, most: int, costs: PassCosts) -> None:
        self._most = most
        self.reprice(costs)
        self._redraft_confidence: float | None = None

    def reprice(self, costs: PassCosts) -> None:
        """From here on passes take so long."""
        self._draft, self._redraft, self._verify = map(_by_tokens, (costs.draft, costs.redraft, costs.verify))

    def chances(self, confidence: FloatArray) -> FloatArray:
        return confidence

    def choose(self, confidence: FloatArray, size: int) -> list[int]:
        trunk, ends = np.cumprod([1.0, *confidence]), break_chances(confidence)
        sure = self._redraft_confidence
        sure = (float(np.mean(confidence)) if len(confidence) else 1.0) if sure is None else sure
        options = [_prefixes(ends[:-1], size, count) for count in range(min(self._most, len(confidence)) + 1)]
        return max(options, key=lambda kept: self._expected_rate(trunk, ends, sure, size, kept))

    def prune(
        self, tree: CandidateTree, reach: FloatArray, confidence: FloatArray, branches: Sequence[Branch]
    ) -> CandidateTree:
        if branches:
            seen = float(np.mean(np.concatenate([branch.confidence for branch in branches])))
            known = self._redraft_confidence
            self._redraft_confidence = seen if known is None else known + _MEMORY * (seen - known)
        redrafted = sum(1 + branch.kept + len(branch.tokens) for branch in branches)
        order = np.argsort(-reach, kind="stable")  # a node is never before its parent: those come first among equals
        count, _ = self._best_count(reach[order], len(confidence) + 1, redrafted)
        if count == len(tree):
            return tree
        return tree.subtree(sorted(order[:count].tolist()))

    def _expected_rate(self, trunk: FloatArray, ends: FloatArray, sure: float, size: int, kept: Sequence[int]) -> float:
        """Tokens per second expected with branches that keep so many drafts.

        Args:
            trunk: f64 [n + 1], the chance that the walk comes to each node of the trunk.
            ends: f64 [n + 1], that it ends there.
            sure: of the tokens of the tails.
        """
        tails = [ends[count] * sure ** np.arange(1, size - count) for count in kept]
        reach = np.concatenate([trunk, *tails])
        reach[::-1].sort()
        return self._best_count(reach, len(trunk), len(kept) * size)[1]

    def _best_count(self, reach: FloatArray, drafted: int, redrafted: int) -> tuple[int, float]:
        """How many of the nodes, taken in this order, give the most tokens per second, and how many that are."""
        spent = self._draft[drafted] + self._redraft[redrafted]
        rates = reach.cumsum() / (spent + self._verify[1 : len(reach) + 1])
        best = int(rates.argmax())
        return best + 1, float(rates[best])


def _by_tokens(points: Sequence[tuple[int, float]]) -> FloatArray:
    """Seconds of a pass of 0, 1, 2, ... tokens, up to the most measured; of none 0."""
    if not points:
        return np.zeros(1)
    tokens, seconds = zip(*points, strict=True)
    return np.concatenate(([0.0], np.interp(np.arange(1, tokens[-1] + 1), tokens, seconds)))


def _prefixes(posterior: FloatArray, size: int, count: int) -> list[int]:
    kept = likeliest(posterior, count)
    return [*kept, len(posterior)] if kept and size > len(posterior) + 1 else kept
