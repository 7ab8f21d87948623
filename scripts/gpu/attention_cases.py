"""StaircaseAttention: random cases, and float64 for them with a bound on what rounding may do.

Written apart from the operator's reference, so that both can be wrong only separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOAT32_EPS = torch.finfo(torch.float32).eps
VISIBILITIES = ("chain", "tree", "staircase", "block_diagonal", "identity")


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Attention:
    """Inputs and attributes, named and ordered as in the operator."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    context_len: torch.Tensor
    visibility: torch.Tensor
    sinks: torch.Tensor | None
    position_ids: torch.Tensor
    scale: float
    sliding_window: int
    causal: int
    softcap: float

    def arguments(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def to(self, device: str) -> Attention:
        return replace(self, **{k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)})


def visibility(kind: str, queries: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [Q, Q] and the depth of every new token, int64 [Q]."""
    index = torch.arange(queries)
    if kind == "identity":
        return torch.eye(queries, dtype=torch.bool), index
    if kind == "block_diagonal":
        block = _below(queries, random) + 1
        return index[:, None] // block == index // block, index % block
    parents = (index - 1).tolist()
    if kind == "tree":
        parents = [-1, *(max(0, node - 1 - _below(4, random)) for node in range(1, queries))]
    elif kind == "staircase":  # a trunk, and branches that leave it one after the other
        trunk = _below(queries, random) + 1
        leaves = sorted(trunk + _below(queries - trunk + 1, random) for _ in range(3))
        for step, first in enumerate(leaves):
            if first < queries:
                parents[first] = min(step, trunk - 1)
    seen = torch.eye(queries, dtype=torch.bool)
    for node in range(1, queries):
        seen[node] |= seen[parents[node]]
    return seen, seen.sum(1) - 1


def _below(bound: int, random: torch.Generator) -> int:
    return int(torch.randint(bound, (), generator=random))


def make(
    seed: int,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 4,
    queries: int = 16,
    dim: int = 128,
    context: int = 100,
    slack: int = 5,
    kind: str = "chain",
    window: int = 0,
    causal: int = 1,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Attention:
    """A random case on the CPU; rows have contexts of their own, the first `context`. What nobody sees is NaN or
    infinite. `slack`: slots behind the new tokens."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    lengths = torch.randint(context + 1, (batch,), generator=random)
    lengths[0] = context
    new = [visibility(kind, queries, random) for _ in range(batch)]
    positions = lengths[:, None] + torch.stack([depths for _, depths in new])
    seen = torch.stack([own for own, _ in new])
    caches = [normal(batch, kv_heads, context + queries + slack, dim).to(dtype) for _ in range(2)]
    poison = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype)
    for row, length in enumerate(lengths.tolist()):
        unseen = torch.ones(caches[0].shape[2], dtype=torch.bool)
        oldest = int(positions[row].min()) - window + 1 if window else 0
        unseen[max(oldest, 0) : length] = False
        unseen[length : length + queries] = ~seen[row].any(0)
        slots = unseen.nonzero()[:, 0]
        for cache in caches:
            cache[row, :, slots] = poison[slots % 3, None]
    return Attention(
        query=(3 * normal(batch, kv_heads * group, queries, dim)).to(dtype),  # weights of different magnitude
        key_cache=caches[0],
        value_cache=caches[1],
        context_len=lengths,
        visibility=seen,
        sinks=(3 * normal(kv_heads * group)).to(dtype) if sinks else None,
        position_ids=positions,
        scale=dim**-0.5,
        sliding_window=window,
        causal=causal,
        softcap=softcap,
    )


def mask(case: Attention, row: int) -> torch.Tensor:
    """bool [Q, length + Q] of one batch row: which slots up to the last new token a query sees."""
    length, queries = int(case.context_len[row]), case.visibility.shape[1]
    device = case.query.device
    seen = torch.cat((torch.ones(queries, length, dtype=torch.bool, device=device), case.visibility[row]), dim=1)
    if case.sliding_window:
        own = case.position_ids[row]
        behind = own[:, None] - torch.cat((torch.arange(length, device=device), own))
        seen &= (behind < case.sliding_window) & (behind > (-1 if case.causal else -case.sliding_window))
    return seen


def expected(case: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [B, Q, Hq*D]: the output, and how far from it rounding may lead.

    Weights are rounded to the dtype before they meet the values, and so is the result. All else is float32, where an
    error of a score is a relative error of its weight; sums inside a matrix unit may be cut off and not rounded, so
    their errors are taken to add up.
    """
    unit = rounding(case.query.dtype)
    tiny = torch.finfo(case.query.dtype).smallest_normal * unit
    outputs, bounds = [], []
    for row in range(len(case.query)):
        seen = mask(case, row)
        slots = seen.any(0)
        group = case.query.shape[1] // case.key_cache.shape[1]
        keys, values = (
            torch.where(slots[:, None], cache[row, :, : len(slots)].double(), 0.0).repeat_interleave(group, 0)
            for cache in (case.key_cache, case.value_cache)
        )
        query = case.query[row].double()
        scores = query @ keys.transpose(1, 2) * case.scale
        magnitude = query.abs() @ keys.abs().transpose(1, 2) * case.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if case.sinks is not None:
            column = case.sinks.double()[:, None, None].expand(-1, len(seen), 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        output = weights @ values
        spread = weights @ values.abs()
        of_scores = magnitude.masked_fill(~seen, 0.0).amax(-1, keepdim=True)
        error = unit + FLOAT32_EPS * (8 * of_scores + 2 * case.softcap + len(slots) / 8 + 16)
        bound = error * spread + unit * output.abs() + tiny * len(slots) * values.abs().amax()
        outputs.append(output.transpose(0, 1).flatten(1))
        bounds.append(bound.transpose(0, 1).flatten(1))
    return torch.stack(outputs), torch.stack(bounds)


def distance(found: torch.Tensor, output: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error in units of its bound: at most 1 when all is right, infinite where something is NaN."""
    ratio = (found.double() - output).abs() / bound
    return float(ratio.nan_to_num(nan=float("inf")).max())
