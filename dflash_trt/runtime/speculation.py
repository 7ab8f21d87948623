"""How much a decode step speculates: how many tokens each row drafts, and in how many branches.

Speculation buys tokens with larger passes. When many sequences share a pass, that can cost more than it gives. No
policy changes an output token: the target decides those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.speculation_models import Part, StepTimes, StepYield
from dflash_trt.runtime.statistics import Stage

Speculation = Literal["auto", "on", "off"]


class Plan(NamedTuple):
    """What one step does for every row.

    Attributes:
        drafts: tokens of the first draft behind the anchor; with 0 no drafter runs.
        branches: of D2SD.
    """

    drafts: int
    branches: int


OFF = Plan(0, 0)


@dataclass(frozen=True)
class StepOutcome:
    """What a step took and brought.

    Attributes:
        rows: sequences in the step.
        seconds: of the whole step, by stage; a pass that did not run is missing. "prefill" are passes that only inject
            features that waited.
        tokens: new tokens of each pass, padding included.
        trunk: of each row, drafts of the first draft put before the target, and how many of them, from the first on, it
            agreed with.
        yielded: of each row, new tokens, the bonus included.
    """

    plan: Plan
    rows: int
    seconds: Mapping[Stage, float]
    tokens: Mapping[Stage, int]
    trunk: Sequence[tuple[int, int]]
    yielded: Sequence[int]


class SpeculationPolicy(Protocol):
    """Chooses before each step and learns from it."""

    def plan(self, rows: int) -> Plan:
        """For a step at a load of so many sequences, at least one; some may not take part yet."""

    def observe(self, outcome: StepOutcome) -> None:
        """Takes in a step's outcome."""


@dataclass(frozen=True)
class FixedPlan:
    """Always the same."""

    always: Plan

    def plan(self, rows: int) -> Plan:
        return self.always

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


_HOLD, _LONGEST_HOLD = 4, 32  # steps for which a choice stands: twice as many when it is the same again
_STEADY = 8  # steps after which a load is no passing one
_BATCH = 4  # steps that are learnt of at once
_MARGIN = 1.03  # how many times faster another plan that drafts must look
_TRIAL = 8  # steps of a trial
_GLANCE = 3  # of one that gives a first idea
_DRAFTED = 4  # drafts that show whether they are right again
_EXTENSION = 8  # steps by which one that pays goes on
_OFTEN, _SELDOM = 12, 4  # of steps with one plan the first so many are timed, and then every such
_SETTLING = 3  # steps behind which times are those of a plan
_CHANGE = 1.0  # steps' time that it costs to change plans and back: caches are cold
_HOPELESS = 0.6  # part of the best rate
_REST = 32  # steps between two trials of a plan
_LATEST = 2000  # steps after which speculation, or none of it, is tried in any case
_SHARE, _LEAST_SHARE = 0.01, 0.005  # of the time that trials may lose; the least after drafts were tried in vain
_CREDIT = 20  # steps' time that may be saved up for trials
_MEMORY = 0.98  # per step that drafts, of what injecting prompts takes


@dataclass(frozen=True)
class _Choice:
    """For some number of rows and until some step: the best plan, seconds of a step and tokens per second of all."""

    rows: int
    until: int
    best: Plan
    seconds: dict[Plan, float]
    rates: dict[Plan, float]


@dataclass
class _Trial:
    """Steps of a plan that does not look best, or that must be known: those count as free.

    Attributes:
        rate: tokens per second of what looks best.
        change: seconds that it costs to change plans and back.
        lost: seconds, so far.
    """

    plan: Plan
    length: int
    free: bool
    rate: float = math.inf
    change: float = 0.0
    steps: int = 0
    lost: float = 0.0


