"""Requests that come and go at random over a scheduler, and drafts that are right now and then whatever the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from runtime.hints import chance, hinted

from dflash_trt.runtime.branching import FixedBranches
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.slots import SlotBatch
from dflash_trt.runtime.speculation import Plan, StepOutcome


class Knowing:
    """A drafter session that drafts from whichever of some sequences has the anchor's token at its position."""

    def __init__(self, session: Any, rights: Sequence[Sequence[int]], accuracy: float) -> None:
        self._session, self._rights, self._accuracy = session, rights, accuracy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, inputs: dict, outputs: Sequence[str], cache: Any) -> dict:
        results = self._session.run(inputs, outputs, cache)
        if "draft_ids" not in results:
            return results
        ids = results["draft_ids"].copy()
        for row, (block, positions) in enumerate(zip(inputs["block_ids"], inputs["block_position_ids"], strict=True)):
            anchor = int(positions[0])
            known = [r for r in self._rights if anchor < len(r) and r[anchor] == block[0]]
            if not known:
                continue
            right = known[int(chance("which", anchor, row) * len(known))]
            starts = np.flatnonzero(positions == anchor).tolist()
            for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
                given = block[start:end].tolist()
                ids[row, start:end] = hinted(ids[row, start:end], given, anchor, right, self._accuracy, "")
        return {**results, "draft_ids": ids}


class Erratic:
    """A policy that changes its mind at every step."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._limits, self._random = engine.limits, np.random.default_rng(seed)
        self.plans: set[Plan] = set()
        self.outcomes: list[StepOutcome] = []

    def plan(self, rows: int) -> Plan:
        drafts = int(self._random.integers(0, self._limits.block_size))
        plan = Plan(drafts, int(self._random.integers(0, self._limits.branches + 1)) if drafts else 0)
        self.plans.add(plan)
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def erratic_scheduler(engine: Engine, seed: int, batch: SlotBatch | None = None) -> tuple[Scheduler, Erratic]:
    """A scheduler whose steps draft now this and now that, with everybody in the queue who comes."""
    policy = Erratic(engine, seed)
    if batch is None:
        batch = SlotBatch(engine.target, engine.drafter, engine.limits, engine.mask_token_id, engine.vp_drafter)
    return Scheduler(batch, policy, lambda plan: FixedBranches(plan.branches) if plan.branches else None, 1000), policy


@dataclass
class Request:
    """A request of a random load.

    Attributes:
        arrives: the step before which it comes.
        leaves: the step before which it is cancelled; None: it stays to its end.
    """

    prompt: list[int]
    options: dict[str, Any]
    arrives: int
    leaves: int | None = None
    sequence: SequenceState | None = None


def serve(engine: Engine, scheduler: Scheduler, requests: Sequence[Request]) -> int:
    """Runs them all; returns the number of steps. Everybody is reported over exactly once, but for the cancelled."""
    over: list[SequenceState] = []
    step = 0
    while step <= max(request.arrives for request in requests) or not scheduler.is_idle:
        for request in requests:
            if request.arrives == step:
                request.sequence = engine.sequence(request.prompt, SamplingParams(**request.options))
                scheduler.submit(request.sequence)
            if request.leaves == step and request.sequence is not None:
                request.sequence.cancelled = True
        over += [sequence for sequence in scheduler.step() if sequence.is_over]
        step += 1
        assert step < 10_000
    stayed = [request.sequence for request in requests if request.sequence and not request.sequence.cancelled]
    assert all(over.count(sequence) == 1 for sequence in stayed)
    return step
