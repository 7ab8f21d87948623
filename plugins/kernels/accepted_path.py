"""After verification, on the device: which path is accepted, and moving what belongs to it into place.

Definitions and references: dflash_trt/ops/accepted_path.py. Rows are moved as 32-bit words, whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .tiling import MAX_QUERIES

NODE_CHUNK = 16  # ancestors of a step of accept_path
PATH_ROWS = 32  # rows of a step of move_rows
MOVE_WORDS = 64  # words of a program of move_rows
GATHER_WORDS = 1024  # words of a program of gather_features
NUM_WARPS = 4


@triton.jit(do_not_specialize=["nodes", "path_capacity"])
def accept_path(
    tokens, choices, visibility, parents, path, path_len, bonus, nodes, path_capacity,
    BLOCK_NODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (batch). i64 [B, nodes] tokens, choices, parents; bool [B, nodes, nodes] visibility: ancestors and self.

    Writes path i64 [B, path_capacity], path_len i64 [B], bonus i64 [B].
    """
    batch = tl.program_id(0)
    node = tl.arange(0, BLOCK_NODES)
    exists = node < nodes
    rows = visibility + batch * nodes * nodes
    size = tl.zeros([BLOCK_NODES], tl.int32)  # nodes of the path that ends here
    wrong = tl.zeros([BLOCK_NODES], tl.int32)  # those that the target does not choose
    for start in range(0, nodes, CHUNK):
        other = start + tl.arange(0, CHUNK)
        parent = tl.load(parents + batch * nodes + other, mask=other < nodes, other=-1)
        token = tl.load(tokens + batch * nodes + other, mask=other < nodes, other=0)
        choice = tl.load(choices + batch * nodes + parent, mask=parent >= 0, other=-1)
        wrong_here = ((other > 0) & ((parent < 0) | (choice != token))).to(tl.int32)
        pair = node[:, None] * nodes + other[None, :]
        ancestor = tl.load(rows + pair, mask=exists[:, None] & (other < nodes)[None, :], other=0).to(tl.int32)
        size += tl.sum(ancestor, 1)
        wrong += tl.sum(ancestor * wrong_here[None, :], 1)
    accepted = exists & (wrong == 0)
    longest = tl.max(tl.where(accepted, size, 0), 0)
    last = tl.min(tl.where(accepted & (size == longest), node, BLOCK_NODES), 0)

    on_path = tl.load(rows + last * nodes + node, mask=exists, other=0) != 0
    behind = (node >= longest) & (node < path_capacity)
    tl.store(path + batch * path_capacity + node, tl.zeros([BLOCK_NODES], tl.int64) + last, mask=behind)
    tl.store(path + batch * path_capacity + size - 1, node.to(tl.int64), mask=on_path & (size <= path_capacity))
    tl.store(path_len + batch, longest.to(tl.int64))
    tl.store(bonus + batch, tl.load(choices + batch * nodes + last))


