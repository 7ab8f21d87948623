"""When an engine's greedy steps run whole on the device: their own operators must be there, and take the tree."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from export.small_pair import small_pair

from dflash_trt.backends import tensorrt_session
from dflash_trt.backends.profiles import profiles
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(max_batch_size=1, max_seq_len=256, max_input_len=99, block_size=16, prefill_chunk=16)
D2SD = replace(LIMITS, vp_block_size=16, branches=15)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows when the operators are made ready for CUDA."""
    calls: list[str] = []
    monkeypatch.setattr(tensorrt_session, "register", lambda: calls.append("register"))
    return calls


def test_the_operators_of_a_step_are_registered_for_cuda(registered: list[str]) -> None:
    for role, graph in (("target", small_pair().target), ("drafter", small_pair().drafter)):
        assert tensorrt_session.whole_steps(graph.spec, profiles(role, LIMITS), "cuda")  # type: ignore[arg-type]
    assert registered == ["register"] * 2


def test_on_a_cpu_nothing_is_registered(registered: list[str]) -> None:
    assert not tensorrt_session.whole_steps(small_pair().target.spec, profiles("target", LIMITS), "cpu")
    assert not registered


def test_a_tree_larger_than_the_kernels_take_is_verified_pass_by_pass(registered: list[str]) -> None:
    assert D2SD.tree_size > 128
    assert not tensorrt_session.whole_steps(small_pair().target.spec, profiles("target", D2SD), "cuda")
    assert tensorrt_session.whole_steps(small_pair().drafter.spec, profiles("drafter", D2SD), "cuda")


def test_without_triton_it_is_said(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec

    def without_triton(name: str, package: str | None = None) -> Any:
        return None if name == "triton" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_triton)
    assert not tensorrt_session.whole_steps(small_pair().target.spec, profiles("target", LIMITS), "cuda")
    assert "triton is not installed" in caplog.text
    assert not registered
