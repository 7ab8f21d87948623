"""The speculation policy on simulated machines: as fast as the best fixed plan, whatever the load and the drafter."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.simulated_decoding import (
    BLOCK_8,
    BLOCK_16,
    D2SD,
    FAIR,
    GOOD,
    MACHINES,
    POOR,
    USELESS,
    Simulation,
    auto,
    constant,
    full,
    limits,
    throughput,
    walk,
)

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
    best, fixed = world.compare(auto(limits), 3000)
    assert best >= 0.93
    assert fixed >= 0.95


@pytest.mark.parametrize("machine", MACHINES)
def test_a_busy_machine_does_not_mislead(machine: str) -> None:
    """All passes take twice as long for a while, again and again; and times scatter a lot."""
    world = Simulation(
        MACHINES[machine], BLOCK_8, constant(4), constant(FAIR), lambda step: 1 + (step // 150 % 3 == 1), noise=0.25
    )
    best, fixed = world.compare(auto(BLOCK_8), 3000)
    assert best >= 0.93
    assert fixed >= 0.95


def test_some_slow_steps_do_not_flip_a_decision() -> None:
    world = Simulation(MACHINES["GPU"], BLOCK_8, constant(4), constant(GOOD), noise=0.05)
    policy = auto(BLOCK_8)
    world.run(policy, 400)
    for slow in range(6):
        plan = policy.plan(4)
        policy.observe(outcome(plan, 4, draft=0.1, verify=0.5, host=0.01))
        after = [plan for plan, *_ in world.run(policy, 60, seed=slow)]
        assert sum(plan.drafts == 7 for plan in after) >= 50


def outcome(plan: Plan, rows: int, **seconds: float) -> StepOutcome:
    """With every draft right."""
    seen: dict[Any, float] = {stage: time for stage, time in seconds.items() if plan.drafts or stage != "draft"}
    return StepOutcome(plan, rows, seen, {}, [(plan.drafts,) * 2] * rows, [1 + plan.drafts] * rows)


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
    plans = [plan for plan, *_ in world.run(auto(BLOCK_8), 1600)]
    assert sum(plan == OFF for plan in plans[400:500]) >= 90
    assert sum(plan.drafts > 1 for plan in plans[1300:]) >= 270


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
    """Sequences end and others begin in nearly every step; the last drafts of one are cut off."""
    spent = {plan: serve(FixedPlan(plan)) for plan in (OFF, full(BLOCK_8))}
    assert serve(auto(BLOCK_8)) <= min(spent.values()) / 0.95


def serve(policy: SpeculationPolicy) -> float:
    """Milliseconds of 600 requests of 1 to 40 tokens, six at a time; each prompt is injected by the first draft."""
    machine, rng, spent = MACHINES["small model on a CPU"], random.Random(5), 0.0
    queue, live, fresh = [rng.randint(1, 40) for _ in range(600)], list[int](), 0
    while queue or live:
        joining = min(len(queue), 6 - len(live))
        live, queue, fresh = live + queue[:joining], queue[joining:], fresh + joining
        plan, rows = policy.plan(len(live)), len(live)
        walks = [walk(rng, Plan(min(plan.drafts, left - 1), 0), FAIR) for left in live]
        times = machine.passes(rows, pass_sizes(BLOCK_8, plan)) | {"host": machine.host(rows)}
        if plan.drafts and fresh:
            times["prefill"], fresh = 0.3 * min(fresh, rows), 0
        spent += sum(times.values())
        seen = {stage: time / 1000 for stage, time in times.items()}
        trunk, yielded = zip(*walks, strict=True)
        policy.observe(StepOutcome(plan, rows, seen, {}, trunk, yielded))
        live = [left - tokens for left, tokens in zip(live, yielded, strict=True) if left > tokens]
    return spent


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
    """Any times, any acceptance, steps cut short by the ends of sequences; the same again gives the same plans."""
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
        seen: dict[Any, float] = {part: seconds * size for part, size in sizes.items()} | {"host": seconds / 7}
        if cut and drafts == 0:
            seen.pop("draft", None)
        result = StepOutcome(plan, rows, seen, {}, [(drafts, agreed)] * rows, [agreed + 1] * rows)
        for policy in policies:
            policy.observe(result)


def test_candidates() -> None:
    assert [plan.drafts for plan in candidates(BLOCK_16, 0)] == [0, 1, 2, 3, 5, 7, 11, 15]
    assert [plan.drafts for plan in candidates(limits(10), 0)] == [0, 1, 2, 3, 5, 7, 9]
    assert candidates(limits(3, branches=4), 4) == [OFF, (1, 0), (2, 0), (2, 1), (2, 2)]


def test_sizes_of_passes_are_those_of_the_bundle() -> None:
    paper = limits(16, branches=4)
    assert pass_sizes(paper, full(paper)) == {"draft": 16, "redraft": 64, "verify": paper.tree_size}
    assert pass_sizes(paper, Plan(5, 0)) == {"draft": 16, "verify": 6}
    assert pass_sizes(paper, OFF) == {"verify": 1}


def test_a_cost_table_spares_what_cannot_pay() -> None:
    """A drafter a hundred times as dear as the target is tried once a while, not when it starts."""
    table = PassCosts(draft=((1, 1.0), (8, 1.0)), redraft=(), verify=((1, 0.01), (8, 0.011)))
    policy = auto(BLOCK_8, table)
    for _ in range(50):
        assert policy.plan(1) == OFF
        policy.observe(outcome(OFF, 1, verify=0.01, host=0.001))


def test_a_fixed_plan_stays() -> None:
    policy = FixedPlan(full(D2SD))
    for rows in (1, 16):
        assert policy.plan(rows) == Plan(7, 4)
        policy.observe(outcome(Plan(7, 4), rows, draft=1.0, verify=1.0, host=1.0))
