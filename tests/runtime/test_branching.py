"""The policies of D2SD: which prefixes a step branches from, and how much of the tree it verifies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime import proposer
from dflash_trt.runtime.branching import AdaptiveBranches, Branch, FixedBranches, PassCosts
from dflash_trt.runtime.drafter import Draft
from dflash_trt.runtime.staircase import Staircase, merge
from dflash_trt.runtime.tree import CandidateTree

PAPER = [0.95, 0.84, 0.62, 0.70, 0.42]
CONFIDENCE = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
LARGEST = 100  # tokens of a pass the tables know


def per_token(fixed: float, token: float) -> tuple[tuple[int, float], ...]:
    return ((1, fixed + token), (LARGEST, fixed + LARGEST * token))


FREE, FLAT = per_token(0, 0), per_token(1, 0)


def costs(draft: Any = FLAT, redraft: Any = FLAT, verify: Any = FLAT) -> PassCosts:
    return PassCosts(draft=draft, redraft=redraft, verify=verify)


@st.composite
def trees(draw: st.DrawFn, largest: int = 24) -> tuple[CandidateTree, np.ndarray]:
    """A tree with the reach of its nodes, children's no larger than their parents', equal ones often."""
    parents, reach = [-1], [1.0]
    for _ in range(draw(st.integers(0, largest - 1))):
        parents.append(draw(st.integers(0, len(parents) - 1)))
        reach.append(reach[parents[-1]] * draw(CONFIDENCE))
    return CandidateTree.from_parents(range(len(parents)), parents), np.array(reach)


@st.composite
def staircases(draw: st.DrawFn) -> tuple[Draft, list[Branch]]:
    """A first draft and its branches, as a re-draft may return them."""
    size = draw(st.integers(1, 6))
    token, sure = st.integers(0, 2), draw(st.sampled_from([CONFIDENCE, st.floats(0.99, 1), st.just(1.0)]))

    def draft(places: int) -> tuple[list[int], list[float]]:
        return draw(st.lists(token, min_size=places, max_size=places)), draw(
            st.lists(sure, min_size=places, max_size=places)
        )

    ids, confidence = draft(size)
    trunk = Draft(np.array(ids), np.array(confidence))
    branch_size = size + 1 + draw(st.integers(0, 3))
    kept = FixedBranches(draw(st.integers(0, 6))).choose(confidence, branch_size)
    rows = [draft(branch_size) for _ in kept]
    flat = Draft(
        np.array([token for tokens, _ in rows for token in tokens]), np.array([c for _, row in rows for c in row])
    )
    return trunk, proposer._branches(trunk, kept, flat)


# -- the paper's rule


@pytest.mark.parametrize(
    ("count", "size", "kept"),
    [
        (0, 6, []),
        (1, 6, [2]),
        (4, 6, [1, 2, 3, 4]),
        (9, 6, [0, 1, 2, 3, 4]),
        (4, 7, [1, 2, 3, 4, 5]),  # longer blocks: the last one keeps the whole draft and extends it
        (1, 9, [2, 5]),
        (0, 9, []),  # no branches, no extension: that is DFlash
    ],
)
def test_fixed_branches(count: int, size: int, kept: list[int]) -> None:
    assert FixedBranches(count).choose(PAPER, size) == kept


def test_fixed_branches_of_nothing_drafted() -> None:
    assert FixedBranches(4).choose([], 1) == []


def test_fixed_branches_verify_the_whole_tree() -> None:
    staircase = merge([[7, 1, 2], [7, 3, 4]])
    assert [*FixedBranches(1).prune(staircase, [0.0, 0.0], [Branch(0, 1.0, [3, 4], [0.0, 0.0])])] == [0, 1, 2, 3, 4]


# -- what the walk may reach


def reach_of(trunk: Draft, branches: list[Branch]) -> tuple[Staircase, list[float]]:
    draft = trunk.ids.tolist()
    staircase = merge([[7, *draft], *([7, *draft[: b.kept], *b.tokens] for b in branches)])
    return staircase, AdaptiveBranches(9, costs()).reach(staircase, trunk.confidence.tolist(), branches)


@given(staircases())
def test_reach_never_grows_towards_the_leaves(drawn: tuple[Draft, list[Branch]]) -> None:
    """The order by reach keeps prefixes whole only if this holds to the last bit."""
    staircase, reach = reach_of(*drawn)
    assert reach[0] == 1
    assert all(reach[node] <= reach[parent] for node, parent in enumerate(staircase.parents) if node)


@given(staircases())
def test_no_more_is_reached_than_what_the_trunk_reaches_and_its_breaks(drawn: tuple[Draft, list[Branch]]) -> None:
    """Of the nodes at one depth the walk comes to one at most."""
    staircase, reach = reach_of(*drawn)
    depths = staircase.tree().depths
    alone = {branch.leaves(drawn[0].ids.tolist()) for branch in drawn[1]}
    if len(alone) == len(drawn[1]):  # several tails behind one break are not told apart
        assert np.bincount(depths, weights=reach).max() <= 1 + 1e-9


def test_reach_of_a_small_staircase() -> None:
    """A branch is reached where the trunk breaks."""
    trunk = Draft(np.array([1, 2]), np.array([0.8, 0.5]))
    redraft = Draft(np.array([0, 3, 4, 0, 0, 5]), np.array([0, 0.9, 0.5, 0, 0, 0.25]))
    branches = proposer._branches(trunk, [0, 1], redraft)
    assert [(b.kept, b.tokens, b.confidence) for b in branches] == [(0, [3, 4], [0.9, 0.5]), (1, [5], [0.25])]
    np.testing.assert_allclose([b.probability for b in branches], [0.2, 0.4])
    staircase, reach = reach_of(trunk, branches)
    assert staircase.tokens == [7, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(reach, [1, 0.8, 0.4, 0.2 * 0.9, 0.2 * 0.9 * 0.5, 0.4 * 0.25])


def test_a_branch_that_drafts_as_the_trunk_did_is_reached_where_they_part() -> None:
    """The re-draft of nothing kept begins like the trunk: where the trunk's first draft is wrong, so is it."""
    trunk = Draft(np.array([1, 2, 3]), np.array([0.8, 0.5, 0.5]))
    branch = Branch(0, 0.2, [1, 2, 6], [0.9, 0.9, 0.7])
    assert branch.leaves([1, 2, 3]) == 2
    staircase, reach = reach_of(trunk, [branch])
    assert staircase.tokens == [7, 1, 2, 3, 6]
    np.testing.assert_allclose(reach, [1, 0.8, 0.4, 0.2, 0.2 * 0.7])


