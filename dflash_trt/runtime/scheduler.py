"""Continuous batching: who gets a slot, whose prompt goes on, and how much is drafted, step by step.

A sequence's tokens do not depend on any of that: its prompt is cut into chunks by its length alone, it has a cache row,
a sampler and a draft state of its own, and the target decides every token.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.errors import BackendError, DflashError, QueueFullError, UsageError
from dflash_trt.runtime.branching import BranchPolicy
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.slots import SlotBatch
from dflash_trt.runtime.speculation import Plan, SpeculationPolicy

DEFAULT_QUEUE = 256


@dataclass
class ServingTotals:
    """Counts since the start.

    Attributes:
        requests: accepted, into the queue or a slot. refused: not accepted, since the queue was full.
        cancelled, failed, finished: accepted ones by how they ended.
        prompt_tokens: of the prompts that went through the target. generated_tokens: emitted.
        steps, step_tokens: verifications of a sequence, and the tokens they yielded: their ratio is the mean acceptance
            length. proposed_drafts, accepted_drafts: their ratio is the acceptance rate.
    """

    requests: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0

    def add(self, sequence: SequenceState) -> None:
        """Counts what a sequence did."""
        statistics = sequence.statistics
        self.prompt_tokens += min(sequence.committed, len(sequence.prompt))
        self.generated_tokens += len(sequence.generated)
        self.steps += statistics.steps
        self.step_tokens += sum(statistics.acceptance_lengths)
        self.proposed_drafts += statistics.proposed_drafts
        self.accepted_drafts += statistics.accepted_drafts

    def end(self, sequence: SequenceState) -> None:
        """Counts a sequence that leaves, with how it ended."""
        self.add(sequence)
        if sequence.finish_reason is not None:
            self.finished += 1
        elif sequence.error is not None:
            self.failed += 1
        else:
            self.cancelled += 1


@dataclass(frozen=True)
class ServingLoad:
    """What is going on: slots and how many are in use, requests that wait for one, and the totals."""

    slots: int
    slots_in_use: int
    queue_depth: int
    totals: ServingTotals


class Scheduler:
    """Runs sequences through the slots of a batch, in the order they came.

    One thread calls `step`; `submit` and `SequenceState.cancelled` may come from any.

    Args:
        policy: plans each step.
        branches: what chooses the branches of a step with this plan (D2SD); None for none.
        max_queue: sequences that may wait for a slot.
    """

    def __init__(
        self,
        batch: SlotBatch,
        policy: SpeculationPolicy,
        branches: Callable[[Plan], BranchPolicy | None],
        max_queue: int = DEFAULT_QUEUE,
    ) -> None:
        if type(max_queue) is not int or max_queue < 0:
            raise UsageError(f"{max_queue!r} must be an integer >= 0", where="max_queue", mend="Change or omit it")
        self._batch, self._policy, self._branches = batch, policy, branches
        self._max_queue = max_queue
        self._queue: deque[SequenceState] = deque()
        self._prompts: deque[SequenceState] = deque()  # those in a slot whose prompt is not through, in turns
        self._totals = ServingTotals()
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._queue and not self._batch.rows

    def load(self) -> ServingLoad:
        """A snapshot."""
        with self._lock:
            totals, sequences = ServingTotals(**vars(self._totals)), self._batch.sequences
            for sequence in sequences:
                totals.add(sequence)
            return ServingLoad(self._batch.slots, len(sequences), len(self._queue), totals)

    def submit(self, sequence: SequenceState) -> None:
        """Puts a sequence into the queue.

        Raises:
            QueueFullError: as many wait as may.
        """
        with self._lock:
            waiting = len(self._queue) - self._batch.free
            if waiting >= self._max_queue:
                self._totals.refused += 1
                raise QueueFullError(
                    f"all {self._batch.slots} slots are taken, and {waiting} requests wait already (max_queue is "
                    f"{self._max_queue})",
                    where="queue",
                    mend="Try again later",
                )
            self._totals.requests += 1
            self._queue.append(sequence)

    def step(self) -> list[SequenceState]:
        """Lets sequences leave and join, then runs a chunk of prompts, then one decode step of all that are through.

        Returns:
            Those that have new tokens or are over, but for the cancelled.
        """
        with self._lock:
            self._leave_cancelled()
            self._admit()
        touched = dict.fromkeys([*self._prefill(), *self._decode()])
        with self._lock:
            for row, sequence in list(self._batch.rows.items()):
                if sequence.is_over:
                    self._leave(row, sequence)
        return list(touched)

    def end_all(self, error: DflashError) -> None:
        """Ends who waits and who runs with an error, when there will be no step any more. Touches no cache."""
        with self._lock:
            for sequence in [*self._queue, *self._batch.rows.values()]:
                sequence.error = sequence.error or error
                self._totals.end(sequence)
            self._queue.clear()
            self._prompts.clear()
            self._batch.rows.clear()

    def _leave_cancelled(self) -> None:
        kept = [sequence for sequence in self._queue if not sequence.cancelled]
        self._totals.cancelled += len(self._queue) - len(kept)
        self._queue = deque(kept)
        for row, sequence in list(self._batch.rows.items()):
            if sequence.cancelled:
                self._leave(row, sequence)

    def _leave(self, row: int, sequence: SequenceState) -> None:
        self._batch.leave(row)
        if sequence in self._prompts:
            self._prompts.remove(sequence)
        self._totals.end(sequence)

    def _admit(self) -> None:
        while self._queue and self._batch.free:
            sequence = self._queue.popleft()
            self._batch.join(sequence)
            self._prompts.append(sequence)
        self._batch.compact()

    def _prefill(self) -> list[SequenceState]:
        """Chunks of prompts in turns, as many as have the tokens of one: those that decode wait no longer than that."""
        left, touched = self._batch.chunk_size, []
        while self._prompts:
            sequence = self._prompts[0]
            size = min(self._batch.chunk_size, len(sequence.prompt) - sequence.committed)
            if size > left:
                break
            left -= size
            self._prompts.popleft()
            row = next(row for row, other in self._batch.rows.items() if other is sequence)
            try:
                self._batch.fit()
                self._batch.prefill_chunk(row, sequence)
            except Exception as error:
                sequence.error = _as_ours(error, "prefill")
            if sequence.is_prefilled or sequence.is_over:
                touched.append(sequence)
            else:
                self._prompts.append(sequence)
        return touched

    def _decode(self) -> list[SequenceState]:
        sequences = [self._batch.rows[row] for row in self._batch.active]
        if not sequences:
            return []
        # Those whose prompts go on count too: they wait for the step, and will soon share the next ones.
        plan = self._policy.plan(len(sequences) + len(self._prompts))
        try:
            self._batch.fit()
            outcome = self._batch.advance(plan, self._branches(plan))
        except Exception as error:
            for sequence in sequences:
                sequence.error = sequence.error or _as_ours(error, "decode step")
        else:
            if len(outcome.yielded) == len(sequences):
                self._policy.observe(outcome)
        return sequences


def _as_ours(error: Exception, where: str) -> DflashError:
    """The error a request ends with: one that was not raised on purpose is named, and does not end the others."""
    if isinstance(error, DflashError):
        return error
    ours = BackendError(f"{type(error).__name__}: {error}", where=where)
    ours.__cause__ = error
    return ours
