"""KVInjection in one launch: norm, rotate and scatter keys, scatter values.

Definition and reference: dflash_trt/ops/kv_injection.py.
A program owns a tile of rows of one KV head. Statistics and rotation are in float32, whatever the dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiling import HEAD_DIMS, block_dim


@triton.jit
def _store(cache, at, x, mask):
    tl.store(cache + at, x.to(cache.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "rows", "capacity", "kv_heads", "max_positions", "rotary_half", "has_norm", "has_count",
    ]
)  # fmt: skip
def kv_injection(
    key, value, norm_weight, position_ids, cos, sin, write_start, row_count, key_cache, value_cache,
    rows, capacity, kv_heads, max_positions, rotary_half, has_norm, has_count, eps,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / TILE_ROWS), KV heads, batch).

    key, value [B, rows, Hkv, D], tables f32 [max_positions, rotary_half], caches [B, Hkv, capacity, D]. PARTIAL:
    2 * rotary_half < D, and what lies behind passes through. Rows from row_count on (with has_count), rows whose slot
    is not in the cache and rows whose position is not in the tables write nothing.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    count = tl.minimum(rows, tl.load(row_count + batch + tl.arange(0, 1), mask=tl.arange(0, 1) < has_count, other=rows))
    position = tl.load(position_ids + batch * rows + row, mask=row < rows, other=-1)
    slot = tl.load(write_start + batch) + row
    writes = (row < count) & (slot >= 0) & (slot < capacity) & (position >= 0) & (position < max_positions)
    mask = writes[:, None]
    source = ((batch.to(tl.int64) * rows + row) * kv_heads + head)[:, None] * HEAD_DIM
    target = ((batch.to(tl.int64) * kv_heads + head) * capacity + slot)[:, None] * HEAD_DIM

    whole = tl.arange(0, BLOCK_DIM)[None, :]
    in_row = mask & (whole < HEAD_DIM)
    tl.store(value_cache + target + whole, tl.load(value + source + whole, mask=in_row), mask=in_row)

    if PARTIAL:
        table = position[:, None] * rotary_half
        x = tl.load(key + source + whole, mask=in_row, other=0.0).to(tl.float32)
        partner = tl.where(whole < rotary_half, whole + rotary_half, whole - rotary_half)
        rotated = whole < 2 * rotary_half
        y = tl.load(key + source + partner, mask=in_row & rotated, other=0.0).to(tl.float32)
        normed = whole < HEAD_DIM * has_norm
        inverse = tl.where(normed, 1 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None], 1.0)
        x *= inverse * tl.load(norm_weight + whole, mask=normed, other=1.0).to(tl.float32)
        y *= inverse * tl.load(norm_weight + partner, mask=normed & rotated, other=1.0).to(tl.float32)
        angle = tl.where(whole < rotary_half, whole, partner)
        c = tl.load(cos + table + angle, mask=mask & rotated, other=1.0)
        s = tl.load(sin + table + angle, mask=mask & rotated, other=0.0)
        _store(key_cache, target + whole, x * c + tl.where(whole < rotary_half, -y, y) * s, in_row)
    else:
        HALF: tl.constexpr = HEAD_DIM // 2
        table = position[:, None] * HALF
        left = tl.arange(0, BLOCK_DIM // 2)[None, :]
        right = left + HALF
        in_half = mask & (left < HALF)
        x = tl.load(key + source + left, mask=in_half, other=0.0).to(tl.float32)
        y = tl.load(key + source + right, mask=in_half, other=0.0).to(tl.float32)
        normed = left < HALF * has_norm
        inverse = tl.where(normed, 1 / tl.sqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None], 1.0)
        x *= inverse * tl.load(norm_weight + left, mask=normed, other=1.0).to(tl.float32)
        y *= inverse * tl.load(norm_weight + right, mask=normed, other=1.0).to(tl.float32)
        c = tl.load(cos + table + left, mask=in_half, other=1.0)
        s = tl.load(sin + table + left, mask=in_half, other=0.0)
        _store(key_cache, target + left, x * c - y * s, in_half)
        _store(key_cache, target + right, y * c + x * s, in_half)


def tile_rows(head_dim: int, itemsize: int, partial: bool) -> int:
    """Rows of a program: 4 KB of keys; half of that where the partners of a rotation are loaded apart."""
    return max(1, (2048 if partial else 4096) // (block_dim(head_dim) * itemsize))


NUM_WARPS = 4


def kv_injection_(
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
    """Launches the kernel; arguments as of the operator, on one CUDA device (or a CPU under the interpreter).

    Raises:
        ValueError: a head size or layout there is no kernel for.
    """
    batch, rows, kv_heads, dim = key.shape
    capacity, (max_positions, rotary_half) = key_cache.shape[2], cos.shape
    if dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {dim}; the kernels have {', '.join(map(str, HEAD_DIMS))}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not cache.is_contiguous() or cache.dtype != key.dtype:
            raise ValueError(f"{name} must be contiguous and of the keys' dtype {key.dtype}, not {cache.dtype}")
    partial = 2 * rotary_half < dim
    size = tile_rows(dim, key.element_size(), partial)
    kernel_arguments = (
        key.contiguous(), value.contiguous(), cos if key_norm_weight is None else key_norm_weight,
        position_ids.contiguous(), cos.contiguous(), sin.contiguous(), write_start,
        write_start if row_count is None else row_count, key_cache, value_cache,
        rows, capacity, kv_heads, max_positions, rotary_half, int(key_norm_weight is not None),
        int(row_count is not None), eps,
    )  # fmt: skip
    kv_injection[(triton.cdiv(rows, size), kv_heads, batch)](
        *kernel_arguments,
        HEAD_DIM=dim, BLOCK_DIM=block_dim(dim), TILE_ROWS=size, PARTIAL=partial, num_warps=NUM_WARPS,
    )  # fmt: skip
