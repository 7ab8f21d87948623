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
        """For a step of so many sequences, at least one."""

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


_HOLD = 8  # steps for which a choice stands
_MARGIN = 1.03  # how many times faster another plan must look
_TRIAL = 2  # steps of a trial
_EXTENSION = 12  # steps by which one that pays goes on
_HOPELESS = 0.6  # part of the best rate
_REST = 32  # steps between two trials of a plan
_LATEST = 2000  # steps after which what is best of speculation, or none of it, is tried in any case
_SHARE = 0.01  # of the time that trials may lose
_CREDIT = 20  # steps' time that may be saved up for trials
_MEMORY = 0.98  # per step that drafts, of what injecting prompts takes


@dataclass(frozen=True)
class _Choice:
    """For some number of rows: the best plan, seconds of a step and tokens per second of all, as of a step."""

    best: Plan
    seconds: dict[Plan, float]
    rates: dict[Plan, float]
    step: int


@dataclass
class _Trial:
    """Steps of a plan that does not look best, or that must be known: those count as free."""

    plan: Plan
    free: bool
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
        self._resting = 0  # steps since the last that drafted
        self._choices: dict[int, _Choice] = {}
        self._outdated = 0  # choices of steps before this are
        self._tried: dict[tuple[int, Plan], int] = {}  # by about the number of rows: the last step
        self._trial: _Trial | None = None
        self._credit = 0.0

    def plan(self, rows: int) -> Plan:
        if not self._times.knows("verify"):
            self._trial = self._trial or _Trial(OFF, free=True)
        elif not self._times.knows("draft"):
            self._trial = self._trial or _Trial(Plan(1, 0), free=True)
        if self._trial is not None:
            return self._trial.plan
        choice = self._choices.get(rows)
        if choice is None or choice.step < self._outdated or choice.step + _HOLD <= self._steps:
            choice = self._choices[rows] = self._choose(rows)
            self._trial = self._reference(rows, choice) or self._overdue(rows, choice)
        return choice.best if self._trial is None else self._trial.plan

    def observe(self, outcome: StepOutcome) -> None:
        plan, rows = outcome.plan, outcome.rows
        self._steps += 1
        self._tried[rows.bit_length(), plan] = self._steps
        self._yield.observe(plan.branches, outcome.trunk, outcome.yielded)
        self._observe_times(outcome)
        self._resting = 0 if plan.drafts else self._resting + 1
        choice = self._choices.get(rows)
        if choice is not None:
            best = choice.seconds[choice.best]
            self._credit = min(_CREDIT * best, self._credit + _SHARE * best)
        if self._trial is not None:
            self._go_on(self._trial, outcome, choice)

    def _go_on(self, trial: _Trial, outcome: StepOutcome, choice: _Choice | None) -> None:
        """Counts a step of a trial. One that pays goes on for some steps."""
        trial.steps += 1
        if choice is not None:
            spent = self._seconds(outcome.rows, trial.plan) + outcome.seconds.get("prefill", 0.0) / self._times.pace
            trial.lost += spent - sum(outcome.yielded) / choice.rates[choice.best]
        if trial.steps >= (_TRIAL if trial.lost >= 0 else _TRIAL + _EXTENSION):
            self._credit -= 0.0 if trial.free else max(0.0, trial.lost)
            self._trial = None
            self._outdated = self._steps

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
        self._times.observe(rows, self._plans[plan], parts)

    def _choose(self, rows: int) -> _Choice:
        seconds = {plan: self._seconds(rows, plan) for plan in self._plans}
        rates = {plan: self._rate(rows, plan, spent) for plan, spent in seconds.items()}
        before = self._choices.get(rows)
        best = max(rates, key=rates.__getitem__)
        if before is not None and rates[best] < _MARGIN * rates[before.best]:
            best = before.best
        return _Choice(best, seconds, rates, self._steps)

    def _seconds(self, rows: int, plan: Plan) -> float:
        return self._times.seconds(rows, self._plans[plan]) + (rows * self._injection if plan.drafts else 0.0)

    def _rate(self, rows: int, plan: Plan, seconds: float) -> float:
        """Expected tokens per second; 0 of a step that is far larger than any that was measured."""
        reaches = plan == OFF or self._times.reaches(rows, self._plans[plan])
        return rows * self._yield.tokens(plan.drafts, plan.branches) / seconds if reaches else 0.0

    def _reference(self, rows: int, choice: _Choice) -> _Trial | None:
        """A trial of what must be known at this load, unless it is plainly worse, and not be forgotten: the best
        speculation, and none."""
        other = self._best_speculation(choice) if choice.best == OFF else OFF
        age = self._age(rows, other)
        if age == math.inf:
            wanted = choice.rates[other] >= _HOPELESS * choice.rates[choice.best]
        else:
            wanted = (self._resting if choice.best == OFF else age) >= _LATEST
        return _Trial(other, free=True) if wanted else None

    def _best_speculation(self, choice: _Choice) -> Plan:
        return max((plan for plan in self._plans if plan.drafts), key=choice.rates.__getitem__)

    def _overdue(self, rows: int, choice: _Choice) -> _Trial | None:
        """A trial of what was not tried for the longest, measured by what that loses, once there is credit for it.

        Without speculation that is the best one: whichever it is, it shows whether drafts are right again.
        """
        if choice.best == OFF:
            ages: dict[Plan, float] = {self._best_speculation(choice): self._resting}
        else:
            ages = {plan: min(self._steps, self._age(rows, plan)) for plan in self._plans if plan != choice.best}
        losses = {plan: self._loss(plan, choice) for plan, age in ages.items() if age >= _REST}
        if not losses:
            return None
        due = max(losses, key=lambda plan: ages[plan] / losses[plan])
        return _Trial(due, free=False) if losses[due] <= self._credit else None

    def _age(self, rows: int, plan: Plan) -> float:
        """Steps since the plan was tried with about as many rows."""
        last = self._tried.get((rows.bit_length(), plan))
        return math.inf if last is None else self._steps - last

    def _loss(self, plan: Plan, choice: _Choice) -> float:
        """Seconds that a trial is expected to lose, at least a little."""
        seconds = choice.seconds[plan]
        return _TRIAL * seconds * max(0.01, 1 - choice.rates[plan] / choice.rates[choice.best])


def candidates(limits: Limits, branches: int) -> list[Plan]:
    """Plans to choose from: none, drafts of blocks of 2, 3, 4, 6, 8, 12, ... tokens, and branches from whole blocks."""
    block = limits.block_size
    sizes = {size for power in range(block.bit_length()) for size in (2**power, 3 * 2**power // 2)} | {block}
    chains = [Plan(size - 1, 0) for size in sorted(sizes) if size <= block]
    return chains + [Plan(block - 1, count) for count in range(1, min(branches, block - 1) + 1)]


def pass_sizes(limits: Limits, plan: Plan) -> dict[Part, int]:
    """New tokens per row of each pass of a step, the most they can be."""
    branching = replace(limits, branches=plan.branches)
    sizes: dict[Part, int] = {"verify": branching.tree_size if plan.branches else 1 + plan.drafts}
    if plan.drafts:
        sizes["draft"] = 1 + plan.drafts
    if plan.branches:
        sizes["redraft"] = branching.redraft_rows * limits.vp_block_size
    return sizes
