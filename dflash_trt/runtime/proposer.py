"""From an anchor to the candidates of a step: a chain (DFlash, DFlare) or a staircase (D2SD)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.backends.base import Array
from dflash_trt.errors import DflashError
from dflash_trt.runtime.branching import Branch, BranchPolicy, staircase_of
from dflash_trt.runtime.drafter import Block, Draft, Drafter, not_finite
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.staircase import break_chances
from dflash_trt.runtime.statistics import DraftStage, StepMeter
from dflash_trt.runtime.trace import BranchTrace, StepTrace
from dflash_trt.runtime.tree import CandidateTree


@dataclass(frozen=True)
class Proposal:
    """What a step puts before the target; `draft` and `confidence` are the trunk's, without the anchor."""

    tree: CandidateTree
    draft: list[int]
    confidence: list[float]
    branches: list[Branch]

    @classmethod
    def anchor(cls, token: int) -> Proposal:
        """Nothing proposed: the anchor alone."""
        return cls(CandidateTree.chain([token]), [], [], [])

    def traced(self, anchor_position: int, path: Sequence[int], emitted: Sequence[int]) -> StepTrace:
        """The step as `run --trace` records it."""
        tree = self.tree
        return StepTrace(
            anchor_position=anchor_position,
            draft=tuple(self.draft),
            confidence=tuple(self.confidence),
            branches=tuple(
                BranchTrace(
                    kept=branch.kept,
                    probability=branch.probability,
                    tokens=tuple(branch.tokens),
                    confidence=tuple(branch.confidence),
                )
                for branch in self.branches
            ),
            tokens=tuple(tree.tokens.tolist()),
            parents=tuple(tree.parents.tolist()),
            depths=tuple(tree.depths.tolist()),
            path=tuple(path),
            emitted=tuple(emitted),
        )


