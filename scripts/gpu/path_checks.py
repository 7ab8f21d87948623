"""Correctness of what follows verification: accept_path, move_rows and gather_features, against plain walks."""

from __future__ import annotations

import torch

from dflash_trt.ops.accepted_path import addresses
from dflash_trt.plugins.kernels.accepted_path import accept_path_, gather_features_, move_rows_
from gpu import path_cases
from gpu.attention_checks import poisoned
from gpu.context import Context
from gpu.injection_cases import bits
from gpu.results import Result


def check_paths(context: Context, result: Result) -> None:
    seed, device = context.options.seed, context.options.device
    sizes = (1, 2, 15, 16, 70, 127, 128) if context.on_gpu else (1, 17)
    for number, nodes in enumerate(sizes):
        context.note(f"paths of {nodes} nodes")
        trees = path_cases.make(seed + number, 3, nodes)
        problem = _accept_problem(trees, device)
        result.check(f"accept_path: {nodes} nodes", not problem, problem)
        problem = _move_problem(trees, device, (torch.bfloat16, torch.float32)[number % 2], seed)
        result.check(f"move_rows, gather_features: {nodes} nodes", not problem, problem)


def _accept_problem(trees: path_cases.Trees, device: str) -> str:
    paths = path_cases.walks(trees)
    width = min(128, int(trees.visibility.sum(-1).max()) + 1)
    inputs = (trees.tokens, trees.choices, trees.visibility, trees.parents)
    with poisoned():
        path, path_len, bonus = accept_path_(*(tensor.to(device) for tensor in inputs), width)
    wanted = path_cases.padded(paths, width), [len(p) for p in paths]
    if path_len.tolist() != wanted[1]:
        return f"lengths {path_len.tolist()}, not {wanted[1]}"
    if not torch.equal(path.cpu(), wanted[0]):
        return f"paths {path.tolist()}, not {wanted[0].tolist()}"
    last = [int(trees.choices[b, p[-1]]) for b, p in enumerate(paths)]
    return "" if bonus.tolist() == last else f"bonus {bonus.tolist()}, not {last}"


def _move_problem(trees: path_cases.Trees, device: str, dtype: torch.dtype, seed: int) -> str:
    """Paths from the root down to some node, whether accepted or not, so that most are long."""
    batch, nodes = trees.tokens.shape
    paths = [trees.visibility[b, nodes - 1 - b % nodes].nonzero()[:, 0].tolist() for b in range(batch)]
    paths = [[0, *path[1:]] if path[0] == 0 else [0] for path in paths]  # a padding node is on no path
    width = max(map(len, paths))
    path, path_len = path_cases.padded(paths, width).to(device), torch.tensor([len(p) for p in paths]).to(device)
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(100, (batch,), generator=random)
    caches = [torch.randn(batch, 2, 100 + nodes, 96, generator=random).to(dtype).to(device) for _ in range(3)]
    wanted = [path_cases.moved(cache, paths, lengths.tolist()) for cache in caches]
    move_rows_(caches, addresses(caches), path, path_len, lengths.to(device))
    if not all(torch.equal(bits(cache), bits(want)) for cache, want in zip(caches, wanted, strict=True)):
        return "move_rows left other rows than the walk"
    features = torch.randn(batch, nodes, 2050, generator=random).to(dtype).to(device)
    with poisoned():
        found = gather_features_(features, path, path_len, width + 2)
    wanted_features = path_cases.gathered(features, paths, width + 2)
    return "" if torch.equal(bits(found), bits(wanted_features)) else "gather_features took other rows than the walk"
