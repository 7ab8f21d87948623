"""A bundle of engines that cannot run here, or whose plugin library is another one, is refused in plain words.

A bundle of the torch backend stands in for one: its recorded values are rewritten, and it is sealed again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_records import LIBRARY, built_record, library_record

import dflash_trt
from dflash_trt import loading
from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_record import EngineRecord
from dflash_trt.bundle import BundleInfo, read_info, write_config
from dflash_trt.errors import BackendError, BundleError
from dflash_trt.loading import open_info

CONTENT = b"kernels" * 1000
Make = Callable[..., Path]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a load finds here: TensorRT 10.14.1.48 and an H100, until a test says something else."""
    here = SimpleNamespace(version="10.14.1.48", gpu=90, asked=[])

    def load(flavour: str) -> Any:
        here.asked.append(flavour)
        if here.version is None:
            raise BackendError("TensorRT is not installed")
        return SimpleNamespace(version=here.version)

    monkeypatch.setattr(tensorrt_api, "load", load)
    monkeypatch.setattr(loading, "gpu_compute_capability", lambda: here.gpu)
    return here


@pytest.fixture
def make(torch_bundle: Path, tmp_path: Path, running: SimpleNamespace) -> Make:
    """Makes a bundle with these values in place of those that would run here."""

    def make(backend: str = "tensorrt", **changes: Any) -> Path:
        folder = Path(shutil.copytree(torch_bundle, tmp_path / "engines"))
        (folder / LIBRARY).parent.mkdir()
        (folder / LIBRARY).write_bytes(CONTENT)
        info = read_info(folder)
        record = replace(built(info), **changes)
        write_config(folder, replace(info, backend=backend, engines=record, compute_capability="9.0"))
        return folder

    return make


def built(info: BundleInfo) -> EngineRecord:
    return built_record(info.limits, info.roles, library_record(CONTENT))


def refused(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        dflash_trt.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder}")
    return message


def test_engines_that_can_run_here(make: Make, running: SimpleNamespace) -> None:
    info = open_info(make())
    assert info.backend == "tensorrt"
    assert info.engines == built(info)
    assert running.asked == ["tensorrt"]


@pytest.mark.parametrize("version", ["10.14.1", "10.16.0.72", "11.0.0.1", "9.3.0"])
def test_another_version(make: Make, running: SimpleNamespace, version: str) -> None:
    running.version = version
    message = refused(make())
    assert f": built with TensorRT 10.14.1.48, running {version}. Build the bundle again, or install" in message


def test_another_version_of_rtx(make: Make, running: SimpleNamespace) -> None:
    running.version = "1.8.0.1"
    folder = make("tensorrt-rtx", name="TensorRT-RTX", version="1.7.1.116", bound=False, plugins=None)
    assert "built with TensorRT-RTX 1.7.1.116, running 1.8.0.1" in refused(folder)
    assert running.asked == ["tensorrt-rtx"]


@pytest.mark.parametrize(("gpu", "here"), [(80, "8.0"), (89, "8.9"), (100, "10.0"), (120, "12.0")])
def test_another_compute_capability(make: Make, running: SimpleNamespace, gpu: int, here: str) -> None:
    running.gpu = gpu
    assert f": built for compute capability 9.0, this GPU has {here}. Build the bundle again" in refused(make())


def test_engines_for_several_compute_capabilities(make: Make, running: SimpleNamespace) -> None:
    folder = make(compute_capabilities=(86, 120))
    for running.gpu in (86, 120):
        open_info(folder)
    running.gpu = 89
    assert "built for compute capability 8.6, 12.0, this GPU has 8.9" in refused(folder)


def test_no_gpu(make: Make, running: SimpleNamespace) -> None:
    running.gpu = None
    assert "built for compute capability 9.0, and there is no CUDA GPU here" in refused(make())


def test_no_tensorrt(make: Make, running: SimpleNamespace) -> None:
    running.version = None
    assert "built with TensorRT 10.14.1.48, and TensorRT is not installed. Install TensorRT" in refused(make())


def test_what_was_lowered_only(make: Make, running: SimpleNamespace) -> None:
    folder = make(stage="lowered", version=None, compute_capabilities=(), plugins=None, facts={})
    assert "was lowered only and has no engines. Build it without --stop-after lower" in refused(folder)


def test_versions_come_before_files(make: Make, running: SimpleNamespace) -> None:
    """Hashing engines takes long."""
    folder, running.version = make(), "10.16.0"
    (folder / LIBRARY).unlink()
    assert "running 10.16.0" in refused(folder)


@pytest.mark.parametrize("place", [0, len(CONTENT) // 2, -1])
def test_a_plugin_library_that_changed(make: Make, place: int) -> None:
    folder = make()
    file = folder / LIBRARY
    data = bytearray(CONTENT)
    data[place] ^= 1
    file.write_bytes(data)
    hashes = [hashlib.sha256(content).hexdigest()[:12] for content in (data, CONTENT)]
    message = refused(folder)
    assert f"{file}: was changed after the build (sha256 {hashes[0]}..., built {hashes[1]}...)" in message


def test_a_plugin_library_of_another_size(make: Make) -> None:
    folder = make()
    with (folder / LIBRARY).open("ab") as file:
        file.write(b"\0")
    assert f"{folder / LIBRARY}: has {len(CONTENT) + 1} bytes, {len(CONTENT)} were built" in refused(folder)


def test_a_plugin_library_that_is_missing(make: Make) -> None:
    folder = make()
    (folder / LIBRARY).unlink()
    assert f"{folder / LIBRARY}: is missing from the bundle" in refused(folder)


def test_a_second_plugin_library(make: Make) -> None:
    folder = make()
    (folder / "plugins" / "other.so").write_bytes(CONTENT)
    assert f"{folder / 'plugins' / 'other.so'}: was added after the build" in refused(folder)
