"""`inspect --preflight` of bundles for TensorRT: their own parser, profiles and plugin library are what counts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makers import make_drafter, make_target

import dflash_trt
from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.backends.profiles import DimRange
from dflash_trt.bundle import CONFIG, read_info, write_config
from dflash_trt.errors import BackendError
from dflash_trt.native import LIBRARY_NAME
from dflash_trt.preflight.plugins import LibraryRegistry
from plugins import native

LIBRARY = f"plugins/{LIBRARY_NAME}"
CONTENT = b"a library"
NOT_ASKED = "ready for TensorRT 10.15, but for the plugin registry, which was not asked: "
Reseal = Callable[..., Path]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lowered bundle of plugin calls, with a file that stands for the library. Read it only."""
    folder = tmp_path_factory.mktemp("bound")
    make_target(folder / "target", num_hidden_layers=2, head_dim=64)
    make_drafter(folder / "drafter", folder / "target", taps=[0, 1], layers=1)
    library = folder / LIBRARY_NAME
    library.write_bytes(CONTENT)
    facts = {
        "version": "0.1.0", "tensorrt": "10.14.1", "triton": "3.9.0", "compute_capabilities": [80, 90],
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }  # fmt: skip
    library.with_suffix(".json").write_text(json.dumps(facts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_api, "installed", lambda flavour: False)
        patch.setenv("DFLASH_TRT_PLUGINS", str(folder))
        dflash_trt.build(
            target=folder / "target", drafter=folder / "drafter", output=folder / "bundle", max_seq_len=96,
            backend="tensorrt", stop_after="lower", verify=False,
        )  # fmt: skip
    return folder / "bundle"


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No TensorRT, and no plugin library but a bundle's, until a test says something else."""
    monkeypatch.setattr(tensorrt_api, "installed", lambda flavour: False)
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(tmp_path / "nowhere"))


@pytest.fixture
def reseal(original: Path, tmp_path: Path) -> Reseal:
    """Makes a bundle with other values in its engine record, sealed again."""

    def make(**changes: Any) -> Path:
        folder = Path(shutil.copytree(original, tmp_path / "resealed"))
        info = read_info(folder)
        assert info.engines is not None
        write_config(folder, replace(info, engines=replace(info.engines, **changes)))
        return folder

    return make


def preflight(run_cli, folder: Path, *options: object) -> tuple[int, dict[str, Any]]:
    code, out, err = run_cli("inspect", folder, "--preflight", "--json", *options)
    assert len(err.splitlines()) == code, err  # one line where there are faults
    return code, json.loads(out)


# --- whose parser ---


def test_a_bundle_says_whose_parser_its_graphs_are_for(run_cli, original, reseal):
    assert preflight(run_cli, original)[1]["target"] == "TensorRT 10.15"
    code, found = preflight(run_cli, reseal(parser="TensorRT 10.17"))
    assert (code, found["target"], found["passed"]) == (0, "TensorRT 10.17", True)


def test_options_win(run_cli, original):
    assert preflight(run_cli, original, "--tensorrt-version", "11.1")[1]["target"] == "TensorRT 11.1"
    rtx = ("--backend", "tensorrt-rtx")
    code, found = preflight(run_cli, original, *rtx, "--tensorrt-version", "1.7")
    assert (code, found["target"]) == (1, "TensorRT-RTX 1.7")
    code, _, err = run_cli("inspect", original, "--preflight", *rtx)  # the record is of another product
    assert code == 2
    assert "TensorRT-RTX is not installed, so there is no version to check against" in err


def test_a_record_that_names_no_parser(run_cli, reseal):
    folder = reseal(parser="TensorRT")
    code, _, err = run_cli("inspect", folder, "--preflight")
    assert code == 2
    assert f"{folder / CONFIG}: 'TensorRT' names no parser" in err


def test_recorded_profiles_count(run_cli, original, reseal):
    """Not those that the limits would give."""
    record = read_info(original).engines
    assert record is not None
    decode, prefill = record.profiles["target"]
    slots = DimRange(min=7, opt=7, max=7)
    other = {**record.profiles, "target": (decode, replace(prefill, dims={**prefill.dims, "C": slots}))}
    code, found = preflight(run_cli, reseal(profiles=other))
    assert code == 1
    target, drafter = found["graphs"]
    assert {fault["rule"] for fault in target["faults"]} == {"capacity"}
    assert all("slots, profile prefill 7. " in fault["text"] for fault in target["faults"])
    assert drafter["faults"] == []


def test_engines_were_checked_when_they_were_built(run_cli, reseal):
    folder = reseal(stage="built", version="10.15.1.29")
    code, out, err = run_cli("inspect", folder, "--preflight")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: {folder}: has engines and no graphs; the preflight was done when they were built. "
        "Check one with graphs, as --stop-after lower writes"
    ]


# --- whose plugin library ---


