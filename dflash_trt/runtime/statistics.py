"""What a generation did, counted by one set of definitions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from dflash_trt.errors import UsageError
from dflash_trt.runtime.tree import CandidateTree

Stage = Literal["prefill", "draft", "redraft", "verify", "accept", "move", "host"]
DraftStage = Literal["draft", "redraft"]


def _no_seconds() -> dict[Stage, float]:
    return dict.fromkeys(get_args(Stage), 0.0)


class Walk(NamedTuple):
    """How far a step's tree went, and how far the walk through it; all counted from behind the anchor.

    Attributes:
        trunk, agreed: drafts of the trunk that were verified, and how many, from the first on, the target chose.
        deepest, reached: the deepest nodes of the tree, and of the path. Of a chain the same as the two above.
    """

    trunk: int
    agreed: int
    deepest: int
    reached: int


@dataclass(frozen=True)
class PositionCount:
    """Steps by what they did at one position behind the anchor, from 1 on.

    Attributes:
        trunk_proposed, trunk_accepted: that verified a draft of the trunk there, and whose trunk was right so far.
        proposed, accepted: that verified a draft there, of whatever branch, and whose path got there.
    """

    position: int
    trunk_proposed: int
    trunk_accepted: int
    proposed: int
    accepted: int


@dataclass
class GenerationStatistics:
    """Counters of one sequence.

    A *step* is one verification: the target checks a candidate tree and at least one token comes out. The token that
    prefill yields belongs to no step. Without speculation each step proposes nothing and yields one token.

    Attributes:
        acceptance_lengths: per step, tokens it yielded: accepted drafts and the bonus token, less what a stop token or
            the length limit cut off (as the authors' loop counts).
        proposed_drafts: drafted tokens put before the target: nodes of the verified trees, roots excluded.
        accepted_drafts: those of them that were emitted, besides each step's last token.
        target_passes, draft_passes, redraft_passes: forward passes of the target, the drafter and the VP drafter, those
            that prefill or only inject included.
        walks: steps by their walk, before a stop cuts some of its tokens off; without those that run whole on a device.
        passes: passes of its steps by stage and new tokens, those of other rows and padding included; not those that
            only inject, nor those of steps that run whole on a device.
        seconds: wall time by stage. "prefill" is all until the first token, and the passes that only inject. A step has
            the passes "draft", "redraft" and "verify" (all of a step that runs whole on a device), and "accept" (the
            target's choices along the path), "move" (the path's cache rows and features), "host" (all other: inputs,
            trees, text).
    """

    acceptance_lengths: list[int] = field(default_factory=list)
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    redraft_passes: int = 0
    walks: Counter[Walk] = field(default_factory=Counter)
    passes: Counter[tuple[Stage, int]] = field(default_factory=Counter)
    seconds: dict[Stage, float] = field(default_factory=_no_seconds)

    def count_draft_pass(self, stage: DraftStage) -> None:
        """Count one forward pass of the drafter or, for "redraft", of the VP drafter."""
        if stage == "draft":
            self.draft_passes += 1
        else:
            self.redraft_passes += 1

    def record_step(self, *, proposed: int, yielded: int, walk: Walk | None = None) -> None:
        """Count one step that proposed so many drafts and yielded so many tokens, the bonus token among them.

        Args:
            walk: what `StepMeter.record_walk` found; None where it is not known.

        Raises:
            UsageError: not 1 <= yielded <= proposed + 1.
        """
        if not 1 <= yielded <= proposed + 1:
            raise UsageError(
                f"{yielded} tokens of {proposed} proposed drafts; it must be 1 <= yielded <= proposed + 1",
                where="GenerationStatistics.record_step",
                mend="count the emitted tokens, the bonus included",
            )
        self.acceptance_lengths.append(yielded)
        self.proposed_drafts += proposed
        self.accepted_drafts += yielded - 1
        if walk is not None:
            self.walks[walk] += 1

    @property
    def positions(self) -> list[PositionCount]:
        """What `walks` says of each position that was verified."""
        return position_counts(self.walks)

    @property
    def steps(self) -> int:
        """Number of verifications."""
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float | None:
        """tau: tokens yielded by steps / steps, the bonus token included; None without steps."""
        return sum(self.acceptance_lengths) / self.steps if self.steps else None

    @property
    def verified_per_step(self) -> float | None:
        """Tokens put before the target / steps: drafts and anchors; None without steps."""
        return self.proposed_drafts / self.steps + 1 if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted drafts / proposed drafts; None when nothing was proposed."""
        return self.accepted_drafts / self.proposed_drafts if self.proposed_drafts else None

    def to_dict(self) -> dict[str, Any]:
        """All counters and both metrics as plain JSON data."""
        return {
            "steps": self.steps,
            "acceptance_lengths": list(self.acceptance_lengths),
            "mean_acceptance_length": self.mean_acceptance_length,
            "proposed_drafts": self.proposed_drafts,
            "accepted_drafts": self.accepted_drafts,
            "acceptance_rate": self.acceptance_rate,
            "verified_per_step": self.verified_per_step,
            "target_passes": self.target_passes,
            "draft_passes": self.draft_passes,
            "redraft_passes": self.redraft_passes,
            "positions": [asdict(count) for count in self.positions],
            "seconds": dict(self.seconds),
        }


def position_counts(walks: Counter[Walk]) -> list[PositionCount]:
    """Steps by position, from 1 to the deepest that a tree has."""
    counts = []
    for position in range(1, max((walk.deepest for walk in walks), default=0) + 1):
        reaching = (sum(n for walk, n in walks.items() if walk[part] >= position) for part in range(len(Walk._fields)))
        counts.append(PositionCount(position, *reaching))
    return counts


@contextmanager
def timed(stage: Stage, sharing: Collection[GenerationStatistics]) -> Iterator[None]:
    """Add the wall time of the `with` body to a stage; the sequences that share it share its time."""
    started = time.perf_counter()
    try:
        yield
    finally:
        share = (time.perf_counter() - started) / len(sharing)
        for statistics in sharing:
            statistics.seconds[stage] += share


class StepMeter:
    """What one step of a batch took and brought.

    Attributes:
        seconds, tokens: of its passes by stage, and their new tokens, padding included.
        trunk: of each row, drafts of its trunk put before the target, and how many, from the first on, it chose.
        yielded: of each row, tokens that came of it, before a stop cuts some off.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins a step."""
        self.seconds: dict[Stage, float] = {}
        self.tokens: dict[Stage, int] = {}
        self.trunk: list[tuple[int, int]] = []
        self.yielded: list[int] = []

    def record_walk(self, tree: CandidateTree, draft: Sequence[int], path: Sequence[int]) -> Walk:
        """Takes the path of one row through its tree.

        Args:
            draft: tokens of the trunk without the anchor; the tree may leave out some at its end.
        """
        trunk = [0]
        for token in draft:
            if (node := tree.child(trunk[-1], token)) is None:
                break
            trunk.append(node)
        agreed = -1  # the anchor is of both
        for node, own in zip(path, trunk, strict=False):
            if node != own:
                break
            agreed += 1
        deepest = len(trunk) - 1 if len(trunk) == len(tree) else int(tree.depths.max())
        self.trunk.append((len(trunk) - 1, agreed))
        self.yielded.append(len(path))
        return Walk(len(trunk) - 1, agreed, deepest, len(path) - 1)

    @contextmanager
    def timed(self, stage: Stage, sharing: Collection[GenerationStatistics], tokens: int) -> Iterator[None]:
        """As `timed`, for a pass of so many new tokens."""
        started = time.perf_counter()
        with timed(stage, sharing):
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        self.tokens[stage] = self.tokens.get(stage, 0) + tokens
        if stage != "prefill":
            for statistics in sharing:
                statistics.passes[stage, tokens] += 1


@contextmanager
def host_time(sharing: Collection[GenerationStatistics], stage: Stage = "host") -> Iterator[None]:
    """Count as `stage` what the `with` body takes besides what it counts itself; sequences that share it share that."""
    started = time.perf_counter()
    before = sum(sum(statistics.seconds.values()) for statistics in sharing)
    yield
    counted = sum(sum(statistics.seconds.values()) for statistics in sharing) - before
    for statistics in sharing:
        statistics.seconds[stage] += (time.perf_counter() - started - counted) / len(sharing)
