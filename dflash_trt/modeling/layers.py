"""The decoder block shared by Qwen3 and Llama targets and by the drafters, written for tracing.

Attention reads and writes fixed-capacity caches through the two custom operators; everything else is plain torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from dflash_trt.checkpoint.spec import AttentionPolicy, DecoderSpec
from dflash_trt.ops.kv_injection import kv_injection
from dflash_trt.ops.staircase_attention import staircase_attention


class RMSNorm(nn.Module):
    """RMS norm over the last dimension with a learned weight [size]; float32 inside, input dtype outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True)
class NewTokens:
    """Where the new tokens of a pass stand.

    position_ids [B, Q], context_len [B] (cached tokens before them), visibility bool [B, Q, Q]; cos, sin
    float32 [max_pos, D/2].
    """

    position_ids: torch.Tensor
    context_len: torch.Tensor
    visibility: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @functools.cached_property
    def causal_visibility(self) -> torch.Tensor:
        """The visibility of layers that are causal inside the block, whatever the caller allowed."""
        return self.visibility & (self.position_ids[:, None, :] <= self.position_ids[:, :, None])


@dataclass(frozen=True)
class Injection:
    """Context rows [B, N, H] to be written before the new tokens' own, in one cache update with them.

    source [B, N+Q]: which row of (context, new tokens) each cache row takes; position_ids [B, N+Q] of the cache rows;
    write_start [B], the slot of the first.
    """

    context: torch.Tensor
    source: torch.Tensor
    position_ids: torch.Tensor
    write_start: torch.Tensor

    @classmethod
    def before(
        cls, tokens: NewTokens, context: torch.Tensor, context_len: torch.Tensor, feature_len: torch.Tensor
    ) -> Injection:
        """Row r < feature_len is context row r, row feature_len + i is new token i, what is left over repeats the last.

        One update per layer, because runtimes update a cache in place only when it is written once.
        """
        available, new = context.shape[1], tokens.position_ids.shape[1]
        rows = torch.arange(available + new, device=context.device)
        own = (rows - feature_len[:, None]).clamp(max=new - 1) + available
        source = torch.where(rows < feature_len[:, None], rows, own)
        context_positions = context_len[:, None] + torch.arange(available, device=context.device)
        positions = torch.cat((context_positions, tokens.position_ids), dim=1).gather(1, source)
        return cls(context, source, positions, context_len)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows [B, N+Q, H] the cache takes, given those of the new tokens [B, Q, H]."""
        merged = torch.cat((self.context, x), dim=1)
        return merged.gather(1, self.source[:, :, None].expand(-1, -1, merged.shape[-1]))


class Attention(nn.Module):
    """Attention of one layer over a cache it writes its new keys and values to."""

    def __init__(self, spec: DecoderSpec, policy: AttentionPolicy) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.eps = spec.rms_norm_eps
        self.policy = policy
        self.q_proj = nn.Linear(spec.hidden_size, spec.num_heads * spec.head_dim, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.qk_norm = spec.qk_norm

    def forward(
        self,
        x: torch.Tensor,
        tokens: NewTokens,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        injection: Injection | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, Q, H] -> attention output [B, Q, H] and the caches."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).float()
        if self.qk_norm:
            query = F.rms_norm(query, (self.head_dim,), self.q_norm.weight.float(), self.eps)
        query = torch.onnx.ops.rotary_embedding(query.transpose(1, 2), tokens.cos, tokens.sin, tokens.position_ids)
        rows = x if injection is None else injection.rows(x)
        key_cache, value_cache = kv_injection(
            self.k_proj(rows).unflatten(-1, (-1, self.head_dim)),
            self.v_proj(rows).unflatten(-1, (-1, self.head_dim)),
            self.k_norm.weight if self.qk_norm else None,
            tokens.position_ids if injection is None else injection.position_ids,
            tokens.cos,
            tokens.sin,
            tokens.context_len if injection is None else injection.write_start,
            key_cache,
            value_cache,
            self.eps,
        )
        out = staircase_attention(
            query.to(x.dtype),
            key_cache,
            value_cache,
            tokens.context_len,
            tokens.causal_visibility if self.policy.causal else tokens.visibility,
            None,
            tokens.position_ids,
            scale=self.head_dim**-0.5,
            sliding_window=self.policy.window,
            causal=self.policy.causal,
        )
        return self.o_proj(out), key_cache, value_cache


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm decoder block; x [B, Q, H]."""

    def __init__(self, spec: DecoderSpec, policy: AttentionPolicy) -> None:
        super().__init__()
        self.self_attn = Attention(spec, policy)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        tokens: NewTokens,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        injection: Injection | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attended, key_cache, value_cache = self.self_attn(
            self.input_layernorm(x), tokens, key_cache, value_cache, injection
        )
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), key_cache, value_cache
