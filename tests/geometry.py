"""Specs of published drafters, for counting what no test can load."""

from __future__ import annotations

from typing import Any

from dflash_trt.checkpoint.spec import AttentionPolicy, DrafterSpec, RopeSpec


def qwen3_drafter(hidden: int, inner: int, layers: int, **own: Any) -> DrafterSpec:
    """A drafter with blocks of 16 for Qwen3-4B or -8B; `own`: architecture, system and taps, which tell kinds apart."""
    return DrafterSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeSpec(theta=1e6, rotary_dim=128),
        policies=(AttentionPolicy(causal=False),) * layers,
        qk_norm=True,
        dtype="bfloat16",
        block_size=16,
        mask_token_id=151669,
        num_target_layers=36,
        target_hidden_size=hidden,
        **own,
    )
