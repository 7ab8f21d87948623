"""BindPlugins: what TensorRT's parser will find, what is refused and why, and that files lose nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from export.small_pair import Graph, Kind, copy_model, model_bytes, small_pair

from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN, OPSET, VERSION, kv_injection_onnx, staircase_attention_onnx
from dflash_trt.passes.attach_functions import AttachFunctions
from dflash_trt.passes.bind_plugins import BindPlugins

INJECTION, ATTENTION = kv_injection_onnx.NAME, staircase_attention_onnx.NAME
SCHEMAS = {INJECTION: kv_injection_onnx.schema(), ATTENTION: staircase_attention_onnx.schema()}
PLUGIN = {"plugin_version": "1", "plugin_namespace": "dflash_trt"}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    INJECTION: {"eps": 1e-6},
    ATTENTION: {"scale": 0.1, "sliding_window": 5, "causal": 1, "softcap": 0.0},
}
SHAPES = {
    "query": ["B", 8, "Q", 64], "visibility": ["B", "Q", "Q"], "context_len": ["B"], "sinks": [8],
    "key": ["B", "N", 2, 64], "value": ["B", "N", 2, 64], "key_norm_weight": [64], "position_ids": ["B", "N"],
    "cos": [99, 32], "sin": [99, 32], "write_start": ["B"],
    "key_cache": ["B", 2, "C", 64], "value_cache": ["B", 2, "C", 64],
}  # fmt: skip
KINDS = {
    "T": ir.DataType.FLOAT16, "tensor(int64)": ir.DataType.INT64, "tensor(bool)": ir.DataType.BOOL,
    "tensor(float)": ir.DataType.FLOAT,
}  # fmt: skip


def small_kernels() -> BindPlugins:
    """As if there were kernels for the small pair."""
    return BindPlugins(head_dims=(16,), attention_dtypes=(ir.DataType.FLOAT,))


@pytest.fixture(params=["target", "drafter"])
def graph(request: pytest.FixtureRequest) -> Graph:
    return small_pair().graph(request.param)


def one_call(op_type: str, absent: tuple[str, ...] = (), **kinds: ir.DataType) -> ir.Model:
    """A portable model of one call whose inputs are the graph's; `kinds` are dtypes of inputs in place of the right."""
    schema = SCHEMAS[op_type]
    values = [
        None
        if parameter.name in absent
        else ir.val(parameter.name, kinds.get(parameter.name, KINDS[parameter.type_str]), SHAPES[parameter.name])
        for parameter in schema.inputs
    ]
    attributes = ATTRIBUTES[op_type]
    node = ir.node(op_type, values, attributes, domain=DOMAIN, num_outputs=len(schema.outputs), name="the_call")
    for output in node.outputs:
        output.dtype = ir.DataType.FLOAT16
    graph = ir.Graph(
        [value for value in values if value is not None], node.outputs, nodes=[node],
        opset_imports={"": OPSET, DOMAIN: VERSION}, name="g",
    )  # fmt: skip
    model = ir.Model(graph, ir_version=11)
    AttachFunctions()(model)
    return model


def calls(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.domain == DOMAIN]


