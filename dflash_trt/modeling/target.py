"""The target graph: one module for prefill chunks and verification."""

from __future__ import annotations

import torch
from torch import nn

from dflash_trt.checkpoint.spec import TargetSpec
from dflash_trt.modeling.layers import DecoderLayer, NewTokens, RMSNorm


class TargetBody(nn.Module):
    """What Hugging Face checkpoints prefix with `model.`."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, policy) for policy in spec.policies)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)


class TargetModel(nn.Module):
    """A Qwen3 or Llama target with taps.

    Args:
        spec: the target.
        taps: ids of the layers whose output is a context feature, in the drafter's order: the residual stream after
            decoder block l, except that the last block's is taken after the final norm, as in transformers'
            `hidden_states[l + 1]`.
        cos, sin: rotary tables, float32 [max_pos, D/2].
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, spec: TargetSpec, taps: tuple[int, ...], cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        self.taps = taps
        self.model = TargetBody(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("rope_cos", cos)
        self.register_buffer("rope_sin", sin)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        visibility: torch.Tensor,
        context_len: torch.Tensor,
        logit_rows: torch.Tensor,
        *caches: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Shapes as in `export/contract.py`; returns logits, token_ids, context_features, then the caches.

        token_ids is -1 where a row of logits is not finite.
        """
        tokens = NewTokens(position_ids, context_len, visibility, self.rope_cos, self.rope_sin)
        x = self.model.embed_tokens(input_ids)
        states, new_caches = [], []
        for i, layer in enumerate(self.model.layers):
            x, key_cache, value_cache = layer(x, tokens, caches[2 * i], caches[2 * i + 1])
            # transformers' hidden_states[l + 1], which drafters are trained on, is normed for the last layer
            last = i == len(self.model.layers) - 1
            states.append(self.model.norm(x) if last and i in self.taps else x)
            new_caches += [key_cache, value_cache]
        wanted = x.gather(1, logit_rows[:, :, None].expand(-1, -1, x.shape[-1]))
        logits = self.lm_head(self.model.norm(wanted)).float()
        features = torch.cat([states[tap] for tap in self.taps], dim=-1)
        # argmax of a row with NaN is some token; -1 cannot be mistaken for one
        finite = logits.sum(-1).abs() < float("inf")
        token_ids = torch.where(finite, logits.argmax(-1), -1)
        return (logits, token_ids, features, *new_caches)
