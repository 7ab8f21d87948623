"""What judges the kernels in scripts/gpu_check.py is right itself, and finds faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import (
    attention_cases,
    attention_checks,
    dispatch_checks,
    injection_cases,
    injection_checks,
    path_cases,
    path_checks,
)
from gpu.attention_cases import DTYPES, VISIBILITIES
from gpu.context import Budget, Context, Options
from gpu.results import Result
from gpu.sections import kernels

from dflash_trt.ops.kv_injection import kv_injection_reference_
from dflash_trt.ops.staircase_attention import staircase_attention_reference
from dflash_trt.plugins.kernels.tiling import HEAD_DIMS, tiles

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cpu(tmp_path: Path) -> Context:
    return Context(Options(device="cpu", seed=3), Budget(200.0), ROOT, tmp_path)


@pytest.mark.parametrize("kind", VISIBILITIES)
@pytest.mark.parametrize("feature", attention_checks.FEATURES)
def test_attention_is_judged_as_the_reference_does_it(kind: str, feature: str) -> None:
    for dtype in DTYPES.values():
        case = attention_cases.make(
            2, dtype, context=70, queries=9, dim=32, kind=kind, **attention_checks.FEATURES[feature]
        )
        output, bound = attention_cases.expected(case)
        found = staircase_attention_reference(*case.arguments())
        assert attention_cases.distance(found, output, bound) <= 1
        assert attention_cases.distance(found * 1.02, output, bound) > 1
        found[0, 0, 0] = float("nan")
        assert attention_cases.distance(found, output, bound) == float("inf")


@pytest.mark.parametrize("shape", [{}, {"norm": False, "counted": True}, {"passing": 5, "dim": 96}])
def test_injections_are_judged_as_the_reference_does_it(shape: dict[str, Any]) -> None:
    for dtype in DTYPES.values():
        # positions inside of the tables, for others the reference has no answer; slots also in front of the cache
        before = injection_cases.make(4, dtype, inside=True, **shape)
        before = replace(before, write_start=before.write_start - 7)
        case = replace(before, key_cache=before.key_cache.clone(), value_cache=before.value_cache.clone())
        kv_injection_reference_(*case.arguments())
        assert injection_cases.wrong(case, before) == ""
        assert injection_cases.written(before)
        b, _, slot = injection_cases.written(before)[0]
        case.value_cache[b, 0, slot, 0] = 9.0
        assert "value_cache" in injection_cases.wrong(case, before)
        case.key_cache[b, 0, slot, 0] += 1.0
        assert "times their bound away" in injection_cases.wrong(case, before)


def launcher_that(change: Callable[[Any], Any], launch: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(*arguments: Any, **settings: Any) -> Any:
        return change(launch(*arguments, **settings))

    return faulty


def off_by_one(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return found[0], found[1] + 1, found[2]


@pytest.mark.parametrize(
    ("module", "name", "fault", "check", "failing"),
    [
        (attention_checks, "staircase_attention", lambda x: x * 1.02, attention_checks.check_attention, "staircase"),
        (injection_checks, "kv_injection_", None, injection_checks.check_injection, "kv_injection"),
        (path_checks, "accept_path_", off_by_one, path_checks.check_paths, "accept_path"),
        (
            path_checks,
            "gather_features_",
            lambda x: x.roll(1, 1),
            path_checks.check_paths,
            "move_rows, gather_features",
        ),
    ],
)
def test_faults_are_found(
    module: Any, name: str, fault: Any, check: Any, failing: str, cpu: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = getattr(module, name)
    faulty = launcher_that(fault, launch) if fault else lambda *arguments: launch(*arguments[:-2], 0.5, arguments[-1])
    monkeypatch.setattr(module, name, faulty)
    result = Result("kernels")
    check(cpu, result)
    failed = [entry.name for entry in result.checks if not entry.ok]
    assert len(failed) >= 2
    assert all(entry.startswith(failing) for entry in failed)


def test_a_fault_in_a_replay_is_found(cpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes its lengths from the host's first launch."""
    launch, stale = dispatch_checks.path_ops.move_rows_, []

    def faulty(*arguments: Any) -> None:
        stale.append(arguments[-1].clone())
        launch(*arguments[:-1], stale[0])

    monkeypatch.setattr(dispatch_checks.path_ops, "move_rows_", faulty)
    result = Result("kernels")
    dispatch_checks.check_capture(cpu, result)
    assert any(not entry.ok and "move_rows" in entry.detail for entry in result.checks)


def test_what_the_time_does_not_allow_is_named(cpu: Context) -> None:
    result = Result("kernels")
    attention_checks.check_attention(replace(cpu, budget=Budget(1.0)), result)
    assert not result.checks
    assert len(result.skipped) == len(attention_checks.FEATURES)
    assert all(part.endswith(": time") for part in result.skipped)


def test_families_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries, contexts, dtypes, features and tiles that are asked for, in few kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    families = list(attention_checks.families(on_gpu=True, quick=False, seed=1))
    assert {1, 16, 70, 128} <= {family.shape["queries"] for family in families}
    assert {0, 4096} <= {length for family in families for length in family.contexts}
    assert {family.dtype for family in families} == set(DTYPES)
    assert {family.shape["dim"] for family in families} == set(HEAD_DIMS)
    for name in ("sinks", "window", "softcap"):
        assert any(family.shape.get(name) for family in families)
    assert {0, 1} <= {family.shape["causal"] for family in families if "causal" in family.shape}
    used = {(family.shape["dim"], family.tile, "window" in family.shape) for family in families if family.tile}
    for dim in HEAD_DIMS:
        for masked in (False, True):
            assert {(dim, tile, masked) for tile in tiles(90, dim, 2, masked)} <= used
    assert len(families) < 60
    quick = list(attention_checks.families(on_gpu=True, quick=True, seed=1))
    assert quick == families[: len(quick)]


def test_trees_have_long_paths_and_equal_siblings() -> None:
    lengths = [len(path) for seed in range(20) for path in path_cases.walks(path_cases.make(seed, 3, 70))]
    assert max(lengths) > 5
    assert min(lengths) == 1


def test_a_part_that_raises_loses_no_other(cpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: Context, result: Result) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(broken, "__name__", "check_operators")
    monkeypatch.setattr(kernels, "check_operators", broken)
    result = Result("kernels")
    kernels.run(cpu, result)
    (failed,) = [entry for entry in result.checks if not entry.ok]
    assert (failed.name, failed.detail) == ("check_operators", "RuntimeError: no such kernel")
    assert any(entry.name.startswith("staircase_attention") for entry in result.checks)
