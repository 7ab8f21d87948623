"""`inspect`, `doctor` and `verify`: JSON and tables, on everything and on garbage."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import dflash_trt


@pytest.fixture
def inspect(run_cli):
    """`inspect --json`'s object."""

    def run(path: Path) -> dict:
        code, out, err = run_cli("inspect", path, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def _tensors(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def test_inspect_a_target(inspect, pair):
    found = inspect(pair.target)
    config = json.loads((pair.target / "config.json").read_text())
    shapes = _tensors(pair.target)
    assert (found["kind"], found["family"], found["dtype"]) == ("target checkpoint", "qwen3", "float32")
    for name in ("hidden_size", "vocab_size", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        assert found[name] == config[name]
    assert found["num_layers"] == config["num_hidden_layers"]
    assert found["tensors"] == len(shapes)
    assert found["parameters"] == sum(map(math.prod, shapes.values())) == found["bytes"] / 4
    assert found["files"] == ["model.safetensors"]


def test_inspect_a_drafter(inspect, pair):
    found = inspect(pair.drafter)
    shapes = _tensors(pair.drafter)
    assert (found["kind"], found["system"], found["block_size"]) == ("drafter checkpoint", "dflash", 8)
    assert (found["taps"], found["mask_token_id"]) == ([0, 2, 3], 319)
    assert found["parameters"] == sum(map(math.prod, shapes.values()))


def test_inspect_a_graph(inspect, bundle, pair):
    found = inspect(bundle / "drafter" / "model.onnx")
    assert found["kind"] == "graph"
    inputs = {value["name"]: value for value in found["inputs"]}
    assert inputs["context_features"]["shape"][2] == 3 * 32
    assert inputs["past_key_0"]["shape"][1::2] == [2, 16]
    assert {value["name"] for value in found["outputs"]} >= {"draft_ids", "confidence", "present_value_1"}
    assert set(found["external_bytes"]) == {"model.safetensors", "target.model.safetensors", "tables.safetensors"}
    drafter = sum(map(math.prod, _tensors(pair.drafter).values())) * 4
    assert found["external_bytes"]["model.safetensors"] == drafter
    assert found["functions"] == []
    assert found["operators"]["TensorScatter"] > 0


def test_inspect_a_portable_graph_names_its_functions(inspect, bundle, dumps):
    found = inspect(dumps / "target" / "1-portable.onnx")
    assert found["operators"]["dflash_trt::KVInjection"] == found["operators"]["dflash_trt::StaircaseAttention"] == 4
    assert any("KVInjection" in name for name in found["functions"])


def test_inspect_a_bundle(inspect, bundle):
    found = inspect(bundle)
    assert (found["kind"], found["system"], found["backend"]) == ("bundle", "dflash", "onnxruntime")
    config = json.loads((bundle / "config.json").read_text())["dflash_trt"]
    assert {name: found[name] for name in config} == config


def test_tables_say_the_same(run_cli, pair, bundle):
    for path, words in (
        (pair.target, ["target checkpoint", "hidden_size", "59808"]),
        (pair.drafter, ["drafter checkpoint", "mask_token_id", "319"]),
        (bundle / "target" / "model.onnx", ["graph", "past_key_0"]),
        (bundle, ["bundle", "onnxruntime", "[0, 2, 3]"]),
    ):
        code, out, err = run_cli("inspect", path)
        assert (code, err) == (0, "")
        for word in words:
            assert word in out


def test_a_path_with_brackets_and_colons_is_shown_as_it_is(run_cli, pair, tmp_path):
    for name in ("model[old]", "[", ":smile:"):
        folder = tmp_path / name
        shutil.copytree(pair.drafter, folder / "x]" if name == "[" else folder, dirs_exist_ok=True)
        code, out, _ = run_cli("inspect", folder / "x]" if name == "[" else folder)
        assert code == 0
        assert name in "".join(out.split())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"hello"),
        ("model.onnx", b"hello"),
        ("model.onnx", b""),
        ("model.onnx", bytes(range(200))),
        ("folder/config.json", b"{"),
        ("folder/config.json", b"\xff\xfe"),
        ("folder/config.json", b"[]"),
        ("folder/config.json", b"{}"),
        ("folder/config.json", b'{"dflash_trt": {}}'),
        ("folder/config.json", b'{"dflash_trt": {"format": 1, "digest": ""}}'),
        ("folder/other.json", b"{}"),
    ],
)
def test_inspect_refuses_garbage(run_cli, tmp_path, name, content):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    path = file if file.parent == tmp_path else file.parent
    code, out, err = run_cli("inspect", path)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert str(path) in err


