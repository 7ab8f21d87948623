"""`inspect --preflight`: of graphs and bundles, healthy and not, with and without a TensorRT to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import onnx_ir as ir
import pytest
from export.small_pair import Kind, small_pair

import dflash_trt
from dflash_trt.backends.lowering import lower_tensorrt
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.passes.bind_plugins import BindPlugins
from dflash_trt.passes.fix_capacity import FixCapacity
from dflash_trt.passes.simplify import Simplify
from plugins import native

RTX = ("--backend", "tensorrt-rtx", "--tensorrt-version", "1.7")


@pytest.fixture(scope="module")
def lowered(pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's bundle up to the engines of TensorRT-RTX."""
    output = tmp_path_factory.mktemp("lowered") / "bundle"
    dflash_trt.build(
        target=pair.target, drafter=pair.drafter, output=output, max_seq_len=96, max_batch_size=2, verify=False,
        backend="tensorrt-rtx", stop_after="lower",
    )  # fmt: skip
    return output


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lowered graph; nobody reads its weights."""
    file = tmp_path_factory.mktemp("graph") / "lowered.onnx"
    parser = ParserVersion.parse("1.7", "tensorrt-rtx")
    model = lower_tensorrt(small_pair().target.portable(), 48, parser, plugins=False)
    ir.save(model, file)
    return file


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of plugins."""
    file = tmp_path_factory.mktemp("graph") / "bound.onnx"
    model = small_pair(Kind(dtype="float16")).drafter.portable()
    for each in (BindPlugins(head_dims=(16,)), FixCapacity(48), Simplify()):
        each(model)
    ir.save(model, file)
    return file


def spoil(file: Path, output: Path) -> str:
    """Gives one node an operator that no parser takes; returns the node's name."""
    model = ir.load(file)
    node = next(node for node in model.graph if node.op_type == "Sigmoid")
    node.op_type = "Erf"
    ir.save(model, output)
    return str(node.name)


def test_a_lowered_bundle_is_ready(run_cli, lowered):
    code, out, err = run_cli("inspect", lowered, "--preflight", *RTX, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["kind"], found["target"], found["passed"]) == ("preflight", "TensorRT-RTX 1.7", True)
    assert found["interface"] == "checked with the bundle's"
    assert [graph["name"] for graph in found["graphs"]] == ["target", "drafter"]
    for entry in found["graphs"]:
        assert entry["faults"] == []
        assert 0 < entry["estimate"]["weights_bytes"] < entry["estimate"]["engine_bytes"]
        assert entry["estimate"]["cache_bytes"] > 0
    code, out, err = run_cli("inspect", lowered, "--preflight", *RTX)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "ready for TensorRT-RTX 1.7"
    assert "device memory: caches" in out
    assert run_cli("inspect", lowered, "--preflight").out.splitlines()[-1] == "ready for TensorRT-RTX 1.7"


def test_a_bundle_of_onnxruntime_is_told_what_it_lacks(run_cli, bundle):
    code, out, err = run_cli("inspect", bundle, "--preflight", *RTX, "--json")
    assert code == 1
    assert "not ready for TensorRT-RTX 1.7: faults in target: " in err
    for entry in json.loads(out)["graphs"]:
        rules = [fault["rule"] for fault in entry["faults"]]
        assert rules.count("capacity") == 1
        assert set(rules) <= {"capacity", "mask"}


def test_a_bundle_without_graphs_is_bad_usage(run_cli, torch_bundle):
    code, _, err = run_cli("inspect", torch_bundle, "--preflight", *RTX)
    assert code == 2
    assert "has no graph of the target" in err


def test_a_graph_is_ready(run_cli, graph):
    code, out, err = run_cli("inspect", graph, "--preflight", "--tensorrt-version", "10.15")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "ready for TensorRT 10.15"
    assert "the build up to" in out
    assert "inputs, outputs, profiles: not run" in out


def test_a_fault_is_named_and_the_exit_code_one(run_cli, graph, tmp_path):
    name = spoil(graph, tmp_path / "spoilt.onnx")
    code, out, err = run_cli("inspect", tmp_path / "spoilt.onnx", "--preflight", *RTX)
    assert code == 1
    assert name in out
    assert "Erf" in out
    assert err.splitlines()[-1].endswith("not ready for TensorRT-RTX 1.7: faults in spoilt.onnx: 1")
    code, out, _ = run_cli("inspect", tmp_path / "spoilt.onnx", "--preflight", *RTX, "--json")
    (fault,) = json.loads(out)["graphs"][0]["faults"]
    assert code == 1
    assert (fault["where"], fault["rule"]) == (f"node {name} (Erf)", "operator")


def test_an_older_version_lacks_operators(run_cli, graph):
    code, out, _ = run_cli("inspect", graph, "--preflight", "--tensorrt-version", "10.14", "--json")
    assert code == 1
    faults = json.loads(out)["graphs"][0]["faults"]
    kinds = {fault["text"] for fault in faults}
    assert len(kinds) == 3 < len(faults)
    for text in kinds:
        assert text.startswith("TensorRT 10.14 does not take ")
        assert "Lower it for TensorRT 10.14: build --backend tensorrt --stop-after lower" in text
    _, out, _ = run_cli("inspect", graph, "--preflight", "--tensorrt-version", "10.14")
    assert sum(line.startswith("│ operator ") for line in out.splitlines()) == 3  # rows of the table
    assert out.count("nodes, the first is") == 3
    assert out.splitlines()[-1] == f"not ready for TensorRT 10.14: faults in lowered.onnx: {len(faults)}"


