"""scripts/gpu_check.py as a program: exit codes, what it writes, and that a section's end is nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu import sections
from gpu.context import Budget, Context, NotRunError, Options
from gpu.report import Report, table_lines
from gpu.results import Check, Result, Table, exit_code, not_run
from gpu.runner import Runner
from gpu.worker import run_section
from test_light_imports import HIDING, LEFT_OUT

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def run_script(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **environment}
    )


def test_no_gpu_is_one_message(tmp_path: Path) -> None:
    done = run_script("--output", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr == "error: there is no CUDA GPU here that torch can use\n"
    assert not done.stdout
    assert not (tmp_path / "out").exists()


def test_unknown_sections_are_bad_usage() -> None:
    done = run_script("--device", "cpu", "--sections", "kernels,speed")
    assert done.returncode == 2
    assert "--sections: speed must be of environment, kernels" in done.stderr


@pytest.mark.slow
def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    """The correctness of what runs in the interpreter; no figures, and it says so."""
    done = run_script("--device", "cpu", "--seed", 11, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "nothing about a GPU" in done.stderr
    assert "seed 11" in done.stderr
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    found = {result["section"]: result for result in content["results"]}
    assert list(found) == list(sections.SECONDS)
    assert content["about"]["seed"] == 11
    for name in ("environment", "kernels", "step"):
        assert found[name]["status"] == "ok", found[name]["reason"]
    names = {check["name"].partition(":")[0] for check in found["kernels"]["checks"]}
    kernels = {"accept_path", "move_rows, gather_features", "kv_injection", "staircase_attention"}
    assert kernels | {"torch.ops staircase_attention", "torch.ops kv_injection_"} <= names
    assert sum("lossless" in check["name"] for check in found["step"]["checks"]) == 6
    for name in ("ceilings", "attention_speed", "injection_speed", "plugins"):
        assert (found[name]["status"], found[name]["reason"]) == ("not run", "needs a GPU")
        assert not found[name]["tables"]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "nothing about a GPU" in text
    assert "µs" not in text


def test_imports_little() -> None:
    """With none of the packages there that a machine with a GPU may lack."""
    left_out = (*LEFT_OUT, "hypothesis", "pytest")
    paths = sorted(path.relative_to(SCRIPT.parent) for path in SCRIPT.parent.rglob("*.py"))
    names = [".".join(path.with_suffix("").parts) for path in paths if path.name != "__init__.py"]
    assert len(names) > 20
    code = HIDING.replace(str(LEFT_OUT), str(left_out))
    assert "hypothesis" in code
    code += f"""
import importlib
sys.path[:0] = {[str(SCRIPT.parent), str(ROOT)]}
for name in {names}:
    importlib.import_module(name)
import dflash_trt.evaluation.losslessness
assert not set({left_out}) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


# --- sections ---


def context(tmp_path: Path, seconds: float = 100.0) -> Context:
    return Context(Options(device="cpu"), Budget(seconds), ROOT, tmp_path)


def test_what_a_section_raises_is_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: Context, result: Result) -> None:
        result.check("first", True)
        raise ValueError("broken")

    monkeypatch.setattr(sections, "load", lambda name: run)
    result = run_section("kernels", context(tmp_path))
    assert (result.status, result.reason) == ("error", "ValueError: broken")
    assert result.checks == [Check("first", True)]
    assert "broken" in result.data["traceback"]


def test_a_section_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: Context, result: Result) -> None:
        raise NotRunError("no such thing here")

    monkeypatch.setattr(sections, "load", lambda name: run)
    assert run_section("rtx", context(tmp_path)) == not_run("rtx", "no such thing here")
    assert run_section("rtx", context(tmp_path, seconds=-1.0)) == not_run("rtx", "time")


def test_budgets_fit_into_the_whole() -> None:
    from gpu.command import SECONDS
    from gpu.runner import _GRACE

    assert sum(sections.SECONDS.values()) <= SECONDS
    assert SECONDS + _GRACE <= 480


def test_a_budget_counts_down() -> None:
    now = 100.0
    budget = Budget(10.0, clock=lambda: now)
    now = 107.0
    assert budget.left() == 3.0
    assert budget.allows(2.9)
    assert not budget.allows(3.0)


def test_exit_codes() -> None:
    fine = Result("kernels", checks=[Check("a", True)])
    assert exit_code([fine, not_run("rtx", "time")]) == 0
    wrong = Result("step", checks=[Check("a", True), Check("b", False)])
    wrong.settle()
    assert exit_code([fine, wrong]) == 1
    assert exit_code([fine, Result("step", status="error")]) == 1


# --- the runner, over workers that behave badly ---

