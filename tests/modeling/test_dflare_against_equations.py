"""The DFlare module over its caches == the paper's equations (arXiv 2606.02091), written out without any cache.

Every cycle the equations run over the whole context so far, layer by layer, tap by tap and head by head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drive import RandomInputs, draft_pass
from makers import make_drafter, make_target

from dflash_trt.backends.torch import TorchSession
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.spec import AttentionPolicy, DrafterSpec
from dflash_trt.checkpoint.target import read_target
from dflash_trt.export.contract import drafter_graph
from dflash_trt.modeling.layers import CacheRows, NewTokens
from dflash_trt.modeling.load import load_drafter

CAPACITY, BLOCK, TAPS, LAYERS = 96, 6, [2, 0, 3], 3
# rows of context features per cycle: the prompt's, then what each step accepted
DELTAS = (9, 1, 4, 6, 2, 1, 5)

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}
VARIANTS: dict[str, tuple[dict[str, Any], tuple[tuple[bool, int], ...]]] = {
    "full": ({}, ((False, 0),) * 3),
    "causal": ({"is_causal": True}, ((True, 0),) * 3),
    "sliding": (SLIDING, ((True, 7), (False, 0), (True, 7))),
    "sliding symmetric": (SLIDING | {"is_causal": False}, ((False, 7), (False, 0), (False, 7))),
    "scales": (
        {"dflash_config": {"input_embedding_scale": 2.5, "output_multiplier": 0.6, "final_logit_softcapping": 3.0}},
        ((False, 0),) * 3,
    ),
}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [n, d] of one head, theta 10000."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[:, :half], x[:, half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class Equations:
    """The drafter in float64."""

    def __init__(self, spec: DrafterSpec, weights: dict[str, np.ndarray], embedding: torch.Tensor) -> None:
        self.spec = spec
        self.w = {name: torch.from_numpy(value).double() for name, value in weights.items()}
        self.embedding = embedding.double()

    def contexts(self, features: torch.Tensor) -> list[torch.Tensor]:
        """features [L, T*H] -> each layer's context f [L, H]: a weighted sum of the taps, then the one shared norm."""
        taps = features.split(self.spec.hidden_size, dim=-1)
        contexts = []
        for logits in self.w["layer_fusion_weights"]:
            grown = [torch.exp(logit) for logit in logits]
            total = sum(share / sum(grown) * tap for share, tap in zip(grown, taps, strict=True))
            contexts.append(rms(total, self.w["hidden_norm.weight"], self.spec.rms_norm_eps))
        return contexts

    def attention(self, layer: int, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        spec, w = self.spec, {name: self.w.get(f"layers.{layer}.self_attn.{name}.weight") for name in (
            "q_proj", "k_proj", "v_proj", "o_proj", "k_proj_target", "v_proj_target", "q_norm", "k_norm")}  # fmt: skip
        length, block = len(context), len(x)
        queries = (x @ w["q_proj"].T).split(spec.head_dim, -1)
        keys = torch.cat((context @ w["k_proj_target"].T, x @ w["k_proj"].T)).split(spec.head_dim, -1)
        values = torch.cat((context @ w["v_proj_target"].T, x @ w["v_proj"].T)).split(spec.head_dim, -1)
        positions = torch.arange(length + block)
        mine = positions[length:]
        visible = torch.ones(block, length + block, dtype=torch.bool)
        policy = spec.policies[layer]
        if policy.causal:
            visible &= positions <= mine[:, None]
        if policy.window:
            visible &= mine[:, None] - positions < policy.window
            visible &= positions - mine[:, None] < policy.window
        heads = []
        for head, query in enumerate(queries):
            shared = head // (spec.num_heads // spec.num_kv_heads)
            q = rope(rms(query, w["q_norm"], spec.rms_norm_eps), mine)
            k = rope(rms(keys[shared], w["k_norm"], spec.rms_norm_eps), positions)
            scores = (q @ k.T / spec.head_dim**0.5).masked_fill(~visible, -torch.inf)
            heads.append(scores.softmax(-1) @ values[shared])
        return torch.cat(heads, -1) @ w["o_proj"].T

    def logits(self, features: np.ndarray, block: np.ndarray) -> np.ndarray:
        """features [L, T*H] of the whole context, block ids [Q] -> [Q, V]."""
        spec = self.spec
        x = self.embedding[torch.from_numpy(block)] * spec.input_embedding_scale
        for layer, context in enumerate(self.contexts(torch.from_numpy(features).double())):
            name = f"layers.{layer}."
            normed = rms(x, self.w[f"{name}input_layernorm.weight"], spec.rms_norm_eps)
            x = x + self.attention(layer, context, normed)
            normed = rms(x, self.w[f"{name}post_attention_layernorm.weight"], spec.rms_norm_eps)
            gate, up, down = (self.w[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        logits = rms(x, self.w["norm.weight"], spec.rms_norm_eps) @ self.embedding.T * spec.output_multiplier
        if cap := spec.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
        return logits.numpy()


class Pair(RandomInputs):
    """A drafter of the package and the equations with the same weights."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        target = make_target(folder / "target")
        tensors = make_drafter(
            folder / "drafter", folder / "target", TAPS, BLOCK, layers=LAYERS, kind="dflare", **changes
        )
        drafter, own = read_drafter(folder / "drafter"), read_target(folder / "target")
        self.spec = drafter.spec
        self.module = load_drafter(drafter.spec, drafter.tensors, own.spec, own.tensors, CAPACITY, "float32")
        self.session = TorchSession(self.module, drafter_graph(drafter.spec, "float32"))
        self.oracle = Equations(drafter.spec, tensors, target.get_input_embeddings().weight.detach())



def assert_drafted(out: dict[str, np.ndarray], row: int, logits: np.ndarray) -> None:
    np.testing.assert_allclose(out["logits"][row], logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(out["draft_ids"][row], logits.argmax(-1))
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    confidence = (probabilities / probabilities.sum(-1, keepdims=True)).max(-1)
    np.testing.assert_allclose(out["confidence"][row], confidence, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cycles(tmp_path: Path, variant: str) -> None:
    changes, policies = VARIANTS[variant]
    pair = Pair(tmp_path, **changes)
    assert pair.spec.policies == tuple(AttentionPolicy(causal=causal, window=window) for causal, window in policies)
    cache, context = pair.session.new_cache(1, CAPACITY), np.zeros((0, len(TAPS) * 32), np.float32)
    for cycle, rows in enumerate(DELTAS):
        features, block = pair.features(1, rows, cycle), pair.block(1, cycle)
        out = draft_pass(pair.session, cache, features, np.array([rows]), np.array([len(context)]), block)
        context = np.concatenate((context, features[0]))
        assert_drafted(out, 0, pair.oracle.logits(context, block[0]))


@pytest.mark.parametrize("variant", ["full", "sliding", "sliding symmetric"])
def test_a_batch_with_different_feature_lengths(tmp_path: Path, variant: str) -> None:
    """Features are padded to the longest row; padding is garbage and must leave no trace in later cycles either."""
    pair = Pair(tmp_path, **VARIANTS[variant][0])
    cache, start = pair.session.new_cache(3, CAPACITY), np.zeros(3, int)
    contexts = [np.zeros((0, len(TAPS) * 32), np.float32)] * 3
    for cycle, lengths in enumerate(([9, 2, 5], [1, 6, 3], [4, 0, 1], [1, 1, 6])):
        features, block = pair.features(3, max(lengths) + 1, cycle), pair.block(3, cycle)
        out = draft_pass(pair.session, cache, features, np.array(lengths), start, block)
        start = start + lengths
        for row, length in enumerate(lengths):
            contexts[row] = np.concatenate((contexts[row], features[row, :length]))
            assert_drafted(out, row, pair.oracle.logits(contexts[row], block[row]))


def test_the_equations_in_angelslims_form(tmp_path: Path) -> None:
    """A test of the test: its loop over taps is the reference code's einsum, norm after the sum."""
    pair = Pair(tmp_path)
    features = torch.from_numpy(pair.features(2, 5, 0)).double()
    weights = pair.oracle.w
    shares = torch.softmax(weights["layer_fusion_weights"], dim=1)
    fused = torch.einsum("bsth,dt->bsdh", features.view(2, 5, len(TAPS), 32), shares)
    normed = torch.nn.functional.rms_norm(fused, (32,), weights["hidden_norm.weight"], pair.spec.rms_norm_eps)
    for row in range(2):
        for layer, context in enumerate(pair.oracle.contexts(features[row])):
            torch.testing.assert_close(context, normed[row, :, layer])


def test_every_layer_and_every_tap_matters(tmp_path: Path) -> None:
    """No tap may be dropped or swapped, no layer given another's weights, without the logits telling."""
    pair = Pair(tmp_path)
    features, block = pair.features(1, 5, 0), pair.block(1, 0)
    expected = pair.oracle.logits(features[0], block[0])
    logits = pair.oracle.w["layer_fusion_weights"]
    for layer in range(LAYERS):
        for tap in range(len(TAPS)):
            pair.oracle.w["layer_fusion_weights"] = logits.clone()
            pair.oracle.w["layer_fusion_weights"][layer, tap] += 1
            assert np.abs(pair.oracle.logits(features[0], block[0]) - expected).max() > 1e-2


def test_fusion_is_float32_whatever_the_weights(tmp_path: Path) -> None:
    """Two large taps that cancel out in the first layer: float16 sums would leave nothing but their rounding."""
    pair = Pair(tmp_path)
    target, drafter = read_target(tmp_path / "target"), read_drafter(tmp_path / "drafter")
    half = load_drafter(drafter.spec, drafter.tensors, target.spec, target.tensors, CAPACITY, "float16")
    shares = half.get_buffer("fusion_shares")
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares.double(), torch.softmax(pair.oracle.w["layer_fusion_weights"], dim=1))
    taps = torch.randn(1, 5, len(TAPS), 32, generator=torch.Generator().manual_seed(0))
    taps[:, :, 0] *= 2000
    taps[:, :, 1] = -taps[:, :, 0] * shares[0, 0] / shares[0, 1]
    features = taps.flatten(2).half()
    tokens = NewTokens(torch.arange(1)[None], torch.zeros(1), torch.ones(1, 1, 1), half.rope_cos, half.rope_sin)
    rows = CacheRows.before(tokens, 5, torch.zeros(1, dtype=torch.int64), torch.tensor([5]))
    injection = half.injections(features, rows)[0]
    context = pair.oracle.contexts(features[0].double())[0]
    projections = [pair.oracle.w[f"layers.0.self_attn.{name}_proj_target.weight"] for name in ("k", "v")]
    expected = context @ torch.cat(projections).T
    assert injection.context.dtype == torch.float16
    torch.testing.assert_close(injection.context[0].double(), expected, rtol=0.01, atol=0.01)
