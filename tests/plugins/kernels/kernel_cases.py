"""What the kernels are given, and what they must answer: float64, one query or key at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gpu.attention_cases import FLOAT32_EPS, Attention, rounding
from gpu.injection_cases import Injection


def double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


# --- visibility: bool [Q, Q] and the depth of every new token ---


def tree(rng: np.random.Generator, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of nodes whose parents come first: ancestors and self."""
    visibility = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        visibility[node] |= visibility[parents[node]]
    return visibility, visibility.sum(1) - 1


def chain(rng: np.random.Generator, queries: int) -> tuple[np.ndarray, np.ndarray]:
    return tree(rng, np.arange(queries) - 1)


def random_tree(rng: np.random.Generator, queries: int) -> tuple[np.ndarray, np.ndarray]:
    return tree(rng, np.array([-1, *(rng.integers(max(0, node - 4), node) for node in range(1, queries))]))


def staircase(rng: np.random.Generator, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """A trunk, and branches that leave it one after the other."""
    trunk = rng.integers(1, queries + 1)
    leaves = np.sort(rng.integers(trunk, queries + 1, 3))
    parents = np.arange(queries) - 1
    for step, first in enumerate(leaves):
        if first < queries:
            parents[first] = min(step, trunk - 1)
    return tree(rng, parents)


def block_diagonal(rng: np.random.Generator, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that see all of themselves, side by side at the same positions."""
    block = rng.integers(1, queries + 1)
    index = np.arange(queries)
    return index[:, None] // block == index[None, :] // block, index % block


def identity(rng: np.random.Generator, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """No token sees another."""
    return np.eye(queries, dtype=bool), np.arange(queries)


def arbitrary(rng: np.random.Generator, queries: int) -> tuple[np.ndarray, np.ndarray]:
    return (rng.random((queries, queries)) < 0.4) | np.eye(queries, dtype=bool), rng.integers(0, queries, queries)


def hidden(rng: np.random.Generator, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """A chain some of whose tokens nobody sees, not even they themselves."""
    visibility, depths = chain(rng, queries)
    return visibility & (rng.random(queries) < 0.6), depths


VISIBILITY: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    f.__name__: f for f in (chain, random_tree, staircase, block_diagonal, identity, arbitrary, hidden)
}


# --- StaircaseAttention ---


def attention(
    seed: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    kv_heads: int = 1,
    group: int = 2,
    queries: int = 4,
    dim: int = 64,
    context: int = 100,
    slack: int = 5,
    visibility: str = "chain",
    window: int = 0,
    causal: int = 1,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Attention:
    """A random case; each row has a context of its own, up to `context`. What nobody sees holds NaN and infinities."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, context + 1, batch)
    lengths[0] = context
    new = [VISIBILITY[visibility](rng, queries) for _ in range(batch)]
    seen = np.stack([visible for visible, _ in new])
    positions = lengths[:, None] + np.stack([depths for _, depths in new])
    shape = (batch, kv_heads, context + queries + slack, dim)
    keys, values = rng.standard_normal(shape), rng.standard_normal(shape)
    for row, length in enumerate(lengths):
        unseen = np.ones(shape[2], bool)
        oldest = positions[row].min() - window + 1 if window else 0
        unseen[max(oldest, 0) : length] = False
        unseen[length : length + queries] = ~seen[row].any(0)
        for cache in (keys, values):
            cache[row, :, unseen] = rng.choice((np.nan, np.inf, -np.inf), (unseen.sum(), kv_heads, dim))
    return Attention(
        # large enough for weights that differ by orders of magnitude
        query=torch.from_numpy(3 * rng.standard_normal((batch, kv_heads * group, queries, dim))).to(dtype),
        key_cache=torch.from_numpy(keys).to(dtype),
        value_cache=torch.from_numpy(values).to(dtype),
        context_len=torch.from_numpy(lengths),
        visibility=torch.from_numpy(seen),
        sinks=torch.from_numpy(3 * rng.standard_normal(kv_heads * group)).to(dtype) if sinks else None,
        position_ids=torch.from_numpy(positions),
        scale=dim**-0.5,
        sliding_window=window,
        causal=causal,
        softcap=softcap,
    )


def attention_bounds(case: Attention) -> tuple[np.ndarray, np.ndarray]:
    """The output [B, Q, Hq, D], zero where a query sees nothing, and how far from it rounding may lead.

    Weights are rounded to the dtype before they meet the values, and so is the result; all else is in float32, where
    an error of a score is a relative error of its weight.
    """
    query, keys, values = double(case.query), double(case.key_cache), double(case.value_cache)
    batch, heads, queries, dim = query.shape
    capacity, group = keys.shape[2], heads // keys.shape[1]
    unit = rounding(case.query.dtype)
    output, bound = np.zeros((2, batch, queries, heads, dim))
    for b in range(batch):
        for i in range(queries):
            seen = [slot for slot in range(capacity) if _sees(case, b, i, slot)]
            for h in range(heads if seen else 0):
                products = keys[b, h // group, seen] @ query[b, h, i] * case.scale
                scores = case.softcap * np.tanh(products / case.softcap) if case.softcap else products
                sink = [] if case.sinks is None else [double(case.sinks)[h]]
                exponentials = np.exp(scores - max(*scores, *sink, -np.inf))
                total = exponentials.sum() + sum(np.exp(s - max(*scores, *sink, -np.inf)) for s in sink)
                weights = exponentials / total
                attended = values[b, h // group, seen]
                output[b, i, h] = weights @ attended
                magnitude = weights @ np.abs(attended)
                of_scores = np.abs(scores).max() + case.softcap + dim**0.5
                error = unit + 2 * FLOAT32_EPS * (of_scores + len(seen) ** 0.5)
                tiny = torch.finfo(case.query.dtype).smallest_normal * unit * len(seen) * np.abs(attended).max()
                bound[b, i, h] = error * magnitude + unit * np.abs(output[b, i, h]) + tiny
    return output, bound


def _sees(case: Attention, row: int, query: int, slot: int) -> bool:
    """The operator's rule."""
    context, queries = int(case.context_len[row]), case.visibility.shape[1]
    if slot < context:
        position = slot
    elif slot < context + queries and case.visibility[row, query, slot - context]:
        position = int(case.position_ids[row, slot - context])
    else:
        return False
    behind = int(case.position_ids[row, query]) - position
    if case.sliding_window == 0:
        return True
    return behind < case.sliding_window and behind > (-1 if case.causal else -case.sliding_window)


# --- KVInjection ---


def injection(
    seed: int,
    dtype: torch.dtype,
    *,
    batch: int,
    rows: int,
    kv_heads: int,
    dim: int,
    passing: int,
    norm: bool,
    counted: bool,
    capacity: int,
    positions: int,
) -> Injection:
    """A random case. Slots and positions may lie outside; `passing` pairs of components do not rotate."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    angles = torch.from_numpy(rng.uniform(0, 7, (positions, dim // 2 - passing))).float()
    cache = (batch, kv_heads, capacity, dim)
    return Injection(
        key=normal(batch, rows, kv_heads, dim) * 5,
        value=normal(batch, rows, kv_heads, dim),
        key_norm_weight=normal(dim) if norm else None,
        position_ids=torch.from_numpy(rng.integers(-1, positions + 1, (batch, rows))),
        cos=angles.cos(),
        sin=angles.sin(),
        write_start=torch.from_numpy(rng.integers(-2, capacity + 2, batch)),
        key_cache=normal(*cache),
        value_cache=torch.full(cache, float("nan"), dtype=dtype),
        eps=0.03,
        row_count=torch.from_numpy(rng.integers(0, rows + 2, batch)) if counted else None,
    )


def written_rows(case: Injection) -> list[tuple[int, int, int]]:
    """(batch row, row, slot) of the rows that write; no two of them share a slot."""
    batch, rows = case.position_ids.shape
    capacity, positions = case.key_cache.shape[2], len(case.cos)
    found = []
    for b in range(batch):
        count = rows if case.row_count is None else min(rows, int(case.row_count[b]))
        for row in range(count):
            slot = int(case.write_start[b]) + row
            if 0 <= slot < capacity and 0 <= int(case.position_ids[b, row]) < positions:
                found.append((b, row, slot))
    return found


def injected_key(case: Injection, b: int, row: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """The key [D] as the cache holds it, and how far from it rounding may lead: a dozen times in float32, then once."""
    key = double(case.key)[b, row, head]
    if case.key_norm_weight is not None:
        key = key / np.sqrt(np.square(key).mean() + case.eps) * double(case.key_norm_weight)
    position, half = int(case.position_ids[b, row]), case.cos.shape[1]
    cos, sin = double(case.cos)[position], double(case.sin)[position]
    rotated, magnitude = key.copy(), np.abs(key)
    for i in range(half):
        rotated[i] = key[i] * cos[i] - key[i + half] * sin[i]
        rotated[i + half] = key[i + half] * cos[i] + key[i] * sin[i]
        magnitude[[i, i + half]] = np.abs(key[[i, i + half]]).sum()
    return rotated, rounding(case.key.dtype) * np.abs(rotated) + 12 * FLOAT32_EPS * magnitude + 1e-7
