"""Traces in numbers: small ones worked out by hand, random ones against a plain recount."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import ANCHOR, make_branch, make_step, make_trace

from dflash_trt.evaluation.trace_summary import Calibration, CalibrationBin, StepView, calibration, summarize
from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.staircase import merge
from dflash_trt.runtime.tree import CandidateTree

CONFIDENCE = (0.9, 0.8, 0.5)

# The branch that keeps one draft wins: 2, 5, 6 and the bonus token 9, where the trunk alone gives 2 and 5. Tree: 1 2 3
# 4 of the trunk, 5 6 of the one branch, 7 of the other.
WON = make_step(
    (2, 3, 4),
    (2, 5, 6, 9),
    [make_branch(1, (5, 6), probability=0.18, confidence=0.5), make_branch(2, (7,), probability=0.36)],
    confidence=CONFIDENCE,
)
# The whole trunk is right. The branch re-drafts its first token alike, then leaves it. Tree: 1 2 3 4, 8 9.
WHOLE = make_step(
    (2, 3, 4),
    (2, 3, 4, 7),
    [make_branch(0, (2, 8, 9), probability=0.1, confidence=0.25)],
    confidence=CONFIDENCE,
)
# The path takes the whole trunk, but the step puts out two tokens. Tree: 1 2 3 4.
CUT = make_step((2, 3, 4), (2, 3, 4, 5), confidence=CONFIDENCE, limit=2)
PLAIN = make_step((), (6,))


@pytest.fixture(scope="module")
def summary():
    return summarize(make_trace([WON, WHOLE, CUT, PLAIN]))


def test_means(summary):
    assert (summary.steps, summary.cut_steps, summary.prompt_tokens, summary.new_tokens) == (4, 1, 3, 12)
    assert summary.mean_acceptance_length == (4 + 4 + 2 + 1) / 4
    assert summary.trunk_mean_acceptance_length == (2 + 4 + 2 + 1) / 4
    assert summary.verified_tokens_per_step == (7 + 6 + 4 + 1) / 4
    assert summary.branches_per_step == 3 / 4
    assert (summary.won_steps, summary.mean_gain) == (1, 2)


def test_positions_leave_out_what_is_not_known(summary):
    found = [(p.position, p.steps, p.tree, p.trunk, pytest.approx(p.predicted)) for p in summary.positions]
    assert found == [
        (1, 3, 1.0, 1.0, 0.9),  # the step of one token drafted nothing
        (2, 3, 1.0, 2 / 3, 0.72),
        (3, 2, 1.0, 1 / 2, 0.36),  # the cut step does not show whether its path got there
    ]


def test_kept_prefixes(summary):
    rows = [
        (p.kept, p.steps, p.predicted, p.broke, p.drafted, p.drafted_predicted, p.drafted_broke, p.won, p.gain)
        for p in summary.kept_prefixes
    ]
    assert rows[0] == (0, 3, pytest.approx(0.1), 0.0, 1, 0.1, 0.0, 0, None)
    assert rows[1] == (1, 3, pytest.approx(0.18), 1 / 3, 1, 0.18, 1.0, 1, 2.0)
    assert rows[2] == (2, 2, pytest.approx(0.36), 0.0, 1, 0.36, 0.0, 0, None)
    assert rows[3] == (3, 2, pytest.approx(0.36), 1 / 2, 0, None, None, 0, None)  # all three right: the whole trunk
    assert len(rows) == 4


def test_branch_ranks(summary):
    rows = [
        (r.rank, r.drafted, r.predicted, r.broke, r.won, r.gain, r.mean_acceptance_length)
        for r in summary.branch_ranks
    ]
    assert rows == [
        (1, 2, pytest.approx((0.36 + 0.1) / 2), 0.0, 0, None, (2 + 4 + 2 + 1) / 4),
        (2, 1, 0.18, 1.0, 1, 2.0, (4 + 4 + 2 + 1) / 4),
    ]


def test_calibration_of_the_trunk(summary):
    # 0.9: right in all three; 0.8: wrong in WON alone; 0.5: judged in WHOLE alone, as CUT does not show it.
    found = summary.trunk_calibration
    assert [(b.low, b.high, b.count) for b in found.bins] == [(0.5, 0.6, 1), (0.8, 0.9, 3), (0.9, 1.0, 3)]
    assert [b.accepted for b in found.bins] == pytest.approx([1, 2 / 3, 1])
    assert [b.confidence for b in found.bins] == pytest.approx([0.5, 0.8, 0.9])
    assert (found.judged, found.accepted) == (7, pytest.approx(6 / 7))
    assert found.error == pytest.approx((1 * 0.5 + 3 * (0.8 - 2 / 3) + 3 * 0.1) / 7)


def test_calibration_of_re_drafts(summary):
    # WON: 5 and 6 right; 7 hangs where the path did not go. WHOLE: 2, merged with the trunk's, right; 8 wrong.
    found = summary.redraft_calibration
    assert found == Calibration(
        judged=4,
        accepted=0.75,
        error=pytest.approx((2 * 0.25 + 2 * 0.5) / 4),
        bins=(CalibrationBin(0.2, 0.3, 2, 0.25, 0.5), CalibrationBin(0.5, 0.6, 2, 0.5, 1.0)),
    )


def test_an_extension_of_the_trunk_is_no_ranked_branch():
    step = make_step((2, 3), (2, 3, 4, 5, 9), [make_branch(2, (4, 5)), make_branch(0, (7, 7, 7, 7))])
    found = summarize(make_trace([step]))
    assert (found.won_steps, found.mean_gain, len(found.branch_ranks)) == (1, 2, 1)
    assert (found.kept_prefixes[2].won, found.kept_prefixes[2].gain) == (1, 2)
    assert found.kept_prefixes[2].drafted_broke == 1
    assert [(p.tree, p.trunk) for p in found.positions] == [(1, 1), (1, 1), (1, 0), (1, 0)]


def test_of_branches_that_share_the_path_that_which_keeps_most_won():
    # The branch that keeps nothing re-drafts 2 alike; both lead to 2 8 9.
    step = make_step((2, 3, 4), (2, 8, 9, 5), [make_branch(0, (2, 8, 9)), make_branch(1, (8, 9))])
    found = summarize(make_trace([step]))
    assert [(p.kept, p.won) for p in found.kept_prefixes if p.drafted] == [(0, 0), (1, 1)]
    assert found.redraft_calibration.judged == 3 + 2
    assert found.redraft_calibration.accepted == 1


def test_what_the_tree_leaves_out_is_not_judged():
    # Of the trunk 2 3 4 only 2 is verified: the target's 3 agrees with the next draft, and no more is known.
    step = make_step((2, 3, 4), (2, 3), tree=CandidateTree.chain([ANCHOR, 2]))
    view = StepView(step)
    assert view.judged_trunk() == [(0.5, True)]
    assert [view.broke(kept) for kept in range(4)] == [False, False, None, None]
    found = summarize(make_trace([step]))
    assert [(p.steps, p.trunk) for p in found.positions] == [(1, 1), (1, 0), (1, 0)]
    assert found.mean_acceptance_length == found.trunk_mean_acceptance_length == 2


def test_a_step_cut_before_the_branch_leaves_the_trunk_gains_nothing():
    step = make_step((2, 3, 4), (2, 5, 6, 9), [make_branch(1, (5, 6))], limit=2)
    view = StepView(step)
    assert (view.gain, view.winner, view.breaks_at, view.cut) == (0, None, 1, True)
    assert view.judged_trunk() == [(0.5, True), (0.5, False)]
    assert view.judged_redrafts() == [(0.5, True)]


def test_a_trace_without_steps_has_no_means():
    found = summarize(make_trace([]))
    assert (found.steps, found.mean_acceptance_length, found.mean_gain) == (0, None, None)
    assert (found.positions, found.kept_prefixes, found.branch_ranks) == ((), (), ())
    assert found.trunk_calibration == Calibration(0, None, None, ())


def test_the_last_bin_takes_certainty_and_what_rounds_above_it():
    found = calibration([(1.0, True), (1.0005, True), (0.0, False)])
    assert [(part.low, part.count, part.confidence) for part in found.bins] == [(0.0, 1, 0.0), (0.9, 2, 1.0)]
    assert found.error == 0


# -- random traces: few tokens, so that candidates share nodes and are often right

TOKENS = st.integers(2, 4)
SHARES = st.floats(0, 1)


@st.composite
def candidates(draw, size: int | None = None, cut: bool = True):
    """A step and the target's choices."""
    size = draw(st.integers(0, 5)) if size is None else size
    draft = draw(st.lists(TOKENS, min_size=size, max_size=size))
    longest = size + draw(st.integers(0, 2)) if cut else size
    kept = draw(st.sets(st.integers(0, size - 1), max_size=3)) if size else set()
    branches = []
    for count in sorted(kept | ({size} if longest > size else set())):
        tail = draw(st.lists(TOKENS, min_size=longest - count, max_size=longest - count))
        branches.append(make_branch(count, tail, draw(SHARES), draw(SHARES)))
    target = draw(st.lists(TOKENS, min_size=longest + 1, max_size=longest + 1))
    limit = draw(st.integers(1, longest + 1)) if cut else None
    confidence = draw(st.lists(SHARES, min_size=size, max_size=size))
    return make_step(draft, target, branches, confidence=confidence, limit=limit), target


