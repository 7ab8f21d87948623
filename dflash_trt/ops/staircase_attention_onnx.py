"""StaircaseAttention's ONNX faces: the schema of a call, and the function bodies that give it its meaning in standard
ops."""

from __future__ import annotations

import onnx
import onnx.parser

from dflash_trt.ops import DOMAIN, OPSET, VERSION, staircase_attention

NAME = staircase_attention.NAME

_FUNCTION = """
<domain: "{domain}", overload: "{overload}", opset_import: ["": {opset}]>
{name} <scale, sliding_window, causal, softcap>
    (query, key_cache, value_cache, context_len, visibility, sinks, position_ids) => (output)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    first_axis = Constant <value_ints = [1]> ()
    last_axis = Constant <value_ints = [2]> ()
    capacity_1d = Shape <start = 2, end = 3> (key_cache)
    capacity = Squeeze (capacity_1d)
    queries_1d = Shape <start = 1, end = 2> (visibility)
    queries = Squeeze (queries_1d)
    last_query = Sub (queries, one)
    slots = Range (zero, capacity, one)
    context_column = Unsqueeze (context_len, first_axis)
    local = Sub (slots, context_column)
    index = Clip (local, zero, last_query)
    in_context = Less (local, zero)
    in_block = Less (local, queries)
    index_row = Unsqueeze (index, first_axis)
    batch_1d = Shape <start = 0, end = 1> (visibility)
    mask_shape = Concat <axis = 0> (batch_1d, queries_1d, capacity_1d)
    index_all = Expand (index_row, mask_shape)
    seen_by_index = GatherElements <axis = 2> (visibility, index_all)
    in_block_row = Unsqueeze (in_block, first_axis)
    in_context_row = Unsqueeze (in_context, first_axis)
    seen_locally = And (seen_by_index, in_block_row)
    seen = Or (seen_locally, in_context_row)
    {window}
    mask = Unsqueeze (visible, first_axis)
    {attend}
    by_token = Transpose <perm = [0, 2, 1, 3]> (attended)
    out_shape = Constant <value_ints = [0, 0, -1]> ()
    output = Reshape (by_token, out_shape)
}}
"""

_NO_WINDOW = "visible = Identity (seen)"

_WINDOW = """window = Constant <value_int: int = @sliding_window> ()
    causal_flag = Constant <value_int: int = @causal> ()
    own_positions = GatherElements <axis = 1> (position_ids, index)
    key_positions = Where (in_context, slots, own_positions)
    query_column = Unsqueeze (position_ids, last_axis)
    key_row = Unsqueeze (key_positions, first_axis)
    distance = Sub (query_column, key_row)
    not_too_old = Less (distance, window)
    is_causal = Cast <to = 9> (causal_flag)
    reach = Where (is_causal, one, window)
    floor = Neg (reach)
    not_too_new = Greater (distance, floor)
    near = And (not_too_old, not_too_new)
    visible = And (seen, near)"""

_STANDARD = "attended = Attention <scale: float = @scale> (query, key_cache, value_cache, mask)"

# Sinks have no place in the standard Attention, and its softcap is applied after the mask, which would unmask.
_EXPLICIT = """query_f32 = Cast <to = 1> (query)
    key_f32 = Cast <to = 1> (key_cache)
    value_f32 = Cast <to = 1> (value_cache)
    kv_heads_1d = Shape <start = 1, end = 2> (key_cache)
    dim_1d = Shape <start = 3, end = 4> (query)
    minus_one = Constant <value_ints = [-1]> ()
    group_shape = Concat <axis = 0> (batch_1d, kv_heads_1d, minus_one, queries_1d, dim_1d)
    grouped = Reshape (query_f32, group_shape)
    key_transposed = Transpose <perm = [0, 1, 3, 2]> (key_f32)
    key_group = Unsqueeze (key_transposed, last_axis)
    value_group = Unsqueeze (value_f32, last_axis)
    products = MatMul (grouped, key_group)
    scale_f32 = Constant <value_float: float = @scale> ()
    scaled = Mul (products, scale_f32)
    {cap}
    group_mask = Unsqueeze (mask, first_axis)
    lowest = Constant <value_float = -3.4028234663852886e38> ()
    scores = Where (group_mask, capped, lowest)
    {normalise}
    attended_groups = MatMul (weights, value_group)
    query_shape = Shape (query)
    attended_f32 = Reshape (attended_groups, query_shape)
    attended = CastLike (attended_f32, query)"""

_CAP = """cap = Constant <value_float: float = @softcap> ()
    uncapped = Div (scaled, cap)
    bounded = Tanh (uncapped)
    capped = Mul (bounded, cap)"""

_SINKS = """sinks_f32 = Cast <to = 1> (sinks)
    one_1d = Constant <value_ints = [1]> ()
    sink_view = Concat <axis = 0> (one_1d, kv_heads_1d, minus_one, one_1d, one_1d)
    sink_heads = Reshape (sinks_f32, sink_view)
    group_1d = Shape <start = 2, end = 3> (grouped)
    sink_shape = Concat <axis = 0> (batch_1d, kv_heads_1d, group_1d, queries_1d, one_1d)
    sink_column = Expand (sink_heads, sink_shape)
    with_sink = Concat <axis = -1> (scores, sink_column)
    all_weights = Softmax <axis = -1> (with_sink)
    from_first = Constant <value_ints = [0]> ()
    on_last = Constant <value_ints = [4]> ()
    weights = Slice (all_weights, from_first, capacity_1d, on_last)"""


def overload(has_sinks: bool, sliding_window: int, softcap: float) -> str:
    """Which function body a call needs: empty for plain full attention, else the features joined by `_`."""
    features = {"window": sliding_window > 0, "softcap": softcap > 0, "sinks": has_sinks}
    return "_".join(name for name, present in features.items() if present)


def function_body(overload: str) -> onnx.FunctionProto:
    """The operator in standard ops of opset 24, for the features named by `overload`."""
    features = set(overload.split("_"))
    attend = _STANDARD
    if features & {"softcap", "sinks"}:
        attend = _EXPLICIT.format(
            cap=_CAP if "softcap" in features else "capped = Identity (scaled)",
            normalise=_SINKS if "sinks" in features else "weights = Softmax <axis = -1> (scores)",
        )
    text = _FUNCTION.format(
        domain=DOMAIN,
        overload=overload,
        opset=OPSET,
        name=NAME,
        window=_WINDOW if "window" in features else _NO_WINDOW,
        attend=attend,
    )
    return onnx.parser.parse_function(text)


def schema() -> onnx.defs.OpSchema:
    """The operator's ONNX schema."""
    parameter = onnx.defs.OpSchema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    attribute, kind = onnx.defs.OpSchema.Attribute, onnx.defs.OpSchema.AttrType
    return onnx.defs.OpSchema(
        NAME,
        DOMAIN,
        VERSION,
        doc=staircase_attention.__doc__ or "",
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        inputs=[
            parameter("query", "T"),
            parameter("key_cache", "T"),
            parameter("value_cache", "T"),
            parameter("context_len", "tensor(int64)"),
            parameter("visibility", "tensor(bool)"),
            parameter("sinks", "T", param_option=optional),
            parameter("position_ids", "tensor(int64)"),
        ],
        outputs=[parameter("output", "T")],
        attributes=[
            attribute("scale", kind.FLOAT, "", required=True),
            attribute("sliding_window", kind.INT, "", required=True),
            attribute("causal", kind.INT, "", required=True),
            attribute("softcap", kind.FLOAT, "", required=True),
        ],
    )
