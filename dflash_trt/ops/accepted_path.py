"""What a greedy decode step does between its passes, on the device: accept a path, move its rows, gather its features.

Trees are padded to N nodes, node 0 the root (`runtime/tree.py`); `visibility[i, j]` says whether j is an ancestor of i
or i itself; `parents` [B, N] int64, the root's -1. Padding nodes see themselves alone. A path is node ids from the root
on, padded with its last node.

The references have no host synchronisation and no shape that depends on data, as the kernels they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_trt.ops import DOMAIN
from dflash_trt.ops.library import LIBRARY

LIBRARY.define(
    "accept_path(Tensor tokens, Tensor choices, Tensor visibility, Tensor parents, int path_capacity) "
    "-> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "move_rows_(Tensor(a!)[] buffers, Tensor pointers, Tensor path, Tensor path_len, Tensor context_len) -> ()"
)
LIBRARY.define("gather_features(Tensor features, Tensor path, Tensor path_len, int out_rows) -> Tensor")


@torch.library.impl(LIBRARY, "accept_path", "CPU")
def accept_path_reference(
    tokens: torch.Tensor, choices: torch.Tensor, visibility: torch.Tensor, parents: torch.Tensor, path_capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accept_path` without a walk: every node is judged at once, by whether all of its ancestors match."""
    batch, nodes = tokens.shape
    ids = torch.arange(nodes, device=tokens.device)
    chosen = choices.gather(1, parents.clamp(min=0))
    match = (ids == 0) | ((chosen == tokens) & (chosen >= 0))
    accepted = ~(visibility & ~match[:, None]).any(-1)
    depth = visibility.sum(-1) - 1
    # distinct, so that equal depths are settled here and not by argmax
    rank = torch.where(accepted, depth * nodes + (nodes - 1 - ids), -1)
    last = rank.argmax(-1, keepdim=True)
    on_path = visibility.gather(1, last[:, :, None].expand(-1, -1, nodes))[:, 0]
    # what is not on the path goes to a column of its own, which is cut off
    place = torch.where(on_path, depth, path_capacity)
    path = last.repeat(1, path_capacity + 1).scatter_(1, place, ids.expand(batch, -1))[:, :path_capacity]
    return path.contiguous(), depth.gather(1, last)[:, 0] + 1, choices.gather(1, last)[:, 0]


@torch.library.impl(LIBRARY, "move_rows_", "CPU")
def move_rows_reference_(
    buffers: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    context_len: torch.Tensor,
) -> None:
    """`move_rows_`: all rows are read before one is written. `pointers` is for the kernel alone."""
    batch, length = path.shape
    row = torch.arange(batch, device=path.device)[:, None]
    index = torch.arange(length, device=path.device)
    moved = (index < path_len[:, None])[:, :, None, None]
    for buffer in buffers:
        # Rows behind the path write back what they hold. Theirs may be beyond the cache: consecutive slots stay
        # distinct modulo its capacity, so none is written twice.
        capacity = buffer.shape[2]
        source = (context_len[:, None] + path) % capacity
        destination = (context_len[:, None] + index) % capacity
        buffer[row, :, destination] = torch.where(moved, buffer[row, :, source], buffer[row, :, destination])


@torch.library.impl(LIBRARY, "gather_features", "CPU")
def gather_features_reference(
    features: torch.Tensor, path: torch.Tensor, path_len: torch.Tensor, out_rows: int
) -> torch.Tensor:
    """`gather_features`."""
    batch, length = path.shape
    index = torch.arange(out_rows, device=path.device)
    nodes = path.gather(1, index.clamp(max=length - 1).expand(batch, -1))
    rows = features.gather(1, nodes[:, :, None].expand(-1, -1, features.shape[-1]))
    return torch.where((index < path_len[:, None])[:, :, None], rows, 0)


@torch.library.register_fake(f"{DOMAIN}::accept_path", lib=LIBRARY)
def _(tokens, choices, visibility, parents, path_capacity):  # type: ignore[no-untyped-def]
    batch = tokens.shape[0]
    return tokens.new_empty((batch, path_capacity)), tokens.new_empty(batch), tokens.new_empty(batch)


@torch.library.register_fake(f"{DOMAIN}::move_rows_", lib=LIBRARY)
def _(buffers, pointers, path, path_len, context_len) -> None:  # type: ignore[no-untyped-def]
    pass


@torch.library.register_fake(f"{DOMAIN}::gather_features", lib=LIBRARY)
def _(features, path, path_len, out_rows):  # type: ignore[no-untyped-def]
    return features.new_empty((features.shape[0], out_rows, features.shape[-1]))


def addresses(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [n] on the device of the buffers: where their memory is, for `move_rows_`; made once for fixed buffers."""
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=buffers[0].device)


def accept_path(
    tokens: torch.Tensor, choices: torch.Tensor, visibility: torch.Tensor, parents: torch.Tensor, path_capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's choices followed down the tree: `runtime.acceptance.walk`, greedy.

    A node is accepted when its parent is and the choice there is its token. The deepest accepted node ends the path,
    of several (equal siblings) the one with the lowest id.

    Args:
        tokens, choices: int64 [B, N]; choices[n] is the target's next token after node n, -1 where its logits are not
            finite, which no token matches.
        visibility: bool [B, N, N].
        parents: int64 [B, N].
        path_capacity: at least the nodes of the longest path from the root.

    Returns:
        path int64 [B, path_capacity]; path_len int64 [B], the root counted; bonus int64 [B], the choice at the last
        node.
    """
    return torch.ops.dflash_trt.accept_path.default(tokens, choices, visibility, parents, path_capacity)


def move_rows_(
    buffers: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    context_len: torch.Tensor,
) -> None:
    """Moves slot context_len + path[i] to context_len + i for i < path_len, in place and in every buffer.

    Args:
        buffers: caches [B, Hkv, C, D] of one shape and dtype.
        pointers: `addresses(buffers)`.
        path: int64 [B, P], P <= C. path_len, context_len: int64 [B].
    """
    torch.ops.dflash_trt.move_rows_.default(list(buffers), pointers, path, path_len, context_len)


def gather_features(features: torch.Tensor, path: torch.Tensor, path_len: torch.Tensor, out_rows: int) -> torch.Tensor:
    """[B, out_rows, F]: row i is row path[i] of features [B, N, F] for i < path_len, zeros beyond."""
    return torch.ops.dflash_trt.gather_features.default(features, path, path_len, out_rows)