class Proposer:
    """Drafts for the rows of a batch, with one drafter or with two.

    Args:
        drafters: of the first draft, and of D2SD the VP drafter.
        meter: counts the passes of a step.
        fault: called with a row and the error of its sequence; that row has no proposal in this step.
    """

    def __init__(
        self, limits: Limits, drafters: Sequence[Drafter], meter: StepMeter, fault: Callable[[int, DflashError], None]
    ) -> None:
        self._limits, self._meter, self._fault = limits, meter, fault
        self._drafters = list(drafters)
        self._drafter = drafters[0]
        self._redrafter = drafters[1] if len(drafters) > 1 else None
        self._rows = 0

    def resize(self, capacity: int) -> None:
        """Gives every row of every cache `capacity` slots."""
        for drafter in self._drafters:
            drafter.resize(capacity)

    def free(self, row: int) -> None:
        """Forgets a row's sequence, and sets what it left in the caches to zero."""
        for drafter in self._drafters:
            drafter.free(row)

    def move_row(self, source: int, destination: int) -> None:
        """Gives a row's sequence another row."""
        for drafter in self._drafters:
            drafter.move_row(source, destination)

    def accept(self, row: int, sequence: SequenceState, features: Array) -> None:
        """Takes the features [n, T*H] of a prompt's chunk or of a step's accepted path.

        They wait for a pass that drafts, which may never come: for a sequence that ends before, or that is not drafted.
        """
        for drafter in self._drafters:
            if drafter.overdue(row, len(features)):
                self._inject_pending(drafter, row, sequence)
            drafter.accept(row, features)

    def _stage(self, drafter: Drafter) -> DraftStage:
        return "draft" if drafter is self._drafter else "redraft"

    def _inject_pending(self, drafter: Drafter, row: int, sequence: SequenceState) -> None:
        with self._meter.timed("prefill", [sequence.statistics], drafter.pending(row)):
            drafter.inject_pending(row)
        sequence.statistics.count_draft_pass(self._stage(drafter))

    def propose(
        self, sequences: Mapping[int, SequenceState], rows: int, drafts: int, policy: BranchPolicy | None
    ) -> dict[int, Proposal]:
        """Candidates for each row, by row.

        Args:
            rows: of the batch that passes take: the first so many.
            drafts: tokens of a first draft at most, below block_size; with 0 no drafter runs.
            policy: chooses the branches of D2SD; None for a trunk alone.
        """
        self._rows = rows
        if not drafts:
            return {row: Proposal.anchor(sequence.anchor) for row, sequence in sequences.items()}
        trunks = self._draft(sequences, drafts)
        if self._redrafter is None or policy is None:
            return {row: _proposal(sequences[row], trunk, [], policy) for row, trunk in trunks.items()}
        kept = {
            row: policy.choose(trunk.confidence.tolist(), self._branch_size(sequences[row], drafts))
            for row, trunk in trunks.items()
        }
        branches = self._redraft({row: sequences[row] for row in trunks}, trunks, kept, drafts)
        return {row: _proposal(sequences[row], trunks[row], found, policy) for row, found in branches.items()}

    def _branch_size(self, sequence: SequenceState, drafts: int) -> int:
        """Tokens of a branch, with the anchor: a shorter first draft shortens it by as much."""
        return min(self._limits.longest_path - (self._limits.block_size - 1 - drafts), _room(sequence))

    def _draft(self, sequences: Mapping[int, SequenceState], drafts: int) -> dict[int, Draft]:
        """Trunks, without the anchor: the first drafts of whole blocks, since drafters are trained on those."""
        drafter = self._drafter
        blocks = {
            row: Block.of([[s.anchor]], min(self._limits.block_size, _room(s)), drafter.mask_token_id)
            for row, s in sequences.items()
        }
        if all(len(block.ids) == 1 for block in blocks.values()):
            empty = Draft(np.zeros(0, np.int64), np.zeros(0))
            return dict.fromkeys(sequences, empty)
        trunks = self._pass(drafter, sequences, blocks)
        kept = slice(1, 1 + drafts)
        return {row: Draft(draft.ids[kept], draft.confidence[kept]) for row, draft in trunks.items()}

    def _pass(
        self, drafter: Drafter, sequences: Mapping[int, SequenceState], blocks: Mapping[int, Block]
    ) -> dict[int, Draft]:
        """One pass of a drafter over the blocks; the rows whose numbers are not finite are faults."""
        for row in drafter.late(blocks, self._rows):
            self._inject_pending(drafter, row, sequences[row])
        stage = self._stage(drafter)
        tokens = self._rows * drafter.block_size(blocks)
        with self._meter.timed(stage, [s.statistics for s in sequences.values()], tokens):
            drafts = drafter.draft(blocks, self._rows)
        for row, sequence in sequences.items():
            sequence.statistics.count_draft_pass(stage)
            if not drafts[row].is_finite:
                del drafts[row]
                self._fault(row, not_finite(drafter.role))
        return drafts

    def _redraft(
        self,
        sequences: Mapping[int, SequenceState],
        trunks: Mapping[int, Draft],
        kept: Mapping[int, list[int]],
        drafts: int,
    ) -> dict[int, list[Branch]]:
        """All branches of all rows in one pass; no pass where no row has any."""
        assert self._redrafter is not None
        redrafter = self._redrafter
        if not any(kept.values()):
            return {row: [] for row in sequences}
        blocks = {}
        for row, sequence in sequences.items():
            candidates = [[sequence.anchor, *trunks[row].ids[:count].tolist()] for count in kept[row]]
            size = self._branch_size(sequence, drafts) if candidates else 1
            blocks[row] = Block.of(candidates or [[sequence.anchor]], size, redrafter.mask_token_id)
        redrafts = self._pass(redrafter, sequences, blocks)
        return {row: _branches(trunks[row], kept[row], draft) for row, draft in redrafts.items()}


def _room(sequence: SequenceState) -> int:
    """Tokens of a block at most: no more drafts than tokens that may come, and none for the last."""
    return 1 if sequence.remaining == 1 else sequence.remaining + 1


def _branches(trunk: Draft, kept: Sequence[int], redraft: Draft) -> list[Branch]:
    """Cuts the re-draft of one row into its branches."""
    if not kept:
        return []
    breaks = break_chances(trunk.confidence.tolist())
    ids, confidence = redraft.ids.reshape(len(kept), -1), redraft.confidence.reshape(len(kept), -1)
    return [
        Branch(count, breaks[count], tokens[count + 1 :].tolist(), sure[count + 1 :].tolist())
        for count, tokens, sure in zip(kept, ids, confidence, strict=True)
    ]


def _proposal(
    sequence: SequenceState, trunk: Draft, branches: list[Branch], policy: BranchPolicy | None
) -> Proposal:
    draft, confidence = trunk.ids.tolist(), trunk.confidence.tolist()
    staircase = staircase_of(sequence.anchor, draft, branches)
    tree = staircase.tree() if policy is None else staircase.part(policy.prune(staircase, confidence, branches))
    return Proposal(tree, draft, confidence, branches)
