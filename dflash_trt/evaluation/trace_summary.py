"""What a trace says about its drafters, as plain numbers.

Everything is judged by what a step put out: where a stop token or the length limit cut it, the rest of its path is as
unknown as what lies behind the path. *Accepted* drafts are nodes of the path that were put out; a draft is *judged*
when it was verified, all before it in its row were accepted, and the step put a token out at its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from dflash_trt.runtime.staircase import break_chances
from dflash_trt.runtime.trace import Branches, BranchTrace, StepTrace, Trace
from dflash_trt.runtime.tree import CandidateTree

BINS = 10

Judgement = tuple[float, bool]
"""The confidence of a judged draft, and whether it was accepted."""


@dataclass(frozen=True)
class KeptPrefix:
    """Branches that keep the first `kept` drafts, and the place in the trunk they are for.

    Attributes:
        steps: whose trunk has so many drafts and is known to break there or elsewhere.
        predicted: mean r(kept) over these steps, by the trunk's confidences; None without any.
        broke: share of these steps whose trunk was right so far and no further; where it ends there, was all right.
        drafted: branches that keep so many, in all steps.
        drafted_predicted, drafted_broke: as the two above, over these branches.
        won: branches that carried the path further than the trunk would.
        gain: tokens a step gained by one that won, on average; None where none did.
    """

    kept: int
    steps: int
    predicted: float | None
    broke: float | None
    drafted: int
    drafted_predicted: float | None
    drafted_broke: float | None
    won: int
    gain: float | None


@dataclass(frozen=True)
class BranchRank:
    """The branches that were `rank`-th likeliest of their step by r(i); extensions of the trunk are not counted.

    Attributes:
        drafted: how many there are.
        predicted: their mean r(i).
        broke: share of them whose trunk broke where they hang; None where that is not known of any.
        won: how many carried the path further than the trunk would.
        gain: tokens a step gained by one that won, on average; None where none did.
        mean_acceptance_length: on the same states with no branches of a later rank.
    """

    rank: int
    drafted: int
    predicted: float
    broke: float | None
    won: int
    gain: float | None
    mean_acceptance_length: float


@dataclass(frozen=True)
class PositionAcceptance:
    """How often the path gets to a position.

    Attributes:
        position: behind the anchor, from 1 on.
        steps: that drafted so far, less those that were cut before.
        tree: share of them whose path got there.
        trunk: share of them whose path got there by drafts of the trunk alone.
        predicted: the trunk's share by its confidences: their mean product so far, 0 of shorter trunks.
    """

    position: int
    steps: int
    tree: float
    trunk: float
    predicted: float


@dataclass(frozen=True)
class CalibrationBin:
    """Judged drafts whose confidence lies in [low, high), the last bin's also at high; never empty."""

    low: float
    high: float
    count: int
    confidence: float
    accepted: float


