"""The DFlash drafter graph: inject the pending features, then draft a block (arXiv 2602.06036, section 4)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from dflash_trt.checkpoint.spec import DrafterSpec, TargetSpec
from dflash_trt.modeling.layers import DecoderLayer, Injection, NewTokens, RMSNorm


class SharedTarget(nn.Module):
    """The target's embedding and output head, which the drafter uses frozen.

    Parameter names are the target checkpoint's, so that both graphs refer to the same bytes.
    """

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.model = nn.ModuleDict({"embed_tokens": embedding})
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.lm_head.weight = embedding.weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model["embed_tokens"](ids)


class DFlashDrafter(nn.Module):
    """Drafts one block from the target's context features.

    The context of all layers is one tensor, `hidden_norm(fc(features))`; every layer injects its keys and values of it
    into its cache, then attends from the block to the context and the block itself.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, spec: DrafterSpec, target: TargetSpec, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        self.spec = spec
        self.target = SharedTarget(target)
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(spec, policy) for policy in spec.policies)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.register_buffer("rope_cos", cos)
        self.register_buffer("rope_sin", sin)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """features [B, N, T*H] -> context [B, N, H], in float32: tapped states of large models exceed float16."""
        fused = F.linear(features.float(), self.fc.weight.float())
        normed = F.rms_norm(fused, (fused.shape[-1],), self.hidden_norm.weight.float(), self.hidden_norm.eps)
        return normed.to(self.fc.weight.dtype)

    def forward(
        self,
        context_features: torch.Tensor,
        feature_len: torch.Tensor,
        context_len: torch.Tensor,
        block_ids: torch.Tensor,
        block_position_ids: torch.Tensor,
        visibility: torch.Tensor,
        *caches: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Shapes as in `export/contract.py`; returns draft_ids, confidence, logits, then the caches.

        Slots context_len .. context_len + N + Q are written; those beyond the block hold nothing of meaning, and
        nothing sees them.
        """
        context = self.fuse(context_features)
        block = NewTokens(block_position_ids, context_len + feature_len, visibility, self.rope_cos, self.rope_sin)
        injection = Injection.before(block, context, context_len, feature_len)
        x = self.target.embed(block_ids) * self.spec.input_embedding_scale
        new_caches = []
        for i, layer in enumerate(self.layers):
            x, key_cache, value_cache = layer(x, block, caches[2 * i], caches[2 * i + 1], injection)
            new_caches += [key_cache, value_cache]
        logits = self.target.lm_head(self.norm(x)).float() * self.spec.output_multiplier
        if self.spec.final_logit_softcapping:
            logits = torch.tanh(logits / self.spec.final_logit_softcapping) * self.spec.final_logit_softcapping
        confidence = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        return (logits.argmax(-1), confidence, logits, *new_caches)
