"""What decoding teaches about drafts and passes: calibration, rests, and the number of verified drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.errors import UsageError
from dflash_trt.runtime.adaptive_drafting import AdaptiveDrafting, Calibration, Experience, Worth
from dflash_trt.runtime.branching import Branch, PassCosts, chosen_drafts
from dflash_trt.runtime.staircase import merge
from dflash_trt.runtime.statistics import StepMeter
from dflash_trt.runtime.tree import CandidateTree

BLOCK = 8


def costs(draft: float, per_token: float) -> PassCosts:
    verify = ((1, 1.0), (BLOCK, 1.0 + (BLOCK - 1) * per_token))
    return PassCosts(draft=((1, draft), (BLOCK, draft)), redraft=(), verify=verify)


# -- calibration


def test_confidences_are_believed_at_first() -> None:
    confidence = [0.0, 0.3, 0.999, 1.0]
    assert Calibration().chances(confidence) == confidence


@pytest.mark.parametrize(("said", "true"), [(0.9, 0.5), (0.45, 0.8), (0.999, 0.9)])
def test_chances_come_to_what_was_seen(said: float, true: float) -> None:
    random, calibration = np.random.default_rng(0), Calibration()
    for _ in range(2000):
        right = int((random.random(BLOCK) < true).cumprod().sum())
        calibration.observe([said] * BLOCK, right)
    assert calibration.chances([said])[0] == pytest.approx(true, abs=0.06)


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 8)), max_size=20),
    st.lists(st.floats(0, 1), max_size=8),
)
def test_chances_are_chances(seen: list[tuple[list[float], int]], asked: list[float]) -> None:
    calibration = Calibration()
    for confidence, right in seen:
        calibration.observe(confidence, min(right, len(confidence)))
    assert all(0 <= chance <= 1 for chance in calibration.chances(asked))


def test_only_drafts_that_were_put_to_the_test_count() -> None:
    """Behind the first wrong one nothing is known."""
    calibration = Calibration()
    for _ in range(50):
        calibration.observe([0.15, 0.55, 0.85], 0)
    first, second, third = calibration.chances([0.15, 0.55, 0.85])
    assert first < 0.05
    assert (second, third) == (0.55, 0.85)


# -- whether to draft


def run(worth: Worth, tokens: int, seconds: float, steps: int) -> int:
    """Steps that drafted."""
    drafted = 0
    for _ in range(steps):
        if worth.wants_drafts():
            worth.observe(tokens, seconds, 1.0)
            drafted += 1
    return drafted


def test_drafts_that_pay_are_never_left_out() -> None:
    assert run(Worth(), tokens=2, seconds=1.5, steps=200) == 200


def test_drafts_that_do_not_pay_are_tried_ever_less() -> None:
    worth = Worth()
    assert run(worth, tokens=1, seconds=1.5, steps=500) < 50


def test_drafts_that_pay_again_are_taken_up_again() -> None:
    worth = Worth()
    run(worth, tokens=1, seconds=1.5, steps=500)
    run(worth, tokens=4, seconds=1.5, steps=300)
    assert run(worth, tokens=4, seconds=1.5, steps=100) == 100


# -- the policy


def decode(
    policy: AdaptiveDrafting, confidence: Sequence[float], right: int, table: PassCosts, steps: int
) -> list[int]:
    """Verified drafts of steps whose drafter is always as sure and whose first `right` drafts are right."""
    verified = []
    tokens, seconds = zip(*table.verify, strict=True)
    for _ in range(steps):
        meter, tree = StepMeter(), CandidateTree.chain([0])
        if drafts := policy.drafts(BLOCK - 1):
            staircase = merge([range(drafts + 1)])
            tree = staircase.part(policy.prune(staircase, confidence[:drafts], []))
            meter.seconds["draft"], meter.tokens["draft"] = table.draft[-1][1], BLOCK
        meter.seconds["verify"] = float(np.interp(len(tree), tokens, seconds))
        meter.tokens["verify"] = len(tree)
        path = list(range(min(right, len(tree) - 1) + 1))
        meter.record_walk(tree, list(range(1, len(tree))), path)
        policy.observe(meter, sum(meter.seconds.values()))
        verified.append(len(tree) - 1)
    return verified


def test_a_drafter_that_is_too_sure_is_found_out() -> None:
    """It is sure of all its drafts and right with two: what costs and never comes true is soon not verified."""
    table = costs(0.2, 0.15)
    policy = AdaptiveDrafting(0, table, Experience(table))
    sure = [0.93, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35]
    verified = decode(policy, sure, 2, table, 300)
    assert verified[0] >= 4
    assert set(verified[200:]) <= {2, 3}


def test_no_drafts_where_they_cost_more_than_they_bring() -> None:
    table = costs(1.5, 0.0)
    policy = AdaptiveDrafting(0, table, Experience(table))
    verified = decode(policy, [0.9] * 7, 0, table, 400)
    assert np.mean([drafts == 0 for drafts in verified[100:]]) > 0.85


def test_a_machine_that_differs_from_the_table() -> None:
    """Built where width is free, run where it is not."""
    built, here = costs(0.2, 0.0), costs(0.2, 0.5)
    policy = AdaptiveDrafting(0, built, Experience(built))
    verified = decode(policy, [0.8, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1], 1, here, 400)
    assert verified[0] == 7
    assert max(verified[300:]) <= 2


@pytest.mark.parametrize("seed", range(3))
def test_bad_luck_does_not_stop_drafts_that_pay(seed: int) -> None:
    """What was expected counts, not what came: one draft that is right half the time, at a fifth more than none."""
    table, random = costs(0.1, 0.1), np.random.default_rng(seed)
    policy = AdaptiveDrafting(0, table, Experience(table))
    drafted = sum(decode(policy, [0.5], int(random.random() < 0.5), table, 1)[0] > 0 for _ in range(400))
    assert drafted > 390


def test_re_drafts_that_are_too_sure_are_found_out() -> None:
    """The trunk breaks at its second draft, and what was re-drafted there is always wrong."""
    table = PassCosts(
        draft=((1, 0.1), (BLOCK, 0.1)), redraft=((1, 0.1), (BLOCK, 0.1)), verify=((1, 1.0), (3 * BLOCK, 1.5))
    )
    policy, confidence = AdaptiveDrafting(1, table, Experience(table)), [0.9, 0.3, 0.3]
    draft, asked = [1, 2, 3], []
    for _ in range(100):
        policy.drafts(3)
        kept = policy.choose(confidence, 4)
        branches = [Branch(count, 0.5, [7, 8, 9][: 3 - count], [0.95] * (3 - count)) for count in kept]
        staircase = merge([[0, *draft], *([0, *draft[: b.kept], *b.tokens] for b in branches)])
        tree = staircase.part(policy.prune(staircase, confidence, branches))
        meter = StepMeter()
        meter.seconds |= {"draft": 0.1, "verify": float(np.interp(len(tree), [1, 24], [1.0, 1.5]))}
        meter.tokens |= {"draft": 4, "verify": len(tree)}
        if kept:
            meter.seconds["redraft"], meter.tokens["redraft"] = 0.1, 4
        meter.record_walk(tree, draft, [0, 1])
        policy.observe(meter, sum(meter.seconds.values()))
        asked.append(kept)
    assert asked[0] == [1]
    assert asked[75:] == [[]] * 25


def test_what_is_learnt_serves_the_next_sequence() -> None:
    table = costs(0.2, 0.15)
    known = Experience(table)
    decode(AdaptiveDrafting(0, table, known), [0.95] * 7, 1, table, 300)
    assert decode(AdaptiveDrafting(0, table, known), [0.95] * 7, 1, table, 1)[0] <= 3


# -- what can be asked for


def test_drafts_that_are_there() -> None:
    table = costs(1, 1)
    assert chosen_drafts(None, 8, speculation=True, branches=0, costs=None) == 7
    assert chosen_drafts(None, 8, speculation=False, branches=0, costs=None) == 0
    assert chosen_drafts(3, 8, speculation=True, branches=2, costs=None) == 3
    assert chosen_drafts("auto", 8, speculation=True, branches="auto", costs=table) == "auto"


@pytest.mark.parametrize(
    ("asked", "speculation", "branches", "table", "text"),
    [
        (0, True, 0, None, "1 to 7"),
        (8, True, 0, None, "1 to 7"),
        (True, True, 0, None, "1 to 7"),
        ("all", True, 0, None, "1 to 7"),
        (3, False, 0, None, "token-by-token"),
        ("auto", True, 0, None, "--no-verify"),
        ("auto", True, 4, costs(1, 1), "4 branches"),
    ],
)
def test_drafts_that_are_not(asked: object, speculation: bool, branches: int, table: PassCosts, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        chosen_drafts(asked, 8, speculation=speculation, branches=branches, costs=table)  # type: ignore[arg-type]
