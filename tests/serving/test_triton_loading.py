"""Loading a model, by its parameters, and what it tells Prometheus."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from backend_double import Logger, MetricFamily, metric, python_backend
from models_here import FakeServer, ask, eventually, serving_here, slow_down

from dflash_trt.errors import BundleError, UsageError


def test_metrics(repository_of, bundle, random_engines):
    with serving_here(repository_of(bundle, "single")) as server:
        labels = {"model": "dflash_trt", "version": "1", "system": "dflash"}
        assert all(each.labels.items() >= labels.items() for found in MetricFamily.metrics.values() for each in found)
        expected = [random_engines["dflash"].generate(text, max_tokens=20).statistics for text in ("Once upon", "abc")]
        for text in ("Once upon", "abc"):
            ask(server, text).wait()
        ask(server, "").wait()
        eventually(lambda: metric("dflash_trt_requests_total", outcome="finished") == 2)
        eventually(lambda: metric("dflash_trt_requests_total", outcome="refused") == 1)
        eventually(lambda: metric("dflash_trt_slots_in_use") == 0)
        steps = sum(each.steps for each in expected)
        proposed = sum(each.proposed_drafts for each in expected)
        accepted = sum(each.accepted_drafts for each in expected)
        assert metric("dflash_trt_prompt_tokens_total") == 12
        assert metric("dflash_trt_generated_tokens_total") == 40
        assert metric("dflash_trt_steps_total") == steps
        assert metric("dflash_trt_step_tokens_total") == 38  # prefill gives the first token of each
        assert metric("dflash_trt_proposed_drafts_total") == proposed
        assert metric("dflash_trt_accepted_drafts_total") == accepted
        assert metric("dflash_trt_acceptance_length") == pytest.approx(38 / steps)
        assert metric("dflash_trt_acceptance_rate") == pytest.approx(accepted / proposed)
        assert (metric("dflash_trt_slots"), metric("dflash_trt_queue_depth")) == (2, 0)


def test_metrics_while_it_works(repository_of, bundle, monkeypatch):
    with serving_here(repository_of(bundle, "single")) as server:
        slow_down(server, monkeypatch)
        senders = [ask(server, max_tokens=60) for _ in range(5)]
        eventually(lambda: (metric("dflash_trt_slots_in_use"), metric("dflash_trt_queue_depth")) == (2, 3))
        for sender in senders:
            sender.wait()
        eventually(lambda: (metric("dflash_trt_slots_in_use"), metric("dflash_trt_queue_depth")) == (0, 0))


def test_a_server_without_metrics(repository_of, bundle):
    folder = repository_of(bundle, "single")
    with python_backend():
        MetricFamily.unsupported = True
        server = FakeServer(folder)
        try:
            assert len(ask(server).tokens()) == 20
            assert any("no metrics" in line for line in Logger.lines)
        finally:
            server.close()


def test_chat_needs_a_template(repository_of, bundle, layout):
    folder = repository_of(bundle, layout)
    model = "preprocessing" if layout == "ensemble" else "dflash_trt"
    key = 'key: "chat"\n  value {\n    string_value: '
    edit(folder, model, f'{key}"false"', f'{key}"true"')
    with serving_here(folder) as server:
        assert "has no chat template" in ask(server).error.message()


def edit(folder: Path, model: str, old: str, new: str) -> None:
    file = folder / model / "config.pbtxt"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('key: "threads"', 'key: "thread"', "parameter threads: is missing"),
        ('"256"', '"many"', 'parameter max_queue: is "many", but must be an integer >= 0'),
        ('"on"', '"sometimes"', 'parameter speculation: is "sometimes", but must be one of auto, on, off'),
        ('"cpu"', '"tpu"', 'parameter device: is "tpu", but must be one of cpu, cuda'),
        ('"built"', '"few"', 'parameter branches: is "few", but must be an integer >= 0'),
        ('"true"', '"yes"', 'parameter exclude_input_in_output: is "yes"'),
        ('"built"', '"1"', "needs a VP drafter"),
    ],
)
def test_a_wrong_parameter_is_named_when_loading(repository_of, bundle, old, new, said):
    folder = repository_of(bundle, "ensemble")
    edit(folder, "dflash_trt", old, new)
    with python_backend(), pytest.raises(UsageError) as raised:
        FakeServer(folder)
    assert said in raised.value.message()
    assert "needs a VP drafter" in said or str(folder / "dflash_trt/config.pbtxt") in raised.value.message()


@pytest.mark.parametrize("branches", ["auto", "0", "2"])
def test_branches_of_d2sd(repository_of, d2sd_bundle, random_engines, branches):
    folder = repository_of(d2sd_bundle, "single")
    edit(folder, "dflash_trt", '"built"', f'"{branches}"')
    if branches == "auto":  # the bundle was built without measuring
        with python_backend(), pytest.raises(UsageError, match="auto needs the cost table"):
            FakeServer(folder)
        return
    with serving_here(folder) as server:
        expected = random_engines["d2sd"].generate("Once upon", max_tokens=20, branches=int(branches))
        (response,) = ask(server).wait()
        assert response["output_ids"].reshape(-1).tolist() == expected.token_ids
        assert response["total_draft_tokens"].item() == expected.statistics.proposed_drafts


def test_a_model_file_that_is_gone_is_named(bundle, repository_of, tmp_path):
    moved = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    folder = repository_of(moved, "single")
    (moved / "target" / "model.onnx").unlink()
    with python_backend(), pytest.raises(BundleError) as raised:
        FakeServer(folder)
    assert raised.value.where == str(moved / "target" / "model.onnx")
    assert raised.value.what == "is missing from the bundle"


def test_a_bundle_that_was_left_behind_is_named(bundle, repository_of, tmp_path):
    moved = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    folder = repository_of(moved, "single")
    moved.rename(tmp_path / "elsewhere")
    with python_backend(), pytest.raises(UsageError, match=r"parameter bundle: leads to .*, where there is no such"):
        FakeServer(folder)


def test_a_tokenizer_that_is_gone_is_named(bundle, repository_of, tmp_path):
    moved = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    folder = repository_of(moved, "ensemble")
    shutil.rmtree(folder / "dflash_trt")
    (moved / "tokenizer" / "tokenizer.json").unlink()
    with python_backend(), pytest.raises(BundleError) as raised:
        FakeServer(folder)
    assert raised.value.where == str(moved / "tokenizer" / "tokenizer.json")
