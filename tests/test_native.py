"""The plugin library as the command line sees it; that it builds is shown by tests/plugins, which use the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_trt import native
from dflash_trt.errors import BackendError

ROOT = Path(__file__).parents[1]


def headers(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "NvInferRuntime.h").touch()
    (folder / "NvInferVersion.h").write_text(version)
    return folder


OLD = "#define NV_TENSORRT_MAJOR 10 //!< x\n#define NV_TENSORRT_MINOR 3 //!< x\n#define NV_TENSORRT_PATCH 0 //!< x\n"
NEW = (
    "#define TRT_MAJOR_ENTERPRISE 11\n#define TRT_MINOR_ENTERPRISE 1\n#define TRT_PATCH_ENTERPRISE 2\n"
    "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE //!< x\n"
)


@pytest.mark.parametrize(("inside", "text", "version"), [("include", OLD, "10.3.0"), (".", NEW, "11.1.2")])
def test_headers_are_found_in_a_sdk_or_its_include(tmp_path: Path, inside: str, text: str, version: str) -> None:
    include = headers(tmp_path / "sdk" / inside, text)
    assert native.tensorrt_headers(tmp_path / "sdk") == (include, version)


def test_headers_come_from_the_environment_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORRT_ROOT", str(headers(tmp_path / "a", OLD)))
    assert native.tensorrt_headers()[1] == "10.3.0"
    assert native.tensorrt_headers(headers(tmp_path / "b", NEW))[1] == "11.1.2"


def test_a_folder_without_headers_is_refused_by_name(run_cli, tmp_path: Path) -> None:
    code, out, err = run_cli("plugins", "build", "--output", str(tmp_path / "out"), "--tensorrt-root", str(tmp_path))
    assert (code, out) == (2, "")
    assert f"{tmp_path}: has no NvInferRuntime.h" in err
    assert "--tensorrt-root" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["86", "80,91", "", "ninety"])
def test_capabilities_without_kernels_are_refused(run_cli, tmp_path: Path, given: str) -> None:
    code, _, err = run_cli("plugins", "build", "--output", str(tmp_path / "out"), "--compute-capability", given)
    assert code == 2
    assert "--compute-capability" in err
    assert not (tmp_path / "out").exists()


def test_a_missing_tool_is_named(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = headers(tmp_path / "sdk", OLD)
    monkeypatch.setattr(shutil, "which", lambda tool, **_: None if tool == "cmake" else tool)
    code, _, err = run_cli("plugins", "build", "--output", str(tmp_path / "out"), "--tensorrt-root", str(sdk))
    assert code == 2
    assert "cmake is not on the PATH" in err
    assert not (tmp_path / "out").exists()


def test_a_failing_step_keeps_the_library_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = headers(tmp_path / "sdk", OLD)
    out = tmp_path / "out"
    out.mkdir()
    (out / native.LIBRARY_NAME).write_bytes(b"old")
    monkeypatch.setattr(native.sys, "executable", shutil.which("false"))
    with pytest.raises(BackendError, match="the kernels failed"):
        native.build_library(out, tensorrt_root=sdk)
    assert (out / native.LIBRARY_NAME).read_bytes() == b"old"


def test_the_path_of_a_library_that_was_not_built(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(tmp_path))
    code, out, err = run_cli("plugins", "path")
    assert (code, out) == (2, "")
    assert str(tmp_path) in err
    assert "dflash-trt plugins build" in err


def test_what_is_known_of_a_library_belongs_to_that_file(tmp_path: Path) -> None:
    library = tmp_path / native.LIBRARY_NAME
    library.write_bytes(b"other")
    with pytest.raises(BackendError, match="not there"):
        native.library_facts(library)
    facts = {"version": "1", "tensorrt": "10", "triton": "3", "compute_capabilities": [], "sha256": "0"}
    library.with_suffix(".json").write_text(json.dumps(facts))
    with pytest.raises(BackendError, match="sha256 differs"):
        native.library_facts(library)


def test_the_library_that_make_builds(run_cli) -> None:
    folder = ROOT / "build" / "plugins"
    if not (folder / native.LIBRARY_NAME).is_file():
        pytest.skip("build/plugins has no library: make plugins")
    code, out, _ = run_cli("plugins", "path", "--output", str(folder))
    assert (code, out.strip()) == (0, str(folder / native.LIBRARY_NAME))
    facts = native.library_facts(Path(out.strip()))
    assert facts["compute_capabilities"] == [80, 90, 100, 120]
    assert facts["tensorrt"].startswith("10.14")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_facts_that_no_build_wrote_are_an_error_and_no_crash(run_cli, tmp_path: Path, monkeypatch, text: str) -> None:
    library = tmp_path / native.LIBRARY_NAME
    library.touch()
    library.with_suffix(".json").write_text(text)
    with pytest.raises(BackendError, match="Build it again"):
        native.library_facts(library)
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(tmp_path))
    code, out, _ = run_cli("doctor", "--json")
    assert code == 0
    assert json.loads(out)["plugins"]["built"] is False


def test_a_folder_that_cannot_be_made_is_said_at_once(run_cli, tmp_path: Path) -> None:
    sdk = headers(tmp_path / "sdk", OLD)
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "out"
    code, out, err = run_cli("plugins", "build", "--output", str(output), "--tensorrt-root", str(sdk))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert str(output) in err


def test_cmake_beside_the_interpreter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cmake = tmp_path / "cmake"
    cmake.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native.sys, "executable", str(tmp_path / "python"))
    assert native._tool("cmake", "Install it") == str(cmake)


def test_half_an_sdk_is_refused(tmp_path: Path) -> None:
    sdk = headers(tmp_path / "sdk", OLD)
    (sdk / "NvInferVersion.h").unlink()
    with pytest.raises(BackendError, match=r"NvInferVersion\.h is missing"):
        native.tensorrt_headers(sdk)
