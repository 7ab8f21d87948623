"""Options that a builder is given, and what is refused of them before anything is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rtx as real
from backends import fake_builder
from backends.fake_builder import FakeConfig

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_builder import TimingCache, check_options
from dflash_trt.backends.engine_record import BuilderOptions
from dflash_trt.backends.tensorrt_api import TensorRT
from dflash_trt.errors import BackendError


def configured(api: TensorRT, **options: Any) -> FakeConfig:
    check_options(api, BuilderOptions(**options), None)
    return api.trt.configs[-1]


def test_a_builder_is_told_every_option() -> None:
    config = configured(fake_builder.tensorrt(), optimization_level=0, workspace=3, refit=True, weight_streaming=True)
    assert config.builder_optimization_level == 0
    assert config.pools == {"WORKSPACE": 3 * 1024 * 1024}
    assert {"REFIT", "WEIGHT_STREAMING"} <= config.flags
    assert config.profiling_verbosity.name == "DETAILED"


def test_a_builder_is_told_nothing_that_was_not_asked() -> None:
    config = configured(fake_builder.tensorrt())
    assert (config.builder_optimization_level, config.pools, config.capabilities) == (3, {}, [])
    assert not {"REFIT", "WEIGHT_STREAMING"} & config.flags
    assert configured(fake_builder.rtx(), compute_capabilities=(86, 120)).capabilities == ["SM86", "SM120"]


@pytest.mark.parametrize("make", [fake_builder.tensorrt, fake_builder.rtx])
@pytest.mark.parametrize("name", ["refit", "weight_streaming"])
def test_a_flag_that_a_version_lacks_is_named(make: Any, name: str) -> None:
    api = make(flags=tuple(flag for flag in fake_builder.FLAGS if flag != name.upper()))
    with pytest.raises(BackendError, match=f"--{name.replace('_', '-')}: {api} has no such builder flag"):
        check_options(api, BuilderOptions(**{name: True}), None)


@pytest.mark.parametrize("cache", [TimingCache(read=Path("x")), TimingCache(write=Path("x"))])
def test_rtx_has_no_timing_cache(cache: TimingCache) -> None:
    api = fake_builder.rtx()
    with pytest.raises(BackendError) as caught:
        check_options(api, BuilderOptions(), cache)
    assert caught.value.where == "--input-timing-cache, --output-timing-cache"
    assert "TensorRT-RTX times nothing" in caught.value.what


def test_timing_caches_are_read_before_anything_is_done(tmp_path: Path) -> None:
    api, file = fake_builder.tensorrt(), tmp_path / "timing.cache"

    def check(cache: TimingCache) -> bytes | None:
        check_options(api, BuilderOptions(), cache)
        return api.trt.configs[-1].cache

    for gone in (file, tmp_path):  # a folder is no file
        with pytest.raises(BackendError) as caught:
            check(TimingCache(read=gone))
        assert caught.value.where == f"--input-timing-cache {gone}"
        assert "no such file" in caught.value.what
    file.write_bytes(b"of another GPU")
    with pytest.raises(BackendError, match=r"TensorRT 10\.16\.1\.11 refuses the timing cache"):
        check(TimingCache(read=file))
    file.write_bytes(FakeConfig.good_cache)
    assert check(TimingCache(read=file)) == FakeConfig.good_cache
    assert check(TimingCache(write=file)) == b""


def test_a_timing_cache_that_cannot_be_written_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_options(fake_builder.tensorrt(), BuilderOptions(), TimingCache(write=Path("new.cache")))
    for place in (tmp_path, tmp_path / "nowhere" / "new.cache"):
        with pytest.raises(BackendError, match=f"--output-timing-cache {place}: cannot be written"):
            check_options(fake_builder.tensorrt(), BuilderOptions(), TimingCache(write=place))
    assert list(tmp_path.iterdir()) == []


def test_the_options_of_the_real_one() -> None:
    real.tensorrt_rtx()
    api = tensorrt_api.load("tensorrt-rtx")
    options = BuilderOptions(compute_capabilities=(86, 120), optimization_level=2, workspace=64, refit=True)
    check_options(api, options, None)
    check_options(api, replace(options, refit=False, weight_streaming=True), None)
    with pytest.raises(BackendError, match="cannot compile ahead of time for 90"):
        check_options(api, replace(options, compute_capabilities=(86, 90)), None)
    with pytest.raises(BackendError, match="times nothing"):
        check_options(api, options, TimingCache())
