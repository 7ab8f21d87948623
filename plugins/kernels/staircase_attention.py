"""StaircaseAttention as two kernels (definition: dflash_trt/ops/staircase_attention.py).

`staircase_context` is the attention itself. A program owns a tile of the (head, query) pairs of one KV head and walks
a share of the context; the keys and values of a share are thus fetched from memory once per KV head: where the pairs
take several tiles, those run side by side and find them in the L2 cache. The context has no mask but the window;
the last share goes on to the new tokens, with their visibility. Both levels are one online softmax.

`staircase_merge` joins the shares by their log-sum-exp. With one share `staircase_context` writes the result itself.

Logarithms are to base 2 inside. Lengths are read on the device. What lies in slots nobody sees does not matter, NaN
included.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .tiling import (
    HEAD_DIMS,
    MAX_QUERIES,
    PROGRAMS_PER_SM,
    Tile,
    architecture,
    block_dim,
    choose_splits,
    pick_tile,
    tiles,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits to base 2."""
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        capped = 1 - 2 / (tl.exp2(products * (scale / softcap * 2 * LOG2E)) + 1)
        return capped * (softcap * LOG2E)
    return products * (scale * LOG2E)


@triton.jit
def _update(scores, v, acc, top, total):
    """One step of the online softmax; `top` is -inf for rows that have seen nothing yet."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total * decay + tl.sum(weights, 1)


@triton.jit(
    do_not_specialize=["queries", "capacity", "kv_heads", "group", "splits", "sliding_window", "causal", "has_sinks"]
)
def staircase_context(
    query, key_cache, value_cache, context_len, visibility, sinks, position_ids, output, partial, lse,
    queries, capacity, kv_heads, group, splits, sliding_window, causal, has_sinks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    LOCAL_COLUMNS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles * splits, KV heads, batch); see the module's docstring.

    query [B, Hkv*group, Q, D], caches [B, Hkv, capacity, D], output [B, Q, Hkv*group*D], partial f32
    [B, Hkv, splits, group*Q, D], lse f32 [B, Hkv, splits, group*Q] (-inf, and no partial, where a share saw nothing).
    WINDOW also takes a `sliding_window` of 0.
    """
    rows = group * queries
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    split = tl.program_id(0) // row_tiles
    head = tl.program_id(1)
    batch = tl.program_id(2)
    pair = batch.to(tl.int64) * kv_heads + head

    row = (tl.program_id(0) % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token = row % queries
    dim = tl.arange(0, BLOCK_DIM)
    row_exists = row < rows
    in_row = (dim < HEAD_DIM)[None, :]
    in_query = (pair * rows + row)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(query + in_query, mask=row_exists[:, None] & in_row, other=0.0)
    keys = key_cache + pair * capacity * HEAD_DIM
    values = value_cache + pair * capacity * HEAD_DIM

    length = tl.maximum(tl.minimum(tl.load(context_len + batch), capacity - queries), 0).to(tl.int32)
    first = 0
    position = token
    if WINDOW:
        position = tl.load(position_ids + batch * queries + token).to(tl.int32)
        # a window of 0 is none: as wide as can be, to both sides
        bounded = tl.minimum(sliding_window, 1)
        width = sliding_window + (1 - bounded) * (1 << 30)
        reach = 1 + (1 - causal * bounded) * (width - 1)
        # no query of the tile sees anything older
        first = tl.maximum(tl.min(position, 0) - width + 1, 0)
    # the new tokens count as the steps they take, so that the last share is not the longest
    steps = tl.cdiv(tl.maximum(length - first, 0), TILE_COLUMNS) + tl.cdiv(queries, LOCAL_COLUMNS)
    share = tl.cdiv(steps, splits) * TILE_COLUMNS
    begin = tl.minimum(first + split * share, length)
    end = tl.minimum(begin + share, length)

    acc = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    column = tl.arange(0, TILE_COLUMNS)

    for start in range(begin, end, TILE_COLUMNS):
        slot = start + column
        at = slot[:, None] * HEAD_DIM + dim[None, :]
        mask = (slot < end)[:, None] & in_row
        k = tl.load(keys + at, mask=mask, other=0.0)
        scores = tl.where((slot < end)[None, :], _scores(q, k, scale, softcap, SOFTCAP), float("-inf"))
        if WINDOW:
            distance = position[:, None] - slot[None, :]
            scores = tl.where((distance < width) & (distance > -reach), scores, float("-inf"))
        v = tl.load(values + at, mask=mask, other=0.0)
        acc, top, total = _update(scores, v, acc, top, total)

    if split == splits - 1:  # the new tokens
        for start in tl.range(0, queries, LOCAL_COLUMNS, num_stages=1):  # a pipeline would take registers
            local = start + tl.arange(0, LOCAL_COLUMNS)
            at = (length + local)[:, None] * HEAD_DIM + dim[None, :]
            k = tl.load(keys + at, mask=(local < queries)[:, None] & in_row, other=0.0)
            pairs = batch * queries * queries + token[:, None] * queries + local[None, :]
            seen = tl.load(visibility + pairs, mask=(local < queries)[None, :], other=0) != 0
            if WINDOW:
                own = tl.load(position_ids + batch * queries + local, mask=local < queries, other=0).to(tl.int32)
                distance = position[:, None] - own[None, :]
                seen = seen & (distance < width) & (distance > -reach)
            # a weight of 0 does not silence NaN, so values that no row sees are not read
            any_row = tl.max(seen.to(tl.int32), 0) > 0
            v = tl.load(values + at, mask=any_row[:, None] & in_row, other=0.0)
            # all loads are on their way before the first product waits for one
            scores = tl.where(seen, _scores(q, k, scale, softcap, SOFTCAP), float("-inf"))
            acc, top, total = _update(scores, v, acc, top, total)

    q_head = head * group + row // queries
    if splits == 1:
        sink = tl.load(sinks + q_head, mask=row < rows * has_sinks, other=float("-inf")).to(tl.float32) * LOG2E
        with_sink = tl.maximum(top, sink)
        shift = tl.where(with_sink == float("-inf"), 0.0, with_sink)
        decay = tl.exp2(top - shift)
        total = total * decay + tl.exp2(sink - shift)
        result = acc * (decay / tl.where(total == 0, 1.0, total))[:, None]
        out_row = (batch.to(tl.int64) * queries + token) * kv_heads * group + q_head
        tl.store(
            output + out_row[:, None] * HEAD_DIM + dim[None, :],
            result.to(output.dtype.element_ty), mask=row_exists[:, None] & in_row,
        )  # fmt: skip
    else:
        at_row = (pair * splits + split) * rows + row
        something = total != 0  # NaN is something
        safe_total = tl.where(something, total, 1.0)
        tl.store(lse + at_row, tl.where(something, top + tl.log2(safe_total), float("-inf")), mask=row_exists)
        tl.store(
            partial + at_row[:, None] * HEAD_DIM + dim[None, :],
            acc / safe_total[:, None], mask=(row_exists & something)[:, None] & in_row,
        )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "kv_heads", "group", "splits", "has_sinks"])
