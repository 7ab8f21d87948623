"""What target and drafter checkpoints share: the decoder block's fields, its tensors, and the check of all tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_trt.checkpoint.config import ConfigFile
from dflash_trt.checkpoint.rope import read_head_dim, read_rope
from dflash_trt.checkpoint.spec import DecoderSpec, Dtype
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]

MAX_LAYERS = 1000
SLIDING, FULL = "sliding_attention", "full_attention"
SPEC_DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_decoder_fields(config: ConfigFile) -> dict[str, Any]:
    """The fields of `DecoderSpec` that both kinds of checkpoint state the same way.

    Left to the caller: architecture, policies, qk_norm, mlp_bias and dtype.

    Raises:
        CheckpointError: a field is missing or breaks its rule, or the checkpoint is quantised.
    """
    if "quantization_config" in config:
        method = config.section("quantization_config").string("quant_method") or "of an unnamed method"
        what = f"quantization_config is present ({method}): quantised checkpoints are not supported"
        raise CheckpointError(what, where=str(config.path), mend="Use the unquantised checkpoint")
    activation = config.string("hidden_act")
    if activation not in (None, "silu"):
        raise config.error("hidden_act", "only silu is supported")
    heads = config.required_integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads") or heads  # absent: one for each query head, as in early Llama
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    head_dim, rope = read_head_dim(config), read_rope(config)
    if rope.rotary_dim != head_dim:
        what = f"rotates {rope.rotary_dim} of {head_dim} head dimensions, but these architectures rotate the whole head"
        raise CheckpointError(what, where=str(config.path), mend="Only partial_rotary_factor 1 is supported")
    bias = bool(config.boolean("attention_bias"))
    return {
        "hidden_size": config.required_integer("hidden_size"),
        "intermediate_size": config.required_integer("intermediate_size"),
        "num_layers": config.required_integer("num_hidden_layers", maximum=MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": config.required_integer("vocab_size"),
        "rms_norm_eps": config.required_number("rms_norm_eps", above=0),
        "max_position_embeddings": config.required_integer("max_position_embeddings"),
        "rope": rope,
        "qkv_bias": bias,
        "output_bias": bias,
    }


def read_layer_types(config: ConfigFile, num_layers: int) -> tuple[str, ...] | None:
    """`layer_types`: for each layer `sliding_attention` or `full_attention`; None where absent."""
    types = config.strings("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise config.error("layer_types", f"must have one entry for each of the {num_layers} layers")
    if not {SLIDING, FULL}.issuperset(types):
        raise config.error("layer_types", f"entries must be {FULL} or {SLIDING}")
    return types


def read_windows(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """The attention window of each layer, 0 for full attention, by Qwen3's rules.

    `layer_types` where given; else the layers from `max_window_layers` on when `use_sliding_window` is true.

    Raises:
        CheckpointError: a sliding layer without a window, or contradicting fields.
    """
    types, enabled = read_layer_types(config, num_layers), config.boolean("use_sliding_window")
    if types is None:
        if not enabled:
            return (0,) * num_layers
        first = config.required_integer("max_window_layers", minimum=0)
        types = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    if SLIDING not in types:
        return (0,) * num_layers
    if enabled is False:
        raise config.error("use_sliding_window", f"layer_types lists {SLIDING}: they must agree")
    window = config.required_integer("sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in types)


def layer_tensors(spec: DecoderSpec, prefix: str) -> Shapes:
    """Names and shapes of one decoder block's tensors, names starting with `prefix` (e.g. `model.layers.0.`)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    if spec.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if spec.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if spec.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def rotary_buffers(num_layers: int, prefix: str) -> set[str]:
    """The only tensors that may go unclaimed: frequencies that old transformers saved; they follow from the config."""
    per_layer = {f"{prefix}layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(num_layers)}
    return per_layer | {f"{prefix}rotary_emb.inv_freq"}


def check_tensors(tensors: TensorFolder, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
    """Every expected tensor is there with its shape, and every tensor there is expected or ignored, by exact name.

    Raises:
        CheckpointError: naming the missing, the misshapen or the unclaimed tensors.
    """
    where = str(tensors.where)
    missing = [name for name in expected if name not in tensors]
    if missing:
        what = f"missing tensors: {_listed(missing)}"
        raise CheckpointError(what, where=where, mend="The config may be another model's, or the download incomplete")
    misshapen = [
        f"{name} is {list(tensors[name].shape)}, but the config says {list(shape)}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if misshapen:
        raise CheckpointError(_listed(misshapen), where=where, mend="The config may be another model's")
    unclaimed = sorted(set(tensors) - set(expected) - set(ignored))
    if unclaimed:
        what = f"tensors that belong to no part of the model: {_listed(unclaimed)}"
        raise CheckpointError(what, where=where, mend="Leaving them out would change the model, so they stop the build")


def main_dtype(tensors: TensorFolder) -> Dtype:
    """The dtype of the largest share of bytes."""
    shares: Counter[str] = Counter()
    for entry in tensors.values():
        shares[entry.dtype] += entry.nbytes
    return SPEC_DTYPES[shares.most_common(1)[0][0]]


def count_parameters(expected: Mapping[str, tuple[int, ...]]) -> int:
    """The number of weights in tensors of these shapes."""
    return sum(math.prod(shape) for shape in expected.values())


def _listed(items: list[str], limit: int = 12) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
