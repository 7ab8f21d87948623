"""The arithmetic of a benchmark, on runs made up with round numbers."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.evaluation.bench_costs import explain, predict, seconds_of
from dflash_trt.evaluation.bench_figures import mode_figures, ratios, set_figures
from dflash_trt.evaluation.bench_measure import Measured, Task, measure
from dflash_trt.evaluation.bench_modes import EngineMode, Run
from dflash_trt.evaluation.bench_report import ModeFigures, Prediction, Spread
from dflash_trt.progress import SilentProgress
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.statistics import GenerationStatistics, Walk

COSTS = PassCosts(draft=((1, 0.5), (8, 1.0)), redraft=((1, 1.0),), verify=((1, 2.0), (2, 3.0), (8, 4.0)))


def counted(lengths: list[int], drafts: int = 0, **seconds: float) -> GenerationStatistics:
    """Statistics of a chain that verifies so many drafts in every step."""
    statistics = GenerationStatistics(target_passes=len(lengths) + 1)
    for yielded in lengths:
        walk = Walk(drafts, yielded - 1, drafts, yielded - 1)
        statistics.record_step(proposed=drafts, yielded=yielded, walk=walk)
        statistics.passes["verify", drafts + 1] += 1
        if drafts:
            statistics.passes["draft", 8] += 1
    statistics.seconds.update(seconds)
    return statistics


def run(tokens: int, first: float, decode: float, statistics: GenerationStatistics | None = None) -> Run:
    return Run(tuple(range(tokens)), first + decode, first, statistics)


def mode(label: str, *, drafter: int = 0, **options: Any) -> EngineMode:
    return EngineMode(label, SimpleNamespace(drafter=drafter), options)  # type: ignore[arg-type]


def always_equal(prompt, plain, output):
    return "equal"


def test_ratios_are_medians_of_runs_of_the_same_turn():
    """A busy second turn: four times as slow, for both."""
    plain = [[run(11, 1, 10), run(11, 1, 44), run(11, 1, 10)], [run(11, 1, 10)] * 3]
    other = [[run(11, 1, 5), run(11, 1, 20), run(11, 1, 4)], [run(6, 1, 20)] * 3]  # half as many tokens: per token
    assert ratios(plain, other) == [pytest.approx(2.2), pytest.approx(0.25)]
    assert ratios([[run(1, 1, 0)]], [[run(1, 1, 0)]]) == [None]


def test_figures_of_a_mode():
    """Two prompts, three turns; the second prompt's steps are cut by its end."""
    plain = [[run(9, 1.0, 8.0, counted([1] * 8, verify=7.0, host=1.0))] * 3, [run(3, 2.0, 2.0, counted([1] * 2))] * 3]
    slow, typical, fast = (
        run(9, 1.0, seconds, counted([4, 4], 7, draft=1.0, verify=2.0, accept=0.25, move=0.25, host=0.5, prefill=9.0))
        for seconds in (9.0, 5.0, 4.0)
    )
    drafted = [[slow, typical, fast], [run(3, 3.0, 1.0, counted([2], 7, verify=1.0))] * 3]
    figures = mode_figures(mode("dflash"), {"plain": plain, "dflash": drafted}, ["equal", "tie"], None)
    assert figures.tokens == 9 + 3
    assert figures.seconds == 6.0 + 4.0
    assert figures.first_token_ms == 2000
    assert figures.ms_per_token == Spread(median=562.5, low=531.25, high=593.75)  # of 625 and 500
    assert figures.ratio is not None
    assert astuple(figures.ratio) == pytest.approx((1.8, 1.7, 1.9))  # of 8/5 and 2/1
    assert figures.total_ratio == pytest.approx(13 / 10)
    assert figures.lossless == {"equal": 1, "tie": 1, "different": 0}
    assert (figures.steps, figures.mean_acceptance_length) == (9, pytest.approx(10 / 3))
    assert figures.mean_of_responses == 3
    assert figures.acceptance_rate == pytest.approx((3 + 3 + 1) / 21)
    assert figures.verified_per_step == 8
    assert figures.target_passes_per_token == pytest.approx(5 / 12)
    assert [at.accepted for at in figures.positions] == pytest.approx([1, 2 / 3, 2 / 3, 0, 0, 0, 0])
    assert all(at.steps == 9 and at.trunk == at.accepted for at in figures.positions)
    stages = figures.stages
    assert stages is not None
    assert (stages.draft, stages.redraft, stages.verify) == pytest.approx((1000 / 3, 0, 1000))
    assert (stages.accept, stages.move, stages.host) == pytest.approx((250 / 3, 250 / 3, 500 / 3))
    assert stages.inject == pytest.approx(1000 / 3)  # 5 + 1 seconds, 4 + 1 of them counted
    assert stages.host_share == pytest.approx(1 / 5)
    assert (figures.prediction, figures.same_steps) == (None, None)


