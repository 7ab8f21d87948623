"""The table of the parsers' operators: against a real parser, and against the graphs it is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import rtx
from export.small_pair import Kind, small_pair
from onnx import parser as onnx_text
from ops.op_cases import attention_model, injection_model

from dflash_trt.backends.parser_ops import _TABLES, Support, first_version, support
from dflash_trt.backends.parser_version import Flavour, ParserVersion, parse_supported
from dflash_trt.errors import UsageError
from dflash_trt.ops import DOMAIN, OPSET, kv_injection_onnx, staircase_attention_onnx
from dflash_trt.passes.bind_plugins import BindPlugins
from dflash_trt.passes.expand_operators import ExpandOperators
from dflash_trt.passes.simplify import Simplify

RTX = ParserVersion("tensorrt-rtx", 1, 7)
NEWEST = ParserVersion("tensorrt", 11, 1)
CAPACITY = 24
FLAVOURS: tuple[Flavour, ...] = ("tensorrt", "tensorrt-rtx")

# --- versions ---


@pytest.mark.parametrize(
    ("text", "flavour", "parsed", "name"),
    [
        ("10.14", "tensorrt", ParserVersion("tensorrt", 10, 14), "TensorRT 10.14"),
        ("10.14.1.48", "tensorrt", ParserVersion("tensorrt", 10, 14), "TensorRT 10.14"),
        ("10.16.0.rc1", "tensorrt", ParserVersion("tensorrt", 10, 16), "TensorRT 10.16"),
        ("1.7.1.116", "tensorrt-rtx", RTX, "TensorRT-RTX 1.7"),
    ],
)
def test_versions_are_read_and_written(text: str, flavour: Flavour, parsed: ParserVersion, name: str) -> None:
    assert ParserVersion.parse(text, flavour) == parsed
    assert str(parsed) == name
    assert ParserVersion.named(name) == parsed
    assert parse_supported(text, flavour) == parsed


@pytest.mark.parametrize("text", ["", "10", "ten.one", "10.", "v10.14", "10.14 ", "\u0661.14", "10." + "9" * 9999])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no version of TensorRT"):
        ParserVersion.parse(text)
    with pytest.raises(UsageError, match=r"--tensorrt-version: .* is no version of TensorRT"):
        parse_supported(text, "tensorrt")


@pytest.mark.parametrize("name", ["", "TensorRT", "10.14", "TensorRT-LLM 1.0", "tensorrt 10.14", "TensorRT  10.14"])
def test_what_names_no_parser_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="names no parser"):
        ParserVersion.named(name)


@pytest.mark.parametrize(
    ("flavour", "supported", "others", "limits"),
    [
        ("tensorrt", ["10.14", "10.99", "11.0", "11.4.0.1"], ["0.0", "1.7", "9.3", "10.13", "12.0"], "10.14 to 11.x"),
        ("tensorrt-rtx", ["1.7", "1.8.0", "1.99"], ["0.9", "1.6", "2.0", "10.15"], "1.7 to 1.x"),
    ],
)
def test_other_versions_are_not_supported(
    flavour: Flavour, supported: list[str], others: list[str], limits: str
) -> None:
    for text in supported:
        assert parse_supported(text, flavour) == ParserVersion.parse(text, flavour)
    for text in others:
        with pytest.raises(UsageError) as error:
            parse_supported(text, flavour)
        name = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}[flavour]
        expected = f"--tensorrt-version: {name} {text} is not supported. Give one from {limits}"
        assert error.value.message() == expected


# What TensorRT's release notes say was added to the parser.
@pytest.mark.parametrize(
    ("version", "lacking"),
    [
        ("10.13", {"Attention", "RMSNormalization", "RotaryEmbedding", "TensorScatter"}),
        ("10.14", {"RMSNormalization", "RotaryEmbedding", "TensorScatter"}),
        ("10.15", set()),
        ("10.16", set()),
        ("11.0", set()),
        ("11.1", set()),
    ],
)
def test_older_versions_lack_what_newer_ones_added(version: str, lacking: set[str]) -> None:
    parser = ParserVersion.parse(version)
    assert {name for name in _TABLES["tensorrt"] if support(name, parser) is None} == lacking


def test_nothing_is_known_of_versions_before_those_that_were_looked_at() -> None:
    assert support("Add", ParserVersion("tensorrt-rtx", 1, 6)) is None
    assert support("Add", ParserVersion("tensorrt", 9, 3)) is None
    assert support("SequenceAt", NEWEST) is None
    assert first_version("SequenceAt", "tensorrt") is None
    assert first_version("TensorScatter", "tensorrt") == ParserVersion("tensorrt", 10, 15)


def test_every_entry_says_where_it_is_from() -> None:
    assert {known.source for known in _TABLES["tensorrt"].values()} == {"documents"}
    assert {known.source for known in _TABLES["tensorrt-rtx"].values()} == {"tried"}


@pytest.mark.parametrize("op_type", _TABLES["tensorrt"])
def test_entries_fit_the_operators_schema(op_type: str) -> None:
    """No dtype that ONNX does not have there, no input too many, no attribute of another name."""
    schema, known = onnx.defs.get_schema(op_type, OPSET), _TABLES["tensorrt"][op_type]
    for ours, theirs in ((known.inputs, schema.inputs), (known.outputs, schema.outputs)):
        assert len(ours) <= len(theirs)
        for dtypes, parameter in zip(ours, theirs, strict=False):
            assert {ir.DataType[dtype.name] for dtype in dtypes} <= {_dtype(text) for text in parameter.types}
    assert known.attributes.keys() <= schema.attributes.keys()
    assert {*known.ranks, *known.constant_inputs, *(index for index, _ in known.static_dimensions)} <= {
        *range(len(known.inputs))
    }


def _dtype(text: str) -> ir.DataType:
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    return {"FLOAT8E4M3FN": ir.DataType.FLOAT8E4M3FN}.get(name) or getattr(ir.DataType, name, ir.DataType.UNDEFINED)


# --- the real parser ---


@pytest.mark.parametrize("op_type", _TABLES["tensorrt-rtx"])
def test_the_real_parser_knows_every_operator(op_type: str) -> None:
    assert rtx.Parser().supports(op_type)


@pytest.mark.parametrize("op_type", ["SplitToSequence", "SequenceAt", "NoSuchOperator"])
def test_operators_outside_the_table_may_be_unknown_to_it(op_type: str) -> None:
    assert support(op_type, RTX) is None
    assert not rtx.Parser().supports(op_type)


# One node of each operator as our graphs have it; {d} is the dtype the operator works on.
UNARY = "g ({{d}}[B, 4] x) => ({{d}}[B, 4] y) {{{{ y = {op} (x) }}}}"
BINARY = "g ({{d}}[B, 4, 4] x, {{d}}[B, 4, 4] z) => ({out}[B, 4, 4] y) {{{{ y = {op} (x, z) }}}}"
REDUCTION = """g ({{d}}[B, 4] x) => ({{d}}[B] y) {{{{
    axes = Constant <value_ints = [-1]> () y = {op} <keepdims = 0> (x, axes) }}}}"""
FORMS: dict[str, str] = {
    **{name: UNARY.format(op=name) for name in ("Abs", "Exp", "Identity", "Neg", "Sigmoid", "Softmax", "Sqrt", "Tanh")},
    **{name: BINARY.format(op=name, out="{d}") for name in ("Add", "And", "Div", "MatMul", "Mul", "Or", "Sub")},
    **{name: BINARY.format(op=name, out="bool") for name in ("Greater", "Less", "LessOrEqual")},
    **{name: REDUCTION.format(op=name) for name in ("ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceSum")},
    "ArgMax": "g ({d}[B, 4] x) => (int64[B] y) {{ y = ArgMax <axis = -1, keepdims = 0> (x) }}",
    "Attention": """g ({d}[B, 4, Q, 64] q, {d}[B, 2, C, 64] k, {d}[B, 2, C, 64] v, bool[B, 1, Q, C] m)
        => ({d}[B, 4, Q, 64] y) {{ y = Attention <scale = 0.125> (q, k, v, m) }}""",
    "Cast": "g ({d}[B, 4] x) => (float[B, 4] y) {{ y = Cast <to = 1> (x) }}",
    "CastLike": "g (float[B, 4] x, {d}[B, 4] z) => ({d}[B, 4] y) {{ y = CastLike (x, z) }}",
    "Clip": "g ({d}[B, 4] x, {d} low, {d} high) => ({d}[B, 4] y) {{ y = Clip (x, low, high) }}",
    "Concat": "g ({d}[B, 4] x, {d}[B, 2] z) => ({d}[B, 10] y) {{ y = Concat <axis = -1> (x, z, x) }}",
    "Constant": """g ({d}[1, 2] x) => ({d}[1, 4] y) {{
        c = Constant <value = {d}[1, 2] {{1, 0}}> () y = Concat <axis = 1> (x, c) }}""",
    "Expand": "g ({d}[B, 1] x, int64[2] shape) => ({d}[B, M] y) {{ y = Expand (x, shape) }}",
    "Gather": "g ({d}[N, 4] x, int64[B] i) => ({d}[B, 4] y) {{ y = Gather <axis = 0> (x, i) }}",
    "GatherElements": "g ({d}[B, 4] x, int64[B, 3] i) => ({d}[B, 3] y) {{ y = GatherElements <axis = 1> (x, i) }}",
    "Gemm": "g ({d}[B, 4] x, {d}[6, 4] w) => ({d}[B, 6] y) {{ y = Gemm <transB = 1> (x, w) }}",
    "RMSNormalization": """g ({d}[B, 8] x, {d}[8] z) => ({d}[B, 8] y) {{
        y = RMSNormalization <axis = -1, stash_type = 1, epsilon = 0.00001> (x, z) }}""",
    "Range": "g ({d} a, {d} b, {d} c) => ({d}[N] y) {{ y = Range (a, b, c) }}",
    "Reshape": "g ({d}[B, 4] x, int64[2] shape) => ({d}[M, N] y) {{ y = Reshape <allowzero = 1> (x, shape) }}",
    "RotaryEmbedding": """g ({d}[B, 2, Q, 8] x, {d}[32, 4] cos, {d}[32, 4] sin, int64[B, Q] p) => ({d}[B, 2, Q, 8] y) {{
        y = RotaryEmbedding (x, cos, sin, p) }}""",
    "Shape": "g ({d}[B, 4] x) => (int64[1] y) {{ y = Shape <start = 0, end = 1> (x) }}",
    "Slice": """g ({d}[B, 4] x, int64[1] end) => ({d}[B, N] y) {{
        start = Constant <value_ints = [0]> () axes = Constant <value_ints = [1]> ()
        y = Slice (x, start, end, axes) }}""",
    "Split": "g ({d}[B, 4] x) => ({d}[B, 2] y, {d}[B, 2] z) {{ y, z = Split <axis = -1, num_outputs = 2> (x) }}",
    "Squeeze": "g ({d}[B, 1] x) => ({d}[B] y) {{ axes = Constant <value_ints = [1]> () y = Squeeze (x, axes) }}",
    "TensorScatter": """g ({d}[B, 2, 24, 8] x, {d}[B, 2, Q, 8] rows, int64[B] start) => ({d}[B, 2, 24, 8] y) {{
        y = TensorScatter <axis = 2, mode = "linear"> (x, rows, start) }}""",
    "Transpose": "g ({d}[B, 4] x) => ({d}[4, B] y) {{ y = Transpose <perm = [1, 0]> (x) }}",
    "Unsqueeze": "g ({d}[B] x) => ({d}[B, 1] y) {{ axes = Constant <value_ints = [1]> () y = Unsqueeze (x, axes) }}",
    "Where": "g (bool[B, 4] c, {d}[B, 4] x, {d}[B, 4] z) => ({d}[B, 4] y) {{ y = Where (c, x, z) }}",
}
WORKED_ON = {"Where": 1, "CastLike": 1}


def dtypes_worked_on(op_type: str) -> frozenset[ir.DataType]:
    known = _TABLES["tensorrt-rtx"][op_type]
    return known.inputs[WORKED_ON.get(op_type, 0)] if known.inputs else known.outputs[0]


def parse(form: str, dtype: str) -> list[str]:
    """What the real parser has against a one-node model."""
    text = f'<ir_version: 11, opset_import: ["": {OPSET}]>\n' + form.format(d=dtype)
    return rtx.Parser().errors(onnx_text.parse_model(text).SerializeToString())


def test_there_is_a_form_of_every_operator() -> None:
    assert FORMS.keys() == _TABLES["tensorrt-rtx"].keys()


@pytest.mark.parametrize("op_type", FORMS)
def test_the_real_parser_takes_every_dtype_of_the_table(op_type: str) -> None:
    refused = {dtype.name: parse(FORMS[op_type], dtype.name.lower()) for dtype in dtypes_worked_on(op_type)}
    assert not any(refused.values()), refused


@pytest.mark.parametrize(
    ("op_type", "dtypes"),
    [
        (("Abs", "Add", "Sub", "Mul", "Div", "Neg", "Less", "ArgMax", "Clip", "ReduceSum", "ReduceMax"), ("bool",)),
        (("And", "Or"), ("float", "float16", "bfloat16", "int32", "int64")),
        (("Exp", "Sigmoid", "Tanh", "Sqrt", "Softmax", "MatMul", "ReduceLogSumExp"), ("int32", "int64", "bool")),
        (("Attention", "RotaryEmbedding", "TensorScatter"), ("int32", "int64", "bool")),
        (("Range",), ("float", "float16", "bfloat16", "bool")),
    ],
)
def test_the_real_parser_refuses_the_dtypes_that_the_table_leaves_out(
    op_type: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    for name in op_type:
        for dtype in dtypes:
            assert ir.DataType[dtype.upper()] not in dtypes_worked_on(name)
            assert parse(FORMS[name], dtype), (name, dtype)


@pytest.mark.parametrize(
    ("op_type", "before", "after", "message"),
    [
        ("Attention", "scale = 0.125", "softcap = 3.0", "softcap"),
        ("Attention", "scale = 0.125", "softmax_precision = 1", "softmax precision"),
        ("Attention", "scale = 0.125", "is_causal = 1", "setMask"),
        ("TensorScatter", '"linear"', '"circular"', "linear"),
        ("TensorScatter", "axis = 2", "axis = 1", "must be -2"),
        ("TensorScatter", "24", "C", "static sequence length"),
        ("TensorScatter", "B, 2, ", "B, ", "required to be 4D"),
        ("ReduceSum", *("[B, 4] x)", "[B, 4] x, int64[1] axes)"), "build-time constant"),
        ("Squeeze", *("[B, 1] x)", "[B, 1] x, int64[1] axes)"), "not a constant"),
        ("Unsqueeze", *("[B] x)", "[B] x, int64[1] axes)"), "not a constant"),
    ],
)
def test_the_real_parser_has_the_limits_of_the_table(op_type: str, before: str, after: str, message: str) -> None:
    form = FORMS[op_type].replace(before, after)
    assert form != FORMS[op_type]
    if "int64[1] axes" in form:  # an input, no constant
        start, end = form.index("axes = Constant"), form.index("()") + len("()")
        form = form[:start] + form[end:]
    errors = parse(form, "float16")
    assert errors
    assert message in errors[0]


# --- our graphs ---


def departures(node: ir.Node, known: Support | None) -> Iterator[str]:
    """In what a node is not as the table says."""
    if known is None:
        yield "not in the table"
        return
    for values, dtypes in ((node.inputs, known.inputs), (node.outputs, known.outputs)):
        if len(values) > len(dtypes) and not known.variadic:
            yield f"{len(values)} inputs or outputs"
        for index, value in enumerate(values):
            if value is not None and value.dtype not in dtypes[min(index, len(dtypes) - 1)]:
                yield f"{value.name} is {value.dtype}"
    for index in known.constant_inputs:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None and not value.is_initializer() and value.producer().op_type != "Constant":
            yield f"input {index} is not constant"
    for name, allowed in known.attributes.items():
        if name in node.attributes and node.attributes[name].value not in allowed:
            yield f"{name} is {node.attributes[name].value}"
    for index, rank in known.ranks.items():
        if index < len(node.inputs) and len(node.inputs[index].shape) != rank:
            yield f"input {index} has rank {len(node.inputs[index].shape)}"
    for index, axis in known.static_dimensions:
        if not isinstance(node.inputs[index].shape[axis], int):
            yield f"dimension {axis} of input {index} is not a number"


def all_departures(model: ir.Model, parser: ParserVersion) -> list[str]:
    nodes = [node for node in model.graph.all_nodes() if node.domain == ""]
    assert nodes
    return [
        f"{node.name} ({node.op_type}): {fault}"
        for node in nodes
        for fault in departures(node, support(node.op_type, parser))
    ]


def with_capacity(model: ir.Model) -> ir.Model:
    """The capacity of the caches, which TensorScatter needs to be a number."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if str(value.name).startswith(("past_", "present_")):
            assert value.shape is not None
            value.shape = ir.Shape([*value.shape[:2], CAPACITY, value.shape[3]])
    return model


