"""StaircaseAttention: the definition as plain loops == the eager reference == the ONNX function body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx.reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    AttentionCase,
    attention_body,
    attention_case,
    attention_formula,
    attention_model,
    attention_reference,
    named_inputs,
    sees,
    shapes,
)

from dflash_trt.ops import staircase_attention_onnx

OVERLOADS = (
    "",
    "window",
    "softcap",
    "sinks",
    "window_softcap",
    "window_sinks",
    "softcap_sinks",
    "window_softcap_sinks",
)
# the two that use the standard Attention operator, which ONNX Runtime's CPU lacks in bfloat16
STANDARD = ("", "window")


def features(overload: str, causal: int = 1) -> dict[str, object]:
    """Arguments of `attention_case` that call for this overload."""
    named = overload.split("_")
    return {
        "window": 5 if "window" in named else 0,
        "softcap": 1.5 if "softcap" in named else 0.0,
        "sinks": "sinks" in named,
        "causal": causal,
    }


def overloads_and_sides() -> list[tuple[str, int]]:
    return [(overload, causal) for overload in OVERLOADS for causal in ((0, 1) if "window" in overload else (1,))]


@settings(deadline=None, max_examples=150)
@given(
    shape=shapes(),
    window=st.sampled_from((0, 0, 1, 2, 3, 6, 50)),
    causal=st.integers(0, 1),
    softcap=st.sampled_from((0.0, 0.0, 0.5, 30.0)),
    sinks=st.booleans(),
)
def test_reference_is_the_formula(shape: dict[str, int], window: int, causal: int, softcap: float, sinks: bool) -> None:
    case = attention_case(**shape, window=window, causal=causal, softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(attention_reference(case), attention_formula(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("overload", "causal"), overloads_and_sides())
@settings(deadline=None, max_examples=25)
@given(shape=shapes())
def test_function_body_is_the_reference(overload: str, causal: int, shape: dict[str, int]) -> None:
    case = attention_case(**shape, **features(overload, causal))
    assert case.overload() == overload
    np.testing.assert_allclose(attention_body(case), attention_reference(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("overload", "causal"), overloads_and_sides())
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # the standard Attention may round scores and weights to the tensor's dtype; the reference rounds the result only
    [("float16", 4e-3), ("bfloat16", 3e-2)],
)
def test_function_body_in_half_precision(overload: str, causal: int, dtype: str, tolerance: float) -> None:
    if dtype == "bfloat16" and overload in STANDARD:
        pytest.skip("ONNX Runtime's CPU has no bfloat16 Attention; see test_standard_attention_in_bfloat16")
    for seed in range(6):
        torch_dtype = getattr(torch, dtype)
        case = attention_case(seed, queries=seed + 1, **features(overload, causal)).rounded(torch_dtype)
        expected = attention_reference(case, torch_dtype)
        np.testing.assert_allclose(attention_body(case, dtype), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("overload", STANDARD)
def test_standard_attention_in_bfloat16(overload: str) -> None:
    """By the reference evaluator of onnx, which rounds every step to bfloat16."""
    for seed in range(2):
        case = attention_case(seed, **features(overload)).rounded(torch.bfloat16)
        model = attention_model(overload, *case.attributes().values(), "bfloat16")
        evaluator = onnx.reference.ReferenceEvaluator(model)
        out = evaluator.run(None, named_inputs(staircase_attention_onnx.schema(), case.inputs()))[0]
        np.testing.assert_allclose(out, attention_reference(case, torch.bfloat16), rtol=4e-2, atol=4e-2)


def invisible(case: AttentionCase, query: int | None = None) -> np.ndarray:
    """Slots no query sees, or that `query` does not see: bool [B, C]."""
    batch, capacity = case.key_cache.shape[0], case.key_cache.shape[2]
    queries = range(case.visibility.shape[1]) if query is None else (query,)
    return np.array(
        [[not any(sees(case, b, i, slot) for i in queries) for slot in range(capacity)] for b in range(batch)]
    )


def poisoned(case: AttentionCase, slots: np.ndarray, key: float, value: float) -> AttentionCase:
    """Keys and values of `slots` [B, C] replaced."""
    place = slots[:, None, :, None]
    return replace(
        case,
        key_cache=np.where(place, np.float32(key), case.key_cache),
        value_cache=np.where(place, np.float32(value), case.value_cache),
    )


@settings(deadline=None, max_examples=40)
@given(shape=shapes(), overload=st.sampled_from(OVERLOADS), causal=st.integers(0, 1))
def test_reference_ignores_what_nobody_sees(shape: dict[str, int], overload: str, causal: int) -> None:
    case = attention_case(**shape, **features(overload, causal))
    clean, slots = attention_reference(case), invisible(case)
    for poison in (1e30, -1e30, np.inf, np.nan):
        np.testing.assert_array_equal(attention_reference(poisoned(case, slots, poison, poison)), clean)


@settings(deadline=None, max_examples=25)
@given(shape=shapes(), overload=st.sampled_from(OVERLOADS), causal=st.integers(0, 1))
def test_a_query_ignores_what_it_does_not_see_though_others_do(
    shape: dict[str, int], overload: str, causal: int
) -> None:
    case = attention_case(**shape, **features(overload, causal))
    query = shape["seed"] % shape["queries"]
    slots = invisible(case, query)
    # what others see is a computed key and value: finite always, NaN would be a broken model
    for poison in (1e30, -1e30):
        worse = poisoned(case, slots, poison, poison)
        np.testing.assert_array_equal(attention_reference(worse)[:, query], attention_reference(case)[:, query])
        np.testing.assert_allclose(
            attention_body(worse)[:, query], attention_reference(case)[:, query], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(("overload", "causal"), overloads_and_sides())
@settings(deadline=None, max_examples=10)
@given(shape=shapes())
def test_function_body_ignores_what_nobody_sees(overload: str, causal: int, shape: dict[str, int]) -> None:
    case = attention_case(**shape, **features(overload, causal))
    clean, slots = attention_body(case), invisible(case)
    # Values must be finite: a weight of 0 times NaN or infinity is NaN in a matrix product. Caches start as zeros and
    # take computed values only, so they are. Keys may be NaN where the body masks by Where; the standard Attention of
    # overloads "" and "window" adds its mask to the scores, so there they must be finite too.
    keys = (1e30, -1e30) if overload in STANDARD else (1e30, -1e30, np.inf, np.nan)
    for key in keys:
        for value in (1e30, -1e30):
            out = attention_body(poisoned(case, slots, key, value))
            np.testing.assert_allclose(out, clean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("has_sinks", "window", "softcap", "expected"),
    [(False, 0, 0.0, ""), (True, 0, 0.0, "sinks"), (False, 4, 0.0, "window"), (True, 4, 2.0, "window_softcap_sinks")],
)
def test_overload_names(has_sinks: bool, window: int, softcap: float, expected: str) -> None:
    assert staircase_attention_onnx.overload(has_sinks, window, softcap) == expected


def test_overloads_cover_all_features() -> None:
    assert set(OVERLOADS) == {
        staircase_attention_onnx.overload(sinks, window, softcap)
        for sinks in (False, True)
        for window in (0, 1)
        for softcap in (0.0, 1.0)
    }


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    case = attention_case(3, batch=3, window=5, sinks=True)
    together = attention_reference(case)
    for row in range(3):
        per_row = ("query", "key_cache", "value_cache", "context_len", "visibility", "position_ids")
        alone = replace(case, **{name: getattr(case, name)[row : row + 1] for name in per_row})
        np.testing.assert_allclose(attention_reference(alone)[0], together[row], rtol=1e-6, atol=1e-6)
