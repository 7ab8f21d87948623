"""What a build for engines settles, and refuses, before it begins: with fakes for TensorRT, the GPU and the library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backends import fake_builder
from backends.fake_builder import FakeConfig

from dflash_trt.backends import engine_plan, tensorrt_api
from dflash_trt.backends.engine_builder import TimingCache
from dflash_trt.backends.engine_plan import EnginePlan, fit_limits, plan_engines
from dflash_trt.backends.engine_record import BuilderOptions
from dflash_trt.backends.parser_version import Flavour
from dflash_trt.backends.tensorrt_api import INSTALL, NAMES, TensorRT
from dflash_trt.config import BuildConfig
from dflash_trt.errors import BackendError, UsageError
from dflash_trt.native import LIBRARY_NAME
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(max_batch_size=1, max_seq_len=500, max_input_len=499, block_size=16, prefill_chunk=256)
D2SD = replace(LIMITS, vp_block_size=16, branches=4)  # 70 nodes, 64 tokens re-drafted
BUILT_FOR = (80, 90)
THERE = "plugin library 0.7, for TensorRT 10.14.1"
LOWER = {"stop_after": "lower"}


@dataclass
class Machine:
    """What a build finds here.

    Attributes:
        api: what is installed; None for nothing.
        gpu: its compute capability; None for no GPU.
        library: the folder of the plugin library.
    """

    library: Path
    api: TensorRT | None = None
    gpu: int | None = 90

    def plan(
        self,
        flavour: Flavour = "tensorrt",
        *,
        limits: Limits = LIMITS,
        head_dims: Sequence[int] = (128, 64),
        dtype: Any = "bfloat16",
        **options: Any,
    ) -> EnginePlan:
        if "prefill_chunk" in options:
            limits = replace(limits, prefill_chunk=options["prefill_chunk"])
        roles = ("target", "drafter", "vp_drafter")
        specs: Any = {role: SimpleNamespace(head_dim=dim) for role, dim in zip(roles, head_dims, strict=False)}
        return plan_engines(flavour, settings(flavour, **options), limits, specs, dtype)

    def refused(self, kind: type[Exception], *args: Any, **options: Any) -> Any:
        """The error of a plan."""
        with pytest.raises(kind) as caught:
            self.plan(*args, **options)
        assert type(caught.value) is kind
        return caught.value

    def load(self, flavour: Flavour) -> TensorRT:
        if self.api is None or self.api.flavour != flavour:
            what = f"{NAMES[flavour]} is not installed"
            raise BackendError(what, where=f"--backend {flavour}", mend=INSTALL[flavour])
        return self.api

    def build_library(self, compute_capabilities: Sequence[int] = BUILT_FOR) -> None:
        file = self.library / LIBRARY_NAME
        file.write_bytes(b"kernels")
        facts = {
            "version": "0.7",
            "tensorrt": "10.14.1",
            "triton": "3.0",
            "compute_capabilities": list(compute_capabilities),
            "sha256": hashlib.sha256(b"kernels").hexdigest(),
        }
        file.with_suffix(".json").write_text(json.dumps(facts))


def settings(flavour: Flavour = "tensorrt", **options: Any) -> BuildConfig:
    return BuildConfig.from_options(target="t", drafter="d", output="o", backend=flavour, **options)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With TensorRT 10.16, an H100 and a plugin library for it."""
    machine = Machine(tmp_path, fake_builder.tensorrt())
    machine.build_library()
    monkeypatch.setattr(tensorrt_api, "load", machine.load)
    monkeypatch.setattr(engine_plan, "gpu_compute_capability", lambda: machine.gpu)
    monkeypatch.setenv("DFLASH_TRT_PLUGINS", str(tmp_path))
    return machine


# --- plugins or not


@pytest.mark.parametrize("plugins", ["auto", "on"])
@pytest.mark.parametrize("options", [{}, LOWER], ids=["whole", "lower"])
def test_plugins_where_all_is_there(machine: Machine, plugins: str, options: dict[str, Any]) -> None:
    plan = machine.plan(plugins=plugins, **options)
    assert plan.binds
    assert plan.library == machine.library / LIBRARY_NAME
    assert plan.plugins is not None
    assert plan.plugins.file == f"plugins/{LIBRARY_NAME}"
    assert (plan.plugins.version, plan.plugins.tensorrt) == ("0.7", "10.14.1")
    assert plan.plugins.compute_capabilities == BUILT_FOR
    assert plan.plugins.sha256 == hashlib.sha256(b"kernels").hexdigest()
    assert plan.plugins_reason == THERE


def test_no_plugins_where_none_are_wanted(machine: Machine) -> None:
    plan = machine.plan(plugins="off")
    assert (plan.binds, plan.library, plan.plugins, plan.plugins_reason) == (False, None, None, "--plugins off")


