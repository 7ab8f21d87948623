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
from dflash_trt.runtime.staircase import Staircase, break_chances, likeliest, merge, prefix_chances
from dflash_trt.runtime.trace import Branches, Drafts

Tail = tuple[float, float]  # chances of a tail's first draft where the trunk breaks before it, and of each behind it

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

    def leaves(self, trunk: Sequence[int]) -> int:
        """How many drafts of the trunk it has in common with it: those it keeps, and those it drafts alike."""
        count = self.kept
        for own, other in zip(self.tokens, trunk[self.kept :], strict=False):
            if own != other:
                break
            count += 1
        return count


def staircase_of(anchor: int, draft: Sequence[int], branches: Sequence[Branch]) -> Staircase:
    """Trunk and branches behind an anchor as one prefix tree."""
    return merge([[anchor, *draft], *([anchor, *draft[: b.kept], *b.tokens] for b in branches)])


class BranchPolicy(Protocol):
    """Chooses before the re-draft, and again after it."""

    def choose(self, confidence: Sequence[float], size: int) -> list[int]:
        """How many drafts each branch keeps, ascending.

        Args:
            confidence: of the n drafts of the trunk.
            size: tokens of a branch with its anchor, at least n + 1. Where it is more, keeping all n extends the trunk.
        """

    def prune(self, staircase: Staircase, confidence: Sequence[float], branches: Sequence[Branch]) -> Sequence[int]:
        """The nodes worth verifying, ascending: with each its parent.

        Args:
            confidence: of the trunk's drafts.
            branches: those of the staircase's candidates behind the trunk.
        """


class FixedBranches:
    """The `count` likeliest prefixes, and the extension of the trunk where VP blocks are longer than first blocks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def choose(self, confidence: Sequence[float], size: int) -> list[int]:
        return _prefixes(break_chances(confidence), size, self._count)

    def prune(self, staircase: Staircase, confidence: Sequence[float], branches: Sequence[Branch]) -> Sequence[int]:
        return range(len(staircase.tokens))


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

    A verified node that the walk comes to yields one token, so a tree yields the sum of its nodes' reach: the chance
    that the walk comes to them. Nodes are taken in the order of their reach, which keeps prefixes whole. What tails
    promise is not known before the re-draft: a mean of those of past steps stands in, at first that of the trunk.

    Attributes:
        expected: tokens that the tree of the last step promised.
    """

    def __init__(self, most: int, costs: PassCosts) -> None:
        self._most = most
        self.reprice(costs)
        self._tail: Tail | None = None
        self.expected = 1.0

    def reprice(self, costs: PassCosts) -> None:
        """From here on passes take so long."""
        self._draft, self._redraft, self._verify = map(_by_tokens, (costs.draft, costs.redraft, costs.verify))

    def chances(self, confidence: Sequence[float]) -> Sequence[float]:
        """That each of the trunk's drafts is right where those before it are."""
        return confidence

    def tail_chances(self, confidence: Sequence[float]) -> Sequence[float]:
        """That each draft of a branch, from where it leaves the trunk, is right where the trunk breaks there and those
        before it are right."""
        return confidence

    def choose(self, confidence: Sequence[float], size: int) -> list[int]:
        right = self.chances(confidence)
        trunk, ends = prefix_chances(right), break_chances(right)
        mean = sum(right) / len(right) if right else 1.0
        first, later = self._tail or (mean, mean)
        tail = [first * later**place for place in range(size - 1)]
        best, best_rate = [], 0.0
        for count in range(min(self._most, len(right)) + 1):
            kept = _prefixes(ends, size, count)
            reach = trunk + [ends[place] * chance for place in kept for chance in tail[: size - 1 - place]]
            _, rate, _ = self._best(sorted(reach, reverse=True), len(trunk), len(kept) * size)
            if rate > best_rate:
                best, best_rate = kept, rate
        return best

    def prune(self, staircase: Staircase, confidence: Sequence[float], branches: Sequence[Branch]) -> Sequence[int]:
        redrafted = sum(1 + branch.kept + len(branch.tokens) for branch in branches)
        return self.worthy(self.reach(staircase, confidence, branches), len(confidence) + 1, redrafted)

    def reach(self, staircase: Staircase, confidence: Sequence[float], branches: Sequence[Branch]) -> list[float]:
        """The chance that the walk comes to each node; a child's is no larger than its parent's.

        A branch leaves the trunk where its tokens first differ: nothing of it is reached but where the trunk breaks
        there. What its tail promises is remembered.
        """
        right = self.chances(confidence)
        trunk, ends = prefix_chances(right), break_chances(right)
        reach = trunk + [0.0] * (len(staircase.tokens) - len(trunk))
        draft = staircase.tokens[1 : len(trunk)]
        firsts: list[float] = []
        rest: list[float] = []
        for branch, path in zip(branches, staircase.paths[1:], strict=True):
            leaves = branch.leaves(draft)
            tail = self.tail_chances(branch.confidence[leaves - branch.kept :])
            chance = ends[leaves]
            for node, one in zip(path[leaves + 1 :], tail, strict=True):
                chance *= one
                reach[node] = max(reach[node], chance)
            alike = leaves > branch.kept
            firsts.append(0.0 if alike else tail[0])  # where the trunk breaks, the same draft is as wrong
            rest.extend(tail if alike else tail[1:])
        if branches:
            self._remember(_mean(firsts), _mean(rest))
        return reach

    def worthy(self, reach: Sequence[float], drafted: int, redrafted: int) -> list[int]:
        """The nodes with the most tokens per second.

        Args:
            drafted, redrafted: tokens of the passes before.
        """
        order = likeliest(reach)  # a node is never before its parent: those come first among equals
        count, _, self.expected = self._best([reach[node] for node in order], drafted, redrafted)
        return sorted(order[:count])

    def _remember(self, first: float, later: float) -> None:
        known = self._tail or (first, later)
        self._tail = known[0] + _MEMORY * (first - known[0]), known[1] + _MEMORY * (later - known[1])

    def _best(self, reach: Sequence[float], drafted: int, redrafted: int) -> tuple[int, float, float]:
        """How many of the nodes, taken in this order, give the most tokens per second; that rate; and their tokens."""
        spent = self._draft[drafted] + self._redraft[redrafted]
        best = (1, 0.0, 1.0)
        tokens = 0.0
        for count, (one, verify) in enumerate(zip(reach, self._verify[1:], strict=False), start=1):
            tokens += one
            rate = tokens / (spent + verify)
            if rate > best[1]:
                best = count, rate, tokens
        return best


def _by_tokens(points: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds of a pass of 0, 1, 2, ... tokens, up to the most measured; of none 0."""
    if not points:
        return [0.0]
    tokens, seconds = zip(*points, strict=True)
    return [0.0, *np.interp(np.arange(1, tokens[-1] + 1), tokens, seconds).tolist()]


def _prefixes(breaks: Sequence[float], size: int, count: int) -> list[int]:
    """The `count` likeliest prefixes (eq. 5) and, if any, the extension of the trunk where there is room for one.

    Args:
        breaks: as of `break_chances`; what is right as a whole does not break.
    """
    drafts = len(breaks) - 1
    kept = sorted(likeliest(breaks[:drafts], count))
    return [*kept, drafts] if kept and size > drafts + 1 else kept


def _mean(chances: Sequence[float]) -> float:
    return sum(chances) / len(chances) if chances else 1.0