class FakeTensorRT(LibraryRegistry):
    """A TensorRT of some version, and which library it was given."""

    def __init__(self, version: str) -> None:
        self.parser = ParserVersion.parse(version)
        self.libraries: list[Path] = []

    def load_plugins(self, library: Path) -> None:
        if library.read_bytes() == CONTENT[::-1]:
            raise BackendError("cannot\nload it", where=str(library), mend="Mend it")
        self.libraries.append(library)

    def __str__(self) -> str:
        return f"{self.parser}.0"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    """TensorRT 10.15 is installed."""
    fake = FakeTensorRT("10.15")
    monkeypatch.setattr(tensorrt_api, "installed", lambda flavour: True)
    monkeypatch.setattr(tensorrt_api, "load", lambda flavour: fake)
    return fake


def test_the_bundles_own_library_is_asked(run_cli, original, here, monkeypatch, tmp_path):
    (tmp_path / LIBRARY_NAME).write_bytes(b"another library")
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(tmp_path))
    code, found = preflight(run_cli, original)
    assert (code, found["summary"]) == (0, "ready for TensorRT 10.15")
    assert here.libraries == [original / LIBRARY]
    assert found["registry"] == f"checked with TensorRT 10.15.0 and {original / LIBRARY}"


def test_without_one_of_its_own_it_is_that_of_builds(run_cli, reseal, here, monkeypatch, tmp_path):
    library = tmp_path / LIBRARY_NAME
    library.write_bytes(b"another library")
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(tmp_path))
    assert preflight(run_cli, reseal(plugins=None))[1]["registry"].endswith(str(library))
    assert here.libraries == [library]


def test_what_the_registry_says_is_a_fault(run_cli, original, here, monkeypatch):
    monkeypatch.setattr(here, "creator_fields", lambda name, version, namespace: None)
    code, found = preflight(run_cli, original)
    assert code == 1
    assert {fault["rule"] for graph in found["graphs"] for fault in graph["faults"]} == {"plugin"}


@pytest.mark.parametrize("case", ["not installed", "another version", "does not load"])
def test_a_registry_that_was_not_asked_is_said(run_cli, original, reseal, monkeypatch, request, case):
    folder = original
    why = "--backend tensorrt: TensorRT is not installed. pip install 'dflash-trt[tensorrt]'"
    if case != "not installed":
        here = request.getfixturevalue("here")
        here.parser = ParserVersion.parse("10.16" if case == "another version" else "10.15")
        why = "TensorRT 10.16.0 is installed, not TensorRT 10.15"
    if case == "does not load":
        folder = reseal()
        (folder / LIBRARY).write_bytes(CONTENT[::-1])
        write_config(folder, read_info(folder))  # it is the one recorded
        why = f"{folder / LIBRARY}: cannot load it. Mend it"
    code, found = preflight(run_cli, folder)
    assert (code, found["passed"], found["registry"]) == (0, True, f"not run: {why}")
    assert found["summary"] == (
        f"{NOT_ASKED}{why}; custom nodes were compared with what the library is known to register"
    )
    code, out, _ = run_cli("inspect", folder, "--preflight")
    assert (code, out.splitlines()[-1]) == (0, found["summary"])


@pytest.mark.parametrize("content", [None, b"A library", CONTENT + b"\0"], ids=["missing", "changed", "longer"])
def test_a_library_that_is_not_the_one_that_was_built(run_cli, reseal, here, content):
    folder = reseal()
    file = folder / LIBRARY
    built = f"built was sha256 {hashlib.sha256(CONTENT).hexdigest()} of {len(CONTENT)} bytes. Build the bundle again"
    if content is None:
        file.unlink()
        text = f"is missing; {built}"
    else:
        file.write_bytes(content)
        text = f"was changed to sha256 {hashlib.sha256(content).hexdigest()} of {len(content)} bytes; {built}"
    code, found = preflight(run_cli, folder)
    assert (code, found["passed"]) == (1, False)
    assert found["faults"] == [{"where": str(file), "rule": "plugin library", "text": text}]
    assert found["summary"] == "not ready for TensorRT 10.15: faults in the plugin library: 1"
    assert found["registry"] == f"not run: {file} is not the library that was built"
    assert [graph["faults"] for graph in found["graphs"]] == [[], []]
    assert here.libraries == []
    code, out, err = run_cli("inspect", folder, "--preflight")
    assert (code, err.splitlines()) == (1, [f"error: {folder}: {found['summary']}"])
    assert "plugin library: TensorRT 10.15" in out


INSPECT = """
import sys
import tensorrt_lean
sys.modules["tensorrt"] = tensorrt_lean  # what preflight asks of TensorRT, its lean runtime has
from dflash_trt.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("version", ["10.16", "11.4"])
def test_a_real_tensorrt_loads_the_bundles_library(reseal, tmp_path, version):
    lean = Path(os.environ.get("TENSORRT_LEAN", native.ROOT / "build")) / f"tensorrt-lean-{version}"
    if not lean.exists():
        pytest.skip(f"the lean runtime of TensorRT {version} is not in {lean}")
    folder = reseal(parser=f"TensorRT {version}")
    shutil.copyfile(native.build().library, folder / LIBRARY)
    write_config(folder, read_info(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(lean), str(native.ROOT)])}
    command = [sys.executable, "-c", INSPECT, "inspect", str(folder), "--preflight", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["summary"] == f"ready for TensorRT {version}"
    assert found["registry"].startswith(f"checked with TensorRT {version}.")
    assert found["registry"].endswith(str(folder / LIBRARY))