# -- pruning


def worthy(policy: AdaptiveBranches, reach: Sequence[float], drafted: int = 6) -> list[int]:
    return policy.worthy(list(reach), drafted, 0)


def closed_subtrees(tree: CandidateTree) -> list[tuple[int, ...]]:
    """Every set of nodes that holds the root and the parent of each of its nodes."""
    others = range(1, len(tree))
    subsets = ((0, *chosen) for size in range(len(tree)) for chosen in combinations(others, size))
    return [nodes for nodes in subsets if all(int(tree.parents[node]) in nodes for node in nodes[1:])]


@settings(deadline=None)
@given(trees(largest=9), st.floats(0.01, 3), st.floats(0, 1), st.floats(0, 1))
def test_no_other_part_of_the_tree_yields_more_per_second(
    grown: tuple[CandidateTree, np.ndarray], draft: float, fixed: float, token: float
) -> None:
    """Against every subtree there is: the sum of its reach over what draft and verification cost."""
    tree, reach = grown
    policy = AdaptiveBranches(4, costs(draft=per_token(draft, 0), verify=per_token(fixed, token)))
    kept = worthy(policy, reach)
    assert tuple(kept) in closed_subtrees(tree)

    def rate(nodes: tuple[int, ...]) -> float:
        return sum(reach[node] for node in nodes) / (draft + fixed + token * len(nodes))

    assert rate(tuple(kept)) >= max(map(rate, closed_subtrees(tree))) * (1 - 1e-9)


