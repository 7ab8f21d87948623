"""KVInjection: the definition as plain loops == the eager reference == the ONNX function body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from op_cases import (
    InjectionCase,
    injection_body,
    injection_case,
    injection_formula,
    injection_reference,
    injections,
)

from dflash_trt.ops import kv_injection


@settings(deadline=None, max_examples=150)
@given(case=injections())
def test_reference_is_the_formula(case: InjectionCase) -> None:
    for found, expected in zip(injection_reference(case), injection_formula(case), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=100)
@given(case=injections())
def test_function_body_is_the_reference(case: InjectionCase) -> None:
    for found, expected in zip(injection_body(case), injection_reference(case), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_function_body_in_half_precision(dtype: str, tolerance: float, norm: bool) -> None:
    """Both compute in float32 and round once, so they are at most one unit in the last place apart."""
    for seed in range(6):
        case = injection_case(seed, 2, 2, seed + 1, 8, 5, 2, norm).rounded(getattr(torch, dtype))
        pairs = zip(injection_body(case, dtype), injection_reference(case, getattr(torch, dtype)), strict=True)
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(case=injections())
def test_other_slots_keep_their_bits(case: InjectionCase) -> None:
    """NaN included: writing does not read."""
    rows, capacity = case.key.shape[1], case.key_cache.shape[2]
    written = np.arange(capacity) - case.write_start[:, None]
    elsewhere = ((written < 0) | (written >= rows))[:, None, :, None]
    poisoned = replace(
        case,
        key_cache=np.full_like(case.key_cache, np.nan),
        value_cache=np.full_like(case.value_cache, np.nan),
    )
    for outputs in (injection_reference(poisoned), injection_body(poisoned)):
        for found, expected in zip(outputs, injection_formula(case), strict=True):
            assert np.isnan(np.broadcast_to(found, expected.shape)[np.broadcast_to(elsewhere, expected.shape)]).all()
            inside = np.broadcast_to(~elsewhere, expected.shape)
            np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-5, atol=1e-5)


def test_a_write_beyond_the_capacity_fails() -> None:
    """It must not wrap around or be cut off."""
    case = injection_case(0, 1, 1, 3, 4, 0, 0, True)
    case = replace(case, write_start=np.array([1]))
    with pytest.raises((IndexError, RuntimeError)):
        injection_reference(case)
    with pytest.raises(Exception, match="TensorScatter"):
        injection_body(case)


def test_overload_names() -> None:
    assert kv_injection.overload(has_norm=True) == ""
    assert kv_injection.overload(has_norm=False) == "no_norm"
