"""`inspect` on a trace: its numbers and its pictures, and one message where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from traces import make_branch, make_step, make_trace

from dflash_trt.documents import to_json

TRACE = make_trace(
    [
        make_step((2, 3, 4), (2, 3, 9), [make_branch(0, (8, 8, 8), 0.5), make_branch(2, (7,), 0.125)]),
        make_step((2, 3, 4), (2, 5, 6, 9), [make_branch(1, (5, 6), 0.25)]),
    ]
)
NAMES = ("staircase", "acceptance", "calibration")


@pytest.fixture
def trace(tmp_path) -> Path:
    file = tmp_path / "run[1].json"
    file.write_text(to_json(TRACE))
    return file


def _pictures(folder: Path) -> list[str]:
    return [str(folder / f"run[1].{name}.png") for name in NAMES]


def test_numbers_and_pictures_of_a_trace(run_cli, trace):
    code, out, _ = run_cli("inspect", trace, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["kind"], found["path"], found["steps"]) == ("trace", str(trace), 2)
    assert (found["system"], found["branches"], found["sampling"]) == ("d2sd", 2, {"temperature": 0.0})
    assert (found["mean_acceptance_length"], found["trunk_mean_acceptance_length"]) == (3.5, 2.5)
    assert [row["drafted"] for row in found["kept_prefixes"]] == [1, 1, 1, 0]
    assert found["trunk_calibration"]["judged"] == 5
    assert found["figures"] == _pictures(trace.parent)
    for file in found["figures"]:
        assert Path(file).read_bytes().startswith(b"\x89PNG")


def test_the_tables_say_the_same(run_cli, trace, tmp_path):
    code, out, _ = run_cli("inspect", trace, "--output", tmp_path / "new" / "folder")
    assert code == 0
    assert out.splitlines()[-3:] == _pictures(tmp_path / "new" / "folder")
    assert all(Path(file).is_file() for file in out.splitlines()[-3:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run[1].json"]
    assert out.splitlines()[0] == f"trace: {trace}"
    for words in ("d2sd, K = 2, blocks of 4", "3.50; with the trunk alone 2.50", "1 of 2 steps, 2.00 tokens each"):
        assert words in out
    assert "\u2026" not in out  # nothing is cut at the usual width


@pytest.mark.parametrize("system", ["dflash", "dflare"])
def test_a_chain_has_no_branches_to_tell_of(run_cli, tmp_path, system):
    file = tmp_path / "chain.json"
    file.write_text(to_json(make_trace([make_step((2, 3), (2, 9))], system=system)))
    code, out, _ = run_cli("inspect", file)
    assert code == 0
    assert f"{system}, K = 0" in out
    assert "won" not in out
    assert "rank" not in out


def test_a_trace_without_steps_has_no_pictures(run_cli, tmp_path):
    file = tmp_path / "empty.json"
    file.write_text(to_json(make_trace([])))
    assert json.loads(run_cli("inspect", file, "--json").out)["figures"] == []
    assert run_cli("inspect", file).code == 0
    assert list(tmp_path.iterdir()) == [file]


def test_the_step_that_is_drawn(run_cli, trace, tmp_path):
    drawn = {}
    for step in (1, 2, None):
        options = () if step is None else ("--step", step)
        assert run_cli("inspect", trace, "--json", *options).code == 0
        drawn[step] = (tmp_path / "run[1].staircase.png").read_bytes()
    assert drawn[None] == drawn[2] != drawn[1]


def _refused(outcome, *words: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("step", [0, 3, -1])
def test_a_step_the_trace_does_not_have(run_cli, trace, step):
    _refused(run_cli("inspect", trace, "--step", step, "--output", trace.parent / "new"), "--step", "steps 1 to 2")
    assert list(trace.parent.iterdir()) == [trace]


def test_pictures_need_a_folder(run_cli, trace):
    _refused(run_cli("inspect", trace, "--output", trace), "--output", "is not a folder")


@pytest.mark.parametrize("option", [("--step", 1), ("--output", "/nowhere")])
def test_drawing_options_are_for_traces(run_cli, pair, option):
    _refused(run_cli("inspect", pair.drafter, *option), option[0], "is for traces", "drafter checkpoint")


# -- what is no trace, or a damaged one


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["not valid JSON"]),
        (b'{"kind": "dflash-trt trace", ', ["not valid JSON"]),
        (b'"\xff"', ["UTF-8"]),
        (b"[" * 100_000, ["nested"]),
        (b"1" * 5000, ["not valid JSON"]),
        (b"{}", ["is JSON but no trace", '"kind": "dflash-trt trace"', "--trace"]),
        (b"[]", ["is JSON but no trace"]),
        (b'{"kind": "dflash-trt trace"}', ["damaged", "system is missing", "more"]),
    ],
)
def test_other_files_are_refused(run_cli, tmp_path, content, words):
    file = tmp_path / "file.json"
    file.write_bytes(content)
    _refused(run_cli("inspect", file), str(file), *words)
    assert list(tmp_path.iterdir()) == [file]


def _edited(**changes: object) -> dict:
    """The trace, with fields of its second step replaced; None removes one."""
    values = json.loads(to_json(TRACE))
    step = values["steps"][1]
    step.update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        del step[name]
    return values


BRANCH = {"kept": 1, "probability": 0.25, "tokens": [5, 6], "confidence": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (_edited(path=None), ["steps[1].path is missing"]),
        (_edited(draft=[2, "three", 4]), ["steps[1].draft[1] should be a valid integer"]),
        (_edited(colour="red"), ["steps[1].colour is no field of a trace"]),
        ({**_edited(), "version": 2}, ["version should be 1"]),
        (_edited(parents=[-1, 0, 1, 2, 1]), ["step 2", "CandidateTree.parents"]),
        (_edited(parents=[-1, 0, 1, 2, 5, 4]), ["step 2", "CandidateTree node 4", "parent 5"]),
        (_edited(depths=[0, 1, 2, 3, 2, 4]), ["step 2", "depth 4 must be 3"]),
        (_edited(tokens=[1, 2, 3, 4, 3, 6]), ["step 2", "same token 3"]),
        (_edited(tokens=[1, 2, 3, 4, 5, 2**70]), ["step 2", "64 bits"]),
        (_edited(tokens=[], parents=[], depths=[]), ["step 2", "CandidateTree"]),
        (_edited(path=[]), ["step 2", "path", "anchor"]),
        (_edited(path=[1, 4, 5]), ["step 2", "path", "anchor"]),
        (_edited(path=[0, 1, 4, 9]), ["step 2", "node 9 is not in the tree of 6 nodes"]),
        (_edited(path=[0, 1, 3]), ["step 2", "node 3 is a child of 2, not of 1"]),
        (_edited(emitted=[]), ["step 2", "emitted", "0 tokens"]),
        (_edited(emitted=[2, 5, 6, 9, 9]), ["step 2", "emitted", "5 tokens of a path of 4 nodes"]),
        (_edited(emitted=[2, 3]), ["step 2", "token 2 is 3, but the accepted node 4 carries 5"]),
        (_edited(confidence=[0.5, 0.5]), ["step 2", "draft", "3 tokens but 2 confidences"]),
        (_edited(confidence=[0.5, 1.5, 0.5]), ["step 2", "draft, confidence", "1.5"]),
        (_edited(branches=[{**BRANCH, "kept": 4}]), ["step 2", "branch 1", "kept 4 must be in 0..3"]),
        (_edited(branches=[{**BRANCH, "confidence": [0.5]}]), ["step 2", "branch 1", "2 tokens but 1 confidences"]),
        (_edited(branches=[{**BRANCH, "probability": -0.5}]), ["step 2", "branch 1, probability", "-0.5"]),
        (_edited(confidence=[0.5, float("nan"), 0.5]), ["step 2", "nan"]),
    ],
)
def test_a_damaged_trace_is_refused(run_cli, tmp_path, values, words):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(values))
    _refused(run_cli("inspect", file), str(file), "damaged trace", *words)
    assert list(tmp_path.iterdir()) == [file]


# -- without matplotlib, without torch


@pytest.fixture
def no_matplotlib(monkeypatch):
    figures = ("matplotlib", "dflash_trt.evaluation.trace_figures", "dflash_trt.evaluation.staircase_figure")
    for name in [name for name in sys.modules if name.startswith(figures)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_a_trace_is_not_drawn_and_all_else_works(run_cli, trace, pair):
    _refused(run_cli("inspect", trace), "matplotlib", "not installed", "pip install matplotlib")
    assert run_cli("inspect", pair.drafter).code == 0
    _refused(run_cli("inspect", pair.drafter, "--step", 1), "is for traces")


def test_a_trace_needs_no_torch(trace):
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'transformers', 'onnx', 'onnxruntime', 'onnx_ir', 'onnxscript']))\n"
        "from dflash_trt.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, "inspect", str(trace), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "trace"
