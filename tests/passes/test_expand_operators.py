"""ExpandOperators: what it writes equals ONNX's definitions and ONNX Runtime's kernels, alone and in whole graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rtx
from export.small_pair import Graph, Kind, assert_same, model_bytes, run_passes, small_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from ops.op_cases import ort_session

from dflash_trt.backends import parser_ops
from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN, OPSET, staircase_attention
from dflash_trt.passes.attach_functions import AttachFunctions
from dflash_trt.passes.bind_plugins import PLUGIN_ATTRIBUTES, BindPlugins
from dflash_trt.passes.expand_operators import ExpandOperators
from dflash_trt.passes.inline import InlineFunctions
from dflash_trt.passes.simplify import Simplify

OLD = ParserVersion("tensorrt", 10, 14)
WRITTEN = {"RMSNormalization", "RotaryEmbedding"}
VOCAB, CAPACITY = 320, 24
KINDS = {"dflash": Kind(), "dflare": Kind(system="dflare", family="llama", tie=False, windows=False)}
DTYPES = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}

# --- single nodes ---


@dataclass(frozen=True)
class Case:
    """A model of one node, and inputs for it."""

    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]

    def expanded(self) -> onnx.ModelProto:
        model = ir.from_proto(self.model)
        assert ExpandOperators(OLD)(model).modified
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        return proto

    def definition(self) -> onnx.ModelProto:
        """A model of the operator's function body in ONNX's own schema."""
        node = self.model.graph.node[0]
        schema = onnx.defs.get_schema(node.op_type, OPSET)
        types = [value.type.SerializeToString() for value in self.model.graph.input]
        body = schema.get_context_dependent_function_with_opset_version(
            schema.since_version, node.SerializeToString(), types
        )
        function = onnx.FunctionProto.FromString(body)
        inputs = [
            helper.make_value_info(name, value.type)
            for name, value in zip(function.input, self.model.graph.input, strict=False)
        ]
        outputs = [helper.make_value_info(function.output[0], self.model.graph.output[0].type)]
        graph = helper.make_graph(function.node, "definition", inputs, outputs)
        return helper.make_model(graph, opset_imports=list(function.opset_import), ir_version=11)

    def evaluate(self, model: onnx.ModelProto) -> np.ndarray:
        """By onnx's reference evaluator."""
        feeds = dict(zip((value.name for value in model.graph.input), self.inputs.values(), strict=True))
        return ReferenceEvaluator(model).run(None, feeds)[0]

    def magnitude(self) -> float:
        """What no intermediate result exceeds by much."""
        floats = [array for array in self.inputs.values() if array.dtype != np.int64]
        return math.prod(max(1.0, float(np.abs(array).max())) for array in floats)


