"""The target module over its caches == one full forward of transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drive import causal, target_pass
from makers import make_target

from dflash_trt.backends.torch import TorchSession
from dflash_trt.checkpoint.target import read_target
from dflash_trt.export.contract import target_graph
from dflash_trt.modeling.load import load_target

CAPACITY = 64
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3 tied": {},
    "qwen3 untied": {"tie": False},
    "qwen3 biases": {"attention_bias": True},
    "qwen3 windows": WINDOWED,
    "qwen3 one head each": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    "qwen3 one shared head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "llama tied": {"family": "llama"},
    "llama untied": {"family": "llama", "tie": False},
    "llama biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama eps": {"family": "llama", "rms_norm_eps": 1e-2},
    **{f"{family} rope {kind}": {"family": family, "rope_parameters": ROPES[kind]} for family in ("qwen3", "llama")
       for kind in ("linear", "llama3", "yarn")},
}  # fmt: skip


class Pair:
    """A module of the package and the model of transformers with the same weights."""

    def __init__(self, folder: Path, taps: tuple[int, ...] = (0, 2), **changes: Any) -> None:
        self.oracle = make_target(folder, **changes)
        checkpoint = read_target(folder)
        module = load_target(checkpoint.spec, taps, checkpoint.tensors, CAPACITY, "float32")
        self.taps = taps
        self.session = TorchSession(module, target_graph(checkpoint.spec, len(taps), "float32"))
        self.vocab_size = checkpoint.spec.vocab_size

    def ids(self, *shape: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.vocab_size, shape)

    @torch.inference_mode()
    def expected(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits [B, N, V] and context features [B, N, T*H] of whole sequences ids [B, N]."""
        out = self.oracle(torch.from_numpy(np.ascontiguousarray(ids)), output_hidden_states=True)
        features = torch.cat([out.hidden_states[tap + 1] for tap in self.taps], dim=-1)
        return out.logits.numpy(), features.numpy()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_and_single_steps(tmp_path: Path, variant: str) -> None:
    pair = Pair(tmp_path, **VARIANTS[variant])
    ids = pair.ids(2, 24)
    logits, features = pair.expected(ids)
    cache, start = pair.session.new_cache(2, CAPACITY), 0
    for size in (9, 1, 7, 4, 1, 1, 1):
        out = target_pass(pair.session, cache, ids[:, start : start + size], np.full(2, start))
        assert_close(out["logits"], logits[:, start : start + size])
        assert_close(out["context_features"], features[:, start : start + size])
        np.testing.assert_array_equal(out["token_ids"], out["logits"].argmax(-1))
        start += size
    assert start == ids.shape[1]


def test_rows_of_different_lengths(tmp_path: Path) -> None:
    """Prefill of each row on a view of the cache, then steps of the batch."""
    pair = Pair(tmp_path, **WINDOWED)
    ids, prompts = pair.ids(3, 20), np.array([11, 3, 8])
    logits, features = pair.expected(ids)
    cache = pair.session.new_cache(3, CAPACITY)
    for row, length in enumerate(prompts):
        target_pass(pair.session, cache.rows(row, row + 1), ids[row : row + 1, :length], np.zeros(1, int))
    for queries in (1, 4, 2):
        step = np.stack([ids[row, start : start + queries] for row, start in enumerate(prompts)])
        out = target_pass(pair.session, cache, step, prompts)
        for row, start in enumerate(prompts):
            assert_close(out["logits"][row], logits[row, start : start + queries])
            assert_close(out["context_features"][row], features[row, start : start + queries])
        prompts = prompts + queries


