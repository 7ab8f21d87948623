"""The decode loop over whole device steps (`device_step.py`): the host reads once a step what came of it.

It serves plain greedy sequences with a fixed number of branches. What samples, penalises, weighs costs or is traced
needs the host between the passes of a step and runs in `DecodeBatch`; both give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_trt.backends.base import Array, DeviceSession
from dflash_trt.runtime.decode import Batch, checked
from dflash_trt.runtime.device_step import DeviceStep
from dflash_trt.runtime.drafter import inject, not_finite
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.statistics import timed


class DeviceSlots:
    """Caches of `max_batch_size` rows, and the steps over their first rows, each made when it is first asked for.

    It outlives a request, so that a step is captured once and not for each. One batch uses it at a time.
    """

    def __init__(
        self,
        target: DeviceSession,
        drafter: DeviceSession,
        vp_drafter: DeviceSession | None,
        limits: Limits,
        mask_token_id: int,
    ) -> None:
        self.target, self.drafter, self.vp_drafter = target, drafter, vp_drafter
        self.limits, self.mask_token_id = limits, mask_token_id
        self._sessions = [target, drafter] if vp_drafter is None else [target, drafter, vp_drafter]
        self._caches = [session.new_cache(limits.max_batch_size, limits.capacity) for session in self._sessions]
        self._steps: dict[tuple[int, int], DeviceStep] = {}
        self._pool: Any = None

    def step(self, batch: int, branches: int) -> DeviceStep:
        """The step of the first `batch` rows, captured where the device can; no row of it is active."""
        if (batch, branches) not in self._steps:
            step = DeviceStep(
                self.target,
                self.drafter,
                self.limits,
                self.mask_token_id,
                batch,
                vp_drafter=self.vp_drafter if branches else None,
                branches=branches,
                caches=[cache.rows(0, batch) for cache in self._caches[: 3 if branches else 2]],
            )
            if all(session.whole_steps for session in self._sessions):
                self._pool = step.capture(self._pool)
            self._steps[batch, branches] = step
        return self._steps[batch, branches]


class DeviceDecodeBatch(Batch):
    """Decodes plain greedy sequences, one device step after the other.

    A step's time counts as "verify" in the statistics, since its passes cannot be told apart.

    Args:
        slots: nobody else's until this calls `release` with them, at its end or when it is abandoned. After an error
            it never does: what is not finite would stay in the caches.
        sequences: as of `Batch`; `params.is_plain_greedy`, and without a trace.
        branches: of D2SD; 0 for a chain.
    """

    def __init__(
        self,
        slots: DeviceSlots,
        sequences: Sequence[SequenceState],
        branches: int,
        release: Callable[[DeviceSlots], None],
    ) -> None:
        super().__init__(slots.target, sequences, slots.limits, speculation=True)
        self._slots, self._release = slots, release
        self._device_step = slots.step(len(sequences), branches)
        self._target_cache = self._device_step.caches[0]

    def prefill(self) -> None:
        super().prefill()
        sequences = self.sequences
        self._device_step.load(
            context_len=[sequence.committed for sequence in sequences],
            anchor=[sequence.anchor for sequence in sequences],
            remaining=[sequence.remaining for sequence in sequences],
            active=[sequence.finish_reason is None for sequence in sequences],
        )
        self._release_at_the_end()

    def _inject(self, row: int, sequence: SequenceState, features: Array, size: int) -> None:
        step, statistics = self._device_step, sequence.statistics
        with timed("prefill", [statistics]):
            for session, cache in zip(step.drafters, step.caches[1:], strict=True):
                inject(session, cache.rows(row, row + 1), features, size, sequence.committed, self._slots.mask_token_id)
        statistics.draft_passes += 1
        statistics.redraft_passes += len(step.drafters) - 1

    def _step(self, sequences: dict[int, SequenceState]) -> None:
        step = self._device_step
        with timed("verify", [sequence.statistics for sequence in sequences.values()]):
            outcomes = step.run()
        for role in (drafter.graph.role for drafter in step.drafters):
            if any(role in outcomes[row].not_finite for row in sequences):
                raise not_finite(role)
        for row, sequence in sequences.items():
            outcome, statistics = outcomes[row], sequence.statistics
            yielded = sequence.emit([checked(token) for token in outcome.tokens])
            statistics.record_step(proposed=outcome.nodes - 1, yielded=yielded)
            statistics.target_passes += 1
            statistics.draft_passes += 1
            statistics.redraft_passes += len(step.drafters) - 1
            sequence.committed += len(outcome.tokens)
        step.stop([row for row, sequence in sequences.items() if sequence.finish_reason is not None])
        self._release_at_the_end()

    def abandon(self) -> None:
        if self.active:
            self._release(self._slots)

    def _release_at_the_end(self) -> None:
        if not self.active:
            self._release(self._slots)
