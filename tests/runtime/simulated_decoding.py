"""Decoding on simulated machines, for policies to play."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.speculation import (
    OFF,
    AdaptivePlan,
    Plan,
    SpeculationPolicy,
    StepOutcome,
    candidates,
    pass_sizes,
)

T = TypeVar("T")
Chances = tuple[float, ...]
Sizes = Mapping[Any, int]


def limits(block: int, branches: int = 0) -> Limits:
    return Limits(
        max_batch_size=16,
        max_seq_len=1024,
        max_input_len=1000,
        block_size=block,
        prefill_chunk=256,
        vp_block_size=block if branches else 0,
        branches=branches,
    )


BLOCK_8, BLOCK_16, D2SD = limits(8), limits(16), limits(8, branches=4)


class Machine(NamedTuple):
    """Milliseconds of a target's pass: `least`, `row` per sequence, and `token` for each token beyond `free` of them.

    Drafters take `draft` times as long. The first step behind another plan takes longer by the part `cold`, the next
    ones less so.
    """

    least: float
    token: float
    free: int
    row: float
    draft: float
    cold: float

    def passes(self, rows: int, sizes: Sizes) -> dict[Any, float]:
        times = {
            part: self.least + self.token * max(0, rows * size - self.free) + self.row * rows
            for part, size in sizes.items()
        }
        return {part: time * (1 if part == "verify" else self.draft) for part, time in times.items()}

    def step(self, rows: int, sizes: Sizes) -> float:
        return sum(self.passes(rows, sizes).values()) + self.host(rows)

    def host(self, rows: int) -> float:
        return 0.2 + 0.05 * rows


MACHINES = {
    "small model on a CPU": Machine(1.0, 0.11, 0, 0.13, 0.6, 0.3),
    "larger model on a CPU": Machine(21.0, 1.0, 0, 0.3, 0.2, 0.03),
    "GPU": Machine(8.0, 0.03, 256, 0.02, 0.2, 0.03),
    "slow GPU": Machine(8.0, 0.25, 32, 0.02, 0.2, 0.03),
}
GOOD, FAIR, POOR, USELESS = ((0.9,) * 15, tuple(0.75 * 0.97**place for place in range(15)), (0.45,) * 15, (0.0,) * 15)


@dataclass
class Simulation:
    """Steps of a batch on a machine, with a drafter that is right at a position with some chance.

    What counts is the time and the tokens that are to be expected; the policy sees them with noise.

    Attributes:
        rows, chances, pace: by step.
        noise: standard deviation of the logarithm of a time; now and then one is several times as long.
    """

    machine: Machine
    limits: Limits
    rows: Callable[[int], int]
    chances: Callable[[int], Chances]
    pace: Callable[[int], float] = lambda step: 1.0
    noise: float = 0.1

    def run(self, policy: SpeculationPolicy, steps: int, seed: int = 1) -> list[tuple[Plan, float, float]]:
        """Of each step the plan, milliseconds and tokens."""
        rng, done, waiting = random.Random(seed), list[tuple[Plan, float, float]](), 0
        for step in range(steps):
            rows, chances = self.rows(step), self.chances(step)
            plan = policy.plan(rows)
            sizes = pass_sizes(self.limits, plan)
            times = self.machine.passes(rows, sizes) | {"host": self.machine.host(rows)}
            if plan.drafts and waiting:
                times["prefill"] = rows * (0.2 + 0.002 * waiting)
            waiting = 0 if plan.drafts else waiting + 1
            pace = self.pace(step) * self._cold([plan for plan, *_ in done[-6:]], plan)
            seen = {stage: time * pace * self._error(rng) / 1000 for stage, time in times.items()}
            trunk, yielded = zip(*(walk(rng, plan, chances) for _ in range(rows)), strict=True)
            tokens = {stage: rows * size for stage, size in sizes.items()}
            policy.observe(StepOutcome(plan, rows, seen, tokens, trunk, yielded))
            done.append((plan, sum(times.values()) * pace, rows * expected(plan, chances)))
        return done

    def _cold(self, before: Sequence[Plan], plan: Plan) -> float:
        """How many times as long a step takes behind others than behind its like."""
        alike = next((count for count, other in enumerate(reversed(before)) if other != plan), 6)
        return 1 + self.machine.cold * 0.7**alike * (alike < 6)

    def _error(self, rng: random.Random) -> float:
        long = rng.choice((3, 10)) if rng.random() < self.noise / 20 else 1
        return long * math.exp(rng.gauss(0, self.noise) - self.noise**2 / 2)

    def best(self, step: int, plans: Sequence[Plan] | None = None) -> float:
        """Tokens per millisecond of the best of some plans, or of all, in a step."""
        rows, chances = self.rows(step), self.chances(step)
        plans = plans or candidates(self.limits, self.limits.branches)
        return max(rate(self.machine, self.limits, plan, rows, chances) for plan in plans) / self.pace(step)

    def compare(self, policy: SpeculationPolicy, steps: int) -> tuple[float, float]:
        """Tokens, against those that the best plan of each step would have yielded in its time, and against those of
        the better of on and off, whichever it is for the whole run."""
        done = self.run(policy, steps)
        tokens, times = sum(tokens for *_, tokens in done), [time for _, time, _ in done]
        ideal, *always = (
            sum(time * self.best(step, plans) for step, time in enumerate(times))
            for plans in (None, [OFF], [full(self.limits)])
        )
        return tokens / ideal, tokens / max(always)


@cache
def rate(machine: Machine, limits: Limits, plan: Plan, rows: int, chances: Chances) -> float:
    return rows * expected(plan, chances) / machine.step(rows, pass_sizes(limits, plan))


def walk(rng: random.Random, plan: Plan, chances: Chances) -> tuple[tuple[int, int], int]:
    """A row's trunk and the tokens it yields; a branch may go on where the trunk breaks."""
    agreed = next((place for place in range(plan.drafts) if rng.random() >= chances[place]), plan.drafts)
    more = 0
    if agreed < plan.drafts and rng.random() < caught(plan.branches, chances):
        more = 1 + next((n for n in range(plan.drafts - agreed - 1) if rng.random() >= chances[n]), 0)
    return (plan.drafts, agreed), agreed + 1 + more


def caught(branches: int, chances: Chances) -> float:
    """The chance that a branch has the token where the trunk breaks."""
    return 0.5 * math.sqrt(branches / 4) * (chances[0] > 0)


@cache
def expected(plan: Plan, chances: Chances) -> float:
    """Tokens of a row, bonus included."""
    reach = [math.prod(chances[:place]) for place in range(plan.drafts + 1)]
    tails = 0.0
    for agreed in range(plan.drafts):
        room = plan.drafts - agreed - 1
        runs = [math.prod(chances[:n]) * (1 - chances[n]) * n for n in range(room)]
        tails += (reach[agreed] - reach[agreed + 1]) * (1 + sum(runs))
    return sum(reach) + caught(plan.branches, chances) * tails


def constant(value: T) -> Callable[[int], T]:
    return lambda step: value


def throughput(done: Sequence[tuple[Plan, float, float]]) -> float:
    return sum(tokens for _, _, tokens in done) / sum(time for _, time, _ in done)


def auto(limits: Limits, costs: PassCosts | None = None) -> AdaptivePlan:
    return AdaptivePlan(limits, limits.branches, costs)


def full(limits: Limits) -> Plan:
    return Plan(limits.block_size - 1, limits.branches)
