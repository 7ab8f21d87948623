"""Small random checkpoints for the tests: a target that transformers saves, a drafter written by hand.

Matrices are drawn with a standard deviation of 0.2, norm weights around 1, DFlare's fusion weights with 1, so that
attention, MLP, every tap and logits all matter and no output is degenerate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

REMOVED = object()
"""In `edit_json` and the makers' overrides: take the field out."""

FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
MATRIX_STD, NORM_STD, FUSION_STD = 0.2, 0.1, 1.0


def make_target(
    path: Path, family: str = "qwen3", tie: bool = True, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> PreTrainedModel:
    """Write a random float32 target with its tokenizer to `path`.

    Args:
        family: "qwen3" or "llama".
        tie: whether the LM head is the embedding.
        max_shard_size: e.g. "20KB" for a sharded checkpoint.
        overrides: config fields in place of the small ones here.

    Returns:
        The model, in eval mode.
    """
    config_class, model_class = FAMILIES[family]
    fields: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = config_class(**(fields | overrides))
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * MATRIX_STD if parameter.dim() > 1 else 1 + noise * NORM_STD)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path, config.vocab_size)
    return model


def make_drafter(
    path: Path,
    target_dir: Path,
    taps: list[int],
    block_size: int = 8,
    layers: int = 2,
    seed: int = 1,
    kind: Literal["dflash", "dflare"] = "dflash",
    **overrides: Any,
) -> dict[str, np.ndarray]:
    """Write a random float32 drafter for the target in `target_dir` to `path`: DFlash in z-lab's dialect, or DFlare in
    AngelSlim's.

    The config is the target's geometry with the drafter's fields, in transformers-4 style; the mask is the last id of
    the vocabulary. All layers attend fully and both ways.

    Args:
        overrides: config fields in place of these (REMOVED takes one out); `dflash_config` is merged.

    Returns:
        The tensors written.
    """
    target = json.loads((target_dir / "config.json").read_text())
    shared = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    config: dict[str, Any] = {name: target[name] for name in shared.split()}
    config |= {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "QwenDFlareDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps},
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": target["max_position_embeddings"],
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": target["tie_word_embeddings"],
        "use_sliding_window": False,
    }
    overrides["dflash_config"] = config["dflash_config"] | overrides.get("dflash_config", {})
    config = _with_changes(config, overrides)
    config["dflash_config"] = _with_changes({}, config["dflash_config"])
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    tensors = _random_drafter_tensors(config, kind, len(taps), target["hidden_size"], np.random.default_rng(seed))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A tokenizer.json whose ids lie in the vocabulary.

    Byte-level (any text, one token a byte) with id 256 as `<|endoftext|>` where the vocabulary has room for it, else
    words `t0`, `t1`, ...
    """
    if vocab_size > 256:
        vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>"])
    else:
        vocabulary = {f"t{number}": number for number in range(vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def edit_json(file: Path, **changes: Any) -> None:
    """Set top-level fields of a JSON file; REMOVED takes one out."""
    file.write_text(json.dumps(_with_changes(json.loads(file.read_text()), changes), indent=2))


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Set tensors of `folder/model.safetensors`, `__` in a name standing for `.`; REMOVED takes one out."""
    file = folder / "model.safetensors"
    named = {name.replace("__", "."): value for name, value in changes.items()}
    save_file(_with_changes(load_file(file), named), file, metadata={"format": "pt"})


def _with_changes(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (values | changes).items() if value is not REMOVED}


def _random_drafter_tensors(
    config: dict[str, Any], kind: str, num_taps: int, target_hidden: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """A drafter's tensors, spelled out here a second time on purpose: tests read what this writes."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, MATRIX_STD, (rows, columns)).astype(np.float32)

    def vector(size: int, mean: float = 1.0) -> np.ndarray:
        return random.normal(mean, NORM_STD, size).astype(np.float32)

    if kind == "dflash":
        tensors = {"fc.weight": matrix(hidden, num_taps * target_hidden)}
    else:
        fusion = random.normal(0, FUSION_STD, (config["num_hidden_layers"], num_taps))
        tensors = {"layer_fusion_weights": fusion.astype(np.float32)}
    tensors |= {"hidden_norm.weight": vector(hidden), "norm.weight": vector(hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm.weight": vector(hidden),
            "post_attention_layernorm.weight": vector(hidden),
            "self_attn.q_proj.weight": matrix(queries, hidden),
            "self_attn.k_proj.weight": matrix(keys, hidden),
            "self_attn.v_proj.weight": matrix(keys, hidden),
            "self_attn.o_proj.weight": matrix(hidden, queries),
            "self_attn.q_norm.weight": vector(head_dim),
            "self_attn.k_norm.weight": vector(head_dim),
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner),
        }
        if config.get("attention_bias"):
            sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
            block |= {f"self_attn.{name}.bias": vector(size, mean=0.0) for name, size in sizes.items()}
        if kind == "dflare":
            block |= {
                "self_attn.k_proj_target.weight": matrix(keys, hidden),
                "self_attn.v_proj_target.weight": matrix(keys, hidden),
            }
        tensors |= {f"layers.{layer}.{name}": value for name, value in block.items()}
    return tensors