def staircase(block_size: int, vp_block_size: int, branches: int) -> Limits:
    return replace(LIMITS, block_size=block_size, vp_block_size=vp_block_size, branches=branches)


AGAINST: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": "float32"}, "the plugins have kernels for float16, bfloat16, not for float32"),
    "head_dim": (
        {"head_dims": (128, 80)},
        "the plugins have kernels for head_dim 64, 96, 128, 256, not for that of drafter 80",
    ),
    "several head_dims": (
        {"head_dims": (32, 128, 80)},
        "the plugins have kernels for head_dim 64, 96, 128, 256, not for that of target 32, vp_drafter 80",
    ),
    "block": ({"limits": replace(LIMITS, block_size=129)}, "a step verifies 129 tokens; the plugins take at most 128"),
    "tree": ({"limits": staircase(24, 24, 5)}, "a step verifies 129 tokens; the plugins take at most 128"),
    "re-draft": ({"limits": staircase(8, 26, 4)}, "a re-draft fills 130 tokens; the plugins take at most 128"),
    "prefill_chunk": ({"prefill_chunk": 129}, "a prompt's pass has 129 tokens; the plugins take at most 128"),
    "several": (
        {"dtype": "float32", "limits": replace(LIMITS, block_size=200), "prefill_chunk": 256},
        "the plugins have kernels for float16, bfloat16, not for float32; a step verifies 200 tokens; the plugins take "
        "at most 128; a prompt's pass has 256 tokens; the plugins take at most 128",
    ),
}


@pytest.mark.parametrize("lower", [{}, LOWER], ids=["whole", "lower"])
@pytest.mark.parametrize("kind", AGAINST)
def test_what_speaks_against_plugins(machine: Machine, kind: str, lower: dict[str, Any]) -> None:
    options, reason = AGAINST[kind]
    plan = machine.plan(**options, **lower)
    assert (plan.binds, plan.library, plan.plugins, plan.plugins_reason) == (False, None, None, reason)
    error = machine.refused(BackendError, plugins="on", **options, **lower)
    assert (error.what, error.where) == (reason, "--plugins on")
    assert "--plugins off" in error.mend
    assert machine.plan(plugins="off", **options).plugins_reason == "--plugins off"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"head_dims": (64, 96, 256)},
        {"limits": replace(LIMITS, block_size=128)},
        {"limits": D2SD},
        {"limits": staircase(8, 16, 7)},  # 8 blocks of 16 are re-drafted
        {"prefill_chunk": 128},
    ],
)
def test_what_the_plugins_just_take(machine: Machine, options: dict[str, Any]) -> None:
    assert machine.plan(plugins="on", **options).binds


def test_rtx_takes_no_plugins(machine: Machine) -> None:
    machine.api, machine.gpu = fake_builder.rtx(), 120
    plan = machine.plan("tensorrt-rtx", limits=replace(LIMITS, block_size=129))
    assert (plan.binds, plan.library, plan.plugins_reason) == (False, None, "TensorRT-RTX takes no plugins")
    error = machine.refused(BackendError, "tensorrt-rtx", plugins="on")
    assert (error.what, error.where) == ("TensorRT-RTX takes no plugins", "--plugins on")


def missing_library(machine: Machine) -> str:
    (machine.library / LIBRARY_NAME).unlink()
    return f"{LIBRARY_NAME} is not there. Build it: dflash-trt plugins build"


def missing_facts(machine: Machine) -> str:
    (machine.library / LIBRARY_NAME).with_suffix(".json").unlink()
    return "what the library was built with is not there"


def damaged(machine: Machine) -> str:
    (machine.library / LIBRARY_NAME).write_bytes(b"other")
    return "is not the library that was built (sha256 differs)"


def for_other_gpus(machine: Machine) -> str:
    machine.build_library((80, 120))
    return "has no kernels for compute capability 9.0, only for 8.0, 12.0"


@pytest.mark.parametrize("spoil", [missing_library, missing_facts, damaged, for_other_gpus])
def test_a_library_that_will_not_do(machine: Machine, spoil: Any) -> None:
    reason = spoil(machine)
    plan = machine.plan()
    assert (plan.binds, plan.library, plan.plugins) == (False, None, None)
    assert reason in plan.plugins_reason
    assert str(machine.library) in plan.plugins_reason
    assert reason in str(machine.refused(BackendError, plugins="on"))
    # the graphs can be bound without it
    plan = machine.plan(plugins="on", **LOWER)
    assert (plan.binds, plan.library, plan.plugins) == (True, None, None)
    assert plan.plugins_reason.startswith("--plugins on; an engine needs the library: ")
    assert reason in plan.plugins_reason


