"""A benchmark from bundles to its report, and the picture of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread

import dflash_trt
from dflash_trt.errors import RequestError, UsageError
from dflash_trt.evaluation import costs
from dflash_trt.evaluation.bench import BenchSettings, run_bench
from dflash_trt.evaluation.bench_measure import physical_cores
from dflash_trt.evaluation.bench_modes import EngineMode, Run
from dflash_trt.evaluation.bench_plot import draw, write_figure
from dflash_trt.evaluation.bench_report import (
    BenchReport,
    ModeFigures,
    Prediction,
    SetFigures,
    Spread,
    StepStages,
)
from dflash_trt.evaluation.losslessness import Comparison
from dflash_trt.runtime.generation import Generation

TEXTS = ("def f(x):", "one two three")


@pytest.fixture(scope="module", autouse=True)
def passes_are_timed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_REPEATS", 1)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    file.write_text("".join(json.dumps({"id": text[:3], "prompt": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture(scope="module")
def report(torch_bundle, torch_d2sd_bundle, pair, prompts) -> BenchReport:
    pytest.importorskip("dflash.model")
    return dflash_trt.bench(
        torch_bundle, str(torch_d2sd_bundle), prompts=[str(prompts)], max_tokens=12, turns=2, threads=1, branches=[2],
        drafts=[3], target=str(pair.target), drafter=pair.drafter,
    )  # fmt: skip


def test_every_mode_is_measured_on_every_prompt(report):
    (found,) = report.sets
    labels = ["plain", "dflash", "dflash:3", "d2sd-2", "transformers", "authors"]
    assert [mode.label for mode in found.modes] == labels
    assert (found.name, [prompt.id for prompt in found.prompts]) == ("own", ["def", "one"])
    for mode in found.modes:
        assert (mode.tokens, mode.lossless) == (24, {"equal": 2, "tie": 0, "different": 0})
        assert mode.seconds > 0
        assert mode.ratio is not None
        assert mode.ratio.low <= mode.ratio.median <= mode.ratio.high
    assert found.modes[0].ratio == Spread(1, 1, 1)
    assert found.modes[-1].same_steps == 2
    assert found.winner in labels[:4]
    assert found.why.startswith(found.winner)
    assert report.passed
    assert [one["label"] for one in report.modes] == labels[:4]
    assert report.machine["threads"] == 1


def test_counts_are_those_of_generate(report, torch_bundle, torch_d2sd_bundle):
    options: dict[str, tuple[Path, dict[str, Any]]] = {
        "plain": (torch_bundle, {"speculation": False}),
        "dflash": (torch_bundle, {}),
        "dflash:3": (torch_bundle, {"drafts": 3}),
        "d2sd-2": (torch_d2sd_bundle, {"branches": 2}),
    }
    for mode in report.sets[0].modes[:4]:
        folder, given = options[mode.label]
        engine = dflash_trt.load(folder, threads=1)
        runs: list[Generation] = [engine.generate(text, max_tokens=12, trace=True, **given) for text in TEXTS]
        steps = [step for run in runs for step in run.trace.steps]
        emitted = [len(step.emitted) for step in steps]
        proposed = sum(len(step.tokens) - 1 for step in steps)
        assert mode.steps == 2 * len(steps)  # turns
        assert mode.mean_acceptance_length == pytest.approx(np.mean(emitted))
        assert mode.verified_per_step == pytest.approx(np.mean([len(step.tokens) for step in steps]))
        assert mode.acceptance_rate == (pytest.approx(sum(n - 1 for n in emitted) / proposed) if proposed else None)
        assert mode.target_passes_per_token == pytest.approx(sum(r.statistics.target_passes for r in runs) / 24)
        for at in mode.positions:
            there = [step for step in steps if max(step.depths) >= at.position]
            assert at.steps == 2 * len(there)
            assert at.accepted == pytest.approx(np.mean([len(step.path) > at.position for step in there]))


def test_stages_and_predictions(report):
    for mode in report.sets[0].modes[:4]:
        stages = mode.stages
        assert stages is not None
        assert stages.verify > 0
        assert (stages.draft > 0) == (mode.label != "plain")
        assert (stages.redraft > 0) == mode.label.startswith("d2sd")
        assert 0 < stages.host_share < 1
        found = mode.prediction
        assert found is not None
        assert found.step_cost == pytest.approx(found.draft + found.redraft + found.verify)
        assert found.predicted == pytest.approx(mode.mean_acceptance_length / found.step_cost)
        assert found.share == pytest.approx(found.measured / found.predicted)
    assert all(mode.stages is mode.prediction is None for mode in report.sets[0].modes[4:])


def test_costs_cover_every_pass(report):
    chain, staircase = report.costs
    assert [size for size, _ in chain.costs.verify] == [1, 2, 3, 4, 6, 8]
    assert chain.costs.redraft == ()
    assert staircase.costs.redraft[-1][0] == 40  # three branches and the extension, of ten
    assert chain.context == report.sets[0].context == (len(TEXTS[0]) + len(TEXTS[1])) // 2 + 6
    for table in (chain.costs.draft, chain.costs.verify, staircase.costs.redraft):
        assert [seconds for _, seconds in table] == sorted(seconds for _, seconds in table)


def test_the_report_is_plain_data(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["kind"], data["version"]) == ("dflash-trt bench", 1)
    assert set(data) == {"kind", "version", *(field.name for field in fields(BenchReport))}
    assert set(data["sets"][0]) == {field.name for field in fields(SetFigures)}
    for mode in data["sets"][0]["modes"]:
        assert set(mode) == {field.name for field in fields(ModeFigures)}
        assert mode["ratio"].keys() == {"median", "low", "high"}
    assert set(data["sets"][0]["modes"][1]["stages"]) == {field.name for field in fields(StepStages)}
    assert set(data["sets"][0]["modes"][1]["prediction"]) == {field.name for field in fields(Prediction)}
    assert data["costs"][0]["costs"]["verify"][0][0] == 1
    assert data["settings"]["target"].endswith("target")


def test_sampled_outputs_are_compared_with_their_seed(torch_bundle, prompts):
    settings = BenchSettings(
        prompts=[str(prompts)], limit=1, max_tokens=8, turns=1, threads=1, temperature=0.9, seed=3, drafts=(2,)
    )
    (found,) = run_bench([torch_bundle], settings).sets
    assert [mode.lossless["equal"] for mode in found.modes] == [1, 1, 1]


def test_sets_of_several_lengths_and_the_room_of_a_bundle(torch_bundle, tmp_path):
    """An output ends where the smallest bundle does."""
    for name, size in (("long", 90), ("short", 5)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "x" * size}))
    asked = [str(tmp_path / f"{name}.jsonl") for name in ("long", "short")]
    long, short = run_bench([torch_bundle], BenchSettings(prompts=asked, max_tokens=9, turns=1, threads=1)).sets
    assert [one.modes[0].tokens for one in (long, short)] == [6, 9]
    assert (long.context, short.context) == (93, 9)


def never_equal(*outputs, **sampling) -> Comparison:
    return Comparison("different")


def test_outputs_that_differ_fail(torch_bundle, prompts, monkeypatch):
    monkeypatch.setattr("dflash_trt.evaluation.bench.compare_outputs", never_equal)
    report = run_bench([torch_bundle], BenchSettings(prompts=[str(prompts)], max_tokens=4, turns=1, threads=1))
    assert not report.passed
    assert "2 of plain on own, 2 of dflash on own" in report.failures()


def test_a_wrong_token_is_found(torch_bundle, prompts, monkeypatch):
    """Through the real comparison."""
    ran = EngineMode.run

    def wrong(self, prompt, max_tokens, sampling) -> Run:
        run = ran(self, prompt, max_tokens, sampling)
        odd = self.label == "dflash"
        return replace(run, token_ids=(*run.token_ids[:-1], (run.token_ids[-1] + odd) % 200))

    monkeypatch.setattr(EngineMode, "run", wrong)
    report = run_bench([torch_bundle], BenchSettings(prompts=[str(prompts)], max_tokens=4, turns=1, threads=1))
    assert [mode.lossless["different"] for mode in report.sets[0].modes] == [0, 2]
    assert not report.passed


def test_in_half_precision_nothing_is_promised(pair, prompts, tmp_path, monkeypatch):
    dflash_trt.build(
        **pair._asdict(), output=tmp_path / "b", max_seq_len=64, backend="torch", dtype="bfloat16", verify=False
    )
    monkeypatch.setattr("dflash_trt.evaluation.bench.compare_outputs", never_equal)
    report = run_bench([tmp_path / "b"], BenchSettings(prompts=[str(prompts)], max_tokens=4, turns=1, threads=1))
    assert report.sets[0].modes[1].lossless["different"] == 2
    assert report.passed


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"turns": 0}, r"--turns: 0 must be an integer >= 1"),
        ({"limit": 0}, r"--limit: 0 must be an integer >= 1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 0.5, "target": "x"}, "--target: its columns are greedy, this run samples"),
        ({"prompts": "code"}, r"prompts: 'code' must be a list\. Give \['code'\]"),
        ({"prompts": ["nothing"]}, "there is no such file or set"),
        ({"branches": (1,)}, "--branches: none of the bundles has a VP drafter"),
        ({"drafts": (8,)}, "--drafts: 8 must be auto or 1 to 7"),
        ({"drafts": ("auto",)}, "auto needs the cost table"),
        ({"threads": 100000}, "--threads"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used(settings, reason, torch_bundle, prompts):
    with pytest.raises(UsageError, match=reason):
        run_bench([torch_bundle], BenchSettings(**({"prompts": [str(prompts)], "threads": 1} | settings)))


def test_nothing_to_measure():
    with pytest.raises(UsageError, match="there is no bundle"):
        dflash_trt.bench()


def test_a_prompt_that_does_not_fit(torch_bundle, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"id": "big", "prompt": "x" * 200}))
    with pytest.raises(RequestError, match="prompt big of own: has 200 tokens"):
        run_bench([torch_bundle], BenchSettings(prompts=[str(file)], threads=1))


def test_without_a_number_all_run_on_the_physical_cores(torch_bundle, prompts, monkeypatch):
    monkeypatch.setattr("dflash_trt.evaluation.bench.physical_cores", lambda: 1)
    report = run_bench([torch_bundle], BenchSettings(prompts=[str(prompts)], limit=1, max_tokens=2, turns=1))
    assert report.machine["threads"] == torch.get_num_threads() == 1


def test_hyperthreads_are_not_cores(monkeypatch):
    """Four processors on two cores of one socket, of which three are ours; elsewhere every processor counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)

    def read_text(self) -> str:
        cpu = int(self.parent.parent.name.removeprefix("cpu"))
        return "0\n" if self.name == "physical_package_id" else f"{cpu % 2}\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    assert physical_cores() == 2

    def missing(self) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert physical_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert physical_cores() == os.cpu_count()