def values_of(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


# --- what is bound ---


def test_every_call_becomes_a_plugin_node(graph: Graph) -> None:
    portable, model = graph.portable(), graph.portable()
    assert small_kernels()(model).modified
    assert calls(model)
    for node, before in zip(calls(model), calls(portable), strict=True):
        assert values_of(node) == values_of(before) | PLUGIN
        assert node.overload == ""
        names = [value.name for value in before.inputs if value is not None]
        assert [value.name for value in node.inputs if value is not None] == names
        assert len(node.inputs) == len(names)
        assert [value.name for value in node.outputs] == [value.name for value in before.outputs]
    assert not model.functions
    assert model.opset_imports == {"": OPSET, DOMAIN: VERSION}


def test_what_is_no_call_stays(graph: Graph) -> None:
    portable, model = graph.portable(), graph.portable()
    small_kernels()(model)
    portable.functions.clear()
    for each in (portable, model):
        for node in calls(each):
            each.graph.remove(node)
    assert model_bytes(model) == model_bytes(portable)


def test_functions_of_others_stay() -> None:
    model = one_call(INJECTION)
    text = '<domain: "other", opset_import: ["": 24]> twice (x) => (y) { y = Add (x, x) }'
    other = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    model.functions[other.identifier()] = other
    BindPlugins()(model)
    assert dict(model.functions) == {other.identifier(): other}


@pytest.mark.parametrize(("op_type", "optional"), [(INJECTION, "key_norm_weight"), (ATTENTION, "sinks")])
@pytest.mark.parametrize("present", [True, False])
def test_absent_inputs_are_left_out(op_type: str, optional: str, present: bool) -> None:
    """Plugins tell by the number of inputs."""
    model = one_call(op_type, () if present else (optional,))
    BindPlugins()(model)
    (node,) = calls(model)
    expected = [parameter.name for parameter in SCHEMAS[op_type].inputs if present or parameter.name != optional]
    assert [value.name for value in node.inputs if value is not None] == expected
    assert len(node.inputs) == len(expected)


def test_binding_twice_changes_nothing(graph: Graph) -> None:
    model = graph.portable()
    small_kernels()(model)
    before = model_bytes(model)
    assert not small_kernels()(model).modified
    assert model_bytes(model) == before


def test_llama_has_no_norm() -> None:
    model = small_pair(Kind(family="llama", tie=False, windows=False, stored="bfloat16")).target.portable()
    small_kernels()(model)
    assert {len(node.inputs) for node in calls(model) if node.op_type == INJECTION} == {8}


# --- files ---


def test_files_lose_nothing(graph: Graph) -> None:
    """Saved and loaded twice, by two libraries; weights stay where they lie."""
    model = graph.portable()
    small_kernels()(model)
    files = [graph.folder / f"bound{i}.onnx" for i in range(3)]
    try:
        ir.save(model, files[0])
        again = ir.load(files[0])
        assert not small_kernels()(again).modified
        ir.save(again, files[1])
        onnx.save(onnx.load(files[1], load_external_data=False), files[2])
        first, second, third = (onnx.load(file, load_external_data=False) for file in files)
        assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
        assert files[1].read_bytes() == files[2].read_bytes()
        assert third == second
        placed = {name: (entry.file.name, entry.offset, entry.nbytes) for name, entry in graph.placed.entries.items()}
        where = {tensor.name: external(tensor) for tensor in third.graph.initializer if tensor.external_data}
        assert where
        assert where == {name: placed[name] for name in where}
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def external(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    fields = {entry.key: entry.value for entry in tensor.external_data}
    return fields["location"], int(fields["offset"]), int(fields["length"])


def test_what_the_parser_reads_is_exact() -> None:
    """Strings as strings, integers as integers, floats with every bit."""
    model = one_call(ATTENTION)
    exact = float(np.float32(1) / np.float32(3))
    calls(model)[0].attributes["scale"] = ir.AttrFloat32("scale", exact)
    BindPlugins()(model)
    proto = ir.to_proto(model)
    (node,) = proto.graph.node
    found = {each.name: (each.type, onnx.helper.get_attribute_value(each)) for each in node.attribute}
    kind = onnx.AttributeProto
    assert found == {
        "scale": (kind.FLOAT, exact),
        "sliding_window": (kind.INT, 5),
        "causal": (kind.INT, 1),
        "softcap": (kind.FLOAT, 0.0),
        "plugin_version": (kind.STRING, b"1"),
        "plugin_namespace": (kind.STRING, b"dflash_trt"),
    }
    assert (node.domain, node.op_type, node.overload) == (DOMAIN, ATTENTION, "")


# --- what is refused ---


def resized(name: str, axis: int, size: int | str | None) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        value = next(value for value in model.graph.inputs if value.name == name)
        value.shape = ir.Shape([*value.shape[:axis], size, *value.shape[axis + 1 :]])

    return change


def attribute(name: str, value: Any) -> Callable[[ir.Model], None]:
    """Sets an attribute of the call, None to take it away."""

    def change(model: ir.Model) -> None:
        (node,) = calls(model)
        if value is None:
            del node.attributes[name]
        else:
            is_attribute = isinstance(value, ir.Attr)
            node.attributes[name] = value if is_attribute else ir.convenience.convert_attribute(name, value)

    return change


def one_input_less(model: ir.Model) -> None:
    calls(model)[0].resize_inputs(5)


def unknown_operator(model: ir.Model) -> None:
    calls(model)[0].op_type = "Unheard"


def one_output_less(model: ir.Model) -> None:
    del model.graph.outputs[1]
    calls(model)[0].resize_outputs(1)


REFUSED: list[tuple[str, Callable[[ir.Model], None], str]] = [
    (ATTENTION, resized("query", 3, 80), "head_dim is 80; it must be one of 64, 96, 128, 256"),
    (INJECTION, resized("key", 3, 32), "head_dim is 32; it must be one of 64, 96, 128, 256"),
    (INJECTION, resized("key", 3, "D"), "head_dim is not known; it must be one of 64, 96, 128, 256"),
    (ATTENTION, resized("query", 2, 129), "has 129 queries; at most 128 are possible"),
    (INJECTION, attribute("epsilon", 1e-6), "attribute epsilon is unknown; there are eps"),
    (ATTENTION, attribute("softcap", None), "attribute softcap is missing"),
    (ATTENTION, attribute("scale", 1), "attribute scale is INT; it must be FLOAT"),
    (ATTENTION, attribute("sliding_window", 2**31), "attribute sliding_window is 2147483648, more than 32 bits hold"),
    (INJECTION, attribute("plugin_version", "2"), "attribute plugin_version is '2'; it must be '1'"),
    (
        INJECTION,
        attribute("eps", ir.RefAttr("eps", "outer", ir.AttributeType.FLOAT)),
        "attribute eps refers to an attribute of a function; it must be a value",
    ),
    (INJECTION, one_input_less, "has 5 inputs; it must have 9, or one less without the optional"),
    (INJECTION, one_output_less, "has 1 outputs; it must have 2"),
    (INJECTION, unknown_operator, "there is no such plugin; there are KVInjection, StaircaseAttention"),
]


@pytest.mark.parametrize(("op_type", "change", "reason"), REFUSED, ids=[reason[:24] for *_, reason in REFUSED])
def test_refusals_name_node_operator_value_and_rule(
    op_type: str, change: Callable[[ir.Model], None], reason: str
) -> None:
    model = one_call(op_type)
    change(model)
    before = model_bytes(model)
    with pytest.raises(ExportError) as refused:
        BindPlugins()(model)
    assert f"node the_call ({calls(model)[0].op_type}): {reason}" in refused.value.what
    assert refused.value.what.count("\n") == 1
    assert model_bytes(model) == before


@pytest.mark.parametrize(
    ("op_type", "name", "dtype", "reason"),
    [
        (ATTENTION, "sinks", "FLOAT", r"input sinks \(sinks\) is FLOAT; it must be FLOAT16"),
        (INJECTION, "cos", "FLOAT16", r"input cos \(cos\) is FLOAT16; it must be FLOAT"),
        (ATTENTION, "context_len", "INT32", r"input context_len \(context_len\) is INT32; it must be INT64"),
        (INJECTION, "key", "DOUBLE", r"input key \(key\) is DOUBLE; it must be BFLOAT16 or FLOAT or FLOAT16"),
    ],
)
def test_refuses_dtypes(op_type: str, name: str, dtype: str, reason: str) -> None:
    with pytest.raises(ExportError, match=reason):
        BindPlugins()(one_call(op_type, **{name: ir.DataType[dtype]}))


def test_refuses_absent_inputs_that_are_not_optional() -> None:
    with pytest.raises(ExportError, match="input write_start is missing"):
        BindPlugins()(one_call(INJECTION, ("write_start",)))


def test_refuses_attention_in_float32() -> None:
    """There are kernels, but not in the library."""
    floats = dict.fromkeys(("query", "key_cache", "value_cache", "sinks"), ir.DataType.FLOAT)
    with pytest.raises(ExportError, match="dtype is FLOAT; it must be one of FLOAT16, BFLOAT16"):
        BindPlugins()(one_call(ATTENTION, **floats))
    BindPlugins(attention_dtypes=(ir.DataType.FLOAT,))(one_call(ATTENTION, **floats))


def test_refuses_calls_in_functions_of_others() -> None:
    model = one_call(INJECTION)
    text = f"""<domain: "other", opset_import: ["": 24, "{DOMAIN}": 1]> wraps (q, k, v, n, s, p) => (y)
        {{ y = {DOMAIN}.{ATTENTION} <scale = 1.0> (q, k, v, n, s, p) }}"""
    other = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    model.functions[other.identifier()] = other
    with pytest.raises(ExportError, match=r"StaircaseAttention\): is in function other::wraps, which must be inlined"):
        BindPlugins()(model)


def test_all_reasons_are_in_one_error(graph: Graph) -> None:
    """For the small pair: head size and dtype of each attention, head size of each injection."""
    model = copy_model(graph.traced)
    with pytest.raises(ExportError) as refused:
        BindPlugins()(model)
    injections = sum(node.op_type == INJECTION for node in calls(model))
    attentions = len(calls(model)) - injections
    assert refused.value.what.count("\n") == injections + 2 * attentions
    for node in calls(model):
        assert f"node {node.name} ({node.op_type}): head_dim is 16" in refused.value.what
