"""StaircaseAttention: a small set of new tokens attends over a long shared context and over itself.

Query i of batch row b sees slots j < context_len[b], and slots context_len[b] + j with visibility[b, i, j]; nothing
else, whatever finite values lie in the rest of the cache (a runtime may multiply them with a weight of 0). A query sees
at least itself: a row that sees nothing has no defined result. Slot j of the context holds position j; new token j is
at `position_ids[b, j]`, which may repeat (trees). With `sliding_window` W > 0 a query at p sees a key at k only if
0 <= p - k < W (`causal` 1) or |p - k| < W (`causal` 0); without a window positions rule nothing.

    query              [B, Hq, Q, D]    float, already normalised and rotated
    key_cache, value_cache [B, Hkv, C, D]  float, rotated keys
    context_len        [B]              int64
    visibility         [B, Q, Q]        bool
    sinks              [Hq]             float, optional: one extra logit per head that takes weight and gives no value
    position_ids       [B, Q]           int64
    ->                 [B, Q, Hq*D]

Scores are scaled, capped (`softcap` c > 0: c * tanh(score / c)), masked, and normalised in float32.
"""

from __future__ import annotations

import torch

from dflash_trt.ops import DOMAIN
from dflash_trt.ops.library import LIBRARY

NAME = "StaircaseAttention"

LIBRARY.define(
    "staircase_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor context_len, Tensor visibility, "
    "Tensor? sinks, Tensor position_ids, float scale, int sliding_window, int causal, float softcap) -> Tensor"
)


def visible_slots(
    capacity: int,
    context_len: torch.Tensor,
    visibility: torch.Tensor,
    position_ids: torch.Tensor,
    sliding_window: int,
    causal: int,
) -> torch.Tensor:
    """The mask over cache slots: bool [B, Q, C]."""
    queries = visibility.shape[-1]
    slots = torch.arange(capacity, device=context_len.device)
    local = slots - context_len[:, None]
    index = local.clamp(0, queries - 1)
    seen_locally = visibility.gather(2, index[:, None].expand(-1, queries, -1)) & (local < queries)[:, None]
    in_context = local < 0
    visible = torch.where(in_context[:, None], torch.ones_like(seen_locally), seen_locally)
    if sliding_window:
        key_positions = torch.where(in_context, slots, position_ids.gather(1, index))
        distance = position_ids[:, :, None] - key_positions[:, None]
        visible = visible & (distance < sliding_window) & (distance > (-1 if causal else -sliding_window))
    return visible


@torch.library.impl(LIBRARY, "staircase_attention", "CPU")
def staircase_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_len: torch.Tensor,
    visibility: torch.Tensor,
    sinks: torch.Tensor | None,
    position_ids: torch.Tensor,
    scale: float,
    sliding_window: int,
    causal: int,
    softcap: float,
) -> torch.Tensor:
    """The eager reference (shapes in the module's docstring), float32 inside."""
    batch, heads, queries, dim = query.shape
    kv_heads, capacity = key_cache.shape[1:3]
    visible = visible_slots(capacity, context_len, visibility, position_ids, sliding_window, causal)[:, None, None]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads, queries, dim)
    scores = grouped @ key_cache.float()[:, :, None].transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float().reshape(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, queries, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    # what a slot outside the mask holds must not matter, NaN included: 0 * NaN is NaN
    values = value_cache.float().masked_fill(~visible.any(dim=3).transpose(-1, -2), 0.0)
    out = weights @ values[:, :, None]
    return out.reshape(batch, heads, queries, dim).transpose(1, 2).reshape(batch, queries, heads * dim).to(query.dtype)


@torch.library.register_fake(f"{DOMAIN}::staircase_attention", lib=LIBRARY)
def _(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, context_len, visibility, sinks, position_ids, scale, sliding_window, causal, softcap
):
    batch, heads, queries, dim = query.shape
    return query.new_empty((batch, queries, heads * dim))


_op = torch.ops.dflash_trt.staircase_attention.default


def staircase_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_len: torch.Tensor,
    visibility: torch.Tensor,
    sinks: torch.Tensor | None,
    position_ids: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    causal: bool = True,
    softcap: float = 0.0,
) -> torch.Tensor:
    """What modules call, traced or eagerly."""
    return _op(
        query, key_cache, value_cache, context_len, visibility, sinks, position_ids,
        scale, sliding_window, int(causal), softcap,
    )  # fmt: skip
