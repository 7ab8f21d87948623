"""What a bundle says of its engines: through a document and back, and why they cannot run somewhere else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_records import built_record
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.backends import engine_record
from dflash_trt.backends.engine_record import (
    BuilderOptions,
    EngineFacts,
    EngineRecord,
    PluginRecord,
    dotted,
    gpu_compute_capability,
    load_faults,
)
from dflash_trt.backends.tensorrt_api import FLAGS
from dflash_trt.documents import DocumentError, parse, to_json, to_values
from dflash_trt.export.contract import Role
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(
    max_batch_size=2, max_seq_len=100, max_input_len=99, block_size=8, prefill_chunk=64, vp_block_size=10, branches=3
)
PLUGINS = PluginRecord(
    file="plugins/lib.so", version="0.1.0", tensorrt="10.14.1", compute_capabilities=(80, 90), sha256="ab" * 32
)
FACTS = EngineFacts(bytes=12345, seconds=2.5, layers={"bfloat16": 90, "float32": 3}, float32_products=1)
ROLES: tuple[Role, ...] = ("target", "drafter", "vp_drafter")
RECORD = built_record(
    LIMITS, ROLES, PLUGINS, plugins_reason="plugin library 0.1.0, for TensorRT 10.14.1",
    options=BuilderOptions(optimization_level=5, workspace=4096, refit=True), facts=dict.fromkeys(ROLES, FACTS),
)  # fmt: skip
LOWERED = replace(
    RECORD, stage="lowered", version=None, compute_capabilities=(), bound=False, plugins=None, facts={},
    options=BuilderOptions(compute_capabilities=(86, 120)),
)  # fmt: skip


# --- documents


@pytest.mark.parametrize("record", [RECORD, LOWERED], ids=["built", "lowered"])
def test_through_a_document_and_back(record: EngineRecord) -> None:
    values = to_values(record)
    assert parse(EngineRecord, json.loads(json.dumps(values)), "record") == record
    assert parse(EngineRecord, json.loads(to_json(record)), "record") == record
    assert values["profiles"]["target"][0]["dims"]["Q"] == {"min": 1, "opt": LIMITS.tree_size, "max": LIMITS.tree_size}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"stage": "half"}, "stage should be 'lowered' or 'built'"),
        ({"compute_capabilities": ["nine"]}, "compute_capabilities[0]"),
        ({"engine": 1}, "engine is no field of a record"),
        ({"profiles": {"draft": []}}, "profiles.draft"),
    ],
)
def test_documents_of_something_else(change: dict[str, Any], told: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(EngineRecord, to_values(RECORD) | change, "record")
    assert told in str(caught.value)


def test_a_document_that_lacks_something() -> None:
    values = to_values(RECORD)
    del values["plugins"]["sha256"]
    with pytest.raises(DocumentError, match=r"plugins\.sha256 is missing"):
        parse(EngineRecord, values, "record")


# --- words


@given(st.integers(1, 19), st.integers(0, 9))
def test_dotted(major: int, minor: int) -> None:
    assert dotted(10 * major + minor) == f"{major}.{minor}"


def test_flags_are_those_that_a_builder_can_be_asked_for() -> None:
    assert BuilderOptions().flags() == []
    assert BuilderOptions(refit=True).flags() == ["refit"]
    assert BuilderOptions(weight_streaming=True).flags() == ["weight_streaming"]
    assert set(BuilderOptions(refit=True, weight_streaming=True).flags()) == set(FLAGS)


BUILT = "built with TensorRT 10.14.1.48"
FOR = "built for compute capability 9.0"


@pytest.mark.parametrize(
    ("running", "gpu", "told"),
    [
        ("10.14.1.48", 90, []),
        ("10.16.0", 90, [f"{BUILT}, running 10.16.0"]),
        ("10.14.1", 90, [f"{BUILT}, running 10.14.1"]),
        (None, 90, [f"{BUILT}, which is not installed"]),
        ("10.14.1.48", 89, [f"{FOR}, this GPU has 8.9"]),
        ("10.14.1.48", 120, [f"{FOR}, this GPU has 12.0"]),
        ("10.14.1.48", None, [f"{FOR}, and there is no CUDA GPU here"]),
        ("11.1.0.1", 100, [f"{BUILT}, running 11.1.0.1", f"{FOR}, this GPU has 10.0"]),
        (None, None, [f"{BUILT}, which is not installed", f"{FOR}, and there is no CUDA GPU here"]),
    ],
)
def test_load_faults(running: str | None, gpu: int | None, told: Sequence[str]) -> None:
    found = list(load_faults(RECORD, running, gpu))
    assert [what for what, _ in found] == list(told)
    assert all(mend for _, mend in found)


@pytest.mark.parametrize(("gpu", "runs"), [(86, True), (120, True), (89, False), (80, False), (None, False)])
def test_engines_for_several_compute_capabilities(gpu: int | None, runs: bool) -> None:
    record = replace(RECORD, name="TensorRT-RTX", version="1.7.1.116", compute_capabilities=(86, 120))
    found = list(load_faults(record, "1.7.1.116", gpu))
    assert (not found) == runs
    assert all("built for compute capability 8.6, 12.0" in what for what, _ in found)
    (what, mend), *_ = load_faults(record, None, 86)
    assert what == "built with TensorRT-RTX 1.7.1.116, which is not installed"
    assert mend == "Install TensorRT-RTX 1.7.1.116"


@pytest.mark.parametrize("running", [None, "10.14.1.48"])
@pytest.mark.parametrize("gpu", [None, 90])
def test_what_was_lowered_only_runs_nowhere(running: str | None, gpu: int | None) -> None:
    (found,) = load_faults(LOWERED, running, gpu)
    assert found[0] == "was lowered only and has no engines"
    assert "--stop-after lower" in found[1]


def test_mends_name_what_to_install() -> None:
    (_, mend), = load_faults(RECORD, "10.16.0", 90)
    assert mend == "Build the bundle again, or install TensorRT 10.14.1.48"


# --- the GPU


def test_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def cuda(available: bool) -> SimpleNamespace:
        return SimpleNamespace(is_available=lambda: available, get_device_capability=lambda: (12, 0))

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=object(), cuda=cuda(True)))
    assert gpu_compute_capability() == 120
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=object(), cuda=cuda(False)))
    assert gpu_compute_capability() is None
    monkeypatch.setattr(engine_record.importlib.util, "find_spec", lambda name: None)
    assert gpu_compute_capability() is None
