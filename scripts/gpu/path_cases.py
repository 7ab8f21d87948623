"""accept_path, move_rows and gather_features: random trees, and plain walks over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Trees:
    """int64 [B, N] tokens, choices, parents and bool [B, N, N] visibility, on the CPU; the rest is padding."""

    tokens: torch.Tensor
    choices: torch.Tensor
    parents: torch.Tensor
    visibility: torch.Tensor


def make(seed: int, batch: int, nodes: int, vocabulary: int = 2) -> Trees:
    """Few tokens, so that many match and equal siblings abound; now and then a choice is -1, which matches none."""
    random = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=random)

    parents = torch.full((batch, nodes), -1)
    visibility = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for node in range(1, nodes - int(integers(max(1, nodes // 4)))):
            parents[b, node] = max(0, node - 1 - int(integers(3)))
            visibility[b, node] |= visibility[b, parents[b, node]]
    missing = torch.rand(batch, nodes, generator=random) < 0.1
    choices = integers(vocabulary, batch, nodes).masked_fill(missing, -1)
    return Trees(integers(vocabulary, batch, nodes), choices, parents, visibility)


def walk(tokens: list[int], choices: list[int], parents: list[int]) -> list[int]:
    """The longest accepted path from the root, node by node; of several, the one that ends at the lowest node."""
    paths = [[0]]
    for node in range(1, len(tokens)):
        hanging = next((path for path in paths if path[-1] == parents[node]), None)
        if hanging is not None and tokens[node] == choices[parents[node]]:
            paths.append([*hanging, node])
    return min(paths, key=lambda path: (-len(path), path[-1]))


def walks(trees: Trees) -> list[list[int]]:
    rows = zip(trees.tokens.tolist(), trees.choices.tolist(), trees.parents.tolist(), strict=True)
    return [walk(*row) for row in rows]


def padded(paths: list[list[int]], width: int) -> torch.Tensor:
    """int64 [B, width]: each path, then its last node."""
    return torch.tensor([path + [path[-1]] * (width - len(path)) for path in paths])


def moved(cache: torch.Tensor, paths: list[list[int]], context: list[int]) -> torch.Tensor:
    """The cache [B, Hkv, C, D] after the rows of each path moved to where its first stands, one by one."""
    result = cache.clone()
    for b, path in enumerate(paths):
        for i, node in enumerate(path):
            result[b, :, context[b] + i] = cache[b, :, context[b] + node]
    return result


def gathered(features: torch.Tensor, paths: list[list[int]], out_rows: int) -> torch.Tensor:
    """[B, out_rows, F]: row i is the feature of the path's node i, zeros beyond."""
    batch, _, size = features.shape
    result = features.new_zeros(batch, out_rows, size)
    for b, path in enumerate(paths):
        for i, node in enumerate(path[:out_rows]):
            result[b, i] = features[b, node]
    return result
