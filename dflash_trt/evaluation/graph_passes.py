"""Passes to compare two sessions of a graph on: random contents, growing caches, sizes that engines are built for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dflash_trt.backends.base import Array, numpy_dtype
from dflash_trt.bundle import BundleInfo
from dflash_trt.export.contract import Role
from dflash_trt.runtime.drafter import Block, block_inputs
from dflash_trt.runtime.tree import CandidateTree

_SEED = 20260206


def graph_passes(info: BundleInfo, role: Role) -> list[dict[str, Array]]:
    """Inputs of a few passes, to be run in this order on one cache of one row; features are float32.

    The target: a chunk of a prompt, one token, a random tree of full size. A drafter: a block of one token and a
    prompt's features, then full blocks with none, some and all of the feature rows valid; the VP drafter's blocks are
    several at once that see only themselves, each with another visible prefix.

    Engines are built for such sizes: with a prompt's chunk go one row of logits or a block of one token, and with a
    full block no more features than a step can accept.
    """
    return list(_target_passes(info) if role == "target" else _drafter_passes(info, role))


def slots_written(passes: list[dict[str, Array]]) -> int:
    """The cache slots the passes write, from the first on."""
    return max(
        int(inputs["context_len"][0])
        + inputs["visibility"].shape[1]
        + (inputs["context_features"].shape[1] if "context_features" in inputs else 0)
        for inputs in passes
    )


def _target_passes(info: BundleInfo) -> Iterator[dict[str, Array]]:
    random, limits = np.random.default_rng(_SEED), info.limits
    chunk = max(1, min(24, limits.prefill_chunk, limits.max_seq_len - 2))
    size = limits.tree_size
    parents = np.array([-1, *(int(random.integers(max(0, i - 3), i)) for i in range(1, size))])
    tree = CandidateTree.from_parents(np.arange(size), parents)
    shapes = (
        (0, np.arange(chunk), np.tri(chunk, dtype=np.bool_), [chunk - 1]),
        (chunk, np.zeros(1, np.int64), np.ones((1, 1), np.bool_), [0]),
        (chunk + 1, tree.depths, tree.visibility(), range(size)),
    )
    for context, depths, visibility, rows in shapes:
        yield {
            "input_ids": random.integers(0, info.target.vocab_size, (1, len(depths))),
            "position_ids": (context + depths)[None],
            "visibility": visibility[None],
            "context_len": np.array([context]),
            "logit_rows": np.array([rows]),
        }


def _drafter_passes(info: BundleInfo, role: Role) -> Iterator[dict[str, Array]]:
    random = np.random.default_rng(_SEED)
    width, limits, context = len(info.taps) * info.target.hidden_size, info.limits, 0
    redrafts = role == "vp_drafter"
    size = limits.vp_block_size if redrafts else limits.block_size
    candidates = max(1, limits.redraft_rows) if redrafts else 1
    room = max(1, limits.max_seq_len // 4)
    for rows, valid, whole in ((16, 16, False), (1, 0, True), (5, 3, True), (4, 4, True)):
        most = min(room, limits.longest_path if whole else limits.prefill_chunk)
        rows, valid = min(rows, most), min(valid, most)
        tokens = random.integers(0, info.target.vocab_size, size).tolist()
        prefixes = [tokens[: kept % size + 1] for kept in range(candidates)] if whole else [[]]
        block = Block.of(prefixes, size if whole else 1, info.mask_token_id)
        features = random.standard_normal((1, rows, width)).astype(numpy_dtype(info.precision)).astype(np.float32)
        yield block_inputs(block, features, valid, context)
        context += valid
