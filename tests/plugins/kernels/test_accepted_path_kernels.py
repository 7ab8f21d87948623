"""The kernels that accept a path, move its rows and gather its features, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu.attention_cases import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import bits, poisoned_allocations
from kernel_cases import tree

from dflash_trt.ops.accepted_path import addresses
from dflash_trt.plugins.kernels.accepted_path import accept_path_, gather_features_, move_rows_

# --- accept_path ---


def random_parents(rng: np.random.Generator, nodes: int, reach: int) -> np.ndarray:
    """Parents come first, at most `reach` nodes before; of what padding there is, none but the root's -1."""
    return np.array([-1, *(rng.integers(max(0, node - reach), node) for node in range(1, nodes))])


def walked(tokens: np.ndarray, choices: np.ndarray, parents: np.ndarray) -> list[int]:
    """The longest accepted path, followed child by child; of several, the one that ends at the lowest node."""

    def paths(node: int) -> list[list[int]]:
        accepted = [n for n in range(len(tokens)) if parents[n] == node and tokens[n] == choices[node]]
        return [[node], *([node, *path] for child in accepted for path in paths(child))]

    return min(paths(0), key=lambda path: (-len(path), path[-1]))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    nodes=st.one_of(st.integers(1, 40), st.sampled_from((15, 16, 17, 70, 127, 128))),
    padding=st.integers(0, 6),
    reach=st.integers(1, 5),
    vocabulary=st.integers(1, 3),
    slack=st.integers(0, 3),
)
def test_accept_path(seed: int, batch: int, nodes: int, padding: int, reach: int, vocabulary: int, slack: int) -> None:
    """Few tokens, so that many match and equal siblings abound; now and then a choice is -1, which matches none."""
    rng = np.random.default_rng(seed)
    parents, visibility = np.full((batch, nodes), -1), np.broadcast_to(np.eye(nodes, dtype=bool), (batch, nodes, nodes))
    visibility = visibility.copy()
    own = max(1, nodes - padding)
    for b in range(batch):
        parents[b, :own] = random_parents(rng, own, reach)
        visibility[b, :own, :own] = tree(rng, parents[b, :own])[0]
    tokens = rng.integers(0, vocabulary, (batch, nodes))
    choices = np.where(rng.random((batch, nodes)) < 0.1, -1, rng.integers(0, vocabulary, (batch, nodes)))
    expected = [walked(tokens[b], choices[b], parents[b]) for b in range(batch)]
    capacity = min(128, int(visibility.sum(-1).max()) + slack)
    with poisoned_allocations():
        found = accept_path_(*map(torch.from_numpy, (tokens, choices, visibility, parents)), capacity)
    path, path_len, bonus = (tensor.tolist() for tensor in found)
    assert path_len == [len(way) for way in expected]
    assert path == [way + [way[-1]] * (capacity - len(way)) for way in expected]
    assert bonus == [choices[b, way[-1]] for b, way in enumerate(expected)]


def test_accept_path_refuses_what_it_has_no_room_for() -> None:
    def empty(nodes: int, path_capacity: int) -> None:
        ids = torch.zeros(1, nodes, dtype=torch.int64)
        accept_path_(ids, ids, torch.eye(nodes, dtype=torch.bool)[None], ids - 1, path_capacity)

    with pytest.raises(ValueError, match="129 nodes"):
        empty(129, 3)
    with pytest.raises(ValueError, match="path of 129 nodes"):
        empty(3, 129)


# --- move_rows ---


def random_paths(rng: np.random.Generator, batch: int, nodes: int) -> tuple[list[list[int]], torch.Tensor]:
    """Ascending node ids from the root on, and the same padded with the last."""
    paths = [[0, *sorted(rng.choice(np.arange(1, nodes), rng.integers(0, nodes), replace=False))] for _ in range(batch)]
    stride = max(map(len, paths))
    return paths, torch.tensor([path + [path[-1]] * (stride - len(path)) for path in paths])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    buffers=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    nodes=st.one_of(st.integers(1, 20), st.integers(60, 80)),
    dim=st.sampled_from((2, 32, 96, 256)),
    context=st.integers(0, 10),
    dtype=st.sampled_from(sorted(DTYPES)),
    idle=st.booleans(),
)
def test_move_rows(
    seed: int, batch: int, buffers: int, kv_heads: int, nodes: int, dim: int, context: int, dtype: str, idle: bool
) -> None:
    rng = np.random.default_rng(seed)
    paths, path = random_paths(rng, batch, nodes)
    if idle:
        paths[0] = []
    context_len = rng.integers(0, context + 1, batch)
    shape = (batch, kv_heads, context + nodes, dim)
    caches = [torch.from_numpy(rng.standard_normal(shape)).to(DTYPES[dtype]) for _ in range(buffers)]
    before = [cache.clone() for cache in caches]
    path_len = torch.tensor([len(nodes) for nodes in paths])
    move_rows_(caches, addresses(caches), path, path_len, torch.from_numpy(context_len))
    for cache, expected in zip(caches, before, strict=True):
        for b, own in enumerate(paths):
            rows = expected[b].clone()
            for i, node in enumerate(own):
                expected[b, :, context_len[b] + i] = rows[:, context_len[b] + node]
        assert torch.equal(bits(cache), bits(expected))


def test_move_rows_refusals() -> None:
    def move(*caches: torch.Tensor) -> None:
        ids = torch.zeros(1, dtype=torch.int64)
        move_rows_(caches, addresses(caches), ids[None], ids, ids)

    with pytest.raises(ValueError, match=r"rows of 3 torch\.float16 are not whole 32-bit words"):
        move(torch.zeros(1, 1, 4, 3, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous and of one shape"):
        move(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 5, 4))
    with pytest.raises(ValueError, match="contiguous and of one shape"):
        move(torch.zeros(1, 1, 8, 4)[:, :, ::2])


# --- gather_features ---


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    nodes=st.integers(1, 20),
    size=st.sampled_from((2, 6, 1024, 2050)),
    out_rows=st.integers(1, 24),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_gather_features(seed: int, out_rows: int, dtype: str, **shape: Any) -> None:
    """NaN included, which is moved and not computed with."""
    batch, nodes, size = (shape[name] for name in ("batch", "nodes", "size"))
    rng = np.random.default_rng(seed)
    paths, path = random_paths(rng, batch, nodes)
    paths[0] = paths[0][: rng.integers(0, 3)]
    features = torch.from_numpy(rng.standard_normal((batch, nodes, size))).to(DTYPES[dtype])
    features[torch.from_numpy(rng.random(features.shape) < 0.1)] = float("nan")
    with poisoned_allocations():
        found = gather_features_(features, path, torch.tensor([len(own) for own in paths]), out_rows)
    expected = torch.zeros(batch, out_rows, size, dtype=DTYPES[dtype])
    for b, own in enumerate(paths):
        for i, node in enumerate(own[:out_rows]):
            expected[b, i] = features[b, node]
    assert torch.equal(bits(found), bits(expected))
