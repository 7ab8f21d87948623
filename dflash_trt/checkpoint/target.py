"""Reading a target checkpoint: Qwen3ForCausalLM or LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from dflash_trt.checkpoint.config import ConfigFile, ConfigObject
from dflash_trt.checkpoint.decoder import (
    Shapes,
    check_tensors,
    count_parameters,
    layer_tensors,
    main_dtype,
    read_decoder_fields,
    read_windows,
    rotary_buffers,
)
from dflash_trt.checkpoint.spec import AttentionPolicy, Dtype, TargetSpec
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.errors import CheckpointError

FAMILIES: dict[str, Literal["qwen3", "llama"]] = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 1 << 26  # of two tied tensors at a time


@dataclass(frozen=True, eq=False)
class TargetCheckpoint:
    """A target model on disk: what it is, its tensors, its folder."""

    spec: TargetSpec
    tensors: TensorFolder
    path: Path


def read_target(folder: Path | str) -> TargetCheckpoint:
    """Read and validate a target checkpoint; weights stay on disk.

    Raises:
        CheckpointError: an unsupported model, a config field that breaks its rule, or tensors that do not fit it.
    """
    path = Path(folder)
    described = target_spec(ConfigFile(path / "config.json"), "float32")
    tensors = TensorFolder.open(path)
    spec = replace(described, dtype=main_dtype(tensors))
    _check_lm_head(spec, tensors)
    ignored = rotary_buffers(spec.num_layers, "model.") | ({LM_HEAD} if spec.tie_word_embeddings else set())
    check_tensors(tensors, expected_tensors(spec), ignored)
    return TargetCheckpoint(spec, tensors, path)


def target_spec(config: ConfigFile, dtype: Dtype) -> TargetSpec:
    """The target that a `config.json` describes (with the `generation_config.json` beside it, if any).

    Args:
        dtype: of the weights, which they alone tell.

    Raises:
        CheckpointError: an unsupported model, or a field that breaks its rule.
    """
    architecture = _read_architecture(config)
    family = FAMILIES[architecture]
    fields = read_decoder_fields(config)
    return TargetSpec(
        **fields,
        architecture=architecture,
        family=family,
        policies=_read_policies(config, family, fields["num_layers"]),
        qk_norm=family == "qwen3",
        mlp_bias=family == "llama" and bool(config.boolean("mlp_bias")),
        dtype=dtype,
        tie_word_embeddings=bool(config.boolean("tie_word_embeddings")),
        eos_token_ids=_read_eos(config.path.parent, config, fields["vocab_size"]),
        bos_token_id=_read_token_id(config, "bos_token_id", fields["vocab_size"]),
    )


def expected_tensors(spec: TargetSpec) -> Shapes:
    """Name and shape of every tensor of the model; `lm_head.weight` only where it is not the embedding."""
    shapes: Shapes = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        shapes |= layer_tensors(spec, f"model.layers.{layer}.")
    shapes["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def parameter_count(spec: TargetSpec) -> int:
    """The number of weights; a tied LM head counts once."""
    return count_parameters(expected_tensors(spec))


def _read_architecture(config: ConfigFile) -> str:
    architectures = config.strings("architectures")
    if architectures is None:
        raise config.missing("architectures", f"Supported targets: {', '.join(FAMILIES)}")
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        drafter = any("Draft" in name or "DFlash" in name for name in architectures)
        mend = "This looks like a drafter: give it as the drafter, not as the target" if drafter else ""
        raise config.error("architectures", f"supported targets are {', '.join(FAMILIES)}", mend)
    return architectures[0]


def _read_policies(config: ConfigFile, family: str, num_layers: int) -> tuple[AttentionPolicy, ...]:
    if family == "llama" and "sliding_window" in config:
        raise config.error("sliding_window", "LlamaForCausalLM attends fully: it must be absent")
    windows = read_windows(config, num_layers) if family == "qwen3" else (0,) * num_layers
    return tuple(AttentionPolicy(causal=True, window=window) for window in windows)


def _read_eos(path: Path, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of `generation_config.json` where it states any, else of `config.json`."""
    generation = path / "generation_config.json"
    sources: list[ConfigObject] = [ConfigFile(generation)] if generation.exists() else []
    source = next((found for found in [*sources, config] if "eos_token_id" in found), None)
    if source is None:
        return ()
    if isinstance(source.values["eos_token_id"], list):
        ids = source.integers("eos_token_id") or ()
    else:
        ids = (source.required_integer("eos_token_id", minimum=0),)
    if any(not 0 <= token < vocab_size for token in ids):
        raise source.error("eos_token_id", f"must lie within the vocabulary, 0 to {vocab_size - 1}")
    return ids


def _read_token_id(config: ConfigFile, field: str, vocab_size: int) -> int | None:
    return config.integer(field, minimum=0, maximum=vocab_size - 1)


def _check_lm_head(spec: TargetSpec, tensors: TensorFolder) -> None:
    """Untied: present. Tied: absent, or the same bits as the embedding."""
    where = str(tensors.where)
    if not spec.tie_word_embeddings:
        if LM_HEAD not in tensors:
            what = f"{LM_HEAD} is missing, but tie_word_embeddings is not true in config.json"
            raise CheckpointError(what, where=where, mend="Download the whole checkpoint, or mend the flag")
        return
    if LM_HEAD in tensors and EMBEDDING in tensors and not _same_bits(tensors, LM_HEAD, EMBEDDING):
        what = f"tie_word_embeddings is true in config.json, but {LM_HEAD} differs from {EMBEDDING}"
        raise CheckpointError(what, where=where, mend="Set tie_word_embeddings to false, or remove the tensor")


def _same_bits(tensors: TensorFolder, first: str, second: str) -> bool:
    if (tensors[first].dtype, tensors[first].shape) != (tensors[second].dtype, tensors[second].shape):
        return False
    left, right = (tensors.bits(name).reshape(-1).view(np.uint8) for name in (first, second))
    starts = range(0, len(left), _COMPARED_BYTES)
    return all(np.array_equal(left[at : at + _COMPARED_BYTES], right[at : at + _COMPARED_BYTES]) for at in starts)