# -- the picture


def ink(file: Path) -> float:
    """Share of pixels that are not white."""
    return float(np.mean(imread(file)[:, :, :3].min(axis=2) < 1))


@pytest.mark.filterwarnings("error")
def test_the_picture_is_written(report, tmp_path):
    before = dict(matplotlib.rcParams)
    many = replace(report, sets=tuple(replace(report.sets[0], name=f"set {n}") for n in range(6)))
    for number, one in enumerate((report, many)):
        file = tmp_path / f"{number}.png"
        write_figure(one, file)
        height, width = imread(file).shape[:2]
        assert 500 < height < 2000
        assert 1500 < width < 5000
        assert ink(file) > 0.03
    assert dict(matplotlib.rcParams) == before


def test_the_picture_shows_the_figures(report):
    speed, acceptance, time = draw(report).axes
    modes = report.sets[0].modes
    bars = [patch.get_height() for patch in speed.patches]
    assert bars == [mode.ratio.median for mode in modes[1:]]
    lines = [list(line.get_ydata()) for line in acceptance.lines]
    assert lines == [[at.accepted for at in mode.positions] for mode in modes if mode.positions]
    stages = [mode.stages for mode in modes if mode.stages is not None]
    whole = [sum(patch.get_width() for patch in time.patches if abs(patch.get_y() + 0.3 - n) < 0.1) for n in range(4)]
    spent = [
        (one.draft + one.redraft + one.verify + one.accept + one.move + one.host + one.inject)
        / mode.mean_acceptance_length
        for one, mode in zip(stages, modes, strict=False)
    ]
    assert whole == pytest.approx(spent)


def test_a_picture_of_nothing_decoded(torch_bundle, prompts, tmp_path):
    report = run_bench([torch_bundle], BenchSettings(prompts=[str(prompts)], max_tokens=1, turns=1, threads=1))
    assert report.sets[0].winner is None
    write_figure(report, tmp_path / "x.png")
    assert ink(tmp_path / "x.png") > 0.005