@given(trees(), st.lists(st.floats(0, 2), min_size=2, max_size=6))
def test_dearer_tokens_never_make_a_larger_tree(grown: tuple[CandidateTree, np.ndarray], prices: list[float]) -> None:
    _, reach = grown
    sizes = [len(worthy(AdaptiveBranches(4, costs(verify=per_token(1.0, price))), reach)) for price in sorted(prices)]
    assert sizes == sorted(sizes, reverse=True)


def test_tokens_that_cost_nothing_are_all_verified() -> None:
    assert worthy(AdaptiveBranches(4, costs()), [1, 0.5, 0.25, 0.25, 0.1, 0.01]) == [*range(6)]


def test_tokens_beyond_price_leave_the_anchor() -> None:
    policy = AdaptiveBranches(4, costs(draft=FREE, verify=per_token(0.0, 1.0)))
    assert worthy(policy, [1, 0.5, 0.25, 0.25, 0.1, 0.01]) == [0]


def test_a_parent_is_never_cut_before_its_child() -> None:
    """A confidence of exactly 1 gives both the same reach."""
    for size in range(1, 7):
        steep = tuple((tokens, 1.0 if tokens <= size else 100.0) for tokens in range(1, 8))
        assert worthy(AdaptiveBranches(4, costs(verify=steep)), [1.0] * 6) == [*range(size)]


@given(staircases(), st.floats(0, 1), st.floats(0, 1))
def test_a_pruned_staircase_is_a_tree(staircase: tuple[Draft, list[Branch]], fixed: float, token: float) -> None:
    """With confidences of exactly 0 and 1 too; the constructor of trees refuses orphans."""
    policy = AdaptiveBranches(6, costs(verify=per_token(fixed, token)))
    proposal = proposer._proposal(SimpleNamespace(anchor=7), *staircase, policy)  # type: ignore[arg-type]
    assert proposal.tree.tokens[0] == 7


# -- how many branches


def naive_rate(confidence: np.ndarray, size: int, count: int, sure: float, table: PassCosts) -> float:
    """Tokens per second of `count` branches, term by term."""
    chance, trunk = 1.0, [1.0]
    ends = []
    for one in confidence:
        ends.append(chance * (1 - one))
        chance *= one
        trunk.append(chance)
    kept = sorted(range(len(ends)), key=lambda place: (-ends[place], place))[:count]
    tails = [ends[place] * sure**step for place in kept for step in range(1, size - place)]
    if kept and size > len(confidence) + 1:
        kept.append(len(confidence))
        tails += [chance * sure**step for step in range(1, size - len(confidence))]
    reach = sorted([*trunk, *tails], reverse=True)

    def price(name: str, tokens: int) -> float:
        (first, low), (last, high) = getattr(table, name)
        return low + (high - low) * (tokens - first) / (last - first)

    spent = price("draft", len(confidence) + 1) + (price("redraft", len(kept) * size) if kept else 0)
    return max(sum(reach[:nodes]) / (spent + price("verify", nodes)) for nodes in range(1, len(reach) + 1))


PRICE = st.tuples(st.floats(0.01, 2), st.floats(0, 0.3))


@given(st.lists(CONFIDENCE, min_size=1, max_size=7), st.integers(0, 3), st.integers(0, 8), PRICE, PRICE, PRICE)
def test_no_other_number_of_branches_promises_more(
    confidence: list[float], more: int, most: int, draft: Any, redraft: Any, verify: Any
) -> None:
    """Against a second formula, for every number there is; branches are the likeliest ones."""
    trunk, size = np.array(confidence), len(confidence) + 1 + more
    table = costs(per_token(*draft), per_token(*redraft), per_token(*verify))
    kept = AdaptiveBranches(most, table).choose(confidence, size)
    numbers = range(min(most, len(trunk)) + 1)
    assert kept in [FixedBranches(number).choose(confidence, size) for number in numbers]
    chosen = next(number for number in numbers if FixedBranches(number).choose(confidence, size) == kept)
    sure = float(np.mean(trunk))
    rates = [naive_rate(trunk, size, number, sure, table) for number in numbers]
    assert rates[chosen] >= max(rates) * (1 - 1e-9)