def test_inspect_refuses_a_missing_path(run_cli):
    code, out, err = run_cli("inspect", "/nowhere", "--json")
    assert (code, out) == (2, "")
    assert "/nowhere" in err


# -- doctor


@pytest.fixture
def doctor(run_cli):
    def run() -> dict:
        code, out, err = run_cli("doctor", "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def test_doctor_tells_versions_and_backends(doctor):
    found = doctor()
    assert found["dflash_trt"] == dflash_trt.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    for package in ("torch", "onnxruntime", "onnx", "numpy"):
        assert found["packages"][package] == importlib.metadata.version(package)
    assert found["backends"]["onnxruntime"] == {"usable": True, "note": ""}
    assert set(found["backends"]) == {"onnxruntime", "torch", "tensorrt", "tensorrt-rtx"}
    for name in ("tensorrt", "tensorrt-rtx"):
        assert found["backends"][name]["usable"] or found["backends"][name]["note"]


def test_doctors_table_says_the_same(run_cli, doctor):
    code, out, _ = run_cli("doctor")
    assert code == 0
    assert doctor()["packages"]["onnxruntime"] in out
    assert "backend onnxruntime" in out


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        (
            "echo 'NVIDIA H200, 9.0, 550.54.15'",
            [{"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "550.54.15"}],
        ),
        ("echo 'No devices were found'", []),
        ("echo failed; exit 9", []),
        ("printf '\\377\\n'", []),
        (None, []),
    ],
)
def test_doctor_survives_any_nvidia_smi(doctor, tmp_path, monkeypatch, script, gpus):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n" if script else "no program")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor()["gpus"] == gpus


def test_doctor_survives_an_nvidia_smi_that_hangs(doctor, tmp_path, monkeypatch):
    import subprocess

    def hang(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("subprocess.run", hang)
    assert doctor()["gpus"] == []


# -- verify


def test_verify_of_a_random_pair_fails_its_acceptance_alone(run_cli, bundle):
    code, out, err = run_cli("verify", bundle, "--json")
    report = json.loads(out)
    assert (code, report["passed"]) == (1, False)
    assert [check["name"] for check in report["checks"] if check["status"] == "failed"] == ["acceptance"]
    assert "tau" in err.splitlines()[-1]
    assert "Traceback" not in err
    measured = {check["name"]: check["measured"] for check in report["checks"]}
    assert measured["acceptance"]["mean_acceptance_length"] < 1.05
    assert measured["losslessness"]["different"] == 0
    assert {"numbers: target.logits", "numbers: drafter.draft_ids"} <= set(measured)


def test_verify_of_a_pair_that_agrees_passes(run_cli, agreeing_pair, tmp_path):
    output = tmp_path / "bundle"
    code, _, err = run_cli(
        "build", "--target", agreeing_pair.target, "--drafter", agreeing_pair.drafter, "--output", output,
        "--max-seq-len", 128,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads((output / "report.json").read_text())
    assert report["passed"]
    assert report["bundle"] == output.name
    assert {check["status"] for check in report["checks"]} == {"passed"}
    acceptance = next(check for check in report["checks"] if check["name"] == "acceptance")
    assert acceptance["measured"]["mean_acceptance_length"] > 3.5  # blocks of 4, all taken but the last
    assert list(output.parent.iterdir()) == [output]

    code, out, _ = run_cli("verify", output)
    assert code == 0
    assert "losslessness" in out
    assert json.loads(run_cli("verify", output, "--json").out)["passed"]