@dataclass(frozen=True)
class Calibration:
    """Confidence against acceptance.

    Attributes:
        judged: drafts.
        accepted: share of them; None without any.
        error: expected calibration error: |mean confidence - share accepted| of the bins, weighed by their counts.
        bins: of equal width, those that are not empty.
    """

    judged: int
    accepted: float | None
    error: float | None
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class TraceSummary:
    """A trace in numbers.

    Attributes:
        branches: the most per step (K), or "auto".
        steps: draft-verify steps; what is a mean over them is None without any.
        cut_steps: those that a stop token or the length limit cut short.
        mean_acceptance_length: tau: tokens put out per step, the bonus token counted.
        trunk_mean_acceptance_length: the same had the trunk been the only candidate, on the same states.
        verified_tokens_per_step: nodes of the verified tree, the anchor counted.
        branches_per_step: extensions of the trunk counted.
        won_steps: whose path left the trunk and so put out more.
        mean_gain: tokens by which these put out more, on average.
    """

    system: str
    speculation: bool
    branches: Branches
    block_size: int
    vp_block_size: int
    sampling: dict[str, Any]
    prompt_tokens: int
    new_tokens: int
    steps: int
    cut_steps: int
    mean_acceptance_length: float | None
    trunk_mean_acceptance_length: float | None
    verified_tokens_per_step: float | None
    branches_per_step: float | None
    won_steps: int
    mean_gain: float | None
    positions: tuple[PositionAcceptance, ...]
    kept_prefixes: tuple[KeptPrefix, ...]
    branch_ranks: tuple[BranchRank, ...]
    trunk_calibration: Calibration
    redraft_calibration: Calibration

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON data."""
        return asdict(self)


class StepView:
    """One step, seen from what it put out.

    Attributes:
        tree: the verified tree.
        shown: accepted nodes in order, the anchor left out, as far as their tokens were put out.
        cut: whether a stop token or the length limit cut the step short.
        trunk: accepted drafts of the trunk.
        breaks_at: drafts of the trunk that the target agrees with before the first it does not; all, if there is none;
            None where the step was cut before that showed.
        ranked: branches, the likeliest first, without the extension of the trunk.
        winner: the branch that carried the path furthest, if further than the trunk; of equal ones that which keeps
            most.
    """

    def __init__(self, step: StepTrace) -> None:
        self.step = step
        self.tree = CandidateTree(*(np.array(ids, np.int64) for ids in (step.tokens, step.parents, step.depths)))
        self.shown = step.path[1 : len(step.emitted) + 1]
        self.cut = len(step.emitted) < len(step.path)
        self.trunk = self.accepted(step.draft)
        agreed = _shared(step.draft, step.emitted)
        self.breaks_at = agreed if agreed < len(step.emitted) or agreed == len(step.draft) else None
        own = [branch for branch in step.branches if branch.kept < len(step.draft)]
        self.ranked = sorted(own, key=lambda branch: (-branch.probability, branch.kept))
        best = max(step.branches, key=lambda branch: (self.accepted(self.row(branch)), branch.kept), default=None)
        self.winner = best if best is not None and self.yielded([best]) > self.yielded([]) else None

    def row(self, branch: BranchTrace) -> tuple[int, ...]:
        """A branch's candidate: the drafts it keeps and its tail, without the anchor."""
        return (*self.step.draft[: branch.kept], *branch.tokens)

    def nodes(self, row: Sequence[int]) -> list[int]:
        """The nodes of a candidate's tokens behind the anchor, as far as the tree has them."""
        nodes, node = [], self.tree.child(0, row[0]) if row else None
        while node is not None:
            nodes.append(node)
            node = self.tree.child(node, row[len(nodes)]) if len(nodes) < len(row) else None
        return nodes

    def accepted(self, row: Sequence[int]) -> int:
        """Tokens of a candidate that were accepted."""
        return _shared(self.nodes(row), self.shown)

    def yielded(self, branches: Sequence[BranchTrace]) -> int:
        """Tokens the step would have put out with the trunk and these branches alone."""
        longest = max([self.trunk, *(self.accepted(self.row(branch)) for branch in branches)])
        return min(longest + 1, len(self.step.emitted))

    @property
    def gain(self) -> int:
        """Tokens the step put out beyond what the trunk alone would have."""
        return len(self.step.emitted) - self.yielded([])

    @property
    def drafted_depth(self) -> int:
        """The furthest position behind the anchor that was drafted or verified."""
        rows = [len(branch.tokens) + branch.kept for branch in self.step.branches]
        return max([len(self.step.draft), max(self.step.depths), *rows])

    def knows(self, position: int) -> bool:
        """Whether the step shows if its path got to a position."""
        return not self.cut or position <= len(self.step.emitted)

    def broke(self, kept: int) -> bool | None:
        """Whether the trunk was right for `kept` drafts and no further; None where the step was cut before."""
        if self.breaks_at is not None:
            return self.breaks_at == kept
        return False if kept < len(self.step.emitted) else None  # cut, and all it put out agrees with the trunk

    def judged_trunk(self) -> list[Judgement]:
        """Judged drafts of the trunk."""
        return self._judged(self.step.draft, self.step.confidence)

    def judged_redrafts(self) -> list[Judgement]:
        """Judged tokens of re-drafted tails, each tail by its own confidences (tails may share nodes)."""
        return [
            judgement
            for branch in self.step.branches
            for judgement in self._judged(self.row(branch), branch.confidence)
        ]

    def _judged(self, row: Sequence[int], confidence: Sequence[float]) -> list[Judgement]:
        """Judged tokens at the end of `row` that the confidences belong to."""
        accepted = self.accepted(row)
        first = len(row) - len(confidence)
        last = min(accepted + 1, len(self.step.emitted), len(self.nodes(row)))
        return [(confidence[index - first], index < accepted) for index in range(first, last)]


