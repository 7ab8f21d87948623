"""What a generation did, counted by one set of definitions."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_trt.errors import UsageError

Stage = Literal["prefill", "draft", "redraft", "verify", "host"]
DraftStage = Literal["draft", "redraft"]


def _no_seconds() -> dict[Stage, float]:
    return {"prefill": 0.0, "draft": 0.0, "redraft": 0.0, "verify": 0.0, "host": 0.0}


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
        seconds: wall time by stage; "prefill" has the passes that only inject, too, and "host" is what runs between
            passes (sampling, trees, text).
    """

    acceptance_lengths: list[int] = field(default_factory=list)
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    redraft_passes: int = 0
    seconds: dict[Stage, float] = field(default_factory=_no_seconds)

    def count_draft_pass(self, stage: DraftStage) -> None:
        """Count one forward pass of the drafter or, for "redraft", of the VP drafter."""
        if stage == "draft":
            self.draft_passes += 1
        else:
            self.redraft_passes += 1

    def record_step(self, *, proposed: int, yielded: int) -> None:
        """Count one step that proposed so many drafts and yielded so many tokens, the bonus token among them.

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
            "seconds": dict(self.seconds),
        }


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

    def record_walk(self, drafts: int, path: Sequence[int]) -> None:
        """Takes the path of one row through a tree whose nodes 1 to `drafts` are those of the trunk."""
        agreed = next((depth for depth, node in enumerate(path) if node != depth or depth > drafts), len(path)) - 1
        self.trunk.append((drafts, agreed))
        self.yielded.append(len(path))

    @contextmanager
    def timed(self, stage: Stage, sharing: Collection[GenerationStatistics], tokens: int) -> Iterator[None]:
        """As `timed`, for a pass of so many new tokens."""
        started = time.perf_counter()
        with timed(stage, sharing):
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        self.tokens[stage] = self.tokens.get(stage, 0) + tokens


@contextmanager
def host_time(sharing: Collection[GenerationStatistics]) -> Iterator[None]:
    """Count as "host" what the `with` body takes besides its passes; the sequences that share it share its time."""
    started = time.perf_counter()
    before = sum(sum(statistics.seconds.values()) for statistics in sharing)
    yield
    passes = sum(sum(statistics.seconds.values()) for statistics in sharing) - before
    for statistics in sharing:
        statistics.seconds["host"] += (time.perf_counter() - started - passes) / len(sharing)