def staircase_merge(
    partial, lse, sinks, output, queries, kv_heads, group, splits, has_sinks,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program per (head, query) pair: grid (group*Q, KV heads, batch). Shapes as in `staircase_context`."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    rows = group * queries
    dim = tl.arange(0, BLOCK_DIM)
    q_head = head * group + row // queries
    first_row = (batch.to(tl.int64) * kv_heads + head) * splits * rows + row

    sink = tl.load(sinks + q_head, mask=row < rows * has_sinks, other=float("-inf")).to(tl.float32) * LOG2E
    top = sink
    total = tl.where(sink > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        at_row = first_row + split.to(tl.int64) * rows
        level = tl.load(lse + at_row, mask=split < splits, other=float("-inf"))
        part = tl.load(
            partial + at_row[:, None] * HEAD_DIM + dim[None, :],
            mask=(level != float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(level, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(level - shift)
        decay = tl.exp2(top - shift)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    result = acc / tl.where(total == 0, 1.0, total)
    out_row = (batch.to(tl.int64) * queries + row % queries) * kv_heads * group + q_head
    tl.store(output + out_row * HEAD_DIM + dim, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)


MERGE_SPLITS = 16  # shares a step of the merge loads at once


def staircase_attention(
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
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Launches the kernels; arguments as of the operator, on one CUDA device (or a CPU under the interpreter).

    Args:
        tile, splits: instead of those the rules of `tiling` choose, for tests and tuning.

    Raises:
        ValueError: a head size, number of queries or layout there is no kernel for.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, capacity = key_cache.shape[1:3]
    if dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {dim}; the kernels have {', '.join(map(str, HEAD_DIMS))}")
    if not 1 <= queries <= min(MAX_QUERIES, capacity):
        raise ValueError(f"{queries} queries; the kernels take 1..{MAX_QUERIES}, and the cache has {capacity} slots")
    query, visibility, position_ids = query.contiguous(), visibility.contiguous(), position_ids.contiguous()
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not cache.is_contiguous() or cache.dtype != query.dtype:
            raise ValueError(f"{name} must be contiguous and of the query's dtype {query.dtype}, not {cache.dtype}")
    group = heads // kv_heads
    rows = group * queries
    masked = sliding_window > 0 or softcap > 0
    tile, chosen = plan(query.device, batch * kv_heads, rows, capacity, dim, query.element_size(), masked, tile)
    splits = chosen if splits is None else splits
    row_tiles = triton.cdiv(rows, tile.rows)
    output = query.new_empty((batch, queries, heads * dim))
    partial = lse = query.new_empty(0, dtype=torch.float32)
    if splits > 1:
        partial = partial.new_empty((batch, kv_heads, splits, rows, dim))
        lse = lse.new_empty((batch, kv_heads, splits, rows))
    has_sinks = int(sinks is not None)
    sinks = query if sinks is None else sinks
    staircase_context[(row_tiles * splits, kv_heads, batch)](
        query, key_cache, value_cache, context_len, visibility, sinks, position_ids, output, partial, lse,
        queries, capacity, kv_heads, group, splits, sliding_window, causal, has_sinks, scale, softcap,
        HEAD_DIM=dim, BLOCK_DIM=block_dim(dim), TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns,
        LOCAL_COLUMNS=tile.local_columns, WINDOW=masked, SOFTCAP=softcap > 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        staircase_merge[(rows, kv_heads, batch)](
            partial, lse, sinks, output, queries, kv_heads, group, splits, has_sinks,
            HEAD_DIM=dim, BLOCK_DIM=block_dim(dim), BLOCK_SPLITS=MERGE_SPLITS, num_warps=4,
        )  # fmt: skip
    return output


@functools.cache  # asked by every layer of every pass that is not captured
def plan(
    device: torch.device,
    pairs: int,
    rows: int,
    capacity: int,
    head_dim: int,
    itemsize: int,
    masked: bool,
    tile: Tile | None = None,
) -> tuple[Tile, int]:
    """The tile and the number of splits for shapes on a device.

    Args:
        pairs: batch * KV heads.
        rows: (head, query) pairs of a KV head.
        masked: as of `tiling.tiles`.
        tile: instead of the one the rule picks.
    """
    if tile is None:
        tile = pick_tile(tiles(_architecture(device), head_dim, itemsize, masked), rows)
    slots = _processors(device) * PROGRAMS_PER_SM[tile.rows]
    return tile, choose_splits(pairs * triton.cdiv(rows, tile.rows), capacity, tile.columns, slots)


def _architecture(device: torch.device) -> int:
    return architecture(torch.cuda.get_device_capability(device)) if device.type == "cuda" else 80


def _processors(device: torch.device) -> int:
    """Multiprocessors; the interpreter runs programs one by one, and takes the splits of a device of eight."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
