"""From an anchor to the candidates of a step: a chain (DFlash, DFlare) or a staircase (D2SD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.backends.base import Array
from dflash_trt.runtime.branching import Branch, BranchPolicy
from dflash_trt.runtime.drafter import Block, Draft, Drafter
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.staircase import break_chances, merge
from dflash_trt.runtime.statistics import timed
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
        drafter: the first draft.
        redrafter, policy: of D2SD: the VP drafter, and what chooses the branches.
    """

    def __init__(
        self, limits: Limits, drafter: Drafter, redrafter: Drafter | None = None, policy: BranchPolicy | None = None
    ) -> None:
        self._limits = limits
        self._drafter, self._redrafter, self._policy = drafter, redrafter, policy
        self._drafters = [drafter] if redrafter is None else [drafter, redrafter]

    def resize(self, capacity: int) -> None:
        """Gives every row of every cache `capacity` slots."""
        for drafter in self._drafters:
            drafter.resize(capacity)

    def prefill(self, row: int, sequence: SequenceState, features: Array, size: int) -> None:
        """Injects a prompt chunk's features [1, N, T*H]."""
        self._drafter.prefill(row, features, size)
        sequence.statistics.draft_passes += 1
        if self._redrafter is not None:
            self._redrafter.prefill(row, features, size)
            sequence.statistics.redraft_passes += 1

    def accept(self, row: int, features: Array) -> None:
        """Takes the features [n, T*H] of a step's accepted path."""
        for drafter in self._drafters:
            drafter.accept(row, features)

    def propose(self, sequences: Mapping[int, SequenceState]) -> dict[int, Proposal]:
        """Candidates for each row, by row."""
        trunks = self._draft(sequences)
        if self._redrafter is None or self._policy is None:
            return {row: _proposal(sequences[row], trunk, []) for row, trunk in trunks.items()}
        kept = {
            row: self._policy.choose(trunk.confidence, self._sizes(sequences[row])[1]) for row, trunk in trunks.items()
        }
        branches = self._redraft(sequences, trunks, kept)
        return {row: _proposal(sequences[row], trunk, branches[row], self._policy) for row, trunk in trunks.items()}

    def _sizes(self, sequence: SequenceState) -> tuple[int, int]:
        """Tokens in a first block and in a branch: no more drafts than tokens that may come; none for the last."""
        room = 1 if sequence.remaining == 1 else sequence.remaining + 1
        return min(self._limits.block_size, room), min(self._limits.longest_path, room)

    def _draft(self, sequences: Mapping[int, SequenceState]) -> dict[int, Draft]:
        """Trunks, without the anchor."""
        mask = self._drafter.mask_token_id
        blocks = {row: Block.of([[s.anchor]], self._sizes(s)[0], mask) for row, s in sequences.items()}
        if all(len(block.ids) == 1 for block in blocks.values()):
            empty = Draft(np.zeros(0, np.int64), np.zeros(0))
            return dict.fromkeys(sequences, empty)
        with timed("draft", [s.statistics for s in sequences.values()]):
            drafts = self._drafter.draft(blocks)
        for sequence in sequences.values():
            sequence.statistics.draft_passes += 1
        return {row: Draft(draft.ids[1:], draft.confidence[1:]) for row, draft in drafts.items()}

    def _redraft(
        self, sequences: Mapping[int, SequenceState], trunks: Mapping[int, Draft], kept: Mapping[int, list[int]]
    ) -> dict[int, list[Branch]]:
        """All branches of all rows in one pass; no pass where no row has any and features may wait."""
        assert self._redrafter is not None
        redrafter = self._redrafter
        waiting = max(redrafter.pending(row) for row in sequences)
        if not any(kept.values()) and waiting + self._limits.longest_path <= self._limits.longest_pending:
            return {row: [] for row in sequences}
        blocks = {}
        for row, sequence in sequences.items():
            candidates = [[sequence.anchor, *trunks[row].ids[:count].tolist()] for count in kept[row]]
            size = self._sizes(sequence)[1] if candidates else 1
            blocks[row] = Block.of(candidates or [[sequence.anchor]], size, redrafter.mask_token_id)
        with timed("redraft", [s.statistics for s in sequences.values()]):
            drafts = redrafter.draft(blocks)
        for sequence in sequences.values():
            sequence.statistics.redraft_passes += 1
        return {row: _branches(trunks[row], kept[row], draft) for row, draft in drafts.items()}


def _branches(trunk: Draft, kept: Sequence[int], redraft: Draft) -> list[Branch]:
    """Cuts the re-draft of one row into its branches."""
    if not kept:
        return []
    breaks = break_chances(trunk.confidence)
    ids, confidence = redraft.ids.reshape(len(kept), -1), redraft.confidence.reshape(len(kept), -1)
    return [
        Branch(count, float(breaks[count]), tokens[count + 1 :].tolist(), sure[count + 1 :].tolist())
        for count, tokens, sure in zip(kept, ids, confidence, strict=True)
    ]


def _proposal(
    sequence: SequenceState, trunk: Draft, branches: list[Branch], policy: BranchPolicy | None = None
) -> Proposal:
    draft, confidence = trunk.ids.tolist(), trunk.confidence.tolist()
    rows = [[sequence.anchor, *draft], *([sequence.anchor, *draft[: b.kept], *b.tokens] for b in branches)]
    tree, nodes = merge(rows)
    if policy is not None:
        reach = np.zeros(len(tree))
        for path, chances in zip(nodes, _reach(confidence, branches), strict=True):
            reach[path] = np.maximum(reach[path], chances)
        tree = policy.prune(tree, reach, trunk.confidence, branches)
    return Proposal(tree, draft, confidence, branches)


def _reach(confidence: list[float], branches: list[Branch]) -> list[np.ndarray]:
    """For the trunk and each branch: the probability that the walk comes to each of its nodes."""
    trunk = np.cumprod([1.0, *confidence])
    tails = [np.cumprod([b.probability, *b.confidence])[1:] for b in branches]
    return [trunk, *(np.concatenate((trunk[: b.kept + 1], tail)) for b, tail in zip(branches, tails, strict=True))]