def summarize(trace: Trace) -> TraceSummary:
    """The numbers of a trace that `read_trace` or `check_step` found sound."""
    views = [StepView(step) for step in trace.steps]
    won = [view for view in views if view.gain > 0]
    return TraceSummary(
        system=trace.system,
        speculation=trace.speculation,
        branches=trace.branches,
        block_size=trace.block_size,
        vp_block_size=trace.vp_block_size,
        sampling=trace.sampling,
        prompt_tokens=len(trace.prompt_token_ids),
        new_tokens=len(trace.token_ids),
        steps=len(views),
        cut_steps=sum(view.cut for view in views),
        mean_acceptance_length=_mean([len(view.step.emitted) for view in views]),
        trunk_mean_acceptance_length=_mean([view.yielded([]) for view in views]),
        verified_tokens_per_step=_mean([len(view.tree) for view in views]),
        branches_per_step=_mean([len(view.step.branches) for view in views]),
        won_steps=len(won),
        mean_gain=_mean([view.gain for view in won]),
        positions=tuple(_positions(views)),
        kept_prefixes=tuple(_kept_prefixes(views)),
        branch_ranks=tuple(_branch_ranks(views)),
        trunk_calibration=calibration([judgement for view in views for judgement in view.judged_trunk()]),
        redraft_calibration=calibration([judgement for view in views for judgement in view.judged_redrafts()]),
    )


def calibration(judged: Sequence[Judgement], bins: int = BINS) -> Calibration:
    """Sorts judged drafts into `bins` equal bins of their confidence."""
    confidence = np.clip([sure for sure, _ in judged], 0.0, 1.0)
    right = np.array([right for _, right in judged], np.float64)
    places = np.minimum((confidence * bins).astype(int), bins - 1)
    found = tuple(
        CalibrationBin(
            low=place / bins,
            high=(place + 1) / bins,
            count=int(np.sum(places == place)),
            confidence=float(confidence[places == place].mean()),
            accepted=float(right[places == place].mean()),
        )
        for place in range(bins)
        if place in places
    )
    if not found:
        return Calibration(0, None, None, ())
    error = sum(part.count * abs(part.confidence - part.accepted) for part in found) / len(judged)
    return Calibration(len(judged), float(right.mean()), error, found)


def _positions(views: Sequence[StepView]) -> Iterator[PositionAcceptance]:
    """A draft that the tree leaves out counts as one the path does not get to."""
    for position in range(1, max((view.drafted_depth for view in views), default=0) + 1):
        known = [view for view in views if view.drafted_depth >= position and view.knows(position)]
        if known:
            yield PositionAcceptance(
                position=position,
                steps=len(known),
                tree=float(np.mean([len(view.shown) >= position for view in known])),
                trunk=float(np.mean([view.trunk >= position for view in known])),
                predicted=float(np.mean([_right_so_far(view.step.confidence, position) for view in known])),
            )


def _kept_prefixes(views: Sequence[StepView]) -> Iterator[KeptPrefix]:
    for kept in range(max((len(view.step.draft) for view in views), default=-1) + 1):
        here = [view for view in views if len(view.step.draft) >= max(kept, 1)]
        known = [view for view in here if view.broke(kept) is not None]
        branches = [(view, branch) for view in views for branch in view.step.branches if branch.kept == kept]
        judged = [broke for view, _ in branches if (broke := view.broke(kept)) is not None]
        won = [view.gain for view, branch in branches if view.winner is branch]
        if known or branches:
            yield KeptPrefix(
                kept=kept,
                steps=len(known),
                predicted=_mean([break_chances(view.step.confidence)[kept] for view in known]),
                broke=_mean([bool(view.broke(kept)) for view in known]),
                drafted=len(branches),
                drafted_predicted=_mean([branch.probability for _, branch in branches]),
                drafted_broke=_mean(judged),
                won=len(won),
                gain=_mean(won),
            )


def _branch_ranks(views: Sequence[StepView]) -> Iterator[BranchRank]:
    for rank in range(1, max((len(view.ranked) for view in views), default=0) + 1):
        branches = [(view, view.ranked[rank - 1]) for view in views if len(view.ranked) >= rank]
        judged = [broke for view, branch in branches if (broke := view.broke(branch.kept)) is not None]
        won = [view.gain for view, branch in branches if view.winner is branch]
        yields = []
        for view in views:
            later = view.ranked[rank:]
            yields.append(view.yielded([branch for branch in view.step.branches if branch not in later]))
        yield BranchRank(
            rank=rank,
            drafted=len(branches),
            predicted=float(np.mean([branch.probability for _, branch in branches])),
            broke=_mean(judged),
            won=len(won),
            gain=_mean(won),
            mean_acceptance_length=float(np.mean(yields)),
        )


def _right_so_far(confidence: Sequence[float], position: int) -> float:
    """The probability that the first `position` drafts are right; 0 where there are fewer."""
    return float(np.prod(confidence[:position])) if position <= len(confidence) else 0.0


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