KINDS: list[Any] = [
    pytest.param(Kind(dtype=dtype, system=system, family=family, tie=tie, windows=tie), id=f"{system}-{dtype}")
    for dtype in ("float32", "float16", "bfloat16")
    for system, family, tie in (("dflash", "qwen3", True), ("dflare", "llama", False))
]


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("kind", KINDS)
def test_inlined_graphs_are_as_the_table_says_and_parse(kind: Kind, role: str, tmp_path: Path) -> None:
    graph = small_pair(kind).graph(role)
    model = with_capacity(graph.inlined())
    Simplify()(model)
    for parser in (RTX, NEWEST):
        assert all_departures(model, parser) == []
    file = graph.folder / f"{tmp_path.name}.onnx"
    ir.save(model, file)
    assert rtx.Parser().errors(file) == []


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("kind", KINDS)
def test_bound_graphs_are_as_the_table_says(kind: Kind, role: str) -> None:
    graph = small_pair(kind).graph(role)
    model = graph.portable()
    dtypes = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    BindPlugins(head_dims=(graph.spec.head_dim,), attention_dtypes=dtypes)(model)
    old = ParserVersion("tensorrt", 10, 14)
    ExpandOperators(old)(model)
    Simplify()(model)
    plugins = [node for node in model.graph if node.domain == DOMAIN]
    assert plugins
    assert all_departures(model, old) == []


