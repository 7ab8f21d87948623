"""The export figures: what is measured, what counts as beside the weights, and when the exit code is 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = EXAMPLES / "tiny"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import export_at_scale

    return export_at_scale


def row(scale: ModuleType, **changes: object):
    plain = scale.Row("onnxruntime", "float32", "some", 299.0, 90.0, 3_900_000_000, 37_000_000_000, 99_000_000)
    return replace(plain, **changes)


@pytest.mark.slow
def test_a_build_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Of the tiny pair's shape; a bundle has more than nothing beside its weights, so the exit code is 1."""
    options = ["--target", TINY / "target/config.json", "--drafter", TINY / "dflash/config.json", "--max-seq-len", 256]
    options += ["--backend", "onnxruntime", "--work", tmp_path, "--most-mb", 0, "--most-seconds", 1e6, "--json"]
    line = [str(part) for part in (sys.executable, EXAMPLES / "export_at_scale.py", *options)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    (measured,) = result["rows"]
    assert measured["linked_bytes"] == pytest.approx(4 * (3_148_608 + 935_168), rel=0.01)
    assert 100_000 < measured["overhead_bytes"] < 2_000_000
    assert 200e6 < measured["memory_bytes"] < 1e9
    assert 0 < measured["cpu_seconds"] < 4 * measured["seconds"]
    assert (measured["backend"], measured["precision"]) == ("onnxruntime", "float32")
    assert result["limits"] == {"seconds": 1e6, "memory_bytes": 4e9, "overhead_bytes": 0.0}
    (broken,) = result["broken"]
    assert "overhead" in broken
    assert broken in done.stderr
    assert "Hashing" in done.stderr  # the build's own progress
    assert list(tmp_path.iterdir()) == []


def test_bytes_beside_the_weights(scale: ModuleType, tmp_path: Path) -> None:
    """A link is not counted twice, a copy is counted in full, be it of a hole."""
    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    (bundle / "target").mkdir(parents=True)
    checkpoint.mkdir()
    for name, size in (("model.safetensors", 5_000_000), ("config.json", 10)):
        with open(checkpoint / name, "wb") as file:
            file.truncate(size)
    for link in (bundle / "target" / "model.safetensors", bundle / "target.model.safetensors"):
        os.link(checkpoint / "model.safetensors", link)
    (bundle / "model.onnx").write_bytes(bytes(700))
    os.link(bundle / "model.onnx", bundle / "same.onnx")
    assert scale._bytes(bundle, [checkpoint]) == (5_000_000, 700)
    with open(bundle / "copy.safetensors", "wb") as file:
        file.truncate(5_000_000)
    assert scale._bytes(bundle, [checkpoint]) == (5_000_000, 5_000_700)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"seconds": 300.5}, ("time 300.50 s, of 300 s",)),
        ({"memory_bytes": 4_100_000_000}, ("memory 4.10 GB, of 4 GB",)),
        ({"overhead_bytes": 37_000_000_000, "seconds": 301.0}, ("time 301.00 s", "overhead 37000.00 MB, of 100 MB")),
    ],
)
def test_limits(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(scale, "run", lambda *arguments: iter([row(scale, **changes)]))
    done = CliRunner().invoke(scale.main)
    assert done.exit_code == bool(words)
    assert len(done.stderr.splitlines()) == len(words)
    assert all(word in done.stderr for word in words)
    for word in ("onnxruntime", "some", "float32", "37.0 GB", "at most 300 seconds, 4 GB of memory, 100 MB"):
        assert word in done.stdout


def test_a_build_that_fails(scale: ModuleType, tmp_path: Path) -> None:
    options = ["--target", str(TINY / "target/config.json"), "--drafter", str(TINY / "target/config.json")]
    done = CliRunner().invoke(scale.main, [*options, "--backend", "onnxruntime", "--work", str(tmp_path)])
    assert done.exit_code == 2
    assert "the build ended with 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_shape_that_cannot_be_made(scale: ModuleType, tmp_path: Path) -> None:
    done = CliRunner().invoke(scale.main, ["--target", "nowhere/config.json", "--work", str(tmp_path)])
    assert done.exit_code == 2
    assert "nowhere: there is no such folder" in done.stderr
