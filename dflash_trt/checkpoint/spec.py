"""What a checkpoint is, as frozen values: the only thing later stages know of it.

The specs are stored in the bundle, so they hold plain data only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]


class Frozen:
    """Base of the values that are stored in documents: frozen dataclasses with keyword arguments.

    `documents.py` checks what it reads; a constructor checks nothing.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - where pydantic looks for it


@dataclass(frozen=True, kw_only=True)
class RopeSpec(Frozen):
    """Rotary embedding of one model; `checkpoint/rope.py` turns it into tables.

    `factor` and what follows are None where the kind does not use them.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float
    rotary_dim: int
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy(Frozen):
    """How one layer attends: `causal` inside the new tokens, `window` 0 for full attention.

    window W: a query at position p sees keys with p - key < W, and, when not causal, key - p < W.
    """

    causal: bool
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(Frozen):
    """What target and drafter layers share (Qwen3 / Llama decoder block)."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    policies: tuple[AttentionPolicy, ...]
    qk_norm: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dtype: Dtype


@dataclass(frozen=True, kw_only=True)
class TargetSpec(DecoderSpec):
    """A target model. Tensor names are those of the Hugging Face checkpoint (`model.layers.{i}...`)."""

    family: Literal["qwen3", "llama"]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterSpec(DecoderSpec):
    """A DFlash or DFlare drafter. Tensor names have no prefix (`layers.{i}...`, `hidden_norm`, `norm`).

    `taps`: ids of target layers; the context feature of tap l is the residual stream after decoder block l.
    """

    system: Literal["dflash", "dflare"]
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
