"""DFlare on TensorRT-LLM's own DFlash draft model and worker.

UNRUN: written against TensorRT-LLM's sources, never run with it. As of the NVIDIA/TensorRT-LLM repository at

    009d8fa431bd3de92245aab80f8b57dc70da1ac4   tensorrt_llm/_torch/models/modeling_dflash.py
    00679c66c3e38f6d2651ad0a5bef0f94d862e36c   tensorrt_llm/_torch/speculative/dflash.py

of the 1.3.0 release candidates, and modeling_utils.py (where `register_draft_model` is) and modeling_speculative.py of
about that time, read without their commits. That API moves. What is built on:

* the worker calls `project_target_hidden(taps)` and hands the result, cast to the dtype of `fc.weight`, to
  `precompute_context_kv(projected, positions)` for keys [N, layers, kv heads, head dim] after k_norm and RoPE, and
  values; it does both only for a draft model with `fc` and `hidden_norm`;
* blocks attend in `dflash_forward` over the cache of those, with the layers' own projections: as in DFlare;
* architectures registered with `register_auto_model` are sent by reference to the processes that run the model, so that
  these import this package, too, and with it the builder.
"""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.models.modeling_dflash import DFlashForCausalLM
from tensorrt_llm._torch.models.modeling_utils import register_auto_model, register_draft_model
from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode
from torch import nn

from .context import DFlareContext, is_context_weight, normed_keys

ARCHITECTURE = "DFlareDraftModel"
BACKBONE = "Qwen3ForCausalLM"


class DFlareForCausalLM(DFlashForCausalLM):
    """A DFlash draft model whose layers each have a context of their own."""

    _fused_kv_weight: torch.Tensor | None

    def __init__(self, draft_config: Any, *, dflash_attention_backend: str = "VANILLA") -> None:
        draft_config.pretrained_config.architectures = [BACKBONE]  # what the layers are built from
        super().__init__(draft_config, dflash_attention_backend=dflash_attention_backend)

    def load_weights(self, weights: dict[str, torch.Tensor], weight_mapper: Any = None, **kwargs: Any) -> None:
        """The context's weights go to `fc`, the others to the DFlash model."""
        backbone = {name: tensor for name, tensor in weights.items() if not is_context_weight(name)}
        context = {name: tensor for name, tensor in weights.items() if is_context_weight(name)}
        super().load_weights(backbone, weight_mapper=weight_mapper, **kwargs)
        layers = self.model.layers
        fc = DFlareContext(context, len(layers), layers[0].self_attn.num_key_value_heads)
        self.fc = fc.to(self.hidden_norm.weight.device)

    def project_target_hidden(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Taps [N, T*H] -> the contexts of all layers side by side [N, D*H]."""
        return self.fc.fuse(hidden_states, self.hidden_norm.weight, self.hidden_norm.eps).flatten(1)

    def _build_fused_kv_buffers(self) -> None:
        """k_norms and head sizes are the layers'; the fused weight is the context's, not that of the block."""
        if self._fused_kv_weight is None:
            super()._build_fused_kv_buffers()
            self._fused_kv_weight = self.fc.weight.detach()

    def precompute_context_kv(
        self, projected_hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts [N, D*H], positions [N] -> keys (after k_norm and RoPE) and values, each [N, D, Hkv, head_dim]."""
        self._build_fused_kv_buffers()
        rows, layers = len(projected_hidden), self._num_attn_layers
        contexts = projected_hidden.to(self.fc.weight.dtype).unflatten(-1, (layers, -1))
        keys, values = self.fc.keys_values(contexts)
        keys = normed_keys(keys, self._k_norm_stacked, self._k_norm_eps)
        self._fused_rope_inplace(keys.view(rows * layers, keys.shape[2] * keys.shape[3]), positions, rows, layers)
        return keys, values


@register_auto_model(ARCHITECTURE)
class NotBuiltHere(nn.Module):
    """Takes this package along to other processes; is built only where the builder below is not known.

    TensorRT-LLM would then make a DFlash model of the drafter's layers that sees no context: lossless, and slow.
    """

    def __init__(self, model_config: Any) -> None:
        super().__init__()
        raise RuntimeError(
            f"{ARCHITECTURE}: the process that runs the model has not imported {__package__} in time. "
            "Set TLLM_WORKER_USE_SINGLE_PROCESS=1, or put the package's folder on PYTHONPATH"
        )


@register_draft_model(SpeculativeDecodingMode.DFLASH)
def build_draft_model(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> DFlareForCausalLM:
    """TensorRT-LLM's draft model for `decoding_type: DFlash`, while this package is imported."""
    architectures = draft_config.pretrained_config.architectures or []
    if ARCHITECTURE not in architectures:
        raise ValueError(f"{__package__} serves {ARCHITECTURE}, not {architectures}: leave out --custom_module_dirs")
    if model_config.mapping.world_size > 1:
        raise ValueError(f"{__package__} serves on one GPU: the context's projections are not sharded")
    return DFlareForCausalLM(draft_config, dflash_attention_backend=model_config.spec_config.attention_backend)
