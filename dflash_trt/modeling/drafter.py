"""What the drafter graphs share: inject the pending features, then draft a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from dflash_trt.checkpoint.spec import DrafterSpec, TargetSpec
from dflash_trt.modeling.layers import CacheRows, DecoderLayer, Injection, NewTokens, RMSNorm


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


class BlockDrafter(nn.Module, ABC):
    """Drafts one block from the target's context features.

    Every layer injects keys and values of its context into its cache, then attends from the block to the context and
    the block itself. What the context of a layer is, subclasses say.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, spec: DrafterSpec, target: TargetSpec, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        self.spec = spec
        self.target = SharedTarget(target)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(spec, policy) for policy in spec.policies)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.register_buffer("rope_cos", cos)
        self.register_buffer("rope_sin", sin)

    @abstractmethod
    def injections(self, features: torch.Tensor, rows: CacheRows) -> Sequence[Injection]:
        """features [B, N, T*H] -> what each layer injects.

        The taps are fused and normed in float32: tapped states of large models exceed float16.
        """

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
        block = NewTokens(block_position_ids, context_len + feature_len, visibility, self.rope_cos, self.rope_sin)
        rows = CacheRows.before(block, context_features.shape[1], context_len, feature_len)
        x = self.target.embed(block_ids) * self.spec.input_embedding_scale
        new_caches = []
        for i, (layer, injection) in enumerate(
            zip(self.layers, self.injections(context_features, rows), strict=True)
        ):
            x, key_cache, value_cache = layer(x, block, caches[2 * i], caches[2 * i + 1], injection)
            new_caches += [key_cache, value_cache]
        logits = self.target.lm_head(self.norm(x)).float() * self.spec.output_multiplier
        if self.spec.final_logit_softcapping:
            logits = torch.tanh(logits / self.spec.final_logit_softcapping) * self.spec.final_logit_softcapping
        # of these runtimes have fast kernels, of logsumexp, which would need no more room, slow ones
        confidence = logits.softmax(-1).amax(-1)
        return (logits.argmax(-1), confidence, logits, *new_caches)

    def normed(self, fused: torch.Tensor) -> torch.Tensor:
        """`hidden_norm` over float32 [..., H], then the dtype of the weights."""
        weight = self.hidden_norm.weight
        return nn.functional.rms_norm(fused, weight.shape, weight.float(), self.hidden_norm.eps).to(weight.dtype)
