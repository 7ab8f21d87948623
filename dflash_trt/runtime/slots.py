"""The decode loop over slots: sequences join and leave between steps, each in a cache row of its own."""

from __future__ import annotations

import time

from dflash_trt.backends.base import Session
from dflash_trt.errors import DflashError
from dflash_trt.runtime.branching import BranchPolicy
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.speculation import Plan, StepOutcome
from dflash_trt.runtime.statistics import host_time

_SHRINK = 4  # a row's capacity is cut when so many times what is needed


class SlotBatch(DecodeBatch):
    """`DecodeBatch` over the rows of one allocation, free ones among them.

    A pass takes the rows up to the last that takes part, so rows are kept together: `compact`. A sequence that fails
    has its error in `sequence.error`, and the others go on.

    Args:
        drafter, vp_drafter: None where steps never speculate, or never branch.
        slots: rows; None for `limits.max_batch_size`.
    """

    def __init__(
        self,
        target: Session,
        drafter: Session | None,
        limits: Limits,
        mask_token_id: int,
        vp_drafter: Session | None = None,
        slots: int | None = None,
    ) -> None:
        self.slots = limits.max_batch_size if slots is None else slots
        super().__init__(target, drafter, [], limits, mask_token_id, vp_drafter, slots=self.slots)

    @property
    def free(self) -> int:
        """Slots without a sequence."""
        return self.slots - len(self.rows)

    @property
    def active(self) -> list[int]:
        """Rows that take part in a step: their prompts are in the cache, and they go on."""
        return [row for row, s in self.rows.items() if s.is_prefilled and not s.is_over]

    def join(self, sequence: SequenceState) -> int:
        """Gives a sequence the first free slot; which one. Before its prompt is prefilled, `fit` makes room for it."""
        row = next(row for row in range(self.slots) if row not in self.rows)
        self.rows[row] = sequence
        return row

    def leave(self, row: int) -> None:
        """Frees a slot. Nothing stays in it, since no mask would hold NaN back from the next sequence."""
        del self.rows[row]
        self._target_cache.clear_row(row)
        if self._proposer is not None:
            self._proposer.free(row)

    def compact(self) -> None:
        """Moves sequences from the last slots into free ones before them."""
        for free in range(len(self.rows)):
            if free not in self.rows:
                last = max(self.rows)
                self.rows[free] = sequence = self.rows.pop(last)
                self._target_cache.copy_row(last, free, sequence.committed)
                self._target_cache.clear_row(last)
                if self._proposer is not None:
                    self._proposer.move_row(last, free)

    def advance(self, plan: Plan, policy: BranchPolicy | None) -> StepOutcome:
        """One step of the active rows, at least one, after `fit`.

        Args:
            plan: how many drafts a trunk has at most.
            policy: chooses the branches.
        """
        started, active = time.perf_counter(), self.active
        sequences = {row: self.rows[row] for row in active}
        with host_time([sequence.statistics for sequence in sequences.values()]):
            self._advance(sequences, plan.drafts, policy)
        seconds = dict(self.meter.seconds)
        seconds["host"] = time.perf_counter() - started - sum(seconds.values())
        meter = self.meter
        return StepOutcome(plan, len(active), seconds, dict(meter.tokens), tuple(meter.trunk), tuple(meter.yielded))

    def _fault(self, row: int, error: DflashError) -> None:
        self.rows[row].error = error

    def fit(self) -> None:
        """Makes room for the prompts and a step of every row, and gives up room that a long sequence left behind.

        The cost of attention goes with the capacity where a backend lets it grow.
        """
        longest = max(max(s.committed, len(s.prompt)) for s in self.rows.values())
        capacity = self.target.capacity_for(longest + self.limits.step_slots, self.limits.capacity)
        if capacity > self._target_cache.capacity or capacity * _SHRINK <= self._target_cache.capacity:
            self._resize(capacity)
