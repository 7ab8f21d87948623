"""The load script: what it counts, its ratios, its exit codes, in this process and against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from serving.triton_server import serving

from dflash_trt.serving.repository import Options, write_repository

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):", "class A:\n", "import os")))
    return file


@pytest.fixture(scope="module")
def run(prompts: Path) -> Run:
    def run(*options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, EXAMPLES / "load_test.py", "--prompts", prompts, *options]
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)

    return run


SMALL = ("--concurrency", 1, "--concurrency", 3, "--requests", 4, "--turns", 2, "--max-tokens", 9, "--threads", 1)


def test_all_modes_at_every_concurrency(run: Run, bundle: Path, tmp_path: Path) -> None:
    done = run("--bundle", bundle, *SMALL, "--plot", tmp_path / "load.png", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {(row["clients"], row["name"]): row for row in result["rows"]}
    assert rows.keys() == {(clients, mode) for clients in (1, 3) for mode in ("on", "off", "auto")}
    for (_, mode), row in rows.items():
        assert (row["requests"], row["tokens"]) == (4 * 2, 9 * 4 * 2)  # the turn that warms up is not among them
        assert row["acceptance_length"] == 1 if mode == "off" else row["acceptance_length"] >= 1
        for rate in (row["tokens_per_second"], row["requests_per_second"]):
            assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]
        assert row["tokens_per_second"]["median"] == pytest.approx(9 * row["requests_per_second"]["median"])
        for latency in (row["seconds_to_first_token"], row["seconds_per_token"]):
            assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
    assert result["different"] == 0
    assert [ratio["clients"] for ratio in result["auto_over_better"]] == [1, 3]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_branches_and_sampling(run: Run, d2sd_bundle: Path) -> None:
    options = ("--speculation", "on", "--speculation", "off", "--temperature", 0.8, "--seed", 5)
    done = run("--bundle", d2sd_bundle, "--branches", 2, *SMALL, *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert [row for row in rows if {*row} & {"on", "off"}] == [[n, mode] for n in "13" for mode in ("on", "off")]
    assert "auto" not in done.stdout
    assert "differ" not in done.stderr


@pytest.mark.parametrize(("least", "code"), [(1e-6, 0), (1e6, 1)])
def test_auto_may_be_required(run: Run, bundle: Path, least: float, code: int) -> None:
    done = run("--bundle", bundle, "--concurrency", 2, "--requests", 2, "--turns", 1, "--require-auto", least)
    assert done.returncode == code, done.stderr
    assert "2 clients: auto / o" in done.stdout
    assert ("2 clients: auto is" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Give --bundle, or --url"),
        (("--bundle", "x", "--url", "http://a:1"), "Give --bundle, or --url"),
        (("--bundle", "nowhere"), "nowhere: there is no such folder"),
        (("--bundle", "x", "--branches", "many"), "many is neither a number nor auto"),
        (("--url", "ftp://a:1"), "ftp://a:1 must be"),
        (("--url", "localhost:8000"), "localhost:8000 must be"),
        (("--url", "http://a:1", "--url", "http://b:1"), "two of a name: http, http"),
        (("--url", "auto=http://a:1", "--url", "on=http://a:1", "--require-auto", 1), "there is auto, on"),
        (("--url", "http://localhost:1"), "http://localhost:1/v2/models/ensemble/generate_stream: "),
        (("--url", "grpc://localhost:1"), "grpc://localhost:1: "),
    ],
)
def test_refused(run: Run, options: tuple[object, ...], message: str) -> None:
    done = run(*options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import load_report

    return load_report


def test_auto_is_compared_with_the_mode_of_the_higher_median_turn_by_turn(report: ModuleType) -> None:
    rates = {"on": [10, 90, 20], "off": [40, 30, 50], "auto": [44, 27, 50]}
    rows = [report.Row(4, mode, [], values) for mode, values in rates.items()]
    (ratio,) = report.ratios([*rows, report.Row(1, "on", [], [1.0])])
    assert (ratio.clients, ratio.better, ratio.turns) == (4, "off", (1.1, 0.9, 1.0))
    assert ratio.median == 1


def test_the_acceptance_length_is_over_all_steps(report: ModuleType) -> None:
    row = report.Row(1, "on")
    for tokens, steps in ((9, 2), (5, 4), (1, 0)):
        row.answers.append(report.Answer("", tokens, 0.1, 0.2, None, steps))
    assert row.acceptance_length == (8 + 4) / 6


@pytest.mark.slow
def test_a_real_server(run: Run, bundle: Path, tmp_path: Path) -> None:
    write_repository(bundle, tmp_path / "models", Options(layout="single"))
    with serving(tmp_path / "models", tmp_path / "server") as server:
        addresses = ("--url", f"http://{server.http}", "--url", f"grpc://{server.grpc}")
        for sampling in ((), ("--temperature", 0.8, "--seed", 5)):
            done = run(*addresses, "--model", "dflash_trt", *SMALL, *sampling, "--json")
            assert done.returncode == 0, done.stderr
            result = json.loads(done.stdout)
            assert result["different"] == 0
            assert {(row["clients"], row["name"], row["tokens"]) for row in result["rows"]} == {
                (clients, scheme, 9 * 4 * 2) for clients in (1, 3) for scheme in ("http", "grpc")
            }
            assert all(row["acceptance_length"] >= 1 for row in result["rows"])
        for address, where in zip(addresses[1::2], ("http", "grpc"), strict=True):
            done = run("--url", address, "--model", "nothing")
            assert done.returncode == 2
            assert f"Error: {where}://" in done.stderr
            assert "'nothing' is not found" in done.stderr
