"""How much a decode step speculates: how many tokens each row drafts, and in how many branches.

Speculation buys tokens with new tokens in the passes. When many sequences share a pass, those can cost more than they
give. No policy changes an output token: the target decides those.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Protocol

from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.statistics import Stage

Speculation = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Plan:
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
        seconds: of the whole step, by stage; a pass that did not run is missing.
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


def full_plan(limits: Limits, branches: int) -> Plan:
    """The largest: a whole block, and so many branches."""
    return Plan(limits.block_size - 1, branches)


@dataclass(frozen=True)
class FixedPlan:
    """Always the same."""

    always: Plan

    def plan(self, rows: int) -> Plan:
        return self.always

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


_REACH = 4  # how many times larger than the largest pass that was measured another may be
# Variances of logarithms of times:
_UNKNOWN = 0.25  # of a pass that was never measured
_SEEDED = 0.05  # of one that was measured when the bundle was built
_NOISE = 0.02  # of one time from the next
_DRIFT = 1e-5  # of what a pass takes, from one step to the next
_PACE_DRIFT = 2e-3  # of the pace of the machine
_OUTLIER = 3.0  # standard deviations that a surprise counts for at most


@dataclass
class _Time:
    """Logarithm of the seconds of one pass at the usual pace, how uncertain it was, and after which step."""

    value: float
    variance: float
    step: int


class _Curve:
    """Seconds of passes of one graph by their sequences and the new tokens of each.

    Those not measured lie on a rising line over rows * (size + 1): a sequence costs about as much as another token,
    since it has a context of its own to read. Between two that were measured the line runs midway between their chord
    and the least possible, which is that a larger pass does more tokens per second: so they look worth a try.
    """

    def __init__(self, seeds: Sequence[tuple[int, float]]) -> None:
        self._times: dict[tuple[int, int], _Time] = {}
        self.largest = 0
        self._line: tuple[list[int], list[float]] | None = None
        for tokens, seconds in seeds:
            self.put(1, tokens, _Time(math.log(seconds), _SEEDED, 0))

    def put(self, rows: int, size: int, time: _Time) -> None:
        """Notes what a pass takes."""
        self._times[rows, size] = time
        self.largest = max(self.largest, rows * (size + 1))
        self._line = None

    def time(self, rows: int, size: int) -> _Time | None:
        """What is known of a pass itself."""
        return self._times.get((rows, size))

    def seconds(self, rows: int, size: int) -> float:
        """Of such a pass at the usual pace."""
        time = self._times.get((rows, size))
        return self._on_line(rows * (size + 1)) if time is None else math.exp(time.value)

    def _on_line(self, x: int) -> float:
        xs, ys = self._line = self._line or self._fit()
        at = bisect_left(xs, x)
        if at == 0:
            return ys[0]
        if at == len(xs):
            return ys[-1] + ((ys[-1] - ys[0]) * (x - xs[-1]) / (xs[-1] - xs[0]) / 2 if len(xs) > 1 else 0.0)
        (x0, x1), (y0, y1) = xs[at - 1 : at + 1], ys[at - 1 : at + 1]
        return (y0 + (y1 - y0) * (x - x0) / (x1 - x0) + max(y0, y1 * x / x1)) / 2

    def _fit(self) -> tuple[list[int], list[float]]:
        """What was measured, made rising: halfway between the least that is above it and the greatest below."""
        at: dict[int, list[float]] = {}
        for (rows, size), time in self._times.items():
            at.setdefault(rows * (size + 1), []).append(math.exp(time.value))
        xs = sorted(at)
        means = [sum(at[x]) / len(at[x]) for x in xs]
        above, below = accumulate(means, max), list(accumulate(reversed(means), min))[::-1]
        return xs, [(high + low) / 2 for high, low in zip(above, below, strict=True)]


class StepTimes:
    """Seconds of the passes and of the host, learnt from steps, at the usual pace of the machine.

    A pass takes its own time, which hardly changes, times the pace of the machine, which does when others use it. A
    surprise is put down to either by how uncertain it is (a Kalman filter of the logarithms, without the covariances):
    so plans compare well that ran at different times.
    """

    def __init__(self, costs: PassCosts | None) -> None:
        """`costs`: of passes over one sequence."""
        seeds: dict[Stage, Sequence[tuple[int, float]]] = {"host": ()}
        if costs is not None:
            seeds |= {"draft": costs.draft, "redraft": costs.redraft, "verify": costs.verify}
        self._curves: dict[Stage, _Curve] = {
            stage: _Curve(seeds.get(stage, ())) for stage in ("draft", "redraft", "verify", "host")
        }
        self._step = 0
        self._pace, self._pace_variance = 0.0, _PACE_DRIFT

    @property
    def pace(self) -> float:
        """How much slower than usual everything is."""
        return math.exp(self._pace)

    def knows(self, stage: Stage) -> bool:
        """Whether any such pass was measured."""
        return self._curves[stage].largest > 0

    def seconds(self, stage: Stage, rows: int, size: int) -> float:
        """Of a pass over so many sequences, with so many new tokens of each; needs a stage that is known."""
        return self._curve(stage).seconds(rows, size)

    def reaches(self, stage: Stage, rows: int, size: int) -> bool:
        """Whether such a pass is not much larger than the largest that was measured."""
        return rows * (size + 1) <= _REACH * self._curve(stage).largest

    def observe(self, rows: int, sizes: Mapping[Stage, int], seconds: Mapping[Stage, float]) -> None:
        """Takes in passes of one step."""
        self._step += 1
        self._pace_variance += _PACE_DRIFT
        whole = sum(seconds[stage] for stage in sizes)
        for stage, size in sizes.items():
            curve, measured = self._curves[stage], math.log(seconds[stage])
            time = curve.time(rows, size)
            if time is None:
                known = self.knows(stage)
                first = math.log(self.seconds(stage, rows, size)) if known else measured - self._pace
                time = _Time(first, _UNKNOWN if known else 4 * _UNKNOWN, self._step)
            own = time.variance + _DRIFT * (self._step - time.step)
            variance = own + self._pace_variance + _NOISE * whole / seconds[stage]  # short passes tell less of the pace
            most = _OUTLIER * math.sqrt(variance)
            surprise = max(-most, min(most, measured - time.value - self._pace))
            curve.put(rows, size, _Time(time.value + own / variance * surprise, own * (1 - own / variance), self._step))
            self._pace += self._pace_variance / variance * surprise
            self._pace_variance *= 1 - self._pace_variance / variance

    def _curve(self, stage: Stage) -> _Curve:
        """As long as nothing is known of re-drafts, they cost what first drafts of as many tokens do."""
        return self._curves["draft" if stage == "redraft" and not self.knows(stage) else stage]


_MEMORY = 0.97  # per step, of what is known of drafts
_GAIN_MEMORY = 0.99  # and of branches, whose gains scatter more
_INERTIA = 4.0  # observations that what is known counts for at least
_GAIN_INERTIA = 16.0


@dataclass
class _Mean:
    """A mean that forgets, but never all."""

    value: float
    weight: float
    memory: float = _MEMORY
    inertia: float = _INERTIA

    def age(self) -> None:
        if self.weight > self.inertia:
            self.weight = max(self.inertia, self.weight * self.memory)

    def add(self, total: float, count: int) -> None:
        if count:
            self.value = (self.value * self.weight + total) / (self.weight + count)
            self.weight += count


class YieldModel:
    """Tokens that a step is expected to give a sequence.

    A draft is right with a chance that depends on its position, given that those before it are. It is learnt only where
    those were, so that shorter drafts do not bias it. What few drafts came to leans on the position before.
    """

    def __init__(self, limits: Limits, branches: int) -> None:
        self._right = [_Mean(0.8, 1.0) for _ in range(limits.block_size - 1)]
        self._most = max(branches, 1)
        self._gain = _Mean(1.5, 8.0, _GAIN_MEMORY, _GAIN_INERTIA)  # of all branches, over the trunk
        self._gains = {count: _Mean(0.0, 0.0, _GAIN_MEMORY, _GAIN_INERTIA) for count in range(1, branches + 1)}

    def observe(self, outcome: StepOutcome) -> None:
        for mean in (*self._right, self._gain, *self._gains.values()):
            mean.age()
        for position, mean in enumerate(self._right):
            reached = sum(1 for proposed, agreed in outcome.trunk if position < proposed and position <= agreed)
            mean.add(sum(1 for _, agreed in outcome.trunk if position < agreed), reached)
        if outcome.plan.branches:
            rows = zip(outcome.trunk, outcome.yielded, strict=True)
            gains = [max(0, tokens - 1 - agreed) for (proposed, agreed), tokens in rows if proposed]
            share = self._share(outcome.plan.branches)
            self._gain.add(sum(gains) / share, len(gains))
            self._gains[outcome.plan.branches].add(sum(gains), len(gains))

    def tokens(self, plan: Plan) -> float:
        """Expected tokens of one sequence, the bonus included."""
        return self._chain(plan.drafts) + (self._branches(plan.branches) if plan.branches else 0.0)

    def _chain(self, drafts: int) -> float:
        tokens = reach = 1.0
        right = self._right[0].value
        for mean in self._right[:drafts]:
            right = (mean.value * mean.weight + right * _INERTIA) / (mean.weight + _INERTIA)
            reach *= right
            tokens += reach
        return tokens

    def _branches(self, count: int) -> float:
        own, usual = self._gains[count], self._gain.value * self._share(count)
        return (own.value * own.weight + usual * _GAIN_INERTIA) / (own.weight + _GAIN_INERTIA)

    def _share(self, count: int) -> float:
        """Part of the gain of all branches that so many may have: the likeliest come first."""
        return (count / self._most) ** 0.5


_HOLD = 8  # steps for which a choice stands
_MARGIN = 1.03  # how much faster another plan must look
_TRIAL = 2  # steps of a trial
_EXTENSION = 13  # steps by which one that pays is extended at most
_HOPELESS = 0.6  # part of the best rate
_REST = 32  # steps between two trials of a plan
_SHARE = 0.01  # of the time that trials may lose
_CREDIT = 20  # steps' time that may be saved up for trials
_HORIZON = 32  # steps in which catching up with waiting features must pay


@dataclass
class _Choice:
    """What is known for a number of rows: the best plan, and seconds and tokens per second of all."""

    best: Plan
    seconds: dict[Plan, float]
    rates: dict[Plan, float]
    until: int


@dataclass
class _Trial:
    plan: Plan
    left: int
    free: bool = False  # whether it needs no credit
    lost: float = 0.0


@dataclass
class _Tried:
    """Trials of a plan with about the same number of rows."""

    steps: int = 0
    last: int = 0


class AdaptivePlan:
    """The plan with the most expected tokens per second: what it yields over what its passes and the host take.

    Both are learnt while it runs. Now and then another plan than the best is tried. The time that those trials lose is
    counted and held to a small share of all.

    Args:
        branches: how many to have at most.
        costs: seconds of passes over one sequence, as measured when the bundle was built.
    """

    def __init__(self, limits: Limits, branches: int, costs: PassCosts | None) -> None:
        self._limits = limits
        self._plans = {plan: pass_sizes(limits, plan) for plan in candidates(limits, branches)}
        self._yield = YieldModel(limits, branches)
        self._times = StepTimes(costs)
        self._steps = 0
        self._choices: dict[int, _Choice] = {}
        self._tried: dict[tuple[int, Plan], _Tried] = {}
        self._trial: _Trial | None = None
        self._credit = 0.0
        self._waiting: dict[Stage, int] = {"draft": 0, "redraft": 0}  # steps since the pass ran
        self._catching_up: float | None = None  # seconds per row, of injecting what waited

    def plan(self, rows: int) -> Plan:
        if not self._times.knows("host"):
            return OFF
        if not self._times.knows("draft"):
            return Plan(1, 0)
        choice = self._choices.get(rows)
        if choice is None or self._steps >= choice.until:
            choice = self._choices[rows] = self._choose(rows)
        return choice.best if self._trial is None else self._trial.plan

    def observe(self, outcome: StepOutcome) -> None:
        plan, rows = outcome.plan, outcome.rows
        self._steps += 1
        tried = self._record(rows, plan)
        tried.steps, tried.last = tried.steps + 1, self._steps
        self._yield.observe(outcome)
        self._observe_costs(outcome)
        choice = self._choices.get(rows)
        if choice is None:
            return
        spent = choice.seconds[plan]
        lost = spent - sum(outcome.yielded) / max(choice.rates[choice.best], 1e-12) if plan != choice.best else 0.0
        most = _CREDIT * choice.seconds[choice.best]
        self._credit = min(most, self._credit + _SHARE * spent)
        if self._trial is not None:
            self._trial.left -= 1
            self._trial.lost += lost
            if self._trial.left <= 0 and (self._trial.lost >= 0 or self._trial.left <= -_EXTENSION):
                self._credit -= 0 if self._trial.free else max(0.0, self._trial.lost)
                self._trial = None
                self._choices.clear()

    def _choose(self, rows: int) -> _Choice:
        seconds = {plan: self._seconds(rows, plan) for plan in self._plans}
        rates = {plan: self._rate(rows, plan, spent) for plan, spent in seconds.items()}
        before = self._choices.get(rows)
        best = max(rates, key=lambda plan: rates[plan])
        if before is not None and rates[best] < _MARGIN * rates[before.best]:
            best = before.best
        choice = _Choice(best, seconds, rates, self._steps + _HOLD)
        if self._trial is None:
            self._trial = self._reference(rows, choice) or self._overdue(rows, choice)
        return choice

    def _reference(self, rows: int, choice: _Choice) -> _Trial | None:
        """A trial of what must be known at this load: none, and the best speculation, unless one is plainly worse."""
        best = max((plan for plan in self._plans if plan.drafts), key=lambda plan: choice.rates[plan])
        least = _HOPELESS * max(choice.rates[OFF], choice.rates[best])
        for plan in (OFF, best):
            if self._record(rows, plan).steps < _TRIAL and choice.rates[plan] >= least:
                return _Trial(plan, _TRIAL, free=True)
        return None

    def _overdue(self, rows: int, choice: _Choice) -> _Trial | None:
        """A trial of what was not tried for long, in proportion to what that loses, if there is credit for it.

        Without speculation that is the best one: whichever it is, it shows whether drafts are right again.
        """
        if choice.best == OFF:
            others = [max((plan for plan in self._plans if plan.drafts), key=lambda plan: choice.rates[plan])]
        else:
            others = [plan for plan in self._plans if plan != choice.best]
        due, dues = None, 0.0
        for plan in others:
            age = self._steps - self._record(rows, plan).last if choice.best != OFF else self._waiting["draft"]
            step = choice.seconds[plan] * (1 - choice.rates[plan] / choice.rates[choice.best])
            loss = _TRIAL * max(step, 0.0) + self._catch_up(rows, plan)
            urgency = age / (loss + 0.01 * choice.seconds[plan])
            if age >= _REST and urgency > dues:
                due, dues = _Trial(plan, _TRIAL), urgency
                affordable = loss <= self._credit
        return due if due is not None and affordable else None

    def _record(self, rows: int, plan: Plan) -> _Tried:
        return self._tried.setdefault((rows.bit_length(), plan), _Tried())

    def _seconds(self, rows: int, plan: Plan) -> float:
        """Of a step, and its part of catching up."""
        step = sum(self._times.seconds(stage, rows, size) for stage, size in self._plans[plan].items())
        return step + self._catch_up(rows, plan) / _HORIZON

    def _rate(self, rows: int, plan: Plan, seconds: float) -> float:
        """Expected tokens per second; 0 where the passes are far larger than any that was measured."""
        known = all(self._times.reaches(stage, rows, size) for stage, size in self._plans[plan].items())
        return rows * self._yield.tokens(plan) / max(seconds, 1e-12) if known or plan == OFF else 0.0

    def _catch_up(self, rows: int, plan: Plan) -> float:
        """Seconds of injecting the features of steps without speculation."""
        if not plan.drafts or self._waiting["draft"] <= 1:
            return 0.0
        usual = self._catching_up
        return rows * (self._times.seconds("draft", 1, self._limits.block_size) if usual is None else usual)

    def _observe_costs(self, outcome: StepOutcome) -> None:
        """Learns from passes of the planned size; a drafter's pass with features of several steps is not one."""
        plan, rows = outcome.plan, outcome.rows
        for stage in self._waiting:
            self._waiting[stage] += 1
        whole = any(proposed == plan.drafts for proposed, _ in outcome.trunk)
        sized: dict[Stage, int] = {}
        for stage, size in self._plans[plan].items():
            if stage not in outcome.seconds:
                continue
            seconds = outcome.seconds[stage]
            late = stage in self._waiting and self._waiting[stage] > 2
            if stage == "draft" and late:
                excess = max(0.0, seconds / self._times.pace - self._times.seconds(stage, rows, size)) / rows
                known = self._catching_up
                self._catching_up = excess if known is None else known + 0.3 * (excess - known)
            if stage in self._waiting:
                self._waiting[stage] = 0
            if whole and not late:
                sized[stage] = size
        self._times.observe(rows, sized, outcome.seconds)


def candidates(limits: Limits, branches: int) -> list[Plan]:
    """Plans to choose from: none, drafts of blocks of 2, 3, 4, 6, 8, 12, ... tokens, and branches from whole blocks."""
    block = limits.block_size
    sizes = {size for power in range(block.bit_length()) for size in (2**power, 3 * 2**power // 2)} | {block}
    chains = [Plan(size - 1, 0) for size in sorted(sizes) if size <= block]
    return chains + [full_plan(limits, count) for count in range(1, min(branches, block - 1) + 1)]


def pass_sizes(limits: Limits, plan: Plan) -> dict[Stage, int]:
    """New tokens per row of each pass of a step, the most they can be; of the host those of the verification."""
    branches = replace(limits, branches=plan.branches)
    verified = branches.tree_size if plan.branches else 1 + plan.drafts
    sizes: dict[Stage, int] = {"verify": verified, "host": verified}
    if plan.drafts:
        sizes["draft"] = 1 + plan.drafts
    if plan.branches:
        sizes["redraft"] = branches.redraft_rows * limits.vp_block_size
    return sizes
