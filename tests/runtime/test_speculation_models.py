"""What is learnt of the times and the yield of steps."""

from __future__ import annotations

import random

import pytest
from runtime.simulated_decoding import FAIR, GOOD, USELESS, expected, walk

from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.speculation import Plan
from dflash_trt.runtime.speculation_models import Part, StepTimes, StepYield


class TestStepTimes:
    def test_between_measured_passes_costs_rise(self) -> None:
        times = StepTimes(PassCosts(draft=(), redraft=(), verify=((1, 1.0), (4, 3.0), (8, 2.0), (16, 9.0))))
        costs = [times.seconds(1, {"verify": size}) for size in range(1, 40)]
        unknown = [cost for size, cost in enumerate(costs, 1) if size not in (1, 4, 8, 16)]
        assert unknown == sorted(unknown)
        assert costs[15] <= unknown[-1] <= 3 * costs[15]

    def test_plans_compare_that_ran_at_different_paces(self) -> None:
        times = StepTimes(None)
        small: dict[Part, int] = {"verify": 1}
        large: dict[Part, int] = {"verify": 8}
        for _ in range(50):
            times.observe(1, small, {"verify": 1.0})
            times.observe(1, large, {"verify": 3.0})
        for _ in range(50):
            times.observe(1, large, {"verify": 6.0})
        ratio = times.seconds(1, large) / times.seconds(1, small)
        assert ratio == pytest.approx(3, rel=0.15)
        assert times.pace == pytest.approx(2, rel=0.15)

    def test_what_a_pass_takes_is_learnt_anew(self) -> None:
        times = StepTimes(PassCosts(draft=(), redraft=(), verify=((1, 1.0), (8, 1.1))))
        sizes: dict[Part, int] = {"verify": 8}
        for _ in range(10):
            times.observe(1, sizes, {"verify": 5.0})
        assert times.seconds(1, sizes) * times.pace == pytest.approx(5, rel=0.1)
        assert times.seconds(1, {"verify": 1}) * times.pace == pytest.approx(1, rel=0.7)


class TestStepYield:
    def test_shorter_drafts_do_not_bias_it(self) -> None:
        rng, seen = random.Random(3), StepYield(7, 0)
        for step in range(400):
            plan = Plan(rng.choice((1, 2, 3)), 0) if step < 300 else Plan(7, 0)
            walks = [walk(rng, plan, FAIR) for _ in range(8)]
            seen.observe(plan.drafts, 0, [trunk for trunk, _ in walks], [tokens for _, tokens in walks])
        for drafts in (1, 3, 7):
            assert seen.tokens(drafts, 0) == pytest.approx(expected(Plan(drafts, 0), FAIR), rel=0.08)

    def test_gain_of_branches(self) -> None:
        rng, seen = random.Random(4), StepYield(7, 4)
        for step in range(600):
            plan = Plan(7, (4, 2, 1)[step % 3])
            walks = [walk(rng, plan, FAIR) for _ in range(4)]
            seen.observe(*plan, [trunk for trunk, _ in walks], [tokens for _, tokens in walks])
        for branches in (1, 2, 4):
            gain = seen.tokens(7, branches) - seen.tokens(7, 0)
            assert gain == pytest.approx(expected(Plan(7, branches), FAIR) - expected(Plan(7, 0), FAIR), rel=0.2)

    def test_what_ends_of_requests_cut_off_counts(self) -> None:
        """Three rows of four go on, the fourth may take two drafts alone."""
        rng, seen = random.Random(5), StepYield(7, 0)
        for _ in range(600):
            walks = [walk(rng, Plan(drafts, 0), FAIR)[0] for drafts in (7, 7, 7, 2)]
            seen.observe(7, 0, walks, [1 + agreed for _, agreed in walks])
        whole, cut = expected(Plan(7, 0), FAIR), expected(Plan(2, 0), FAIR)
        assert seen.tokens(7, 0) == pytest.approx((3 * whole + cut) / 4, rel=0.05)

    def test_a_change_is_told_and_soon_learnt(self) -> None:
        rng, seen = random.Random(6), StepYield(7, 0)
        for number, (chances, tokens) in enumerate(((GOOD, 5.7), (USELESS, 1.0), (GOOD, 5.7))):
            told = []
            for _ in range(400):
                walks = [walk(rng, Plan(7, 0), chances)[0] for _ in range(2)]
                told.append(seen.observe(7, 0, walks, [1 + agreed for _, agreed in walks]))
            assert number == 0 or any(told[:12])
            assert not any(told[100:])
            assert seen.tokens(7, 0) == pytest.approx(tokens, rel=0.1)
