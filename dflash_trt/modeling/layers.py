"""The decoder block shared by Qwen3 and Llama targets and by the drafters, written for tracing.

Attention reads and writes fixed-capacity caches through the two custom operators; everything else is plain torch.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
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
class CacheRows:
    """The rows a cache update writes: context rows, then the new tokens' own, in one update.

    source [B, N+Q]: which row of (context, new tokens) each cache row takes; position_ids [B, N+Q] of the cache rows;
    write_start [B], the slot of the first.
    """

    source: torch.Tensor
    position_ids: torch.Tensor
    write_start: torch.Tensor

    @classmethod
    def before(
        cls, tokens: NewTokens, available: int, context_len: torch.Tensor, feature_len: torch.Tensor
    ) -> CacheRows:
        """Row r < feature_len is context row r, row feature_len + i is new token i, what is left over repeats the last.

        One update per layer, because runtimes update a cache in place only when it is written once.

        Args:
            available: context rows there are, N; feature_len [B] of them are valid.
        """
        new = tokens.position_ids.shape[1]
        rows = torch.arange(available + new, device=feature_len.device)
        own = (rows - feature_len[:, None]).clamp(max=new - 1) + available
        source = torch.where(rows < feature_len[:, None], rows, own)
        context_positions = context_len[:, None] + torch.arange(available, device=feature_len.device)
        positions = torch.cat((context_positions, tokens.position_ids), dim=1).gather(1, source)
        return cls(source, positions, context_len)

    def gather(self, context: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """context [B, N, S], the new tokens' own [B, Q, S] -> the rows the cache takes [B, N+Q, S]."""
        merged = torch.cat((context, own), dim=1)
        return merged.gather(1, self.source[:, :, None].expand(-1, -1, merged.shape[-1]))


@dataclass(frozen=True)
class Injection(ABC):
    """Context rows that one layer writes to its cache before the new tokens' own."""

    rows: CacheRows
    context: torch.Tensor

    @abstractmethod
    def keys_values(self, x: torch.Tensor, k_proj: nn.Module, v_proj: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, Q, H] of the new tokens -> keys and values [B, N+Q, Hkv*D] of all rows."""


class HiddenContext(Injection):
    """context [B, N, H]: hidden states, which the layer projects together with the new tokens'."""

    def keys_values(self, x: torch.Tensor, k_proj: nn.Module, v_proj: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows.gather(self.context, x)
        return k_proj(rows), v_proj(rows)


class ProjectedContext(Injection):
    """context [B, N, 2*Hkv*D]: keys and values side by side, projected already by weights of the context's own."""

    def keys_values(self, x: torch.Tensor, k_proj: nn.Module, v_proj: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.cat((k_proj(x), v_proj(x)), dim=-1)
        keys, values = self.rows.gather(self.context, own).chunk(2, dim=-1)
        return keys, values


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
        if injection is None:
            keys, values = self.k_proj(x), self.v_proj(x)
            position_ids, write_start = tokens.position_ids, tokens.context_len
        else:
            keys, values = injection.keys_values(x, self.k_proj, self.v_proj)
            position_ids, write_start = injection.rows.position_ids, injection.rows.write_start
        key_cache, value_cache = kv_injection(
            keys.unflatten(-1, (-1, self.head_dim)),
            values.unflatten(-1, (-1, self.head_dim)),
            self.k_norm.weight if self.qk_norm else None,
            position_ids,
            tokens.cos,
            tokens.sin,
            write_start,
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