@pytest.mark.parametrize(
    ("built_for", "gpu", "serves"),
    [
        ((80,), 80, True),
        ((80,), 86, True),
        ((80,), 89, True),
        ((80,), 90, False),
        ((90,), 90, True),
        ((90,), 86, False),
        ((100, 120), 120, True),
        ((100, 120), 100, True),
        ((100, 120), 121, False),  # no kernels are compiled for it
        ((80, 90, 100, 120), 75, False),
    ],
)
def test_which_gpus_a_library_serves(machine: Machine, built_for: tuple[int, ...], gpu: int, serves: bool) -> None:
    machine.build_library(built_for)
    machine.gpu = gpu
    assert machine.plan().binds == serves


def test_where_no_gpu_is_named_any_library_is_taken(machine: Machine) -> None:
    machine.gpu = None
    assert machine.plan(**LOWER).library is not None
    assert not machine.plan(compute_capability="86,120", **LOWER).binds  # it has no kernels for 12.0
    assert machine.plan(compute_capability="86,90", **LOWER).binds


# --- which TensorRT


@pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt-rtx"])
def test_no_tensorrt(machine: Machine, flavour: Flavour) -> None:
    machine.api = None
    error = machine.refused(BackendError, flavour)
    assert error.what == f"{NAMES[flavour]} is not installed"
    assert error.where == f"--backend {flavour}"
    assert INSTALL[flavour] in error.mend
    assert "--stop-after lower" in error.mend
    plan = machine.plan(flavour, **LOWER)
    assert (plan.api, plan.stops) == (None, True)
    assert plan.missing == f"{NAMES[flavour]} is not installed: {INSTALL[flavour]}"
    assert "\n" not in plan.missing
    assert str(plan.parser) == {"tensorrt": "TensorRT 10.15", "tensorrt-rtx": "TensorRT-RTX 1.7"}[flavour]


def test_with_tensorrt_and_a_gpu_nothing_is_missing(machine: Machine) -> None:
    for options in ({}, LOWER):
        plan = machine.plan(**options)
        assert plan.api is machine.api
        assert (plan.missing, plan.stops) == ("", bool(options))
        assert str(plan.parser) == "TensorRT 10.16"


def test_tensorrt_without_a_gpu(machine: Machine) -> None:
    machine.gpu = None
    error = machine.refused(BackendError)
    assert error.what == "TensorRT compiles for the GPU at hand, and torch sees none"
    assert "--stop-after lower" in error.mend
    plan = machine.plan(**LOWER)
    assert plan.api is machine.api
    assert plan.missing.startswith("TensorRT compiles for the GPU at hand, and torch sees none")
    assert plan.compute_capabilities == ()


def test_rtx_without_a_gpu_misses_nothing(machine: Machine) -> None:
    machine.api, machine.gpu = fake_builder.rtx(), None
    assert machine.plan("tensorrt-rtx", **LOWER).missing == ""
    assert machine.plan("tensorrt-rtx", compute_capability="86").missing == ""


@pytest.mark.parametrize("installed", [True, False])
def test_a_parser_that_is_asked_for(machine: Machine, installed: bool) -> None:
    machine.api = machine.api if installed else None
    assert str(machine.plan(tensorrt_version="11.1", **LOWER).parser) == "TensorRT 11.1"
    assert str(machine.plan("tensorrt-rtx", tensorrt_version="1.9", **LOWER).parser) == "TensorRT-RTX 1.9"
    assert "ten" in str(machine.refused(UsageError, tensorrt_version="ten", **LOWER))


def test_what_builds_is_what_is_installed(machine: Machine) -> None:
    error = machine.refused(UsageError, tensorrt_version="10.14")
    assert error.where == "--tensorrt-version"
    assert "--stop-after lower" in error.mend


# --- compute capabilities


@pytest.mark.parametrize(
    ("asked", "gpu", "found"),
    [
        ("86,120", None, (86, 120)),
        ("86,120", 89, (86, 120)),
        ("120,86,120", None, (120, 86)),
        (None, 89, (89,)),
    ],
)
@pytest.mark.parametrize("options", [{}, LOWER], ids=["whole", "lower"])
def test_rtx_compiles_for_what_is_asked_or_for_the_gpu_at_hand(
    machine: Machine, asked: str | None, gpu: int | None, found: tuple[int, ...], options: dict[str, Any]
) -> None:
    machine.api, machine.gpu = fake_builder.rtx(), gpu
    plan = machine.plan("tensorrt-rtx", compute_capability=asked, **options)
    assert plan.compute_capabilities == found
    assert plan.options.compute_capabilities == (found if plan.flavour == "tensorrt-rtx" else ())


