"""Which modes a benchmark has, what they are called, and that a run is what the engine did."""

from __future__ import annotations

import shutil

import pytest

from dflash_trt.errors import UsageError
from dflash_trt.evaluation.bench_modes import EngineMode, engine_modes, open_bundles
from dflash_trt.runtime.branching import PassCosts

COSTS = PassCosts(draft=((1, 1.0), (8, 1.0)), redraft=((1, 1.0), (40, 1.0)), verify=((1, 1.0), (40, 1.0)))


@pytest.fixture(scope="module")
def loaded(torch_bundle, torch_d2sd_bundle):
    return open_bundles([torch_bundle, torch_d2sd_bundle], threads=1)


def labels(bundles, branches=(), drafts=()) -> list[str]:
    return [mode.label for mode in engine_modes(bundles, branches, drafts)]


def test_what_a_bundle_can_do(loaded, monkeypatch):
    dflash, d2sd = loaded
    assert labels([dflash]) == ["plain", "dflash"]
    assert labels([d2sd]) == ["plain", "dflash", "d2sd-3"]
    assert labels([d2sd], branches=(0, 1, 2, 2)) == ["plain", "dflash", "d2sd-1", "d2sd-2"]
    monkeypatch.setattr(d2sd.engine, "costs", COSTS)
    assert labels([d2sd]) == ["plain", "dflash", "d2sd-3", "d2sd-auto"]
    assert labels([dflash], drafts=(3, "auto")) == ["plain", "dflash", "dflash:3", "dflash:auto"]
    assert [mode.is_fixed for mode in engine_modes([d2sd], (1, "auto"), ())] == [True, True, True, False]


def test_options_are_those_of_generate(loaded):
    modes = engine_modes([loaded[1]], (2,), (3,))
    assert [dict(mode.options) for mode in modes] == [
        {"speculation": False}, {"branches": 0}, {"branches": 0, "drafts": 3}, {"branches": 2}
    ]  # fmt: skip


def test_a_drafter_that_two_bundles_have_is_measured_once(loaded):
    modes = engine_modes(loaded, (), ())
    assert [(mode.label, mode.bundle) for mode in modes] == [
        ("plain", loaded[0]), ("dflash", loaded[0]), ("d2sd-3", loaded[1])
    ]  # fmt: skip


def test_equal_labels_are_told_apart(torch_d2sd_bundle, tmp_path):
    for name in ("one", "two", "more/two"):
        shutil.copytree(torch_d2sd_bundle, tmp_path / name)
    bundles = open_bundles([tmp_path / name for name in ("one", "two")], threads=1)
    assert labels(bundles) == ["plain", "dflash", "d2sd-3 of one", "d2sd-3 of two"]
    bundles = open_bundles([tmp_path / name for name in ("one", "two", "more/two")], threads=1)
    whole = [f"d2sd-3 of {tmp_path / name}" for name in ("two", "more/two")]
    assert labels(bundles) == ["plain", "dflash", "d2sd-3 of one", *whole]


def test_what_cannot_be_opened_together(torch_bundle, loaded):
    with pytest.raises(UsageError, match="a bundle was given twice"):
        open_bundles([torch_bundle, torch_bundle / ".." / torch_bundle.name], threads=1)
    with pytest.raises(UsageError, match="none of the bundles has a VP drafter"):
        engine_modes(loaded[:1], (2,), ())


@pytest.mark.parametrize("options", [{"speculation": False}, {}, {"drafts": 3}], ids=str)
def test_a_run_is_what_the_engine_gives(options, loaded):
    mode = EngineMode("x", loaded[0], options)
    prompt, sampling = loaded[0].engine.tokenizer.encode("a prompt"), {"temperature": 0.8, "seed": 3}
    run = mode.run(prompt, 20, sampling)
    expected = loaded[0].engine.generate(prompt, max_tokens=20, **options, **sampling)
    assert run.token_ids == tuple(expected.token_ids)
    assert run.statistics.acceptance_lengths == expected.statistics.acceptance_lengths
    assert run.decode_tokens == 19 == sum(expected.statistics.acceptance_lengths)
    assert 0 < run.first_token_seconds < run.seconds
    assert run.decode_seconds == run.seconds - run.first_token_seconds


def test_a_run_of_one_token(loaded):
    run = EngineMode("x", loaded[0]).run([1, 2, 3], 1, {"temperature": 0.0, "seed": 0})
    assert (len(run.token_ids), run.decode_tokens) == (1, 0)
    assert run.statistics.steps == 0
