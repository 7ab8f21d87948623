"""What a report says of engines: read back where they are open, and what was not run and why where they are not.

Engines are stand-ins, in whose place a torch bundle's recorded values are rewritten; one bundle is lowered for real.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backends.fake_engine import Built, FakeTensorRT, api_of, over_fakes
from backends.inspector import FC, HALF, engine_json, fused, gemm
from export.small_pair import small_pair

import dflash_trt
from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_record import BuilderOptions, EngineFacts, EngineRecord
from dflash_trt.backends.profiles import profiles
from dflash_trt.backends.tensorrt_session import open_engine_session
from dflash_trt.bundle import BundleInfo, read_info
from dflash_trt.cli.tables import print_report
from dflash_trt.evaluation.engine_checks import engine_checks, network_checks, preflight_checks
from dflash_trt.evaluation.report import Check, VerifyReport
from dflash_trt.evaluation.verify import report_not_run, verify
from dflash_trt.export.contract import Role
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(max_batch_size=2, max_seq_len=20, max_input_len=19, block_size=4, prefill_chunk=12)
ROLES: tuple[Role, ...] = ("target", "drafter")
FACTS = EngineFacts(bytes=1, seconds=1.0, layers={"float16": 9, "float32": 3, "int64": 2}, float32_products=1)


@pytest.fixture
def info(torch_bundle: Path) -> BundleInfo:
    """Of a bundle of float16 engines."""
    read = read_info(torch_bundle)
    record = EngineRecord(
        name="TensorRT",
        stage="built",
        parser="TensorRT 10.16",
        version="10.16.0.72",
        compute_capabilities=(90,),
        bound=False,
        plugins=None,
        plugins_reason="",
        profiles={role: profiles(role, read.limits) for role in read.roles},
        options=BuilderOptions(),
        facts=dict.fromkeys(read.roles, FACTS),
    )
    return replace(read, backend="tensorrt", precision="float16", engines=record)


def opened(folder: Path, information: str, rtx: bool = False) -> tuple[Any, list[FakeTensorRT]]:
    """An engine over sessions whose inspectors tell this, and the modules they were opened with."""
    file, sessions, modules = folder / "rank0.engine", {}, []
    file.write_bytes(b"engine")
    for role in ROLES:
        graph, given = small_pair().graph(role), profiles(role, LIMITS)
        api = api_of(Built(graph.module, graph.spec, list(given), information=information), rtx)
        sessions[role] = open_engine_session(api, file, graph.spec, given, LIMITS.capacity, None, device="cpu")
        modules.append(api.trt)
    return SimpleNamespace(sessions=sessions), modules


# -- engines that are open


@pytest.mark.parametrize("rtx", [False, True], ids=["tensorrt", "rtx"])
@pytest.mark.parametrize(
    ("layers", "status", "reason", "measured"),
    [
        ([*HALF, FC], "passed", "^$", {"float16": 2, "float32": 1}),
        ([*HALF, fused("Half")], "passed", "^$", {"float16": 2, "float16 and float32": 1}),
        ([*HALF, FC, FC], "passed", "^2 matrix products read float32 and", {"float16": 2, "float32": 2}),
        ([FC], "failed", "^no matrix product computes in float16: 1 in float32$", {"float32": 1}),
        (
            [FC, FC], "failed", "^no matrix product .*: 2 in float32; 2 matrix products read float32 and",
            {"float32": 2},
        ),
        ([gemm("BFloat16"), *HALF], "failed", "^1 matrix products compute in bfloat16", {"bfloat16": 1, "float16": 2}),
        ([gemm("N/A")], "not run", "^the inspector does not tell in which dtype", {"unknown": 1}),
        (["q_proj", "fc"], "not run", "^the inspector does not tell in which dtype", {}),
        ([], "not run", "^the inspector does not tell in which dtype", {}),
    ],
)  # fmt: skip
def test_precision_is_read_back_from_open_sessions(
    tmp_path: Path, info: BundleInfo, rtx: bool, layers: list[Any], status: str, reason: str, measured: dict[str, int]
) -> None:
    engine, modules = opened(tmp_path, engine_json(*layers), rtx)
    found = list(engine_checks(info, engine))
    assert [(check.name, check.status) for check in found] == [(f"engine: {role}", status) for role in ROLES]
    products = {f"products in {dtypes}": count for dtypes, count in measured.items()}
    there = {} if status == "not run" else {"float32 products of the graph": 1}
    for check in found:
        assert re.search(reason, check.reason), check.reason
        assert check.measured == products | there
        assert check.limit.endswith("matrix products in float16, or float32 where the graph asks for it")
    assert [trt.calls for trt in modules] == [["deserialize_cuda_engine"]] * 2  # no engine is read twice


def test_all_checks_of_engines_that_run(torch_bundle: Path, info: BundleInfo) -> None:
    """These sessions compute, and have no engine to read."""
    assert info.engines is not None
    facts = dict.fromkeys(ROLES, replace(FACTS, layers={"float32": 12}))
    info = replace(info, precision="float32", engines=replace(info.engines, facts=facts))
    engine = over_fakes(dflash_trt.load(torch_bundle))
    report = verify(torch_bundle, info, engine)
    names = [check.name for check in report.checks]
    assert names[:6] == [f"{kind}: {role}" for kind in ("preflight", "network", "engine") for role in ROLES]
    assert names[-2:] == ["losslessness", "acceptance"]
    statuses = {check.name: check.status for check in report.checks}
    assert {statuses[name] for name in names[:4]} == {"passed"}
    for name in names[4:6]:
        assert statuses[name] == "not run"
    assert {status for name, status in statuses.items() if name.startswith("numbers: ")} == {"passed"}
    assert len(names[6:-2]) == sum(len(info.graphs[role].spec.outputs) + 1 for role in ROLES)
    assert statuses["losslessness"] == "passed"


# -- engines that are not run


def test_what_was_checked_before_the_build(info: BundleInfo) -> None:
    for check, role in zip(preflight_checks(info), ROLES, strict=True):
        graph = info.graphs[role].spec
        caches = 2 * graph.num_layers
        assert (check.name, check.status) == (f"preflight: {role}", "passed")
        inputs, outputs = len(graph.inputs) + caches, len(graph.outputs) + caches
        assert check.measured == {"inputs": inputs, "outputs": outputs, "profiles": 2}
        assert "TensorRT 10.16" in check.limit


@pytest.mark.parametrize(
    ("layers", "status", "reason"),
    [
        ({"float16": 9, "float32": 3, "int64": 2}, "passed", ""),
        ({"float16": 9}, "passed", ""),
        ({"float32": 9, "int64": 1}, "failed", "no layer computes in float16"),
        ({"float16": 9, "bfloat16": 1, "fp8": 1}, "failed", "layers in bfloat16, fp8"),
    ],
)
def test_networks(info: BundleInfo, layers: dict[str, int], status: str, reason: str) -> None:
    assert info.engines is not None
    facts = {"target": replace(FACTS, layers=layers)}
    target, drafter = network_checks(replace(info, engines=replace(info.engines, facts=facts)))
    assert (target.status, target.reason, target.measured) == (status, reason, layers)
    assert (drafter.status, drafter.reason) == ("not run", "the build stopped after lowering")


def test_a_report_of_engines_that_cannot_run_here(torch_bundle: Path, info: BundleInfo) -> None:
    report = report_not_run(torch_bundle, info, "there is no GPU")
    values = json.loads(report.to_json())
    assert values["passed"] is True
    assert values["counts"] == {"passed": 4, "failed": 0, "not run": 6}
    assert {c["reason"] for c in values["checks"] if c["status"] == "not run"} == {"there is no GPU"}


@pytest.mark.parametrize("checked", [True, False])
def test_a_build_that_stops_before_its_engines(
    agreeing_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Its report says what the build saw, with --no-verify too."""
    monkeypatch.setattr(tensorrt_api, "installed", lambda flavour: False)
    result = dflash_trt.build(
        **agreeing_pair._asdict(), output=tmp_path / "bundle", backend="tensorrt", stop_after="lower",
        plugins="off", max_seq_len=64, verify=checked,
    )  # fmt: skip
    assert result.report is not None
    values = json.loads((tmp_path / "bundle" / "report.json").read_text())
    assert values == json.loads(result.report.to_json())
    assert values["bundle"] == "bundle"
    found = {check["name"]: (check["status"], check["reason"]) for check in values["checks"]}
    why = "was lowered only and has no engines" if checked else "--no-verify"
    expected: dict[str, tuple[str, str]] = {}
    for role in ROLES:
        expected[f"preflight: {role}"] = "passed", "checked in the build"
        expected[f"network: {role}"] = "not run", "the build stopped after lowering"
        expected |= {f"{kind}: {role}": ("not run", why) for kind in ("engine", "numbers")}
    expected |= dict.fromkeys(("losslessness", "acceptance"), ("not run", why))
    assert found == expected
    assert values["counts"] == Counter(status for status, _ in found.values()) | {"failed": 0}


def test_bundles_of_other_backends_have_no_report_unless_verified(torch_bundle: Path) -> None:
    assert not (torch_bundle / "report.json").exists()


# -- reports


def test_a_printed_report_ends_with_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    statuses = ("passed", "not run", "passed", "failed", "not run", "not run")
    checks = tuple(Check(f"check {i}", status, {}, "none") for i, status in enumerate(statuses))
    report = VerifyReport("bundle", "tensorrt", "float16", "float", checks)
    print_report(report)
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 1 failed, 3 not run"
    assert not report.passed
