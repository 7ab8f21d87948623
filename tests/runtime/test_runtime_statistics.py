"""Metrics by their definitions, and what each step is counted as: by position, by pass and by time."""

import json
import time
from collections import Counter
from itertools import takewhile

import pytest
from runtime.triples import BALANCED, hint, prompts_of, small_triple

from dflash_trt.errors import UsageError
from dflash_trt.runtime.statistics import GenerationStatistics, StepMeter, Walk, host_time, position_counts, timed
from dflash_trt.runtime.tree import CandidateTree


def test_definitions() -> None:
    statistics = GenerationStatistics()
    for yielded in (4, 1, 8):
        statistics.record_step(proposed=7, yielded=yielded)
    assert statistics.acceptance_lengths == [4, 1, 8]
    assert statistics.steps == 3
    assert statistics.mean_acceptance_length == pytest.approx(13 / 3)
    assert statistics.acceptance_rate == pytest.approx(10 / 21)


def test_an_acceptance_rate_of_15_percent_can_be_three_tokens_a_step() -> None:
    statistics = GenerationStatistics()
    for yielded in (3, 3, 3, 4):
        statistics.record_step(proposed=15, yielded=yielded)
    assert statistics.acceptance_rate == pytest.approx(0.15)
    assert statistics.mean_acceptance_length == pytest.approx(3.25)


def test_nothing_measured_is_none_not_zero() -> None:
    statistics = GenerationStatistics()
    assert statistics.mean_acceptance_length is None
    assert statistics.acceptance_rate is None
    statistics.record_step(proposed=0, yielded=1)
    assert statistics.mean_acceptance_length == 1.0
    assert statistics.acceptance_rate is None


@pytest.mark.parametrize(("proposed", "yielded"), [(3, 5), (3, 0), (-1, 1)])
def test_impossible_counts(proposed: int, yielded: int) -> None:
    with pytest.raises(UsageError, match=r"1 <= yielded <= proposed \+ 1"):
        GenerationStatistics().record_step(proposed=proposed, yielded=yielded)


def test_stages_and_dictionary() -> None:
    statistics = GenerationStatistics()
    for _ in range(2):
        with timed("draft", [statistics]):
            statistics.draft_passes += 1
    with pytest.raises(RuntimeError), timed("verify", [statistics]):
        raise RuntimeError
    assert statistics.seconds["draft"] > 0
    assert statistics.seconds["verify"] > 0
    assert statistics.seconds["prefill"] == 0
    plain = json.loads(json.dumps(statistics.to_dict()))
    assert plain["draft_passes"] == 2
    assert plain["mean_acceptance_length"] is None
    assert set(plain["seconds"]) == {"prefill", "draft", "redraft", "verify", "accept", "move", "host"}
    assert GenerationStatistics().seconds["draft"] == 0, "state must not be shared"


def test_sequences_share_the_time_of_a_pass_and_the_host_has_the_rest() -> None:
    shared = [GenerationStatistics() for _ in range(2)]
    with host_time(shared), timed("verify", shared):
        time.sleep(0.02)
    assert shared[0].seconds["verify"] == shared[1].seconds["verify"] >= 0.01
    assert 0 <= shared[0].seconds["host"] < shared[0].seconds["verify"]


def test_a_stage_has_what_was_not_counted_within_it(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    statistics = GenerationStatistics()
    with host_time([statistics]):
        now += 1
        with host_time([statistics], "prefill"):
            now += 10
            with timed("verify", [statistics]):
                now += 100
        now += 2
    assert {stage: spent for stage, spent in statistics.seconds.items() if spent} == {
        "host": 3, "prefill": 10, "verify": 100
    }  # fmt: skip


def test_walks_by_position():
    """A trunk of 3 whose first 2 are right and a branch that goes on; then a trunk that was left out but for 1."""
    meter = StepMeter()
    tree = CandidateTree.from_parents([9, 1, 2, 3, 7, 8, 5], [-1, 0, 1, 2, 2, 4, 0])
    first = meter.record_walk(tree, [1, 2, 3], [0, 1, 2, 4, 5])
    cut = CandidateTree.from_parents([9, 1, 7], [-1, 0, 1])
    second = meter.record_walk(cut, [1, 2, 3], [0, 1, 2])
    assert (first, second) == (Walk(3, 2, 4, 4), Walk(1, 1, 2, 2))
    walks = Counter([first, second])
    assert meter.trunk == [(3, 2), (1, 1)]
    assert meter.yielded == [5, 3]
    at = [(n.trunk_proposed, n.trunk_accepted, n.proposed, n.accepted) for n in position_counts(walks)]
    assert at == [(2, 2, 2, 2), (1, 1, 2, 2), (1, 0, 1, 1), (0, 0, 1, 1)]


def expected_walk(step) -> Walk:
    """Counted once more, from what the trace says."""
    edges = zip(step.parents, step.tokens, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    trunk, node = [], 0
    for token in step.draft:
        node = children.get((node, token))
        if node is None:
            break
        trunk.append(node)
    agreed = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(step.path[1:], trunk, strict=False))))
    return Walk(len(trunk), agreed, max(step.depths), len(step.path) - 1)


@pytest.mark.parametrize("options", [{"branches": 0}, {"branches": 3}, {"branches": "auto"}], ids=str)
def test_steps_are_counted_as_traced(options, tmp_path):
    engine = small_triple(tmp_path, block_size=5, vp_block_size=6, branches=3, costs=BALANCED)
    (prompt,) = prompts_of(engine, 9)
    hint(engine, [prompt], (0.8, 0.8))
    generation = engine.generate(prompt, trace=True, max_tokens=90, **options)
    statistics, steps = generation.statistics, generation.trace.steps
    assert statistics.walks == Counter(map(expected_walk, steps))
    assert statistics.steps == len(steps)
    sizes = Counter(count for (stage, count), n in statistics.passes.items() for _ in range(n) if stage == "verify")
    assert sizes == Counter(len(step.tokens) for step in steps)
    redrafted = sum(n for (stage, _), n in statistics.passes.items() if stage == "redraft")
    assert redrafted == sum(bool(step.branches) for step in steps)
    positions = statistics.positions
    assert sum(at.accepted for at in positions) == sum(len(step.path) - 1 for step in steps) > 0
    assert [at.position for at in positions] == list(range(1, max(max(step.depths) for step in steps) + 1))
    assert statistics.to_dict()["positions"][0]["proposed"] == positions[0].proposed


def test_without_speculation_nothing_is_proposed_anywhere(tmp_path):
    engine = small_triple(tmp_path)
    statistics = engine.generate(prompts_of(engine, 4)[0], speculation=False, max_tokens=10).statistics
    assert statistics.positions == []
    assert statistics.walks == {Walk(0, 0, 0, 0): 9}
    assert statistics.passes == {("verify", 1): 9}


@pytest.mark.parametrize("several", [False, True])
def test_every_moment_is_of_one_stage(several, tmp_path):
    """All but making caches and handing out, for one sequence and for slots."""
    engine = small_triple(tmp_path, branches=3, max_batch_size=2)
    prompts = prompts_of(engine, 40, 5)[: 1 + several]
    started = time.perf_counter()
    outputs = engine.generate(prompts, max_tokens=40)
    elapsed = time.perf_counter() - started
    totals = Counter()
    for output in outputs:
        totals.update(output.statistics.seconds)
    assert all(seconds > 0 for seconds in totals.values())
    assert sum(totals.values()) <= elapsed