def test_without_statistics_only_time_is_known():
    plain = [[run(5, 1, 4, counted([1] * 4, verify=4.0))]]
    figures = mode_figures(mode("transformers"), {"plain": plain, "transformers": [[run(5, 1, 8)]]}, ["equal"], COSTS)
    assert figures.ratio == Spread(0.5, 0.5, 0.5)
    assert figures.steps is figures.mean_acceptance_length is figures.stages is figures.prediction is None
    assert figures.positions == ()


def test_predictions_follow_the_passes_that_ran():
    """Single passes take 2; a step drafts 8 for 1 and verifies 8 for 4: 2.5 single ones for 4 tokens."""
    plain = [run(9, 1, 99, counted([1] * 8, verify=16.0, host=4.0, prefill=77.0))]
    drafted = [run(9, 1, 99, counted([4, 4], 7, draft=2.0, verify=8.0, host=2.5))]
    found = predict(COSTS, drafted, plain, [drafted[0].statistics])
    assert found == Prediction(
        draft=0.5, redraft=0.0, verify=2.0, step_cost=2.5, predicted=1.6, measured=20 / 12.5, share=1.0
    )
    assert predict(COSTS, plain, plain, [plain[0].statistics]).predicted == 1.0
    assert predict(None, drafted, plain, [drafted[0].statistics]) is None
    assert predict(COSTS, drafted, plain, [counted([])]) is None


def test_costs_are_interpolated():
    assert [seconds_of(COSTS.verify, tokens) for tokens in (1, 2, 5, 8)] == [2.0, 3.0, 3.5, 4.0]


def figures_of(label: str, speed: float, tau: float, cost: float | None) -> ModeFigures:
    prediction = None if cost is None else Prediction(0.5, 0.0, cost - 0.5, cost, tau / cost, speed, 1.0)
    return ModeFigures(
        label, 10, 1.0, 1.0, None, Spread(speed, speed, speed), speed, {}, mean_acceptance_length=tau,
        verified_per_step=8.0, prediction=prediction,
    )  # fmt: skip


def test_the_winner_and_why():
    plain, dflash = figures_of("plain", 1.0, 1.0, 1.0), figures_of("dflash", 2.1, 3.1, 1.4)
    branches = figures_of("d2sd-4", 1.5, 3.6, 2.3)
    assert explain([plain, branches, dflash]) == (
        "dflash wins (2.10x): a step yields 3.10 tokens and costs 1.40 single steps (verifies 8.0 tokens); d2sd-4 "
        "comes next (1.50x): its step yields more, 3.60, but costs 2.30 single steps (verifies 8.0)."
    )
    assert explain([plain, figures_of("dflash", 0.8, 1.2, 1.5)]) == (
        "plain wins: a step of dflash, the next best (0.80x), yields 1.20 tokens and costs 1.50 single steps (verifies "
        "8.0 tokens)."
    )
    assert explain([plain, dflash]).endswith("no other mode is faster than token by token.")
    cheap = figures_of("auto", 2.0, 2.0, 1.2)
    assert "auto comes next (2.00x): its step yields fewer, 2.00, but costs 1.20" in explain([dflash, cheap])
    worse = figures_of("worse", 2.0, 2.0, 1.9)
    assert "its step yields fewer, 2.00, and costs 1.90" in explain([dflash, worse])
    same = figures_of("same", 2.0, 3.1, 1.9)
    assert "its step yields as many, 3.10, and costs 1.90" in explain([dflash, same])
    unknown = figures_of("unknown", 2.0, 3.0, None)
    assert "its step yields fewer, 3.00, and verifies 8.0." in explain([dflash, unknown])
    assert explain([]).startswith("Nothing was decoded")
    assert explain([plain]) == "plain is alone."


TASKS = (Task("a", (1, 2), 9), Task("b", (1, 2, 3, 4), 9))