def test_logit_rows_select_and_repeat(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    ids, rows = pair.ids(2, 6), np.array([[5, 0], [2, 2]])
    logits, _ = pair.expected(ids)
    out = target_pass(pair.session, pair.session.new_cache(2, 8), ids, np.zeros(2, int), logit_rows=rows)
    assert_close(out["logits"], np.take_along_axis(logits, rows[:, :, None], axis=1))
    assert out["token_ids"].shape == (2, 2)


def test_taps_in_the_order_asked(tmp_path: Path) -> None:
    pair = Pair(tmp_path, taps=(2, 0, 1))
    ids = pair.ids(1, 5)
    out = target_pass(pair.session, pair.session.new_cache(1, 8), ids, np.zeros(1, int))
    assert_close(out["context_features"], pair.expected(ids)[1])


def test_a_tap_of_the_last_layer_is_normed(tmp_path: Path) -> None:
    """transformers norms its last hidden state, and on that a drafter that taps it was trained."""
    pair = Pair(tmp_path, taps=(3, 1))
    ids = pair.ids(1, 5)
    out = target_pass(pair.session, pair.session.new_cache(1, 8), ids, np.zeros(1, int))
    logits, features = pair.expected(ids)
    assert_close(out["context_features"], features)
    assert_close(out["logits"], logits)


def random_tree(nodes: int, seed: int) -> list[int]:
    """Parents, -1 for the root; a node's parent precedes it."""
    rng = np.random.default_rng(seed)
    return [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.parametrize("variant", ["qwen3 tied", "qwen3 windows", "llama untied"])
@pytest.mark.parametrize("seed", range(3))
def test_every_path_of_a_tree_is_a_sequence_of_its_own(tmp_path: Path, variant: str, seed: int) -> None:
    pair, nodes, prompt_len = Pair(tmp_path, **VARIANTS[variant]), 11, 7
    parents = random_tree(nodes, seed)
    prompt, tokens = pair.ids(1, prompt_len, seed=seed), pair.ids(1, nodes, seed=seed + 100)
    paths = [path_to(parents, node) for node in range(nodes)]
    visibility = np.zeros((1, nodes, nodes), bool)
    for node, path in enumerate(paths):
        visibility[0, node, path] = True
    depth = np.array([[len(path) - 1 for path in paths]])
    cache = pair.session.new_cache(1, CAPACITY)
    target_pass(pair.session, cache, prompt, np.zeros(1, int))
    out = target_pass(pair.session, cache, tokens, np.full(1, prompt_len), visibility, depth)
    leaves = set(range(nodes)) - set(parents)
    for leaf in leaves:
        path = paths[leaf]
        logits, features = pair.expected(np.concatenate([prompt, tokens[:, path]], axis=1))
        assert_close(out["logits"][0, path], logits[0, prompt_len:])
        assert_close(out["context_features"][0, path], features[0, prompt_len:])


def test_moving_the_accepted_path_into_place(tmp_path: Path) -> None:
    """After `Cache.move` the sequence goes on as if the path had been decoded as a chain."""
    pair = Pair(tmp_path, **WINDOWED)
    parents = [-1, 0, 0, 2, 1, 3]
    prompt, tokens, accepted = pair.ids(1, 4), pair.ids(1, 6, seed=1), [0, 2, 3, 5]
    visibility = np.zeros((1, 6, 6), bool)
    for node in range(6):
        visibility[0, node, path_to(parents, node)] = True
    depth = np.array([[len(path_to(parents, node)) - 1 for node in range(6)]])
    cache = pair.session.new_cache(1, CAPACITY)
    target_pass(pair.session, cache, prompt, np.zeros(1, int))
    target_pass(pair.session, cache, tokens, np.full(1, 4), visibility, depth)
    cache.move(0, [4 + node for node in accepted], 4)
    following = pair.ids(1, 3, seed=2)
    out = target_pass(pair.session, cache, following, np.full(1, 8))
    logits, _ = pair.expected(np.concatenate([prompt, tokens[:, accepted], following], axis=1))
    assert_close(out["logits"], logits[:, 8:])


def test_stale_slots_do_not_matter(tmp_path: Path) -> None:
    """Nothing clears a cache: what a rejected draft left behind the committed length must not be seen."""
    pair = Pair(tmp_path)
    ids = pair.ids(1, 10)
    clean, used = (pair.session.new_cache(1, CAPACITY) for _ in range(2))
    for buffer in used.buffers:
        buffer.fill_(1e4)
    for start, size in ((0, 6), (6, 4)):
        expected = target_pass(pair.session, clean, ids[:, start : start + size], np.full(1, start))
        out = target_pass(pair.session, used, ids[:, start : start + size], np.full(1, start))
        np.testing.assert_array_equal(out["logits"], expected["logits"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_near(tmp_path: Path, dtype: Any) -> None:
    make_target(tmp_path)
    checkpoint = read_target(tmp_path)
    ids = np.random.default_rng(0).integers(0, checkpoint.spec.vocab_size, (1, 12))
    outs = []
    for kind in ("float32", dtype):
        module = load_target(checkpoint.spec, (0, 2), checkpoint.tensors, CAPACITY, kind)
        session = TorchSession(module, target_graph(checkpoint.spec, 2, kind))
        inputs = {
            "input_ids": ids,
            "position_ids": np.arange(12)[None],
            "visibility": causal(12),
            "context_len": np.zeros(1, int),
            "logit_rows": np.arange(12)[None],
        }
        outs.append(session.run(inputs, ["logits", "context_features"], session.new_cache(1, 16)))
    assert outs[1]["logits"].dtype == np.float32
    assert str(outs[1]["context_features"].dtype) == f"torch.{dtype}"
    error = np.abs(outs[1]["logits"] - outs[0]["logits"]).max() / np.abs(outs[0]["logits"]).max()
    assert error < (0.01 if dtype == "float16" else 0.05)
