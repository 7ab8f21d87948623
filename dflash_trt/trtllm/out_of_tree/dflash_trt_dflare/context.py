"""DFlare's context in plain torch: a mix of the target's taps for each layer, and keys and values of its own weights.

With D layers, T taps h_j and the checkpoint's `layer_fusion_weights` W [D, T], layer i's context is

    f_i = hidden_norm(sum_j shares[i, j] * h_j),    shares = softmax(W) over the taps,

and its keys and values are `k_proj_target` and `v_proj_target` of f_i.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

FUSION_WEIGHTS = "layer_fusion_weights"
TARGET_PROJECTIONS = ("k_proj_target", "v_proj_target")

# Rows that are fused at once: taps are mixed in float32, and a long prompt's would need gigabytes.
_ROWS = 1024


class DFlareContext(nn.Module):
    """Stands where a DFlash drafter has `fc`: whoever serves it asks for `fc.weight` alone, for its dtype.

    Args:
        weights: those of the checkpoint, of which `is_context_weight` says which are needed.
        num_layers: D.
        num_kv_heads: Hkv of a layer.
    """

    shares: torch.Tensor

    def __init__(self, weights: Mapping[str, torch.Tensor], num_layers: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.register_buffer("shares", torch.softmax(weights[FUSION_WEIGHTS].float(), dim=1))
        names = [f"layers.{i}.self_attn.{name}.weight" for i in range(num_layers) for name in TARGET_PROJECTIONS]
        missing = [name for name in names if name not in weights]
        if missing or len(self.shares) != num_layers:
            what = f"{missing[0]} is missing" if missing else f"{FUSION_WEIGHTS} has {len(self.shares)} rows"
            raise ValueError(f"{what}: this is no DFlare drafter of {num_layers} layers")
        stacked = torch.cat([weights[name] for name in names]).unflatten(0, (num_layers, -1))
        self.weight = nn.Parameter(stacked.contiguous(), requires_grad=False)  # [D, 2*Hkv*head_dim, H]

    def fuse(self, features: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """features [N, T*H], the taps side by side -> each layer's context [N, D, H], in norm_weight's dtype.

        Mixing and norm are done in float32: tapped states of large models exceed float16.
        """
        return torch.cat([self._fuse(rows, norm_weight, eps) for rows in features.split(_ROWS)])

    def _fuse(self, features: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        fused = self.shares @ features.float().unflatten(-1, (self.shares.shape[1], -1))
        return F.rms_norm(fused, norm_weight.shape, norm_weight.float(), eps).to(norm_weight.dtype)

    def keys_values(self, contexts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """contexts [N, D, H] -> keys and values [N, D, Hkv, head_dim] of the context, before k_norm and RoPE."""
        projected = torch.bmm(contexts.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
        heads = projected.unflatten(-1, (2, self.num_kv_heads, -1))
        return heads[:, :, 0].contiguous(), heads[:, :, 1].contiguous()


def normed_keys(keys: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    """keys [N, D, Hkv, head_dim], k_norm weights [D, head_dim] of each layer -> the same, normed in float32."""
    normed = F.rms_norm(keys.float(), keys.shape[-1:], eps=eps) * weights.float()[:, None]
    return normed.to(keys.dtype)


def is_context_weight(name: str) -> bool:
    """Whether a tensor of the checkpoint belongs to the context, not to the backbone."""
    return name == FUSION_WEIGHTS or not set(TARGET_PROJECTIONS).isdisjoint(name.split("."))