def one_node(
    op_type: str, inputs: dict[str, np.ndarray], shapes: list[list[Any]], dtype: str, **attributes: Any
) -> Case:
    """`shapes` of the inputs as the model declares them, None where they are dynamic."""
    kinds = [TensorProto.INT64 if array.dtype == np.int64 else DTYPES[dtype][0] for array in inputs.values()]
    infos = [helper.make_tensor_value_info(*given) for given in zip(inputs, kinds, shapes, strict=True)]
    output = helper.make_tensor_value_info("y", DTYPES[dtype][0], shapes[0])
    node = helper.make_node(op_type, list(inputs), ["y"], name=f"the_{op_type}", **attributes)
    graph = helper.make_graph([node], "one_node", infos, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    return Case(model, inputs)


@st.composite
def normalisations(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Case:
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    x = rng.standard_normal(shape) * draw(st.sampled_from((1e-3, 1.0, 300.0)))
    scale = 1 + 0.3 * rng.standard_normal(shape[axis:])
    before = axis % len(shape)
    attributes: dict[str, Any] = draw(st.sampled_from(({}, {"epsilon": 1e-6}, {"epsilon": 0.1, "stash_type": 1})))
    if axis != -1 or draw(st.booleans()):
        attributes["axis"] = axis
    return one_node(
        "RMSNormalization",
        {"x": x.astype(DTYPES[dtype][1]), "scale": scale.astype(DTYPES[dtype][1])},
        [[None] * before + shape[before:], shape[before:]],
        dtype,
        **attributes,
    )


@st.composite
def rotations(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Case:
    dtype = draw(st.sampled_from(dtypes))
    batch, heads, length, half = (draw(st.integers(1, 4)) for _ in range(4))
    dim = 2 * half + 2 * draw(st.integers(0, 3))
    positioned, flat = draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    shape = [batch, length, heads * dim] if flat else [batch, heads, length, dim]
    declared = [None, None, heads * dim] if flat else [None, heads, None, dim]
    table = [7, half] if positioned else [batch, length, half]
    tables = [[7, half] if positioned else [None, None, half]] * 2
    inputs = {"x": shape, "cos": table, "sin": table}
    arrays = {name: rng.standard_normal(size).astype(DTYPES[dtype][1]) for name, size in inputs.items()}
    attributes: dict[str, Any] = {"interleaved": 1} if draw(st.booleans()) else {}
    if dim > 2 * half or draw(st.booleans()):
        attributes["rotary_embedding_dim"] = 2 * half
    if flat or ("rotary_embedding_dim" in attributes and draw(st.booleans())):
        attributes["num_heads"] = heads
    positions = [[None, None]] if positioned else []
    if positioned:
        arrays["position_ids"] = rng.integers(0, 7, (batch, length))
    return one_node("RotaryEmbedding", arrays, [declared, *tables, *positions], dtype, **attributes)


CASES = st.one_of(normalisations(), rotations())


@settings(deadline=None, max_examples=150)
@given(CASES)
def test_what_is_written_equals_the_definition_to_the_bit(case: Case) -> None:
    found, expected = case.evaluate(case.expanded()), case.evaluate(case.definition())
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@settings(deadline=None, max_examples=60)
@given(st.one_of(normalisations(("float32", "float16")), rotations(("float32", "float16"))))
def test_what_is_written_equals_the_kernels_of_onnxruntime(case: Case) -> None:
    """They sum in another order, and fuse a product with a sum."""
    before, after = (ort_session(model).run(None, case.inputs)[0] for model in (case.model, case.expanded()))
    step = float(np.finfo(before.dtype).eps)
    if case.model.graph.node[0].op_type == "RMSNormalization":
        np.testing.assert_allclose(after, before, rtol=4 * step, atol=0)
    else:
        np.testing.assert_allclose(after, before, rtol=0, atol=2 * step * case.magnitude())


@settings(deadline=None, max_examples=60)
@given(CASES)
def test_a_real_parser_takes_what_is_written(case: Case) -> None:
    assert rtx.Parser().errors(case.expanded().SerializeToString()) == []


@given(CASES)
@settings(deadline=None, max_examples=20)
def test_new_nodes_are_named_after_the_one_they_replace(case: Case) -> None:
    nodes = case.expanded().graph.node
    replaced = case.model.graph.node[0].name
    values = [name for node in nodes for name in node.output]
    assert all(node.name.startswith(f"{replaced}/") for node in nodes)
    assert all(name.startswith("y/") for name in values if name != "y")
    assert len(set(values)) == len(values)
    assert len({node.name for node in nodes}) == len(nodes)


@pytest.mark.parametrize(
    ("op_type", "attributes"), [("RMSNormalization", {"axis": 1}), ("RotaryEmbedding", {"num_heads": 2})]
)
def test_an_unknown_rank_is_refused_where_it_matters(op_type: str, attributes: dict[str, int]) -> None:
    inputs = [ir.val(name, ir.DataType.FLOAT) for name in ("x", "a", "b", "c")][: 2 if "axis" in attributes else 4]
    node = ir.node(op_type, inputs, attributes, name="it")
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": OPSET}, name="g")
    with pytest.raises(ExportError, match=rf"node it \({op_type}\): the rank of input x is not known"):
        ExpandOperators(OLD)(ir.Model(graph, ir_version=11))


# --- whole graphs ---


@pytest.fixture(params=[(kind, role) for kind in KINDS for role in ("target", "drafter")], ids="-".join)
def graph(request: pytest.FixtureRequest) -> Graph:
    kind, role = request.param
    return small_pair(KINDS[kind]).graph(role)


@pytest.fixture
def scattering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TensorRT 10.14 had TensorScatter, so that graphs without plugins lack only what can be written."""
    known = replace(parser_ops._TENSORRT["TensorScatter"], first=(10, 14))
    monkeypatch.setitem(parser_ops._TENSORRT, "TensorScatter", known)


@pytest.fixture
def file(graph: Graph, tmp_path: Path) -> Iterator[Path]:
    """For a model with the graph's weights, which lie in its folder."""
    path = graph.folder / f"{tmp_path.name}.onnx"
    yield path
    path.unlink()


def op_types(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph.all_nodes() if node.domain == ""}


def bound(graph: Graph) -> ir.Model:
    """Plugin-bound, as if there were kernels for these small models."""
    model = graph.portable()
    BindPlugins(head_dims=(graph.spec.head_dim,), attention_dtypes=(ir.DataType.FLOAT,))(model)
    return model


def run(model: ir.Model, graph: Graph, file: Path) -> list[dict]:
    ir.save(model, file)
    return run_passes(OrtSession(file, graph.spec, threads=1), VOCAB)


@pytest.mark.usefixtures("scattering")
def test_graphs_keep_their_outputs(graph: Graph, file: Path) -> None:
    model = graph.inlined()
    assert op_types(model) >= WRITTEN
    assert ExpandOperators(OLD)(model).modified
    assert not op_types(model) & WRITTEN
    Simplify()(model)
    assert_same(run(model, graph, file), run_passes(graph.ort(), VOCAB), 2e-5)


def test_bound_graphs_keep_their_plugins_and_outputs(graph: Graph, file: Path) -> None:
    model = bound(graph)
    plugins = [ir.to_proto(node) for node in model.graph if node.domain == DOMAIN]
    assert op_types(model) >= {"RotaryEmbedding"}
    assert ExpandOperators(OLD)(model).modified
    assert [ir.to_proto(node) for node in model.graph if node.domain == DOMAIN] == plugins
    assert not op_types(model) & WRITTEN
    Simplify()(model)
    unbind(model)
    assert_same(run(model, graph, file), run_passes(graph.ort(), VOCAB), 2e-5)


def unbind(model: ir.Model) -> None:
    """Makes plugins function calls again, of bodies that ONNX Runtime knows."""
    for node in model.graph:
        if node.domain == DOMAIN:
            for name in PLUGIN_ATTRIBUTES:
                del node.attributes[name]
            optional, count = (5, 7) if node.op_type == staircase_attention.NAME else (2, 9)
            inputs = list(node.inputs)
            if len(inputs) < count:
                inputs.insert(optional, None)
            node.resize_inputs(len(inputs))
            for index, value in enumerate(inputs):
                node.replace_input_with(index, value)
    AttachFunctions()(model)
    InlineFunctions()(model)


@pytest.mark.usefixtures("scattering")
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_half_precision_graphs_keep_their_outputs(role: str, tmp_path: Path) -> None:
    """Only roundings differ: ONNX Runtime multiplies by the norm's weight before it rounds."""
    graph = small_pair(Kind(dtype="float16")).graph(role)
    model = graph.inlined()
    ExpandOperators(OLD)(model)
    Simplify()(model)
    file = graph.folder / f"{tmp_path.name}.onnx"
    found, expected = run(model, graph, file), run_passes(graph.ort(), VOCAB)
    names = {name for result in found for name in result} - {"token_ids", "draft_ids"}
    for ours, theirs in zip(found, expected, strict=True):
        for name in names & ours.keys():
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0.01, atol=0.03, err_msg=name)


@pytest.mark.usefixtures("scattering")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_real_parser_takes_whole_graphs(role: str, dtype: Any, tmp_path: Path) -> None:
    graph = small_pair(Kind(dtype=dtype)).graph(role)
    model = graph.inlined()
    ExpandOperators(OLD)(model)
    Simplify()(model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if str(value.name).startswith(("past_", "present_")) and value.shape is not None:
            value.shape = ir.Shape([*value.shape[:2], CAPACITY, value.shape[3]])
    file = graph.folder / f"{tmp_path.name}.onnx"
    ir.save(model, file)
    assert rtx.Parser().errors(file) == []


def test_a_second_run_changes_nothing(graph: Graph) -> None:
    model = bound(graph)
    ExpandOperators(OLD)(model)
    before = model_bytes(model)
    assert not ExpandOperators(OLD)(model).modified
    assert model_bytes(model) == before


@pytest.mark.parametrize("version", ["10.15", "11.1"])
@pytest.mark.parametrize("form", ["inlined", "bound"])
def test_newer_parsers_take_graphs_as_they_are(graph: Graph, form: str, version: str) -> None:
    model = graph.inlined() if form == "inlined" else bound(graph)
    before = model_bytes(model)
    assert not ExpandOperators(ParserVersion.parse(version))(model).modified
    assert model_bytes(model) == before


def test_rtx_takes_graphs_as_they_are(graph: Graph) -> None:
    assert not ExpandOperators(ParserVersion("tensorrt-rtx", 1, 7))(graph.inlined()).modified


# --- refusals ---


def test_caches_cannot_be_updated_without_plugins() -> None:
    graph = small_pair().target
    with pytest.raises(ExportError) as refused:
        ExpandOperators(OLD)(graph.inlined())
    assert refused.value.message() == (
        "TensorRT 10.14: TensorScatter is there from TensorRT 10.15 on; 4 nodes have it, the first is "
        f"{next(node.name for node in graph.inlined().graph if node.op_type == 'TensorScatter')}. "
        "Use a later TensorRT, or build with --plugins on"
    )


def test_attention_before_its_version_is_refused() -> None:
    model = small_pair().target.inlined()
    before = model_bytes(model)
    with pytest.raises(ExportError, match=r"Attention is there from TensorRT 10\.14 on; 2 nodes have it, the first is"):
        ExpandOperators(ParserVersion("tensorrt", 10, 13))(model)
    assert model_bytes(model) == before


def test_several_operators_are_named_one_a_line() -> None:
    with pytest.raises(ExportError) as refused:
        ExpandOperators(ParserVersion("tensorrt", 10, 13))(small_pair().target.inlined())
    first, *lines = refused.value.message().splitlines()
    assert first == "TensorRT 10.13: lacks what no other operators can do:"
    assert [line.split()[0] for line in lines] == ["TensorScatter", "Attention"]


def test_a_single_node_is_no_plural_and_rtx_has_no_plugins() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [3])
    node = ir.node("Tanh", [x], name="only")
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": OPSET}, name="g")
    with pytest.raises(ExportError) as refused:
        ExpandOperators(ParserVersion("tensorrt-rtx", 1, 6))(ir.Model(graph, ir_version=11))
    assert refused.value.message() == (
        "TensorRT-RTX 1.6: Tanh is there from TensorRT-RTX 1.7 on; the node that has it is only. "
        "Use a later TensorRT-RTX"
    )


def test_functions_must_be_inlined_before() -> None:
    with pytest.raises(ir.passes.PreconditionError, match="functions must be inlined"):
        ExpandOperators(OLD)(small_pair().target.portable())


def test_operators_that_no_table_knows_are_left_alone() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [3])
    foreign = ir.node("RMSNormalization", [x, x], domain="elsewhere")
    unknown = ir.node("Erf", foreign.outputs)
    graph = ir.Graph([x], unknown.outputs, nodes=[foreign, unknown], opset_imports={"": OPSET}, name="g")
    assert not ExpandOperators(OLD)(ir.Model(graph, ir_version=11)).modified
    assert [node.op_type for node in graph] == ["RMSNormalization", "Erf"]
