"""`dflash-trt bench`: what it prints, what it writes, and what it refuses before it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from dflash_trt.cli.bench import command
from dflash_trt.evaluation import costs
from dflash_trt.evaluation.losslessness import Comparison


@pytest.fixture(scope="module", autouse=True)
def passes_are_timed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_REPEATS", 1)
        yield


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "own.jsonl"
    file.write_text('{"id": "a", "prompt": "def f(x):"}\n{"prompt": "while True:"}\n')
    return file


@pytest.fixture
def bench(run_cli, bundle, prompts):
    """The command with what keeps it short; options that come later win."""
    common = ("--prompts", prompts, "--max-tokens", "8", "--turns", "1", "--threads", "1")
    return lambda *args: run_cli("bench", bundle, *common, *args)


def test_tables(bench, bundle, tmp_path):
    plot = tmp_path / "figure.png"
    done = bench("--drafts", "3", "--plot", plot)
    assert done.code == 0, done.err
    for text in (
        "1 thread, 1 turn, 8 new tokens at most, greedy",
        "own, 2 prompts",
        "plain", "dflash", "dflash:3",
        "outputs as plain", "2 of 2",
        "tau", "host share", "accept", "move",
        f"{bundle}: a pass by its new tokens, behind 14 cached ones",
        "predicted", "measured",
        "own: ",
    ):  # fmt: skip
        assert text in done.out, text
    assert "own, 2 prompts" in done.err  # the progress
    assert imread(plot).shape[1] > 1000


def test_json(bench):
    done = bench("--json", "--limit", "1")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["kind"] == "dflash-trt bench"
    assert data["settings"] | {"prompts": None} == {
        "prompts": None, "limit": 1, "max_tokens": 8, "chat": None, "temperature": 0.0, "seed": 0, "threads": 1,
        "turns": 1, "branches": [], "drafts": [], "target": None, "drafter": None, "device": "cpu",
    }  # fmt: skip
    assert [mode["label"] for mode in data["sets"][0]["modes"]] == ["plain", "dflash"]
    assert [one["id"] for one in data["sets"][0]["prompts"]] == ["a"]
    assert data["passed"] is True


def test_outputs_that_differ_exit_with_1(bench, monkeypatch):
    monkeypatch.setattr("dflash_trt.evaluation.bench.compare_outputs", lambda *args, **kwargs: Comparison("different"))
    done = bench()
    assert done.code == 1
    assert "0 of 2, 2 different" in done.out
    assert "outputs differ from token-by-token decoding: 2 of plain on own, 2 of dflash on own" in done.err


def test_pictures_that_could_not_be_written_are_refused_at_once(run_cli, bundle, tmp_path, monkeypatch):
    def refused(file: Path) -> str:
        done = run_cli("bench", bundle, "--prompts", "nothing", "--plot", file)
        assert done.code == 2
        return done.err

    (tmp_path / "folder.png").mkdir()
    assert f"--plot {tmp_path / 'x.jpg'}: must end in .png" in refused(tmp_path / "x.jpg")
    assert "is there and is no file" in refused(tmp_path / "folder.png")
    assert "its folder does not exist" in refused(tmp_path / "no" / "x.png")
    assert "lies in a bundle, which must stay as it was built" in refused(bundle / "x.png")
    assert "there is no such file or set" in refused(tmp_path / "x.png")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert "its folder cannot be written to" in refused(tmp_path / "x.png")


def test_without_matplotlib_there_is_no_picture(run_cli, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run_cli("bench", bundle, "--plot", tmp_path / "x.png")
    assert done.code == 2
    assert "needs the package matplotlib. Install it: pip install matplotlib" in done.err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--turns", "0"), "turns"),
        (("--limit", "0"), "limit"),
        (("--drafts", "many"), "drafts"),
        (("--device", "tpu"), "device"),
        (("--temperature", "-1"), "temperature"),
        (("--target", "/nowhere"), "there is no such folder"),
        (("--drafter", "/nowhere"), "needs the target's folder, too"),
        (("--branches", "2"), "none of the bundles has a VP drafter"),
        (("--prompts", "nothing"), "there is no such file or set"),
        (("--chat",), "the model has no chat template"),
    ],
)
def test_refusals(args, reason, bench):
    done = bench(*args)
    assert done.code == 2
    assert reason in done.err
    assert done.out == ""


def test_bundles_of_two_targets(run_cli, bundle, damaged, prompts):
    """Bundles that cannot be read, or not together."""
    (damaged / "report.json").write_text("{}")
    for folders, reason in (((bundle, bundle), "given twice"), ((bundle, damaged), "added after the build")):
        done = run_cli("bench", *folders, "--prompts", prompts)
        assert (done.code, done.out) == (2, "")
        assert reason in done.err


def test_at_least_one_bundle_is_given():
    assert CliRunner().invoke(command, []).exit_code == 2


def test_it_needs_no_torch(bundle, prompts):
    absent = "import sys\nsys.modules.update(dict.fromkeys(('torch', 'transformers', 'onnx', 'matplotlib')))\n"
    script = f"{absent}from dflash_trt.cli.main import main\nmain(sys.argv[1:])"
    options = ("--prompts", prompts, "--limit", 1, "--max-tokens", 3, "--turns", 1, "--threads", 1, "--json")
    args = [sys.executable, "-c", script, "bench", bundle, *options]
    done = subprocess.run([str(arg) for arg in args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
