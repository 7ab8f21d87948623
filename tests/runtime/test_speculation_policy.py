"""The speculation policy on simulated machines: as fast as the best fixed plan, whatever the load and the drafter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.speculation import (
    OFF,
    AdaptivePlan,
    FixedPlan,
    Plan,
    SpeculationPolicy,
    StepOutcome,
    candidates,
    pass_sizes,
)
from dflash_trt.runtime.speculation_models import StepTimes, StepYield

Chances = tuple[float, ...]


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
    """Milliseconds of passes: `token` each beyond `free` of them, `row` for each sequence, and never less than `least`."""

    least: float
    token: float
    free: int
    row: float
    draft: float  # of the time of a target's pass

    def passes(self, rows: int, sizes: dict[str, int]) -> dict[str, float]:
        times = {
            part: self.least + self.token * max(0, rows * size - self.free) + self.row * rows
            for part, size in sizes.items()
        }
        return {part: time * (1 if part == "verify" else self.draft) for part, time in times.items()}

    def step(self, rows: int, sizes: dict[str, int]) -> float:
        return sum(self.passes(rows, sizes).values()) + self.host(rows)

    def host(self, rows: int) -> float:
        return 0.2 + 0.05 * rows


MACHINES = {
    "small model on a CPU": Machine(1.0, 0.11, 0, 0.13, 0.6),
    "larger model on a CPU": Machine(21.0, 1.0, 0, 0.3, 0.2),
    "GPU": Machine(8.0, 0.03, 256, 0.02, 0.2),
    "slow GPU": Machine(8.0, 0.25, 32, 0.02, 0.2),
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
        rng, done, waiting = random.Random(seed), [], 0
        for step in range(steps):
            rows, chances = self.rows(step), self.chances(step)
            plan = policy.plan(rows)
            sizes = pass_sizes(self.limits, plan)
            times: dict[str, float] = self.machine.passes(rows, sizes) | {"host": self.machine.host(rows)}
            if plan.drafts and waiting:
                times["prefill"] = rows * (0.2 + 0.002 * waiting)
            waiting = 0 if plan.drafts else waiting + 1
            pace = self.pace(step)
            seen = {stage: time * pace * self._error(rng) / 1000 for stage, time in times.items()}
            trunk, yielded = zip(*(walk(rng, plan, chances) for _ in range(rows)), strict=True)
            tokens = {stage: rows * size for stage, size in sizes.items()}
            policy.observe(StepOutcome(plan, rows, seen, tokens, trunk, yielded))  # type: ignore[arg-type]
            done.append((plan, sum(times.values()) * pace, rows * expected(plan, chances)))
        return done

    def _error(self, rng: random.Random) -> float:
        long = rng.choice((3, 10)) if rng.random() < self.noise / 20 else 1
        return long * math.exp(rng.gauss(0, self.noise) - self.noise**2 / 2)

    def best(self, step: int, plans: Sequence[Plan] | None = None) -> float:
        """Tokens per millisecond of the best of some plans, or of all, in a step."""
        rows, chances = self.rows(step), self.chances(step)
        plans = plans or candidates(self.limits, self.limits.branches)
        return max(rate(self.machine, self.limits, plan, rows, chances) for plan in plans) / self.pace(step)


@cache
def rate(machine: Machine, limits: Limits, plan: Plan, rows: int, chances: Chances) -> float:
    return rows * expected(plan, chances) / machine.step(rows, pass_sizes(limits, plan))  # type: ignore[arg-type]


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


def constant[T](value: T) -> Callable[[int], T]:
    return lambda step: value


def throughput(done: Sequence[tuple[Plan, float, float]]) -> float:
    return sum(tokens for _, _, tokens in done) / sum(time for _, time, _ in done)


def auto(limits: Limits, costs: PassCosts | None = None) -> AdaptivePlan:
    return AdaptivePlan(limits, limits.branches, costs)


def full(limits: Limits) -> Plan:
    return Plan(limits.block_size - 1, limits.branches)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("limits", [BLOCK_8, BLOCK_16, D2SD], ids=["block 8", "block 16", "D2SD"])
def test_is_nearly_as_fast_as_the_best_fixed_plan(machine: str, limits: Limits) -> None:
    """From the first step on, with all that trials cost; the bound on the better of on and off is the promised one."""
    shares = []
    for rows in (1, 4, 16):
        for chances in (GOOD, FAIR, POOR, USELESS):
            world = Simulation(MACHINES[machine], limits, constant(rows), constant(chances))
            reached = throughput(world.run(auto(limits), 2000))
            assert reached >= 0.95 * world.best(0, [OFF, full(limits)]), (rows, chances[0])
            shares.append(reached / world.best(0))
    assert min(shares) >= 0.9
    assert sum(shares) / len(shares) >= 0.97


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("limits", [BLOCK_8, D2SD], ids=["block 8", "D2SD"])
def test_follows_the_number_of_sequences(machine: str, limits: Limits) -> None:
    rng, load = random.Random(2), [4]
    for _ in range(3000):
        load.append(min(16, max(1, load[-1] + rng.choice((-1, 0, 0, 1)) * (rng.random() < 0.4))))
    world = Simulation(MACHINES[machine], limits, load.__getitem__, constant(FAIR))
    best, fixed = best_and_fixed(world, world.run(auto(limits), 3000))
    assert best >= 0.93
    assert fixed >= 0.95


def best_and_fixed(world: Simulation, done: Sequence[tuple[Plan, float, float]]) -> tuple[float, float]:
    """Throughput, against that of the best plan of each step and against the better of on and off."""
    ideal = sum(time * world.best(step) for step, (_, time, _) in enumerate(done))
    always = []
    for plan in (OFF, full(world.limits)):
        always.append(throughput(Simulation(*vars(world).values()).run(FixedPlan(plan), len(done))))
    return sum(tokens for *_, tokens in done) / ideal, throughput(done) / max(always)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_busy_machine_does_not_mislead(machine: str) -> None:
    """All passes take twice as long for a while, again and again; and times scatter a lot."""
    world = Simulation(
        MACHINES[machine], BLOCK_8, constant(4), constant(FAIR), lambda step: 1 + (step // 150 % 3 == 1), noise=0.25
    )
    best, fixed = best_and_fixed(world, world.run(auto(BLOCK_8), 3000))
    assert best >= 0.93
    assert fixed >= 0.95


def test_some_slow_steps_do_not_flip_a_decision() -> None:
    world = Simulation(MACHINES["GPU"], BLOCK_8, constant(4), constant(GOOD), noise=0.05)
    policy = auto(BLOCK_8)
    world.run(policy, 400)
    for slow in range(6):
        plan = policy.plan(4)
        policy.observe(outcome(plan, 4, {"draft": 0.1, "verify": 0.5, "host": 0.01}))
        after = [plan for plan, *_ in world.run(policy, 60, seed=slow)]
        assert sum(plan.drafts == 7 for plan in after) >= 50


def outcome(plan: Plan, rows: int, seconds: dict[str, float]) -> StepOutcome:
    """With every draft right."""
    needed = {"verify", "host", *(["draft"] if plan.drafts else []), *(["redraft"] if plan.branches else [])}
    seen = {stage: time for stage, time in seconds.items() if stage in needed}
    return StepOutcome(plan, rows, seen, {}, [(plan.drafts,) * 2] * rows, [1 + plan.drafts] * rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_drafter_that_gets_worse_is_noticed_within_tens_of_steps(rows: int) -> None:
    world = Simulation(
        MACHINES["small model on a CPU"], BLOCK_8, constant(rows), lambda step: GOOD if step < 500 else USELESS
    )
    plans = [plan for plan, *_ in world.run(auto(BLOCK_8), 700)]
    assert sum(plan.drafts > 0 for plan in plans[400:500]) >= 80
    assert sum(plan == OFF for plan in plans[560:]) >= 125


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("machine", ["larger model on a CPU", "GPU"])
def test_a_drafter_that_gets_better_is_noticed_by_trials(machine: str, rows: int) -> None:
    world = Simulation(MACHINES[machine], BLOCK_8, constant(rows), lambda step: USELESS if step < 500 else GOOD)
    plans = [plan for plan, *_ in world.run(auto(BLOCK_8), 1200)]
    assert sum(plan == OFF for plan in plans[400:500]) >= 90
    assert sum(plan.drafts > 1 for plan in plans[900:]) >= 270


@pytest.mark.parametrize("limits", [BLOCK_8, BLOCK_16, D2SD], ids=["block 8", "block 16", "D2SD"])
@pytest.mark.parametrize("machine", MACHINES)
def test_trials_of_a_useless_drafter_cost_little(machine: str, limits: Limits) -> None:
    """Once it knows, two per cent of the time at most; but they never end."""
    world = Simulation(MACHINES[machine], limits, constant(8), constant(USELESS))
    done = world.run(auto(limits), 3000)[500:]
    assert throughput(done) >= 0.98 * world.best(0)
    assert any(plan.drafts for plan, *_ in done[1000:])


def test_does_not_flap() -> None:
    """Two plans that are worth the same alternate at the pace of trials, not at that of noise."""
    world = Simulation(MACHINES["GPU"], BLOCK_16, constant(4), constant(POOR))
    runs = [len(list(steps)) for _, steps in groupby(plan for plan, *_ in world.run(auto(BLOCK_16), 3000)[500:])]
    assert sum(length for length in runs if length >= 8) >= 0.8 * sum(runs)


def test_short_requests() -> None:
    """Each step some sequences end and others begin, whose prompts are injected; the last drafts of one are cut off."""
    machine, spent, got = MACHINES["small model on a CPU"], dict.fromkeys(("auto", "on", "off"), 0.0), 24 * 400
    policies = {"auto": auto(BLOCK_8), "on": FixedPlan(full(BLOCK_8)), "off": FixedPlan(OFF)}
    for name, policy in policies.items():
        rng = random.Random(5)
        lengths = [1 + 23 * 2 * rng.random() for _ in range(400)]
        lengths = [round(length * got / sum(lengths)) for length in lengths]
        live: list[int] = []
        while lengths or live:
            while lengths and len(live) < 6:
                live.append(lengths.pop())
            plan, rows = policy.plan(len(live)), len(live)
            walks = [walk(rng, Plan(min(plan.drafts, left - 1), 0), FAIR) for left in live]
            sizes = pass_sizes(BLOCK_8, plan)
            times = machine.passes(rows, sizes) | {"host": machine.host(rows)}  # type: ignore[arg-type]
            if plan.drafts and len(live) > rows - 2:
                times["prefill"] = 0.05 * rows
            policy.observe(
                StepOutcome(
                    plan,
                    rows,
                    {stage: time / 1000 for stage, time in times.items()},  # type: ignore[misc]
                    {},
                    [trunk for trunk, _ in walks],
                    [tokens for _, tokens in walks],
                )
            )
            spent[name] += sum(times.values())
            live = [left - tokens for left, (_, tokens) in zip(live, walks, strict=True) if left > tokens]
    assert spent["auto"] <= min(spent["on"], spent["off"]) / 0.95


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([limits(2), BLOCK_8, limits(8, branches=12), limits(5, branches=2)]),
    st.lists(
        st.tuples(st.integers(1, 16), st.floats(0, 1e3), st.floats(0, 1), st.booleans()), min_size=1, max_size=80
    ),
    st.booleans(),
)
def test_whatever_happens_plans_fit_the_bundle(
    bundle: Limits, steps: list[tuple[int, float, float, bool]], allowed: bool
) -> None:
    """Any times, any acceptance, steps cut short by the ends of their sequences; the same again gives the same plans."""
    branches = bundle.branches if allowed else 0
    policies = [AdaptivePlan(bundle, branches, None) for _ in range(2)]
    for rows, seconds, share, cut in steps:
        plan = policies[0].plan(rows)
        assert policies[1].plan(rows) == plan
        assert 0 <= plan.drafts < bundle.block_size
        assert 0 <= plan.branches <= min(branches, plan.drafts)
        sizes = pass_sizes(bundle, plan)
        assert sizes["verify"] <= bundle.tree_size
        assert sizes.get("redraft", 0) <= bundle.redraft_rows * bundle.vp_block_size
        drafts = plan.drafts // 2 if cut else plan.drafts
        agreed = int(share * drafts)
        seen = {part: seconds * size for part, size in sizes.items()} | {"host": seconds / 7}
        if cut and drafts == 0:
            seen.pop("draft", None)
        result = StepOutcome(plan, rows, seen, {}, [(drafts, agreed)] * rows, [agreed + 1] * rows)  # type: ignore[arg-type]
        for policy in policies:
            policy.observe(result)


def test_candidates() -> None:
    assert [plan.drafts for plan in candidates(BLOCK_16, 0)] == [0, 1, 2, 3, 5, 7, 11, 15]
    assert [plan.drafts for plan in candidates(limits(10), 0)] == [0, 1, 2, 3, 5, 7, 9]
    assert candidates(limits(3, branches=4), 4) == [OFF, (1, 0), (2, 0), (2, 1), (2, 2)]


def test_sizes_of_passes_are_those_of_the_bundle() -> None:
    paper = limits(16, branches=4)
    assert pass_sizes(paper, full(paper)) == {"draft": 16, "redraft": 64, "verify": paper.tree_size}
    assert pass_sizes(paper, Plan(5, 0)) == {"draft": 6, "verify": 6}
    assert pass_sizes(paper, OFF) == {"verify": 1}


def test_a_cost_table_spares_what_cannot_pay() -> None:
    """A drafter a hundred times as dear as the target is tried once a while, not when it starts."""
    table = PassCosts(draft=((1, 1.0), (8, 1.0)), redraft=(), verify=((1, 0.01), (8, 0.011)))
    policy = auto(BLOCK_8, table)
    for _ in range(50):
        assert policy.plan(1) == OFF
        policy.observe(outcome(OFF, 1, {"verify": 0.01, "host": 0.001}))


class TestStepTimes:
    def test_between_measured_passes_costs_rise(self) -> None:
        times = StepTimes(PassCosts(draft=(), redraft=(), verify=((1, 1.0), (4, 3.0), (8, 2.0), (16, 9.0))))
        costs = [times.seconds(1, {"verify": size}) for size in range(1, 40)]
        unknown = [cost for size, cost in enumerate(costs, 1) if size not in (1, 4, 8, 16)]
        assert unknown == sorted(unknown)
        assert costs[15] <= unknown[-1] <= 3 * costs[15]

    def test_plans_compare_that_ran_at_different_paces(self) -> None:
        times, small, large = StepTimes(None), {"verify": 1}, {"verify": 8}
        for _ in range(50):
            times.observe(1, small, {"verify": 1.0})  # type: ignore[arg-type]
            times.observe(1, large, {"verify": 3.0})  # type: ignore[arg-type]
        for _ in range(50):
            times.observe(1, large, {"verify": 6.0})  # type: ignore[arg-type]
        ratio = times.seconds(1, large) / times.seconds(1, small)  # type: ignore[arg-type]
        assert ratio == pytest.approx(3, rel=0.15)
        assert times.pace == pytest.approx(2, rel=0.15)

    def test_what_a_pass_takes_is_learnt_anew(self) -> None:
        times, sizes = StepTimes(PassCosts(draft=(), redraft=(), verify=((1, 1.0), (8, 1.1)))), {"verify": 8}
        for _ in range(10):
            times.observe(1, sizes, {"verify": 5.0})  # type: ignore[arg-type]
        assert times.seconds(1, sizes) * times.pace == pytest.approx(5, rel=0.1)  # type: ignore[arg-type]
        assert times.seconds(1, {"verify": 1}) * times.pace == pytest.approx(1, rel=0.5)


class TestStepYield:
    def test_shorter_drafts_do_not_bias_it(self) -> None:
        rng, seen = random.Random(3), StepYield(7, 0)
        for step in range(400):
            plan = Plan(rng.choice((1, 2, 3)), 0) if step < 300 else Plan(7, 0)
            walks = [walk(rng, plan, FAIR) for _ in range(8)]
            seen.observe(0, [trunk for trunk, _ in walks], [tokens for _, tokens in walks])
        for drafts in (1, 3, 7):
            assert seen.tokens(drafts, 0) == pytest.approx(expected(Plan(drafts, 0), FAIR), rel=0.08)

    def test_gain_of_branches(self) -> None:
        rng, seen = random.Random(4), StepYield(7, 4)
        for step in range(600):
            plan = Plan(7, (4, 2, 1)[step % 3])
            walks = [walk(rng, plan, FAIR) for _ in range(4)]
            seen.observe(plan.branches, [trunk for trunk, _ in walks], [tokens for _, tokens in walks])
        for branches in (1, 2, 4):
            gain = seen.tokens(7, branches) - seen.tokens(7, 0)
            assert gain == pytest.approx(expected(Plan(7, branches), FAIR) - expected(Plan(7, 0), FAIR), rel=0.2)

    def test_nothing_is_learnt_of_steps_without_drafts(self) -> None:
        seen = StepYield(7, 0)
        before = [seen.tokens(drafts, 0) for drafts in range(8)]
        for _ in range(100):
            seen.observe(0, [(0, 0)] * 4, [1] * 4)
        assert [seen.tokens(drafts, 0) for drafts in range(8)] == before


def test_a_fixed_plan_stays() -> None:
    policy = FixedPlan(full(D2SD))
    for rows in (1, 16):
        assert policy.plan(rows) == Plan(7, 4)
        policy.observe(outcome(Plan(7, 4), rows, {"verify": 1.0, "host": 1.0}))