def test_rtx_has_to_be_told_where_there_is_no_gpu(machine: Machine) -> None:
    machine.api, machine.gpu = fake_builder.rtx(), None
    error = machine.refused(UsageError, "tensorrt-rtx")
    assert (error.what, error.where) == ("is needed where torch sees no GPU", "--compute-capability")
    assert "86,89,120" in error.mend
    assert machine.plan("tensorrt-rtx", **LOWER).compute_capabilities == ()


def test_rtx_refuses_what_it_cannot_compile_for_at_once(machine: Machine) -> None:
    machine.api = fake_builder.rtx()
    for options in ({"compute_capability": "86,90"}, {}):  # the GPU at hand is one too
        error = machine.refused(BackendError, "tensorrt-rtx", **options)
        assert error.what == "TensorRT-RTX 1.7.1.116 cannot compile ahead of time for 90"
        assert "75, 80, 86, 89, 120, 121" in error.mend


@pytest.mark.parametrize(
    ("asked", "gpu", "told"),
    [
        ("86", 90, "8.6 is asked for, this GPU has 9.0"),
        ("86,90", 90, "8.6, 9.0 is asked for, this GPU has 9.0"),
        ("90", None, "9.0 is asked for, torch sees no GPU"),
    ],
)
def test_tensorrt_compiles_for_no_other_gpu(machine: Machine, asked: str, gpu: int | None, told: str) -> None:
    machine.gpu = gpu
    error = machine.refused(BackendError, compute_capability=asked)
    assert error.what == f"TensorRT compiles for the GPU at hand: {told}"
    assert error.where == "--compute-capability"
    lowered = machine.plan(compute_capability=asked, **LOWER)
    assert lowered.compute_capabilities == settings(compute_capability=asked).compute_capability


@pytest.mark.parametrize("asked", [None, "90", "9.0"])
def test_tensorrt_compiles_for_the_gpu_at_hand(machine: Machine, asked: str | None) -> None:
    plan = machine.plan(compute_capability=asked)
    assert plan.compute_capabilities == (90,)
    config = machine.api.trt.configs[-1]
    assert config.capabilities == []  # it is not told, and cannot be


# --- options


def test_options_are_those_of_the_configuration(machine: Machine, tmp_path: Path) -> None:
    read, write = tmp_path / "in.cache", tmp_path / "out.cache"
    read.write_bytes(FakeConfig.good_cache)
    plan = machine.plan(
        builder_optimization_level=2, workspace=512, weight_streaming=True, refit=True, input_timing_cache=read,
        output_timing_cache=write,
    )  # fmt: skip
    assert plan.options == BuilderOptions(
        compute_capabilities=(), optimization_level=2, workspace=512, refit=True, weight_streaming=True
    )
    assert plan.timing_cache == TimingCache(read, write)
    assert machine.plan().timing_cache is None
    assert machine.plan(output_timing_cache=write).timing_cache == TimingCache(None, write)
    assert machine.plan(input_timing_cache=read).timing_cache == TimingCache(read, None)


def test_options_that_this_tensorrt_lacks_are_refused_at_once(machine: Machine) -> None:
    machine.api = fake_builder.tensorrt("11.9.0.1", flags=("REFIT", "TF32"))
    assert machine.refused(BackendError, weight_streaming=True).where == "--weight-streaming"
    assert machine.plan(refit=True).options.flags() == ["refit"]


@pytest.mark.parametrize("asked", [1, 64, 128, 256, None])
@pytest.mark.parametrize("plugins", ["auto", "off"])
def test_chunks_of_a_prompt_fit_the_plugins(machine: Machine, asked: int | None, plugins: str) -> None:
    limits = replace(LIMITS, prefill_chunk=asked or 256)
    plan = machine.plan(prefill_chunk=asked, plugins=plugins, limits=limits)
    fitted = fit_limits(plan, limits)
    assert plan.binds == (plugins == "auto" and asked != 256)
    assert fitted.prefill_chunk == (128 if plan.binds and asked is None else asked or 256)
    assert replace(fitted, prefill_chunk=limits.prefill_chunk) == limits


def test_rtx_refits_only_where_a_gpu_is(machine: Machine) -> None:
    machine.api = fake_builder.rtx()
    assert machine.plan("tensorrt-rtx", refit=True, compute_capability="86").options.refit
    machine.gpu = None
    error = machine.refused(BackendError, "tensorrt-rtx", refit=True, compute_capability="86")
    assert error.where == "--refit"


def test_a_parser_without_a_cache_update_needs_the_plugins(machine: Machine) -> None:
    machine.api = fake_builder.tensorrt(version="10.14.1.48")
    assert machine.plan().binds
    error = machine.refused(BackendError, plugins="off")
    assert "TensorRT 10.14 can update caches in place with plugins only (--plugins off)" in error.what
    assert "10.15 or later" in error.mend