WORKER = """
import json, os, sys, time
work = json.loads(sys.argv[1])
def say(**event): print(json.dumps(event), flush=True)
def result(name, **own):
    base = {"section": name, "status": "ok", "reason": "", "seconds": 1.0, "checks": [], "tables": [], "skipped": [],
            "facts": {}, "data": {}}
    say(event="result", result={**base, **own})
for name in work["sections"]:
    say(event="start", section=name)
    say(event="note", text=f"{name} runs")
    if name == "kernels":
        KERNELS
    elif name == "ceilings":
        result(name, data={"bandwidth": 2.0, "flops": {"bf16": 3.0}})
    else:
        result(name, facts={"ceilings": work["ceilings"], "seed": work["options"]["seed"]})
"""
DYING = {
    "crash": ("sys.stderr.write('no more'); os._exit(7)", "error", "the process ended with 7: no more"),
    "hang": ("time.sleep(600)", "error", "it took too long and was ended"),
    "lost device": ("result(name, status='failed'); sys.exit(3)", "failed", ""),
}


@pytest.mark.parametrize("way", DYING)
def test_a_worker_that_ends_loses_no_other_section(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sections.SECONDS, "kernels", 0.1)
    code, status, reason = DYING[way]
    found: list[Result] = []
    notes: list[str] = []
    names = ["environment", "ceilings", "kernels", "step", "rtx"]
    runner = Runner(
        [sys.executable, "-c", WORKER.replace("KERNELS", code)], Options(seed=5), found.append,
        lambda section, note: notes.append(note), grace=1.0,
    )  # fmt: skip
    runner.run(names, 60.0)
    assert [result.section for result in found] == names
    assert (found[2].status, found[2].reason) == (status, reason)
    assert [result.status for result in found if result.section != "kernels"] == ["ok"] * 4
    # the worker that goes on knows what was measured before
    assert found[3].facts == {"ceilings": {"bandwidth": 2.0, "flops": {"bf16": 3.0}}, "seed": 5}
    assert "kernels runs" in notes


def test_what_no_longer_fits_is_said() -> None:
    found: list[Result] = []
    Runner([sys.executable, "-c", WORKER.replace("KERNELS", "pass")], Options(), found.append).run(["step", "rtx"], 0.0)
    assert found == [not_run("step", "time"), not_run("rtx", "time")]


def test_a_worker_that_never_starts_is_every_section_s_error() -> None:
    found: list[Result] = []
    Runner([sys.executable, "-c", "raise SystemExit('no torch')"], Options(), found.append).run(["step", "rtx"], 60.0)
    assert [(result.section, result.status) for result in found] == [("step", "error"), ("rtx", "error")]
    assert "no torch" in found[0].reason


@pytest.mark.slow
def test_a_wrong_kernel_is_exit_code_1(tmp_path: Path) -> None:
    """From a worker with a fault in a kernel's own source to the exit code."""
    faulty = tmp_path / "faulty.py"
    faulty.write_text(
        f"""import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "plugins")]}
import interpreter
from dflash_trt.plugins.kernels import staircase_attention
import triton.language as tl
staircase_attention.LOG2E = tl.constexpr(1.47)
from gpu.worker import main
main(sys.argv[1])
"""
    )
    report = Report(tmp_path / "out", {}, on_gpu=False)
    Runner([sys.executable, str(faulty)], Options(device="cpu"), report.add).run(["kernels"], 120.0)
    (result,) = report.results
    assert result.status == "failed"
    failed = [check.name for check in result.checks if not check.ok]
    assert len(failed) >= 6
    assert all("staircase_attention" in name for name in failed)
    assert exit_code(report.results) == 1
    assert f"- FAILED {failed[0]}" in (tmp_path / "out" / "results.md").read_text()


# --- what is written ---


MARKDOWN = """# GPU check

- device: H200
- seed: 3

| section | result | checks | seconds |
|---|---|---|---|
| environment | ok |  | 0.0 |
| kernels | failed (1 parts not run) | 1 of 2 | 12.3 |
| rtx | not run: tensorrt_rtx is not installed |  | 0.0 |

## environment

### Environment

|  |  |
|---|---|
| torch | 2.9 |

## kernels

### Speed

| Q | µs |
|---|---|
| 16 | 1.5 |
| 70 | - |

A note.

1 of 2 checks passed.

- FAILED wrong / so: 3.1 of the bound

Not run:

- more: time

## rtx

not run: tensorrt_rtx is not installed
"""


def test_report(tmp_path: Path) -> None:
    report = Report(tmp_path / "out", {"device": "H200", "seed": 3}, on_gpu=True)
    table = Table("Speed", ["Q", "µs"], [[16, "1.5"], [70, None]], "A note.")
    report.add(
        Result("environment", facts={"torch": "2.9"}, tables=[Table("Environment", ["", ""], [["torch", "2.9"]])])
    )
    checks = [Check("right", True), Check("wrong | so", False, "3.1 of\nthe bound")]
    report.add(Result("kernels", "failed", checks=checks, tables=[table], skipped=["more: time"], seconds=12.34))
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"][1]["tables"][0]["rows"][1] == [
        70,
        None,
    ]
    report.add(not_run("rtx", "tensorrt_rtx is not installed"))
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [Result.from_dict(result) for result in content["results"]] == report.results
    assert (tmp_path / "out" / "results.md").read_text() == MARKDOWN


def test_cells_are_one_line() -> None:
    rows: list[list[Any]] = [["a|b\nc", "x" * 400]]
    (line,) = table_lines(Table("", ["", ""], rows))[2:]
    assert line.startswith("| a/b c | xxx")
    assert len(line) < 320