def test_as_many_as_there_are_where_passes_cost_the_same_whatever_their_width() -> None:
    policy = AdaptiveBranches(4, costs(redraft=FREE))
    assert policy.choose(PAPER, 6) == [1, 2, 3, 4]
    assert policy.choose(PAPER, 8) == [1, 2, 3, 4, 5]
    assert AdaptiveBranches(9, costs(redraft=FREE)).choose(PAPER, 6) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "table",
    [
        costs(redraft=per_token(50.0, 0.0)),
        costs(redraft=per_token(0.0, 2.0)),
        costs(redraft=per_token(0.1, 0.0), verify=per_token(0.0, 1.0)),
    ],
    ids=["a dear re-draft", "dear re-drafted tokens", "dear verified tokens"],
)
def test_none_where_they_do_not_pay(table: PassCosts) -> None:
    assert AdaptiveBranches(4, table).choose(PAPER, 6) == []


def test_none_of_nothing_drafted() -> None:
    policy = AdaptiveBranches(4, costs())
    assert policy.choose([], 1) == []
    assert policy.prune(merge([[3]]), [], []) == [0]


def redrafted(policy: AdaptiveBranches, confidence: float, *, alike: bool = False) -> None:
    """A step whose two branches have such tails, which begin as the trunk goes on or otherwise."""
    draft, firsts = [1, 2, 3, 4, 5], [2, 5] if alike else [6, 9]
    branches = [Branch(1, 0.1, [firsts[0], 8], [confidence] * 2), Branch(4, 0.1, firsts[1:], [confidence])]
    policy.prune(merge([[7, *draft], *([7, *draft[: b.kept], *b.tokens] for b in branches)]), PAPER, branches)


def test_re_drafts_that_were_unsure_are_asked_for_less() -> None:
    """What past steps re-drafted stands in for the confidences that are not known yet."""
    policy = AdaptiveBranches(4, costs(redraft=per_token(0.2, 0.0)))
    assert policy.choose(PAPER, 6) != []
    redrafted(policy, 0.01)
    assert policy.choose(PAPER, 6) == []
    for _ in range(30):
        redrafted(policy, 0.95)
    assert policy.choose(PAPER, 6) != []


def test_re_drafts_that_repeat_the_trunk_are_not_asked_for() -> None:
    """However sure they are: they bring nothing."""
    price = costs(redraft=per_token(0.2, 0.0))
    new, same = AdaptiveBranches(4, price), AdaptiveBranches(4, price)
    for _ in range(30):
        redrafted(new, 0.8)
        redrafted(same, 0.8, alike=True)
    assert new.choose(PAPER, 6) != []
    assert same.choose(PAPER, 6) == []


def test_steps_without_re_drafts_leave_the_memory_alone() -> None:
    policy = AdaptiveBranches(4, costs(redraft=per_token(0.2, 0.0)))
    before = policy.choose(PAPER, 6)
    for _ in range(30):
        policy.prune(merge([[7, 1, 2, 3, 4, 5]]), [0.01] * 5, [])
    assert policy.choose(PAPER, 6) == before


def test_what_a_tree_promises() -> None:
    """The sum of what is reached of it."""
    policy = AdaptiveBranches(0, costs(verify=per_token(1.0, 0.2)))
    nodes = policy.prune(merge([[7, 1, 2, 3]]), [0.5, 0.4, 0.1], [])
    assert policy.expected == pytest.approx(sum([1, 0.5, 0.2, 0.02][: len(nodes)]))