def test_an_unknown_domain_is_a_fault_and_no_stack(graph, tmp_path):
    model = ir.load(graph)
    for node in model.graph:  # so that dtypes have to be inferred
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    node = next(node for node in model.graph if node.op_type == "Sigmoid")
    node.domain = "com.other"
    ir.save(model, tmp_path / "foreign.onnx")
    # in a process of its own: pytest's handlers keep what is logged from stderr
    command = [sys.executable, "-m", "dflash_trt", "inspect", str(tmp_path / "foreign.onnx"), "--preflight", *RTX]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "com.other" in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_plugins_are_told_from_the_schemas_without_tensorrt(run_cli, bound, monkeypatch):
    monkeypatch.setattr("dflash_trt.backends.tensorrt_api.installed", lambda flavour: False)
    code, out, _ = run_cli("inspect", bound, "--preflight", "--tensorrt-version", "10.16")
    assert code == 0
    assert "plugin registry: not run: --backend tensorrt: TensorRT is not installed" in out
    assert out.splitlines()[-1] == (
        "ready for TensorRT 10.16, but for the plugin registry, which was not asked: --backend tensorrt: TensorRT is "
        "not installed. pip install 'dflash-trt[tensorrt]'; custom nodes were compared with what the library is known "
        "to register"
    )
    code, out, _ = run_cli("inspect", bound, "--preflight", *RTX, "--json")
    assert code == 1
    assert {fault["rule"] for fault in json.loads(out)["graphs"][0]["faults"]} == {"plugin"}
    assert json.loads(out)["registry"] == "not run: TensorRT-RTX takes no plugins"


INSPECT = """
import sys
import tensorrt_lean
sys.modules["tensorrt"] = tensorrt_lean  # what preflight asks of TensorRT, its lean runtime has
from dflash_trt.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("version", ["10.16", "11.4"])
def test_plugins_are_looked_up_in_the_installed_tensorrt(bound: Path, tmp_path: Path, version: str) -> None:
    lean = Path(os.environ.get("TENSORRT_LEAN", native.ROOT / "build")) / f"tensorrt-lean-{version}"
    if not lean.exists():
        pytest.skip(f"the lean runtime of TensorRT {version} is not in {lean}")
    library = native.build().library

    def inspect(file: Path, folder: Path, *options: str) -> tuple[int, dict]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(lean), str(native.ROOT)])}
        environment["DFLASH_TRT_PLUGINS"] = str(folder)
        command = [sys.executable, "-c", INSPECT, "inspect", str(file), "--preflight", "--json", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)

    code, found = inspect(bound, library.parent)
    assert (code, found["target"]) == (0, f"TensorRT {version}")
    assert found["registry"].startswith(f"checked with TensorRT {version}")
    assert found["registry"].endswith(str(library))

    code, found = inspect(bound, library.parent, "--tensorrt-version", "10.17")
    assert code == 0
    assert found["registry"].startswith(f"not run: TensorRT {version}")
    code, found = inspect(bound, tmp_path)
    assert (code, found["registry"][:8]) == (0, "not run:")
    assert "dflash-trt plugins build" in found["registry"]

    model = ir.load(bound)
    call = next(node for node in model.graph if node.op_type == "KVInjection")
    call.attributes["plugin_version"] = ir.AttrString("plugin_version", "2")
    ir.save(model, tmp_path / "newer.onnx")
    code, found = inspect(tmp_path / "newer.onnx", library.parent)
    (fault,) = found["graphs"][0]["faults"]
    assert (code, fault["where"], fault["rule"]) == (1, f"node {call.name} (KVInjection)", "plugin")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tensorrt-version", "10.16"), "--tensorrt-version: is for --preflight"),
        (("--backend", "tensorrt"), "--backend: is for --preflight"),
        (("--preflight", "--tensorrt-version", "new"), "--tensorrt-version: 'new' is no version of TensorRT"),
        (("--preflight", "--tensorrt-version", "10.13"), "TensorRT 10.13 is not supported. Give one from 10.14 to"),
        (("--preflight", "--tensorrt-version", "12.0"), "TensorRT 12.0 is not supported. Give one from 10.14 to 11.x"),
        (("--preflight", *RTX, "--tensorrt-version", "10.15"), "TensorRT-RTX 10.15 is not supported. Give one from"),
        (("--preflight", *RTX, "--step", "1"), "--step: is for traces"),
        (("--preflight", *RTX, "--output", "x"), "--output: is for traces"),
        (("--preflight", "--backend", "onnxruntime"), "Invalid value for '--backend'"),
    ],
)
def test_bad_usage(run_cli, graph, options, message):
    code, out, err = run_cli("inspect", graph, *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_without_a_version_and_without_tensorrt(run_cli, graph, monkeypatch, backend):
    monkeypatch.setattr("dflash_trt.backends.tensorrt_api.installed", lambda flavour: False)
    code, out, err = run_cli("inspect", graph, "--preflight", "--backend", backend)
    assert (code, out) == (2, "")
    assert "is not installed, so there is no version to check against. Give one: --tensorrt-version" in err


def test_without_a_version_the_installed_one_counts(run_cli, graph, monkeypatch):
    module = ModuleType("tensorrt_rtx")
    module.__version__ = "1.7.9.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)
    monkeypatch.setattr("dflash_trt.backends.tensorrt_api.installed", lambda flavour: True)
    code, out, _ = run_cli("inspect", graph, "--preflight", "--backend", "tensorrt-rtx")
    assert (code, out.splitlines()[-1]) == (0, "ready for TensorRT-RTX 1.7")


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_what_is_no_graph_is_bad_usage(run_cli, pair, tmp_path, content):
    path = pair.target
    if content is not None:
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
    code, _, err = run_cli("inspect", path, "--preflight", *RTX)
    assert code == 2
    assert str(path) in err
