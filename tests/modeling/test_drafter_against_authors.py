"""The drafter module == the authors' implementation (PyPI `dflash` 0.1.0), driven as its own generation loop does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drive import RandomInputs, draft_pass
from makers import REMOVED, make_drafter, make_target
from transformers import Qwen3Config

from dflash_trt.backends.torch import TorchSession
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.spec import AttentionPolicy
from dflash_trt.checkpoint.target import read_target
from dflash_trt.export.contract import drafter_graph
from dflash_trt.modeling.load import load_drafter

authors = pytest.importorskip("dflash.model")

CAPACITY, BLOCK, TAPS = 96, 6, [0, 2]
# rows of context features per cycle: the prompt's, then what each step accepted
DELTAS = (9, 1, 4, 6, 2, 1, 5)

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}
VARIANTS: dict[str, tuple[dict[str, Any], tuple[AttentionPolicy, ...]]] = {
    "full": ({}, (AttentionPolicy(causal=False),) * 3),
    "full causal": ({"is_causal": True}, (AttentionPolicy(causal=True),) * 3),
    "sliding": (SLIDING, tuple(AttentionPolicy(causal=window > 0, window=window) for window in (7, 0, 7))),
    "sliding causal": (
        SLIDING | {"is_causal": True},
        tuple(AttentionPolicy(causal=True, window=window) for window in (7, 0, 7)),
    ),
    "sliding symmetric": (
        SLIDING | {"is_causal": False},
        tuple(AttentionPolicy(causal=False, window=window) for window in (7, 0, 7)),
    ),
    "sliding wide": (
        SLIDING | {"sliding_window": 16},
        tuple(AttentionPolicy(causal=window > 0, window=window) for window in (16, 0, 16)),
    ),
    "biases": ({"attention_bias": True}, (AttentionPolicy(causal=False),) * 3),
    "yarn": (
        {"rope_theta": REMOVED, "rope_scaling": REMOVED, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}},
        (AttentionPolicy(causal=False),) * 3,
    ),
    "scales": (
        {"dflash_config": {
            "input_embedding_scale": 2.5, "output_multiplier": 0.6, "final_logit_softcapping": 3.0}},
        (AttentionPolicy(causal=False),) * 3,
    ),
}  # fmt: skip


class Pair(RandomInputs):
    """A drafter of the package and the authors' with the same weights."""

    def __init__(self, folder: Path, tie: bool = True, **changes: Any) -> None:
        self.target = make_target(folder / "target", tie=tie)
        tensors = make_drafter(folder / "drafter", folder / "target", TAPS, BLOCK, layers=3, **changes)
        drafter, target = read_drafter(folder / "drafter"), read_target(folder / "target")
        self.spec = drafter.spec
        module = load_drafter(drafter.spec, drafter.tensors, target.spec, target.tensors, CAPACITY, "float32")
        self.session = TorchSession(module, drafter_graph(drafter.spec, "float32"))
        config = Qwen3Config(**json.loads((folder / "drafter" / "config.json").read_text()))
        self.oracle = authors.DFlashDraftModel(config).eval()
        state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        self.oracle.load_state_dict(state, strict=True)

    @torch.inference_mode()
    def expected(self, features: np.ndarray, block: np.ndarray, start: int, cache: Any) -> np.ndarray:
        """One cycle as `dflash_generate` drives it: logits of the whole block [Q, V]."""
        scale = float(authors._draft_value(self.oracle.config, "input_embedding_scale", 1.0))
        rows = features.shape[1]
        hidden = self.oracle(
            target_hidden=torch.from_numpy(features),
            noise_embedding=authors._raw_input_embeddings(self.target, torch.from_numpy(block), scale),
            position_ids=torch.arange(start - rows, start + block.shape[1])[None],
            past_key_values=cache,
            use_cache=True,
        )
        authors._crop_to(cache, start)
        return self.oracle.compute_logits(hidden, authors._output_head(self.target))[0].numpy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_cycles(tmp_path: Path, variant: str) -> None:
    changes, policies = VARIANTS[variant]
    pair = Pair(tmp_path, **changes)
    assert pair.spec.policies == policies
    cache, theirs, start = pair.session.new_cache(1, CAPACITY), authors._make_cache(pair.oracle.config), 0
    for cycle, rows in enumerate(DELTAS):
        features, block = pair.features(1, rows, cycle), pair.block(1, cycle)
        out = draft_pass(pair.session, cache, features, np.array([rows]), np.array([start]), block)
        start += rows
        logits = pair.expected(features, block, start, theirs)
        np.testing.assert_allclose(out["logits"][0], logits, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(out["draft_ids"][0], logits.argmax(-1))
        probabilities = torch.from_numpy(logits).softmax(-1).amax(-1).numpy()
        np.testing.assert_allclose(out["confidence"][0], probabilities, rtol=1e-4)


def test_an_untied_head(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tie=False)
    features, block = pair.features(1, 5, 0), pair.block(1, 0)
    out = draft_pass(pair.session, pair.session.new_cache(1, 16), features, np.array([5]), np.zeros(1, int), block)
    logits = pair.expected(features, block, 5, authors._make_cache(pair.oracle.config))
    np.testing.assert_allclose(out["logits"][0], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["full", "sliding", "sliding symmetric"])
def test_a_batch_with_different_feature_lengths(tmp_path: Path, variant: str) -> None:
    """Features are padded to the longest row; padding is garbage and must leave no trace in later cycles either."""
    pair = Pair(tmp_path, **VARIANTS[variant][0])
    cache = pair.session.new_cache(3, CAPACITY)
    theirs = [authors._make_cache(pair.oracle.config) for _ in range(3)]
    start = np.zeros(3, int)
    for cycle, lengths in enumerate(([9, 2, 5], [1, 6, 3], [4, 1, 1], [1, 1, 6])):
        features, block = pair.features(3, max(lengths), cycle), pair.block(3, cycle)
        out = draft_pass(pair.session, cache, features, np.array(lengths), start, block)
        start = start + lengths
        for row, length in enumerate(lengths):
            logits = pair.expected(features[row : row + 1, :length], block[row : row + 1], int(start[row]), theirs[row])
            np.testing.assert_allclose(out["logits"][row], logits, rtol=1e-4, atol=1e-4)


def test_shorter_blocks_are_prefixes_only_where_causal(tmp_path: Path) -> None:
    """A drafter that looks both ways answers differently to a shorter block, as the authors' does."""
    pair = Pair(tmp_path)
    features, block = pair.features(1, 5, 0), pair.block(1, 0)
    answers = []
    for size in (BLOCK, BLOCK - 2):
        cache = pair.session.new_cache(1, 16)
        out = draft_pass(pair.session, cache, features, np.array([5]), np.zeros(1, int), block[:, :size])
        theirs = authors._make_cache(pair.oracle.config)
        np.testing.assert_allclose(
            out["logits"][0], pair.expected(features, block[:, :size], 5, theirs), rtol=1e-4, atol=1e-4
        )
        answers.append(out["logits"][0, : BLOCK - 2])
    assert not np.allclose(*answers, atol=1e-3)
