"""Both metrics by their definitions."""

import json
import time

import pytest

from dflash_trt.errors import UsageError
from dflash_trt.runtime.statistics import GenerationStatistics, host_time, timed


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
    assert set(plain["seconds"]) == {"prefill", "draft", "redraft", "verify", "host"}
    assert GenerationStatistics().seconds["draft"] == 0, "state must not be shared"


def test_sequences_share_the_time_of_a_pass_and_the_host_has_the_rest() -> None:
    shared = [GenerationStatistics() for _ in range(2)]
    with host_time(shared), timed("verify", shared):
        time.sleep(0.02)
    assert shared[0].seconds["verify"] == shared[1].seconds["verify"] >= 0.01
    assert 0 <= shared[0].seconds["host"] < shared[0].seconds["verify"]