def test_figures_of_a_set():
    """Against "plain" a fixed mode gains on the first prompt, another on the second, and one that chooses on both."""
    runs = {
        "plain": [[run(9, 1, 8.0, counted([1] * 8, verify=8.0))], [run(9, 1, 8.0, counted([1] * 8, verify=8.0))]],
        "dflash": [[run(9, 1, 4.0, counted([8], 7, verify=4.0))], [run(9, 1, 10.0, counted([8], 7, verify=9.0))]],
        "dflash:1": [[run(9, 1, 6.0, counted([2] * 4, 1))], [run(9, 1, 6.0, counted([2] * 4, 1))]],
        "dflash:auto": [[run(9, 1, 4.0, counted([8], 7))], [run(9, 1, 6.0, counted([2] * 4, 1))]],
        "other": [[run(9, 1, 1.0, counted([8], 7))], [run(9, 1, 1.0, counted([8], 7))]],
        "transformers": [[run(9, 1, 16.0)], [run(9, 1, 16.0)]],
    }
    modes = [
        mode("plain", speculation=False),
        mode("dflash"),
        mode("dflash:1", drafts=1),
        mode("dflash:auto", drafts="auto"),
        mode("other", drafter=1),
    ]

    @dataclass
    class Baseline:
        label: str = "transformers"

    def judge(prompt, plain, output):
        return "different" if prompt == (1, 2, 3, 4) else "equal"

    found = set_figures(Measured("s", TASKS, runs), [*modes, Baseline()], {"dflash": COSTS}, judge)
    assert (found.name, found.context) == ("s", 7)  # 2 + 9 // 2 and 4 + 9 // 2
    assert [one.label for one in found.modes] == list(runs)
    assert found.winner == "other"
    (auto,) = found.auto
    assert (auto.label, auto.best_fixed) == ("dflash:auto", "dflash:1")
    assert auto.total_ratio == pytest.approx(12 / 10)
    assert auto.ratio == Spread(1.25, 1.125, 1.375)
    assert [one.prediction is not None for one in found.modes] == [False, True, False, False, False, False]
    assert found.prompts[1].lossless == dict.fromkeys(runs, "different")
    assert found.prompts[1].ms_per_token["dflash"] == 1250
    assert (found.prompts[1].id, found.prompts[1].prompt_tokens, found.prompts[1].new_tokens["plain"]) == ("b", 4, 9)


def test_the_worst_turn_is_judged():
    plain, odd = Run((1, 2), 2, 1), Run((1, 3), 2, 1)
    runs = {"plain": [[plain] * 3], "dflash": [[plain, odd, plain]]}
    verdict = {(1, 2): "equal", (1, 3): "tie"}
    found = set_figures(
        Measured("s", TASKS[:1], runs), [mode("plain"), mode("dflash")], {}, lambda prompt, plain, out: verdict[out]
    )
    assert [one.lossless["tie"] for one in found.modes] == [0, 1]


def test_outputs_of_one_token_have_no_speed():
    runs = {"plain": [[run(1, 1, 0.0, counted([]))]], "dflash": [[run(1, 1, 0.0, counted([]))]]}
    modes = [mode("plain"), mode("dflash"), mode("dflash:auto", drafts="auto")]
    found = set_figures(
        Measured("s", TASKS[:1], runs | {"dflash:auto": runs["dflash"]}), modes, {"dflash": COSTS}, always_equal
    )
    assert found.winner is None
    assert found.auto == ()
    assert found.modes[1].ratio is found.modes[1].ms_per_token is found.modes[1].mean_acceptance_length is None


class Recording:
    """A mode that notes when it was asked for what."""

    def __init__(self, label: str, calls: list) -> None:
        self.label, self._calls = label, calls

    def run(self, prompt, max_tokens, sampling):
        self._calls.append((self.label, prompt, max_tokens, dict(sampling)))
        return run(max_tokens, 1, 1)


def test_modes_take_turns_and_none_always_goes_first():
    calls: list = []
    modes = [Recording(label, calls) for label in "xyz"]
    found = measure("s", TASKS, modes, {"seed": 1}, 3, SilentProgress())
    warm_up, calls = calls[:3], calls[3:]
    assert [call[0] for call in warm_up] == ["x", "y", "z"]
    rounds = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert len(rounds) == 6
    assert {call[1] for call in rounds[0]} == {(1, 2)}
    assert [one[0][0] for one in rounds] == ["x", "y", "y", "z", "z", "x"]
    assert all(sorted(call[0] for call in one) == ["x", "y", "z"] for one in rounds)
    assert all(call[2:] == (9, {"seed": 1}) for call in calls)
    assert found.runs.keys() == set("xyz")
    assert all(len(turns) == 3 for runs in found.runs.values() for turns in runs)
