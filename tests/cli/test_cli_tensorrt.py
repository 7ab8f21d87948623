"""`build --backend tensorrt --stop-after lower`: all but the engines, on a machine without TensorRT and a GPU."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
from makers import make_drafter, make_target

from dflash_trt import load
from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.bundle import read_info
from dflash_trt.errors import BundleError
from dflash_trt.evaluation.numbers import compare_graphs
from dflash_trt.loading import reference_session
from dflash_trt.native import LIBRARY_NAME

Run = Callable[..., Any]  # what a command did: code, out, err


class Pair(NamedTuple):
    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair with heads of 64, for which there are plugins."""
    folder = tmp_path_factory.mktemp("wide")
    make_target(folder / "target", num_hidden_layers=2, head_dim=64)
    make_drafter(folder / "drafter", folder / "target", taps=[0, 1], layers=1)
    return Pair(folder / "target", folder / "drafter")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for a built plugin library: a file with what its build wrote down."""
    folder = tmp_path / "library"
    folder.mkdir()
    file = folder / LIBRARY_NAME
    file.write_bytes(b"a library")
    facts = {
        "version": "0.1.0",
        "tensorrt": "10.14.1",
        "triton": "3.9.0",
        "compute_capabilities": [80, 90],
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    file.with_suffix(".json").write_text(json.dumps(facts))
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(folder))
    return file


@pytest.fixture(autouse=True)
def without_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt_api, "installed", lambda flavour: False)
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(tmp_path / "nowhere"))


def lower(run_cli: Run, pair: Pair, output: Path, *options: object) -> Any:
    return run_cli(
        "build", "--target", pair.target, "--drafter", pair.drafter, "--output", output, "--backend", "tensorrt",
        "--stop-after", "lower", "--max-seq-len", 96, "--max-batch-size", 2, *options,
    )  # fmt: skip


def operators(output: Path, role: str) -> Counter[str]:
    graph = onnx.load(output / role / "model.onnx", load_external_data=False).graph
    return Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph.node)


def test_with_the_plugin_library(run_cli: Run, wide_pair: Pair, library: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    outcome = lower(run_cli, wide_pair, output)
    assert outcome.code == 0, outcome.err
    err = " ".join(outcome.err.split())
    assert "Plugins: on (plugin library 0.1.0, for TensorRT 10.14.1)" in err
    assert "TensorRT is not installed: pip install 'dflash-trt[tensorrt]'" in err
    for role, layers in (("target", 2), ("drafter", 1)):
        found = operators(output, role)
        assert found["dflash_trt::KVInjection"] == found["dflash_trt::StaircaseAttention"] == layers
        assert not {"Attention", "TensorScatter"} & found.keys()
    nodes = onnx.load(output / "target" / "model.onnx", load_external_data=False).graph.node
    for node in nodes:
        if node.domain:
            attributes = {a.name: a.s for a in node.attribute}
            assert (attributes["plugin_version"], attributes["plugin_namespace"]) == (b"1", b"dflash_trt")
    info = read_info(output)
    assert info.engines is not None
    assert info.engines.plugins is not None
    assert (info.engines.stage, info.engines.bound, info.engines.version) == ("lowered", True, None)
    assert info.limits.prefill_chunk <= 128
    copy = output / info.engines.plugins.file
    assert copy.read_bytes() == library.read_bytes()
    assert info.engines.plugins.sha256 == info.files[info.engines.plugins.file].sha256
    with pytest.raises(BundleError, match="was lowered only and has no engines"):
        load(output)


def test_engine_directories_have_tensorrt_llms_layout(run_cli: Run, wide_pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    assert lower(run_cli, wide_pair, output).code == 0
    for role, layers in (("target", 2), ("drafter", 1)):
        config = json.loads((output / role / "config.json").read_text())
        assert set(config) == {"version", "pretrained_config", "build_config"}
        model, limits = config["pretrained_config"], config["build_config"]
        assert (model["architecture"], model["dtype"]) == ("Qwen3ForCausalLM", "bfloat16")
        sizes = {"num_hidden_layers": layers, "hidden_size": 32, "head_size": 64, "num_key_value_heads": 2}
        assert {name: model[name] for name in sizes} == sizes
        assert (model["qwen_type"], model["attn_bias"], model["qk_layernorm"]) == ("qwen3", False, True)
        assert limits["max_batch_size"] == 2
        assert limits["max_beam_width"] == 1
        assert limits["max_seq_len"] == 96


def test_without_the_library_the_layers_are_tensorrts_own(run_cli: Run, wide_pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    outcome = lower(run_cli, wide_pair, output)
    assert outcome.code == 0, outcome.err
    assert f"Plugins: off ({tmp_path / 'nowhere'}" in "".join(outcome.err.replace("\n", ""))
    found = operators(output, "target")
    assert found["Attention"] == 2
    assert found["TensorScatter"] == 4
    assert found["Where"] >= 1
    info = read_info(output)
    assert info.engines is not None
    assert (info.engines.bound, info.engines.plugins) == (False, None)
    assert "dflash-trt plugins build" in info.engines.plugins_reason


def test_plugins_on_without_the_library_still_binds(run_cli: Run, wide_pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    outcome = lower(run_cli, wide_pair, output, "--plugins", "on", "--tensorrt-version", "10.14")
    assert outcome.code == 0, outcome.err
    assert "an engine needs the library" in " ".join(outcome.err.split())
    found = operators(output, "target")
    assert found["dflash_trt::KVInjection"] == 2
    assert not {"RMSNormalization", "RotaryEmbedding"} & found.keys()  # the parser of 10.14 lacks them
    info = read_info(output)
    assert info.engines is not None
    assert (info.engines.bound, info.engines.plugins, info.engines.parser) == (True, None, "TensorRT 10.14")


def test_10_14_without_plugins_cannot_update_in_place(run_cli: Run, wide_pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    outcome = lower(run_cli, wide_pair, output, "--plugins", "off", "--tensorrt-version", "10.14")
    assert outcome.code == 2
    assert "TensorRT 10.14 can update caches in place with plugins only (--plugins off)" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_an_engine_needs_tensorrt(run_cli: Run, wide_pair: Pair, tmp_path: Path) -> None:
    outcome = run_cli(
        "build", "--target", wide_pair.target, "--drafter", wide_pair.drafter, "--output", tmp_path / "bundle",
        "--backend", "tensorrt",
    )  # fmt: skip
    assert outcome.code == 2
    assert "TensorRT is not installed. pip install 'dflash-trt[tensorrt]'; --stop-after lower" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--vp",)], ids=["dflash", "d2sd"])
def test_lowered_graphs_give_the_references_numbers(
    run_cli: Run, pair: Pair, vp_drafter: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The float32 graphs for TensorRT's own layers run in ONNX Runtime too, at their one capacity."""
    output = tmp_path / "bundle"
    outcome = lower(run_cli, pair, output, "--dtype", "float32", *(("--vp-drafter", vp_drafter) if options else ()))
    assert outcome.code == 0, outcome.err
    info = read_info(output)
    compared = 0
    for role in info.roles:
        session = AtCapacity(output / role / "model.onnx", info.graphs[role].spec, threads=1)
        for result in compare_graphs(info, role, session, reference_session(output, info, role)):
            assert result.passed, (role, result)
            compared += 1
    assert compared == 4 * len(info.roles)


class AtCapacity(OrtSession):
    """Makes caches of the one capacity that the graph has."""

    fixed_shapes = True

    def capacity_for(self, needed: int, limit: int) -> int:
        return limit
