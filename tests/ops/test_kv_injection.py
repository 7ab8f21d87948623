"""KVInjection: the definition as plain loops == the eager reference == the ONNX function body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    InjectionCase,
    injection_body,
    injection_case,
    injection_formula,
    injection_reference,
    injection_tensors,
    injections,
)

from dflash_trt.ops import kv_injection_onnx


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
@pytest.mark.parametrize("passing", [0, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_function_body_in_half_precision(dtype: str, tolerance: float, passing: int, norm: bool) -> None:
    """Both compute in float32 and round once, so they are at most one unit in the last place apart."""
    for seed in range(6):
        case = injection_case(seed, 2, 2, seed + 1, 8, 5, 2, norm, passing).rounded(getattr(torch, dtype))
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


@settings(deadline=None, max_examples=100)
@given(case=injections(), data=st.data())
def test_rows_without_a_slot_write_nothing(case: InjectionCase, data: st.DataObject) -> None:
    """Those behind the count, whose positions are anything, and those whose slot is not in the cache."""
    batch, rows = case.position_ids.shape
    capacity = case.key_cache.shape[2]
    start = np.array(data.draw(st.lists(st.integers(-rows, capacity + 1), min_size=batch, max_size=batch)))
    count = np.array(data.draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch)))
    expected = [case.key_cache.copy(), case.value_cache.copy()]
    # what every row would write, each into a cache that has room for all
    roomy = np.zeros((*case.key_cache.shape[:2], rows, case.key.shape[-1]), np.float32)
    written = injection_formula(replace(case, write_start=0 * start, key_cache=roomy, value_cache=roomy))
    for cache, new in zip(expected, written, strict=True):
        for b, i in np.ndindex(batch, rows):
            if i < count[b] and 0 <= start[b] + i < capacity:
                cache[b, :, start[b] + i] = new[b, :, i]
    positions = np.where(np.arange(rows) < count[:, None], case.position_ids, 1 << 40)
    tensors = injection_tensors(replace(case, write_start=start, position_ids=positions))
    torch.ops.dflash_trt.kv_injection_(*tensors, case.eps, torch.from_numpy(count))
    for found, cache in zip(tensors[7:], expected, strict=True):
        np.testing.assert_allclose(found.numpy(), cache, rtol=1e-5, atol=1e-5)


def test_a_write_beyond_the_capacity_fails_in_onnx_runtime() -> None:
    """The function body cannot leave rows out: a runtime refuses."""
    case = injection_case(0, 1, 1, 3, 4, 0, 0, True)
    with pytest.raises(Exception, match="TensorScatter"):
        injection_body(replace(case, write_start=np.array([1])))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("partial", [True, False])
def test_overload_names(norm: bool, partial: bool) -> None:
    expected = {(True, False): "", (False, False): "no_norm", (True, True): "partial"}
    assert kv_injection_onnx.overload(norm, partial) == expected.get((norm, partial), "no_norm_partial")
