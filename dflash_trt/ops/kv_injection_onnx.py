"""KVInjection's ONNX faces: the schema of a call, and the function bodies that give it its meaning in standard ops."""

from __future__ import annotations

import onnx
import onnx.parser

from dflash_trt.ops import DOMAIN, OPSET, VERSION, kv_injection

NAME = kv_injection.NAME

_FUNCTION = """
<domain: "{domain}", overload: "{overload}", opset_import: ["": {opset}]>
{name} <eps> (key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache)
    => (new_key_cache, new_value_cache)
{{
    key_f32 = Cast <to = 1> (key)
    {normalise}
    key_heads = Transpose <perm = [0, 2, 1, 3]> (normed)
    {rotate}
    key_rows = CastLike (rotated, key_cache)
    value_heads = Transpose <perm = [0, 2, 1, 3]> (value)
    value_rows = CastLike (value_heads, value_cache)
    new_key_cache = TensorScatter <axis = 2, mode = "linear"> (key_cache, key_rows, write_start)
    new_value_cache = TensorScatter <axis = 2, mode = "linear"> (value_cache, value_rows, write_start)
}}
"""

_NORM = """weight_f32 = Cast <to = 1> (key_norm_weight)
    normed = RMSNormalization <axis = -1, stash_type = 1, epsilon: float = @eps> (key_f32, weight_f32)"""

_NO_NORM = "normed = Identity (key_f32)"

_ROTATE = "rotated = RotaryEmbedding (key_heads, cos, sin, position_ids)"

# The operator's own rotary_embedding_dim is an attribute, which a call does not have: the tables say how many rotate.
_ROTATE_PART = """half_1d = Shape <start = 1, end = 2> (cos)
    rotary_1d = Add (half_1d, half_1d)
    dim_1d = Shape <start = 3, end = 4> (key_heads)
    from_first = Constant <value_ints = [0]> ()
    on_last = Constant <value_ints = [3]> ()
    turning = Slice (key_heads, from_first, rotary_1d, on_last)
    passing = Slice (key_heads, rotary_1d, dim_1d, on_last)
    turned = RotaryEmbedding (turning, cos, sin, position_ids)
    rotated = Concat <axis = -1> (turned, passing)"""


def overload(has_norm: bool, partial: bool) -> str:
    """Which function body a call needs: empty for a norm and whole heads rotated, else what differs joined by `_`.

    Args:
        partial: whether the tables rotate a part of each head only, R < D.
    """
    features = {"no_norm": not has_norm, "partial": partial}
    return "_".join(name for name, present in features.items() if present)


def function_body(overload: str) -> onnx.FunctionProto:
    """The operator in standard ops of opset 24; overloads with `no_norm` ignore the weight."""
    text = _FUNCTION.format(
        domain=DOMAIN,
        overload=overload,
        opset=OPSET,
        name=NAME,
        normalise=_NO_NORM if "no_norm" in overload else _NORM,
        rotate=_ROTATE_PART if "partial" in overload else _ROTATE,
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
        doc=kv_injection.__doc__ or "",
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