@triton.jit(do_not_specialize=["capacity", "kv_heads", "words", "path_stride"])
def move_rows(
    buffers, path, path_len, context_len, capacity, kv_heads, words, path_stride,
    PATH_ROWS: tl.constexpr, MOVE_WORDS: tl.constexpr,
):  # fmt: skip
    """Grid (buffers * KV heads, ceil(words / MOVE_WORDS), batch): slot context_len + path[i] -> context_len + i.

    A path ascends and path[i] >= i, so a step of rows never reads what an earlier step wrote.
    """
    batch = tl.program_id(2)
    head = tl.program_id(0) % kv_heads
    cache = tl.load(buffers + tl.program_id(0) // kv_heads).to(tl.pointer_type(tl.int32))
    length = tl.load(path_len + batch)
    context = tl.load(context_len + batch)
    word = (tl.program_id(1) * MOVE_WORDS + tl.arange(0, MOVE_WORDS))[None, :]
    first_slot = (batch.to(tl.int64) * kv_heads + head) * capacity + context
    for start in range(0, path_stride, PATH_ROWS):
        row = start + tl.arange(0, PATH_ROWS)
        from_row = tl.load(path + batch * path_stride + row, mask=row < length, other=0)
        moves = (row < length) & (from_row != row) & (context + from_row < capacity)
        mask = moves[:, None] & (word < words)
        rows = tl.load(cache + (first_slot + from_row)[:, None] * words + word, mask=mask, other=0)
        # another thread's source may be this thread's destination
        tl.debug_barrier()
        tl.store(cache + (first_slot + row)[:, None] * words + word, rows, mask=mask)


@triton.jit(do_not_specialize=["nodes", "words", "path_stride", "out_rows"])
def gather_features(
    features, path, path_len, output, nodes, words, path_stride, out_rows, GATHER_WORDS: tl.constexpr
):  # fmt: skip
    """Grid (out_rows, ceil(words / GATHER_WORDS), batch).

    Output row i is features row path[i], and zeros from path_len on.
    """
    row = tl.program_id(0)
    batch = tl.program_id(2)
    word = tl.program_id(1) * GATHER_WORDS + tl.arange(0, GATHER_WORDS)
    length = tl.minimum(tl.load(path_len + batch), path_stride)
    node = tl.load(path + batch * path_stride + tl.minimum(row, path_stride - 1))
    source = (batch.to(tl.int64) * nodes + node) * words
    data = tl.load(features + source + word, mask=(word < words) & (row + word * 0 < length), other=0)
    tl.store(output + (batch.to(tl.int64) * out_rows + row) * words + word, data, mask=word < words)


def accept_path_(
    tokens: torch.Tensor, choices: torch.Tensor, visibility: torch.Tensor, parents: torch.Tensor, path_capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches `accept_path`; arguments and results as of the operator.

    Raises:
        ValueError: a tree or a path larger than the kernel's.
    """
    batch, nodes = tokens.shape
    if nodes > MAX_QUERIES:
        raise ValueError(f"a tree of {nodes} nodes; the kernel takes 1..{MAX_QUERIES}")
    if path_capacity > MAX_QUERIES:
        raise ValueError(f"a path of {path_capacity} nodes; the kernel writes 1..{MAX_QUERIES}")
    path = tokens.new_empty((batch, path_capacity))
    path_len, bonus = tokens.new_empty(batch), tokens.new_empty(batch)
    accept_path[(batch,)](
        tokens.contiguous(), choices.contiguous(), visibility.contiguous(), parents.contiguous(),
        path, path_len, bonus, nodes, path_capacity, BLOCK_NODES=MAX_QUERIES, CHUNK=NODE_CHUNK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return path, path_len, bonus


def move_rows_(
    buffers: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    context_len: torch.Tensor,
) -> None:
    """Launches `move_rows` over caches [B, Hkv, C, D] of one shape.

    Args:
        pointers: int64 [n] on the device, the addresses of the caches.

    Raises:
        ValueError: caches it cannot address.
    """
    batch, kv_heads, capacity, dim = buffers[0].shape
    words = _words(buffers[0], dim)
    if any(buffer.shape != buffers[0].shape or not buffer.is_contiguous() for buffer in buffers):
        raise ValueError("the caches must be contiguous and of one shape")
    path = path.contiguous()
    move_rows[(len(buffers) * kv_heads, triton.cdiv(words, MOVE_WORDS), batch)](
        pointers, path, path_len, context_len, capacity, kv_heads, words, path.shape[1],
        PATH_ROWS=PATH_ROWS, MOVE_WORDS=MOVE_WORDS, num_warps=NUM_WARPS,
    )  # fmt: skip


def gather_features_(
    features: torch.Tensor, path: torch.Tensor, path_len: torch.Tensor, out_rows: int
) -> torch.Tensor:
    """Launches `gather_features`; features [B, N, F] -> [B, out_rows, F]."""
    batch, nodes, size = features.shape
    words = _words(features, size)
    features, path = features.contiguous(), path.contiguous()
    output = features.new_empty((batch, out_rows, size))
    gather_features[(out_rows, triton.cdiv(words, GATHER_WORDS), batch)](
        features.view(torch.int32), path, path_len, output.view(torch.int32), nodes, words, path.shape[1], out_rows,
        GATHER_WORDS=GATHER_WORDS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return output


def _words(buffer: torch.Tensor, size: int) -> int:
    """32-bit words in a row of `size` elements."""
    words, rest = divmod(size * buffer.element_size(), 4)
    if rest:
        raise ValueError(f"rows of {size} {buffer.dtype} are not whole 32-bit words")
    return words
