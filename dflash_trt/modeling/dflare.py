"""The DFlare drafter (arXiv 2606.02091): a context of its own for each layer, projected by weights of its own.

With D layers, T taps h_j and the checkpoint's `layer_fusion_weights` W [D, T], layer i's context is

    f_i = hidden_norm(sum_j shares[i, j] * h_j),    shares = softmax(W) over the taps,

and its keys and values are `k_proj_target` and `v_proj_target` of f_i; the block's are `k_proj` and `v_proj` as in
DFlash. `k_norm` and RoPE are those of the layer, for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from dflash_trt.checkpoint.drafter_kinds import TARGET_PROJECTIONS
from dflash_trt.checkpoint.spec import DrafterSpec, TargetSpec
from dflash_trt.modeling.drafter import BlockDrafter
from dflash_trt.modeling.layers import CacheRows, Injection, ProjectedContext

FUSION_SHARES = "fusion_shares"


def fusion_shares(weights: np.ndarray) -> np.ndarray:
    """`layer_fusion_weights` [D, T] of any dtype -> the share of each tap in each layer's context, float32 [D, T]."""
    weights = weights.astype(np.float32)
    grown = np.exp(weights - weights.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


class DFlareDrafter(BlockDrafter):
    """See the module's docstring.

    The shares are a buffer, float32 [D, T]: they are constant once trained, and the graph need not know the weights
    they come from.
    """

    fusion_shares: torch.Tensor

    one_product = True
    """Whether the contexts of all layers are projected at once: a product with quantised weights takes one matrix."""

    def __init__(self, spec: DrafterSpec, target: TargetSpec, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__(spec, target, cos, sin)
        for layer in self.layers:
            for name in TARGET_PROJECTIONS:
                projection = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=False)
                layer.get_submodule("self_attn").register_module(name, projection)
        self.register_buffer(FUSION_SHARES, torch.empty(spec.num_layers, len(spec.taps)))

    def injections(self, features: torch.Tensor, rows: CacheRows) -> Sequence[Injection]:
        taps = features.float().unflatten(-1, (len(self.spec.taps), -1))
        contexts = self.normed(self.fusion_shares @ taps)  # [B, N, D, H]
        if not self.one_product:
            pairs = zip(self._projections(), contexts.unbind(2), strict=True)
            return [
                ProjectedContext(rows, torch.cat([F.linear(context, weight) for weight in weights], dim=-1))
                for weights, context in pairs
            ]
        batch, available = features.shape[:2]
        # One product for all layers. Weights stand on the left: ONNX Runtime packs no batched weight beforehand, and on
        # the right packs it anew in every run (4B drafter, 1 to 16 rows on one core: 34 ms instead of 14).
        weights = torch.cat([weight for pair in self._projections() for weight in pair])
        stacked = weights.unflatten(0, (self.spec.num_layers, -1))
        projected = torch.bmm(stacked, contexts.permute(2, 3, 0, 1).flatten(2))
        by_layer = projected.unflatten(2, (batch, available)).permute(0, 2, 3, 1)
        return [ProjectedContext(rows, context) for context in by_layer.unbind()]

    def _projections(self) -> list[list[torch.Tensor]]:
        """k_proj_target and v_proj_target [Hkv*head_dim, H] of every layer.

        Put together they are a Concat of initialisers in the graph, which keep their places in the checkpoint's file;
        ONNX Runtime folds it when it opens the graph.
        """
        return [
            [self.get_parameter(f"layers.{layer}.self_attn.{name}.weight") for name in TARGET_PROJECTIONS]
            for layer in range(self.spec.num_layers)
        ]
