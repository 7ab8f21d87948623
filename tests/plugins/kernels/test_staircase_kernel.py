"""The StaircaseAttention kernels in the interpreter against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu.attention_cases import DTYPES, Attention
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import poisoned_allocations
from kernel_cases import VISIBILITY, attention, attention_bounds

from dflash_trt.ops.staircase_attention import staircase_attention_reference
from dflash_trt.plugins.kernels.staircase_attention import MERGE_SPLITS, staircase_attention
from dflash_trt.plugins.kernels.tiling import HEAD_DIMS, SHARED_MEMORY, Tile, tiles

pytestmark = [
    # the softcap's tanh by way of an infinite exponential, and keys nobody sees
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]

SMALL = Tile(16, 32, 4, 1)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "window": {"window": 20},
    "symmetric": {"window": 3, "causal": 0},
    "softcap": {"softcap": 2.0},
    "all": {"window": 50, "causal": 0, "softcap": 1.5, "sinks": True},
}


def check(case: Attention, tile: Tile | None = SMALL, splits: int | None = 1) -> None:
    with poisoned_allocations():
        found = staircase_attention(*case.arguments(), tile=tile, splits=splits)
    output, bound = attention_bounds(case)
    assert found.dtype == case.query.dtype
    assert found.shape == (*output.shape[:2], output.shape[2] * output.shape[3])
    error = np.abs(found.double().numpy().reshape(output.shape) - output)
    assert (error <= bound).all(), f"{np.nanmax(error / bound)} times the bound, {np.isnan(error).sum()} are NaN"


@pytest.mark.parametrize("dtype", DTYPES)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 7),
    queries=st.integers(1, 9),
    dim=st.sampled_from((32, 64, 96)),
    context=st.integers(0, 150),
    slack=st.integers(0, 40),
    visibility=st.sampled_from(sorted(VISIBILITY)),
    window=st.sampled_from((0, 0, 1, 2, 5, 40)),
    causal=st.integers(0, 1),
    softcap=st.sampled_from((0.0, 0.0, 0.5, 20.0)),
    sinks=st.booleans(),
    columns=st.sampled_from((16, 32, 64)),
    splits=st.integers(1, 4),
)
def test_any_case(dtype: str, columns: int, splits: int, **shape: Any) -> None:
    check(attention(dtype=DTYPES[dtype], **shape), Tile(16, columns, 4, 1), splits)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("context", [0, 1, 31, 32, 33, 64, 96])
def test_lengths_around_a_step(context: int, splits: int, features: str) -> None:
    check(attention(context, torch.float32, dim=32, context=context, queries=3, **FEATURES[features]), SMALL, splits)


@pytest.mark.parametrize("visibility", VISIBILITY)
@pytest.mark.parametrize("queries", [1, 17])
def test_every_visibility(visibility: str, queries: int) -> None:
    check(attention(1, torch.float32, dim=32, context=40, queries=queries, visibility=visibility, window=9))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("context", [0, 70])
@pytest.mark.parametrize("splits", [2, MERGE_SPLITS, MERGE_SPLITS + 1, 40])
def test_more_splits_than_blocks(splits: int, context: int, sinks: bool) -> None:
    """And than one step of the merge takes: shares that saw nothing leave poison behind."""
    check(attention(2, torch.float32, batch=2, dim=32, context=context, queries=2, sinks=sinks), SMALL, splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 70, 200])
@pytest.mark.parametrize("causal", [0, 1])
def test_windows(causal: int, window: int, splits: int) -> None:
    """Of new tokens at one position, ahead of and behind each other, with tiles that begin at different slots."""
    shape = {"dim": 32, "context": 100, "queries": 20, "group": 3, "visibility": "arbitrary"}
    check(attention(3, torch.float32, window=window, causal=causal, **shape), SMALL, splits)


def every_tile() -> list[Any]:
    kinds = itertools.product(SHARED_MEMORY, HEAD_DIMS, (2, 4), (False, True))
    found = {
        (tile.rows, tile.columns, dim, size, masked)
        for cc, dim, size, masked in kinds
        for tile in tiles(cc, dim, size, masked)
    }
    return [pytest.param(*each, id="-".join(map(str, each))) for each in sorted(found)]


@pytest.mark.parametrize(("rows", "columns", "dim", "size", "masked"), every_tile())
def test_every_tile(rows: int, columns: int, dim: int, size: int, masked: bool) -> None:
    """With more rows than one tile holds, and more blocks than splits."""
    queries = rows // 3 + 2
    context = 2 * columns + 5
    case = attention(
        4, torch.float16 if size == 2 else torch.float32, group=3, queries=queries, dim=dim, context=context,
        visibility="random_tree", window=context // 2 if masked else 0,
    )  # fmt: skip
    check(case, Tile(rows, columns, 4, 1), 2)


@pytest.mark.parametrize(("dtype", "group", "features"), [("bf16", 1, "all"), ("fp16", 5, "plain")])
def test_as_many_queries_as_there_can_be(dtype: str, group: int, features: str) -> None:
    """With the tile and the splits the rules choose."""
    shape = {"group": group, "queries": 128, "dim": 128, "context": 130, "visibility": "staircase"}
    check(attention(5, DTYPES[dtype], **shape, **FEATURES[features]), None, None)


@pytest.mark.parametrize("splits", [1, 2])
def test_large_scores(splits: int) -> None:
    """One key takes all the weight; exponentials of differences, not of scores."""
    case = attention(6, torch.float32, dim=32, context=50, sinks=True)
    check(replace(case, query=case.query * 300), SMALL, splits)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("broken", ["query", "key", "value", "new key"])
def test_what_is_not_finite_stays_so(broken: str, splits: int) -> None:
    """A model that overflows must be found out, so NaN may not get lost in a share or in the merge."""
    torch.manual_seed(0)
    batch, kv_heads, group, queries, dim, capacity, context = 2, 2, 2, 3, 32, 64, 40
    query = torch.randn(batch, kv_heads * group, queries, dim)
    key, value = torch.randn(2, batch, kv_heads, capacity, dim)
    visibility = torch.ones(queries, queries, dtype=torch.bool).tril().repeat(batch, 1, 1)
    place = {"query": query[1, 2, 1], "key": key[1, 0, 7], "value": value[1, 0, 39], "new key": key[1, 1, context + 1]}
    place[broken][3] = float("nan")
    lengths = torch.full((batch,), context)
    positions = lengths[:, None] + torch.arange(queries)
    arguments = (query, key, value, lengths, visibility, None, positions, dim**-0.5, 0, 1, 0.0)
    with np.errstate(invalid="ignore"):
        result = staircase_attention(*arguments, tile=SMALL, splits=splits)
    expected = staircase_attention_reference(*arguments)
    assert expected.isnan().any()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.allclose(result, expected, atol=1e-5, equal_nan=True)


def test_refusals() -> None:
    case = attention(7, torch.float16, dim=32, queries=129, context=3)
    with pytest.raises(ValueError, match=r"129 queries; the kernels take 1\.\.128"):
        staircase_attention(*case.arguments())
    with pytest.raises(ValueError, match="head_dim is 48"):
        staircase_attention(*attention(7, torch.float16, dim=48).arguments())
    case = attention(7, torch.float16)
    with pytest.raises(ValueError, match=r"key_cache must .* torch\.float16, not torch\.float32"):
        staircase_attention(*replace(case, key_cache=case.key_cache.float()).arguments())
    sliced = case.value_cache.repeat(1, 1, 2, 1)[:, :, ::2]
    with pytest.raises(ValueError, match="value_cache must be contiguous"):
        staircase_attention(*replace(case, value_cache=sliced).arguments())