@settings(max_examples=60, deadline=None)
@given(st.lists(candidates(), min_size=1, max_size=6))
def test_parts_add_up(drawn):
    found = summarize(make_trace([step for step, _ in drawn]))
    reached = [round(p.tree * p.steps) for p in found.positions]
    assert reached == sorted(reached, reverse=True)
    assert all(1 >= p.tree >= p.trunk >= 0 for p in found.positions)
    for part in (found.trunk_calibration, found.redraft_calibration):
        assert sum(b.count for b in part.bins) == part.judged
        assert all(b.count > 0 and b.low <= b.confidence <= b.high and 0 <= b.accepted <= 1 for b in part.bins)
        assert part.error is None or 0 <= part.error <= 1
    assert sum(p.won for p in found.kept_prefixes) == found.won_steps
    assert found.branches_per_step * found.steps == pytest.approx(sum(p.drafted for p in found.kept_prefixes))
    taus = [found.trunk_mean_acceptance_length, *(r.mean_acceptance_length for r in found.branch_ranks)]
    assert taus == sorted(taus)
    assert taus[-1] <= found.mean_acceptance_length
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["steps"] == found.steps


@settings(max_examples=60, deadline=None)
@given(st.lists(candidates(size=4, cut=False), min_size=1, max_size=6))
def test_of_whole_steps_of_one_size_fewer_get_further(drawn):
    found = summarize(make_trace([step for step, _ in drawn]))
    for curve in ([p.tree for p in found.positions], [p.trunk for p in found.positions]):
        assert curve == sorted(curve, reverse=True)
    assert {p.steps for p in found.positions} == {len(drawn)}
    assert sum(p.broke for p in found.kept_prefixes) == pytest.approx(1)
    assert 1 + sum(p.tree for p in found.positions) == pytest.approx(found.mean_acceptance_length)


@settings(max_examples=60, deadline=None)
@given(candidates())
def test_the_trunk_and_some_branches_give_what_walking_their_tree_gives(drawn):
    step, target = drawn
    view = StepView(step)
    for count in range(len(step.branches) + 1):
        branches = step.branches[:count]
        staircase = merge([[ANCHOR, *step.draft], *([ANCHOR, *view.row(branch)] for branch in branches)])
        tokens = walk(staircase.tree(), lambda node, path: target[len(path)]).tokens
        assert view.yielded(branches) == min(len(tokens), len(step.emitted))
    assert view.yielded(step.branches) == len(step.emitted)


@settings(max_examples=60, deadline=None)
@given(candidates())
def test_drafts_are_judged_by_the_targets_choices(drawn):
    step, target = drawn

    def judged(row, confidence):
        first = len(row) - len(confidence)
        shown = [index for index in range(first, len(row)) if index < len(step.emitted)]
        return [
            (confidence[index - first], row[index] == target[index])
            for index in shown
            if list(row[:index]) == target[:index]
        ]

    view = StepView(step)
    assert view.judged_trunk() == judged(step.draft, step.confidence)
    assert view.judged_redrafts() == [
        result for branch in step.branches for result in judged(view.row(branch), branch.confidence)
    ]