OVERLOADS = [("KVInjection", name) for name in ("", "no_norm", "partial", "no_norm_partial")] + [
    ("StaircaseAttention", staircase_attention_onnx.overload(sinks, window, softcap))
    for sinks in (False, True)
    for window in (0, 3)
    for softcap in (0.0, 2.0)
]

SHAPES: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(("key_cache", "value_cache"), ("B", 2, CAPACITY, 64)),
    **dict.fromkeys(("key", "value"), ("B", "Q", 2, 64)),
    **dict.fromkeys(("context_len", "write_start"), ("B",)),
    "key_norm_weight": (64,),
    "position_ids": ("B", "Q"),
    "query": ("B", 4, "Q", 64),
    "sinks": (4,),
    "visibility": ("B", "Q", "Q"),
}


@pytest.mark.parametrize(("op_type", "overload"), OVERLOADS)
def test_every_body_of_our_operators_parses(op_type: str, overload: str) -> None:
    if op_type == kv_injection_onnx.NAME:
        proto = injection_model(overload, 1e-5, "float16")
    else:
        window, softcap = 3 * ("window" in overload), 2.0 * ("softcap" in overload)
        proto = attention_model(overload, 0.125, window, 1, softcap, "float16")
    model = ir.from_proto(onnx.inliner.inline_local_functions(proto))
    rotated = 24 if "partial" in overload else 32
    for value in model.graph.inputs:
        value.shape = ir.Shape(SHAPES.get(str(value.name).removeprefix("in_"), (32, rotated)))
    Simplify()(model)
    assert all_departures(model, RTX) == []
    assert rtx.Parser().errors(ir.to_proto(model).SerializeToString()) == []
