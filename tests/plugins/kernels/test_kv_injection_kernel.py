"""The KVInjection kernel in the interpreter against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu.attention_cases import DTYPES
from gpu.injection_cases import Injection
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import bits
from kernel_cases import double, injected_key, injection, written_rows

from dflash_trt.plugins.kernels.kv_injection import kv_injection_


def check(case: Injection) -> None:
    key_cache, value_cache = case.key_cache.clone(), case.value_cache.clone()
    kv_injection_(*case.arguments())
    expected_values, untouched = value_cache.clone(), torch.ones(key_cache.shape[0], key_cache.shape[2], dtype=bool)
    for b, row, slot in written_rows(case):
        expected_values[b, :, slot] = case.value[b, row]
        untouched[b, slot] = False
        for head in range(key_cache.shape[1]):
            key, bound = injected_key(case, b, row, head)
            error = np.abs(double(case.key_cache)[b, head, slot] - key)
            assert (error <= bound).all(), f"{(error / bound).max()} times the bound"
    assert torch.equal(bits(case.value_cache), bits(expected_values))
    kept = untouched[:, None, :, None].expand_as(key_cache)
    assert torch.equal(bits(case.key_cache)[kept], bits(key_cache)[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    rows=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from((32, 64, 96, 128, 256)),
    passing=st.sampled_from((0, 0, 1, 4, 15)),
    norm=st.booleans(),
    counted=st.booleans(),
    capacity=st.integers(1, 60),
    positions=st.integers(1, 50),
)
def test_any_case(dtype: str, **shape: Any) -> None:
    check(injection(dtype=DTYPES[dtype], **shape))


def inside(**changes: Any) -> Injection:
    """A case whose rows and positions all lie inside."""
    shape = {"batch": 2, "rows": 5, "kv_heads": 2, "dim": 64, "passing": 0, "norm": True, "counted": False}
    case = injection(1, torch.float32, capacity=20, positions=30, **shape)
    positions = torch.arange(5) + torch.tensor([[3], [25]])
    return replace(case, write_start=torch.tensor([0, 15]), position_ids=positions, **changes)


def test_every_row_is_written() -> None:
    case = inside()
    assert len(written_rows(case)) == 10
    check(case)


@pytest.mark.parametrize("count", [-1, 0])
def test_no_row_is_written(count: int) -> None:
    case = inside(row_count=torch.full((2,), count))
    assert not written_rows(case)
    check(case)


def test_lengths_far_outside() -> None:
    """Products of slots and sizes that 32 bits do not hold."""
    case = inside()
    check(replace(case, write_start=torch.tensor([2**40, -(2**40)])))
    check(replace(case, position_ids=case.position_ids + 2**40))


def test_what_is_not_written_may_be_anything() -> None:
    """Keys of rows beyond the count, and the norm's weight where there is none."""
    case = inside(row_count=torch.tensor([2, 3]), key_norm_weight=None)
    for b, count in enumerate((2, 3)):
        case.key[b, count:] = float("nan")
        case.value[b, count:] = float("inf")
    check(case)
    assert case.key_cache.isfinite().all()


def test_refusals() -> None:
    case = inside()
    with pytest.raises(ValueError, match="head_dim is 48"):
        kv_injection_(*replace(case, key=case.key[..., :48]).arguments())
    with pytest.raises(ValueError, match=r"value_cache must .* torch\.float32, not torch\.float16"):
        kv_injection_(*replace(case, value_cache=case.value_cache.half()).arguments())
    with pytest.raises(ValueError, match="key_cache must be contiguous"):
        kv_injection_(*replace(case, key_cache=case.key_cache.repeat(1, 1, 2, 1)[:, :, ::2]).arguments())