class AdaptivePlan:
    """The plan with the most expected tokens per second: what it yields over what it takes.

    Both are learnt while it runs. Now and then another plan than the best is tried; the time that trials lose is
    counted and held to a small share of all.

    Args:
        branches: how many to have at most.
        costs: seconds of passes over one sequence, as measured when the bundle was built.
    """

    def __init__(self, limits: Limits, branches: int, costs: PassCosts | None) -> None:
        self._plans = {plan: pass_sizes(limits, plan) for plan in candidates(limits, branches)}
        self._yield = StepYield(*max(self._plans))
        self._times = StepTimes(costs)
        self._injection = 0.0  # seconds per row of a step that drafts, behind another that does
        self._steps = 0
        self._seen: list[StepOutcome] = []  # of which nothing is learnt yet: a few at once take less time
        self._load, self._load_step = 1, 0  # about the number of rows, since some step
        self._last, self._alike = OFF, 0  # the plan of the last step, and of how many on end
        self._resting = 0  # steps since the last that drafted
        self._tried: dict[tuple[int, Plan], int] = {}  # by about the number of rows: the last step
        self._usual, self._hold = OFF, _HOLD  # the best plan of the last choice, and how long that stood
        self._choice: _Choice | None = None
        self._trial: _Trial | None = None
        self._credit, self._share = 0.0, _SHARE

    def plan(self, rows: int) -> Plan:
        if self._trial is not None:
            return self._trial.plan
        if not _are_near(rows, self._load):
            self._load, self._load_step = rows, self._steps
        if self._is_due(rows):
            self._catch_up()
            self._trial = self._first()
            if self._trial is None:
                self._choice = self._choose(rows)
                self._trial = (self._try_drafts if self._choice.best == OFF else self._try_others)(self._choice)
        return self._trial.plan if self._trial is not None else self._usual

    def observe(self, outcome: StepOutcome) -> None:
        self._seen.append(outcome)
        if self._trial is not None or len(self._seen) >= _BATCH:
            self._catch_up()

    def _is_due(self, rows: int) -> bool:
        """Whether to choose again. Drafts begin with injecting all that waits: not for a load that is passing."""
        choice = self._choice
        if choice is None:
            return True
        late = self._steps - choice.until
        if late < 0 and _are_near(rows, choice.rows):
            return False
        return choice.best != OFF or late >= _LONGEST_HOLD or self._steps - self._load_step >= _STEADY

    def _catch_up(self) -> None:
        for seen in self._seen:
            self._learn(seen)
        self._seen.clear()

    def _learn(self, outcome: StepOutcome) -> None:
        plan, rows = outcome.plan, outcome.rows
        self._steps += 1
        self._alike = self._alike + 1 if plan == self._last else 1
        self._last = plan
        self._tried[rows.bit_length(), plan] = self._steps
        if plan.drafts and self._yield.observe(*plan, outcome.trunk, outcome.yielded):
            self._choice = None
        if self._alike <= _OFTEN or self._alike % _SELDOM == 0:
            self._observe_times(outcome)
        self._resting = 0 if plan.drafts else self._resting + 1
        if self._choice is not None:
            best = self._choice.seconds[self._choice.best]
            self._credit = min(_CREDIT * best, self._credit + self._share * best)
        if self._trial is not None:
            self._go_on(self._trial, outcome)

    def _first(self) -> _Trial | None:
        """What to begin with, as long as nothing is known of some pass."""
        if not self._times.knows("verify"):
            return _Trial(OFF, _TRIAL, free=True)
        return None if self._times.knows("draft") else _Trial(Plan(1, 0), _GLANCE, free=True)

    def _go_on(self, trial: _Trial, outcome: StepOutcome) -> None:
        """Counts a step of a trial. One that pays goes on for some steps."""
        trial.steps += 1
        trial.lost += sum(outcome.seconds.values()) / self._times.pace - sum(outcome.yielded) / trial.rate
        if trial.steps >= (trial.length if trial.lost >= 0 else trial.length + _EXTENSION):
            self._share = _LEAST_SHARE if self._usual == OFF and trial.lost >= 0 else _SHARE
            if not trial.free:
                self._credit -= max(0.0, trial.lost) + trial.change
            self._trial = self._choice = None

    def _observe_times(self, outcome: StepOutcome) -> None:
        """Learns from passes of the planned size: at their ends sequences draft less."""
        plan, rows, seconds = outcome.plan, outcome.rows, outcome.seconds
        parts: dict[Part, float] = {"verify": seconds["verify"] + seconds["host"]}
        if plan.drafts:
            if not self._resting:
                injection = seconds.get("prefill", 0.0) / self._times.pace / rows
                self._injection += (1 - _MEMORY) * (injection - self._injection)
            if all(proposed < plan.drafts for proposed, _ in outcome.trunk):
                return
            parts["draft"] = seconds["draft"]
            if plan.branches and "redraft" in seconds:
                parts["redraft"] = seconds["redraft"]
        self._times.observe(rows, self._plans[plan], parts, settled=self._alike > _SETTLING)

    def _choose(self, rows: int) -> _Choice:
        seconds = {plan: self._seconds(rows, plan) for plan in self._plans}
        rates = {plan: self._rate(rows, plan, spent) for plan, spent in seconds.items()}
        best = max(rates, key=rates.__getitem__)
        if rates[best] >= rates[self._usual] * (1 if best == OFF else _MARGIN) and best != self._usual:
            self._usual, self._hold = best, _HOLD
        else:
            self._hold = min(_LONGEST_HOLD, 2 * self._hold)
        return _Choice(rows, self._steps + self._hold, self._usual, seconds, rates)

    def _seconds(self, rows: int, plan: Plan) -> float:
        return self._times.seconds(rows, self._plans[plan]) + (rows * self._injection if plan.drafts else 0.0)

    def _rate(self, rows: int, plan: Plan, seconds: float) -> float:
        """Expected tokens per second; 0 of a step that is far larger than any that was measured."""
        reaches = plan == OFF or self._times.reaches(rows, self._plans[plan])
        return rows * self._yield.tokens(plan.drafts, plan.branches) / seconds if reaches else 0.0

    def _try_drafts(self, choice: _Choice) -> _Trial | None:
        """While none is best: a trial of speculation, for what must be known at this load, and lest nobody notices that
        drafts are right again. It is of the plan that may gain most, were all drafts right, by the time it takes."""
        plans, seconds = [plan for plan in self._plans if plan.drafts], choice.seconds
        best = max(plans, key=choice.rates.__getitem__)
        if self._is_new(best, choice):
            return self._try(best, _GLANCE, choice, free=True)
        rate = choice.rates[OFF] / choice.rows
        plan = max(plans, key=lambda plan: ((1 + plan.drafts) / seconds[plan] - rate) / seconds[plan])
        length = -(-_DRAFTED // choice.rows)
        if self._resting >= _LATEST:
            return self._try(plan, length, choice, free=True)
        due = self._resting >= _REST and self._loss(plan, length, choice) <= self._credit
        return self._try(plan, length, choice) if due else None

    def _try_others(self, choice: _Choice) -> _Trial | None:
        """While some speculation is best: a trial of none, for what must be known and not be forgotten; or of what was
        not tried for the longest, measured by what that loses, once there is credit for it."""
        ages = {plan: self._age(choice.rows, plan) for plan in self._plans if plan != choice.best}
        if self._is_new(OFF, choice) or ages[OFF] >= _LATEST:
            return self._try(OFF, _TRIAL, choice, free=True)
        losses = {plan: self._loss(plan, _TRIAL, choice) for plan, age in ages.items() if age >= _REST}
        due = max(losses, key=lambda plan: ages[plan] / losses[plan], default=OFF)
        return self._try(due, _TRIAL, choice) if losses.get(due, math.inf) <= self._credit else None

    def _try(self, plan: Plan, length: int, choice: _Choice, *, free: bool = False) -> _Trial:
        best = choice.best
        return _Trial(plan, length, free, choice.rates[best], _CHANGE * choice.seconds[best])

    def _is_new(self, plan: Plan, choice: _Choice) -> bool:
        """Whether a plan that may be worth it was never tried at such a load."""
        new = (choice.rows.bit_length(), plan) not in self._tried
        return new and choice.rates[plan] >= _HOPELESS * choice.rates[choice.best]

    def _age(self, rows: int, plan: Plan) -> int:
        """Steps since the plan was tried with about as many rows, or since the first."""
        return self._steps - self._tried.get((rows.bit_length(), plan), 0)

    def _loss(self, plan: Plan, steps: int, choice: _Choice) -> float:
        """Seconds that a trial is expected to lose."""
        worse = max(0.0, 1 - choice.rates[plan] / choice.rates[choice.best])
        return _CHANGE * choice.seconds[choice.best] + steps * worse * choice.seconds[plan]


def _are_near(rows: int, others: int) -> bool:
    """Whether what is known of steps of so many rows holds for so many others."""
    return 2 * rows <= 3 * others and 2 * others <= 3 * rows


def candidates(limits: Limits, branches: int) -> list[Plan]:
    """Plans to choose from: none; 1, 2, 3, 5, 7, 11, ... drafts of a block; branches from whole blocks."""
    block = limits.block_size
    sizes = {size for power in range(block.bit_length()) for size in (2**power, 3 * 2**power // 2)} | {block}
    chains = [Plan(size - 1, 0) for size in sorted(sizes) if size <= block]
    return chains + [Plan(block - 1, count) for count in range(1, min(branches, block - 1) + 1)]


def pass_sizes(limits: Limits, plan: Plan) -> dict[Part, int]:
    """New tokens per row of each pass of a step, the most they can be."""
    branching = replace(limits, branches=plan.branches)
    sizes: dict[Part, int] = {"verify": branching.tree_size if plan.branches else 1 + plan.drafts}
    if plan.drafts:
        sizes["draft"] = limits.block_size
    if plan.branches:
        sizes["redraft"] = branching.redraft_rows * limits.vp_block_size
    return sizes
