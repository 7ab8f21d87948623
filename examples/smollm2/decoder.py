"""Greedy decoding of many texts at once, for making training data.

transformers appends to its caches and expands them to all heads for every token, which for many short texts costs more
than the model; here a cache is written in place, and heads that share keys are queries of one head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class BatchDecoder:
    """A Llama without biases, its Q, K, V and its gate and up projections joined."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.config = model, model.config
        layers = model.model.layers
        self._qkv = [
            torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]) for a in (x.self_attn for x in layers)
        ]
        self._gate_up = [torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]) for layer in layers]

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int, end: int, enough: float) -> list[list[int]]:
        """What follows each prompt: up to `end`, which is kept, or `new_tokens`, or until a share `enough` of all texts
        has ended: a pass for the last ones would cost as much as one for all."""
        device, width = self.model.device, max(map(len, prompts))
        padded = torch.zeros(len(prompts), width, dtype=torch.long)
        pads = torch.tensor([width - len(prompt) for prompt in prompts])
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = torch.tensor(prompt)
        padded, pads = padded.to(device), pads.to(device)
        visible = torch.arange(width + new_tokens, device=device) >= pads[:, None]
        positions = (torch.arange(width, device=device) - pads[:, None]).clamp(min=0)
        filled = DynamicCache(config=self.config)
        states = self.model.model(padded, attention_mask=visible[:, :width].long(), position_ids=positions,
                                  past_key_values=filled).last_hidden_state  # fmt: skip
        caches = [self._room(layer.keys, new_tokens) + self._room(layer.values, new_tokens) for layer in filled.layers]
        del filled
        tokens = [self.model.lm_head(states[:, -1]).argmax(-1)]  # a matrix: of more, torch copies the head for each
        ended = tokens[0] == end
        while len(tokens) < new_tokens and ended.float().mean() < enough:
            place = width + len(tokens) - 1
            tokens.append(self._next(tokens[-1], place, place - pads, visible[:, None, None, : place + 1], caches))
            ended |= tokens[-1] == end
        texts = torch.stack(tokens, dim=1).tolist()
        return [text[: text.index(end) + 1] if end in text else text for text in texts]

    @staticmethod
    def _room(filled: Tensor, slots: int) -> tuple[Tensor]:
        return (F.pad(filled, (0, 0, 0, slots)),)

    def _next(
        self, tokens: Tensor, place: int, positions: Tensor, visible: Tensor, caches: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """`tokens` i64 [B] at slot `place` -> the tokens after them, i64 [B]."""
        config, model = self.config, self.model.model
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        x = model.embed_tokens(tokens)
        cos, sin = model.rotary_emb(x, positions[:, None])
        for layer, qkv, gate_up, (keys, values) in zip(model.layers, self._qkv, self._gate_up, caches, strict=True):
            rows = F.linear(layer.input_layernorm(x), qkv).view(len(tokens), heads + 2 * groups, 1, size)
            q, k, v = rows.split([heads, groups, groups], dim=1)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys[:, :, place], values[:, :, place] = k[:, :, 0], v[:, :, 0]
            q = q.reshape(len(tokens), groups, heads // groups, size)
            seen = (keys[:, :, : place + 1], values[:, :, : place + 1])
            mixed = F.scaled_dot_product_attention(q, *seen, attn_mask=visible)
            x = x + layer.self_attn.o_proj(mixed.reshape(len(tokens), heads * size))
            gate, up = F.linear(layer.post_attention_layernorm(x), gate_up).chunk(2, dim=-1)
            x = x + layer.mlp.down_proj(F.silu(gate) * up)
        return self.model.lm_head(model.norm(x)).argmax(-1)
