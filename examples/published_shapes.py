"""The configurations of published checkpoints, as far as they say what shape one has, and the number of its files."""

from __future__ import annotations

from typing import Any, NamedTuple

Config = dict[str, Any]


class Shape(NamedTuple):
    """What a published checkpoint looks like: `config.json`, and the number of its weight files."""

    config: Config
    shards: int = 1


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tie: bool) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": tie,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def _drafter(target: Config, architecture: str, layers: int, taps: list[int]) -> Config:
    """Blocks of 16, and the target's geometry: what z-lab and AngelSlim publish for Qwen3-4B and Qwen3-8B."""
    kept = {name: value for name, value in target.items() if name not in ("bos_token_id", "eos_token_id")}
    return kept | {
        "architectures": [architecture],
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": taps},
        "layer_types": ["full_attention"] * layers,
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
    }


_QWEN3_4B = _qwen3(2560, 9728, 36, 32, tie=True)
_QWEN3_8B = _qwen3(4096, 12288, 36, 32, tie=False)
_DFLASH = ("DFlashDraftModel", 5, [1, 9, 17, 25, 33])
_DFLARE = ("QwenDFlareDraftModel", 7, [1, 5, 9, 13, 17, 21, 25, 29, 33])

SHAPES = {
    "qwen3-0.6b": Shape(_qwen3(1024, 3072, 28, 16, tie=True)),
    "qwen3-4b": Shape(_QWEN3_4B, 3),
    "qwen3-4b-dflash-b16": Shape(_drafter(_QWEN3_4B, *_DFLASH)),
    "qwen3-4b-dflare-b16": Shape(_drafter(_QWEN3_4B, *_DFLARE)),
    "qwen3-8b": Shape(_QWEN3_8B, 5),
    "qwen3-8b-dflash-b16": Shape(_drafter(_QWEN3_8B, *_DFLASH)),
    "qwen3-8b-dflare-b16": Shape(_drafter(_QWEN3_8B, *_DFLARE)),
}
