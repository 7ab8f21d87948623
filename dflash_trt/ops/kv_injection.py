"""KVInjection: normalise, rotate and write new keys and values into a fixed-capacity cache.

Row i of batch row b goes to slot `write_start[b] + i`, its key RMS-normalised (when a weight is given) and rotated at
`position_ids[b, i]`: the first R of its D components, half-split within R; the others pass. Used for the drafter's
injected context, the drafter's own block and the target's new tokens.

    key, value         [B, N, Hkv, D]   float
    key_norm_weight    [D]              float, optional
    position_ids       [B, N]           int64
    cos, sin           [max_pos, R/2]   float32, R <= D
    write_start        [B]              int64
    key_cache, value_cache [B, Hkv, C, D]  float; the outputs alias them
"""

from __future__ import annotations

import torch

from dflash_trt.ops import DOMAIN
from dflash_trt.ops.library import LIBRARY

NAME = "KVInjection"

_INPUTS = (
    "Tensor key, Tensor value, Tensor? key_norm_weight, Tensor position_ids, Tensor cos, Tensor sin, Tensor write_start"
)
LIBRARY.define(
    f"kv_injection_({_INPUTS}, Tensor(a!) key_cache, Tensor(b!) value_cache, float eps, Tensor? row_count=None) -> ()"
)
LIBRARY.define(f"kv_injection({_INPUTS}, Tensor key_cache, Tensor value_cache, float eps) -> (Tensor, Tensor)")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, computed and returned in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: torch.Tensor, position_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split layout, in float32: x [B, H, N, D], position_ids [B, N], tables [max_pos, R/2]."""
    c = cos[position_ids].unsqueeze(1)
    s = sin[position_ids].unsqueeze(1)
    half = cos.shape[-1]
    first, second, passed = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s, passed), dim=-1)


@torch.library.impl(LIBRARY, "kv_injection_", "CPU")
def kv_injection_reference_(
    key: torch.Tensor,
    value: torch.Tensor,
    key_norm_weight: torch.Tensor | None,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    write_start: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    eps: float,
    row_count: torch.Tensor | None = None,
) -> None:
    """The eager reference: writes into the caches in place (shapes in the module's docstring).

    Args:
        row_count: int64 [B], the rows there are; those beyond write nothing, whatever their position. None for all N.

    Rows whose slot is not in the cache write nothing either: neither wrapped around nor out of bounds.
    """
    batch, rows = position_ids.shape
    capacity = key_cache.shape[2]
    starts = write_start.tolist()
    counts = [rows] * batch if row_count is None else row_count.tolist()
    if row_count is not None:
        beyond = torch.arange(rows, device=row_count.device) >= row_count[:, None]
        position_ids = position_ids.masked_fill(beyond, 0)
    if key_norm_weight is not None:
        key = rms_norm(key, key_norm_weight, eps)
    key = rotate(key.transpose(1, 2), position_ids, cos, sin)
    value = value.transpose(1, 2)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        first, end = max(0, -start), min(count, rows, capacity - start)
        if first < end:
            key_cache[row, :, start + first : start + end] = key[row, :, first:end]
            value_cache[row, :, start + first : start + end] = value[row, :, first:end]


@torch.library.register_fake(f"{DOMAIN}::kv_injection_", lib=LIBRARY)
def _(  # type: ignore[no-untyped-def]
    key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps, row_count=None
) -> None:
    _check_heads(key, value, key_cache)


@torch.library.impl(LIBRARY, "kv_injection", "CompositeExplicitAutograd")
def _functional(
    key: torch.Tensor,
    value: torch.Tensor,
    key_norm_weight: torch.Tensor | None,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    write_start: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    _in_place(key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps)
    return key_cache, value_cache


@torch.library.register_fake(f"{DOMAIN}::kv_injection", lib=LIBRARY)
def _(key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps):  # type: ignore[no-untyped-def]
    _check_heads(key, value, key_cache)
    return torch.empty_like(key_cache), torch.empty_like(value_cache)


def _check_heads(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor) -> None:
    heads, dim = key_cache.shape[1], key_cache.shape[3]
    if key.shape[2:] != (heads, dim) or value.shape[2:] != (heads, dim):
        raise ValueError(f"keys {tuple(key.shape)} do not fit a cache of {heads} heads of size {dim}")


_in_place = torch.ops.dflash_trt.kv_injection_.default
_traced = torch.ops.dflash_trt.kv_injection.default


def kv_injection(
    key: torch.Tensor,
    value: torch.Tensor,
    key_norm_weight: torch.Tensor | None,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    write_start: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What modules call: a functional op while tracing, the op that writes in place when run eagerly."""
    args = (key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps)
    if torch.compiler.is_exporting():
        return _traced(*args)
    _in_place(*args)
    return key_cache, value_cache
