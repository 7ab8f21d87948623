"""KVInjection: normalise, rotate and write new keys and values into a fixed-capacity cache.

Row i of batch row b goes to slot `write_start[b] + i`, its key RMS-normalised (when a weight is given) and rotated at
`position_ids[b, i]`. Used for the drafter's injected context, the drafter's own block and the target's new tokens.

    key, value         [B, N, Hkv, D]   float
    key_norm_weight    [D]              float, optional
    position_ids       [B, N]           int64
    cos, sin           [max_pos, D/2]   float32
    write_start        [B]              int64
    key_cache, value_cache [B, Hkv, C, D]  float; the outputs alias them
"""

from __future__ import annotations

import onnx
import onnx.parser
import torch

from dflash_trt.ops import DOMAIN, OPSET, VERSION

NAME = "KVInjection"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, computed and returned in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: torch.Tensor, position_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split layout, in float32: x [B, H, N, D], position_ids [B, N], tables [max_pos, D/2]."""
    c = cos[position_ids].unsqueeze(1)
    s = sin[position_ids].unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def kv_injection_(
    key: torch.Tensor,
    value: torch.Tensor,
    key_norm_weight: torch.Tensor | None,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    write_start: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    eps: float,
) -> None:
    """The eager reference: writes into the caches in place (shapes in the module's docstring)."""
    if key_norm_weight is not None:
        key = rms_norm(key, key_norm_weight, eps)
    key = rotate(key.transpose(1, 2), position_ids, cos, sin)
    batch, rows = position_ids.shape
    slots = write_start[:, None] + torch.arange(rows, device=write_start.device)
    batch_index = torch.arange(batch, device=write_start.device)[:, None]
    # advanced indices around a slice put the indexed dimensions first: [B, N, Hkv, D]
    key_cache[batch_index, :, slots] = key.transpose(1, 2).to(key_cache.dtype)
    value_cache[batch_index, :, slots] = value.to(value_cache.dtype)


@torch.library.custom_op(f"{DOMAIN}::kv_injection", mutates_args=())
def _kv_injection(
    key: torch.Tensor,
    value: torch.Tensor,
    key_norm_weight: torch.Tensor | None,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    write_start: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    kv_injection_(key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps)
    return key_cache, value_cache


@_kv_injection.register_fake
def _(key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps):  # type: ignore[no-untyped-def]
    heads, dim = key_cache.shape[1], key_cache.shape[3]
    if key.shape[2:] != (heads, dim) or value.shape[2:] != (heads, dim):
        raise ValueError(f"keys {tuple(key.shape)} do not fit a cache of {heads} heads of size {dim}")
    return torch.empty_like(key_cache), torch.empty_like(value_cache)


def kv_injection(
    key: torch.Tensor,
    value: torch.Tensor,
    key_norm_weight: torch.Tensor | None,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    write_start: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What modules call: a functional custom op while tracing, the in-place reference when run eagerly."""
    args = (key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps)
    if torch.compiler.is_exporting():
        return torch.ops.dflash_trt.kv_injection(*args)
    kv_injection_(*args)
    return key_cache, value_cache


_FUNCTION = """
<domain: "{domain}", overload: "{overload}", opset_import: ["": {opset}]>
{name} <eps> (key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache)
    => (new_key_cache, new_value_cache)
{{
    key_f32 = Cast <to = 1> (key)
    {normalise}
    key_heads = Transpose <perm = [0, 2, 1, 3]> (normed)
    rotated = RotaryEmbedding (key_heads, cos, sin, position_ids)
    key_rows = CastLike (rotated, key_cache)
    value_heads = Transpose <perm = [0, 2, 1, 3]> (value)
    value_rows = CastLike (value_heads, value_cache)
    new_key_cache = TensorScatter <axis = 2, mode = "linear"> (key_cache, key_rows, write_start)
    new_value_cache = TensorScatter <axis = 2, mode = "linear"> (value_cache, value_rows, write_start)
}}
"""

_NORMALISE = {
    "": """weight_f32 = Cast <to = 1> (key_norm_weight)
    normed = RMSNormalization <axis = -1, stash_type = 1, epsilon: float = @eps> (key_f32, weight_f32)""",
    "no_norm": "normed = Identity (key_f32)",
}


def overload(has_norm: bool) -> str:
    """Which of the two function bodies a call needs."""
    return "" if has_norm else "no_norm"


def function_body(overload: str) -> onnx.FunctionProto:
    """The operator in standard ops of opset 24; overload `no_norm` ignores the weight."""
    text = _FUNCTION.format(
        domain=DOMAIN, overload=overload, opset=OPSET, name=NAME, normalise=_NORMALISE[overload]
    )
    return onnx.parser.parse_function(text)


def schema() -> onnx.defs.OpSchema:
    """The operator's ONNX schema."""
    parameter = onnx.defs.OpSchema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return onnx.defs.OpSchema(
        NAME,
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        inputs=[
            parameter("key", "T"),
            parameter("value", "T"),
            parameter("key_norm_weight", "T", param_option=optional),
            parameter("position_ids", "tensor(int64)"),
            parameter("cos", "tensor(float)"),
            parameter("sin", "tensor(float)"),
            parameter("write_start", "tensor(int64)"),
            parameter("key_cache", "T"),
            parameter("value_cache", "T"),
        ],
        outputs=[parameter("key_cache", "T"), parameter("value_cache", "T")],
        attributes=[onnx.defs.OpSchema.Attribute("eps", onnx.defs.OpSchema.AttrType.FLOAT, "", required=True)],
    )
