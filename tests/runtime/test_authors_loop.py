"""The decode loop against two independent ones: transformers' greedy generate(), and the authors' DFlash loop."""

from __future__ import annotations

import numpy as np
import pytest
from engines import torch_engine
from makers import make_drafter, make_target
from oracles import AuthorsLoop, greedy, transformers_target

CASES = {
    "full attention, qwen3, tied": ("qwen3", True, {}),
    "full attention, llama, untied": ("llama", False, {}),
    "causal": ("qwen3", True, {"is_causal": True}),
    "causal sliding window": (
        "qwen3",
        False,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True},
    ),
    "symmetric sliding window": (
        "qwen3",
        True,
        {
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 7,
            "use_sliding_window": True,
            "is_causal": False,
        },
    ),
    "scaled": ("qwen3", True, {"dflash_config": {"input_embedding_scale": 1.7, "final_logit_softcapping": 3.0}}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_and_the_same_steps_as_the_authors(case, tmp_path):
    family, tie, overrides = CASES[case]
    # two tokens that repeat each other make random drafts right often
    make_target(tmp_path / "t", family, tie, seed=3, vocab_size=5)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[0, 1, 3], block_size=6, seed=4, **overrides)
    engine = torch_engine(tmp_path / "t", tmp_path / "d")
    authors = AuthorsLoop(tmp_path / "t", tmp_path / "d")
    random = np.random.default_rng(5)
    lengths = set()
    for size in (1, 3, 10, 17, 40):
        prompt = random.integers(0, 4, size).tolist()
        tokens, steps = authors.greedy(prompt, 50)
        ours = engine.generate(prompt, max_tokens=50)
        assert ours.token_ids == tokens == greedy(authors.target, prompt, 50)
        assert ours.statistics.acceptance_lengths == steps
        lengths.update(steps)
    assert len(lengths) >= 2


def test_stop_tokens_end_both_alike(tmp_path):
    make_target(tmp_path / "t", seed=3, vocab_size=5, eos_token_id=2)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[0, 1, 3], block_size=6, seed=4)
    engine = torch_engine(tmp_path / "t", tmp_path / "d")
    authors = AuthorsLoop(tmp_path / "t", tmp_path / "d")
    random = np.random.default_rng(6)
    reasons = set()
    for size in (1, 4, 9, 20, 30, 33):
        prompt = random.integers(0, 4, size).tolist()
        tokens, steps = authors.greedy(prompt, 30, stop=[2])
        ours = engine.generate(prompt, max_tokens=30)
        assert ours.token_ids == tokens == greedy(authors.target, prompt, 30)
        assert ours.statistics.acceptance_lengths == steps
        reasons.add(ours.finish_reason)
    assert "stop" in reasons


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_generates_what_transformers_does(rope, tmp_path):
    make_target(tmp_path / "t", "llama", False, seed=1, vocab_size=40, rope_parameters=rope)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[1, 2], block_size=4, seed=2)
    engine = torch_engine(tmp_path / "t", tmp_path / "d")
    reference = transformers_target(tmp_path / "t")
    prompt = np.random.default_rng(0).integers(0, 40, 50).tolist()
    assert engine.generate(prompt, max_tokens=40).token_ids == greedy(reference, prompt, 40)
