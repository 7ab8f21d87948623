"""Each pass: what it ensures, that it changes no output, and that a second run changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from export.small_pair import Graph, Kind, assert_same, copy_model, model_bytes, small_pair
from passes.running import run

from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN, OPSET, VERSION, kv_injection, staircase_attention
from dflash_trt.passes.attach_functions import AttachFunctions
from dflash_trt.passes.bind_plugins import BindPlugins
from dflash_trt.passes.check_in_place import CheckInPlace
from dflash_trt.passes.inline import InlineFunctions
from dflash_trt.passes.simplify import Simplify

ROLES = ("target", "drafter")
# what the design names: anything else of theirs would not be in place, or not be one kernel
FUSED = {"Attention", "TensorScatter", "RMSNormalization", "RotaryEmbedding"}


@pytest.fixture(params=ROLES)
def graph(request: pytest.FixtureRequest) -> Graph:
    return small_pair().graph(request.param)


# --- AttachFunctions ---


def test_attach_gives_every_call_a_body(graph: Graph) -> None:
    model = copy_model(graph.traced)
    assert AttachFunctions()(model).modified
    calls = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    assert calls
    for node in calls:
        function = model.functions[node.op_identifier()]
        assert [value.name for value in function.inputs][: len(node.inputs)]
        assert len(function.inputs) == len(node.inputs)
        assert set(node.attributes) == set(function.attributes)
    # a windowed and a full layer
    overloads = {node.overload for node in calls if node.op_type == staircase_attention.NAME}
    assert overloads == {"", "window"}
    assert model.opset_imports == {"": OPSET, DOMAIN: VERSION}


def test_attach_is_idempotent(graph: Graph) -> None:
    model = copy_model(graph.traced)
    AttachFunctions()(model)
    before = model_bytes(model)
    assert not AttachFunctions()(model).modified
    assert model_bytes(model) == before


def test_attach_leaves_out_the_norm_of_llama() -> None:
    graph = small_pair(Kind(family="llama", tie=False, windows=False, stored="bfloat16")).target
    keys = {key[1:] for key in graph.portable().functions if key[0] == DOMAIN}
    assert keys == {("KVInjection", "no_norm"), ("StaircaseAttention", "")}


def injections(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.op_type == kv_injection.NAME]


def with_table(graph: Graph, shape: tuple[int | str, int | str]) -> ir.Model:
    """The traced graph with rotary tables of another shape."""
    model = copy_model(graph.traced)
    for node in injections(model):
        cos = node.inputs[4]
        assert cos is not None
        cos.shape = ir.Shape(shape)
    return model


def test_attach_tells_heads_that_rotate_in_part(graph: Graph) -> None:
    for half, overload in ((graph.spec.head_dim // 2, ""), (graph.spec.head_dim // 2 - 1, "partial")):
        model = with_table(graph, (64, half))
        AttachFunctions()(model)
        assert {node.overload for node in injections(model)} == {overload}


@pytest.mark.parametrize(("half", "message"), [(9, "rotate 18 of 16"), ("H", "dimension 1 of input .* is not known")])
def test_attach_refuses_tables_it_cannot_place(graph: Graph, half: int | str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        AttachFunctions()(with_table(graph, (64, half)))


def test_attach_refuses_an_operator_without_a_body(graph: Graph) -> None:
    model = copy_model(graph.traced)
    next(node for node in model.graph.all_nodes() if node.domain == DOMAIN).op_type = "Unheard"
    with pytest.raises(ExportError, match="Unheard"):
        AttachFunctions()(model)


# --- InlineFunctions ---


def test_inline_leaves_standard_operators_only(graph: Graph) -> None:
    model = graph.portable()
    assert InlineFunctions()(model).modified
    for node in model.graph.all_nodes():
        assert node.domain == ""
        assert node.overload == ""
        assert not onnx.defs.get_schema(node.op_type, OPSET, "").deprecated
    assert {node.op_type for node in model.graph.all_nodes()} >= FUSED
    assert not model.functions
    assert model.opset_imports == {"": OPSET}


def test_inline_keeps_io_and_weights(graph: Graph) -> None:
    portable, inlined = graph.portable(), graph.inlined()
    for ours, theirs in (
        (portable.graph.inputs, inlined.graph.inputs),
        (portable.graph.outputs, inlined.graph.outputs),
    ):
        assert [(v.name, v.dtype, v.shape) for v in ours] == [(v.name, v.dtype, v.shape) for v in theirs]
    assert list(portable.graph.initializers) == list(inlined.graph.initializers)


def test_inline_is_idempotent(graph: Graph) -> None:
    model = graph.inlined()
    before = model_bytes(model)
    assert not InlineFunctions()(model).modified
    assert model_bytes(model) == before


def test_inline_refuses_calls_without_bodies(graph: Graph) -> None:
    with pytest.raises(ir.passes.PostconditionError, match="custom nodes left"):
        InlineFunctions()(copy_model(graph.traced))


def test_inline_changes_no_output(graph: Graph, tmp_path: Path) -> None:
    assert_same(run(graph.inlined(), graph, tmp_path), run(graph.portable(), graph, tmp_path), 1e-6)


# --- Simplify ---


def test_simplify_changes_no_output(graph: Graph, tmp_path: Path) -> None:
    plain, simple = graph.inlined(), graph.inlined()
    assert Simplify()(simple).modified
    assert len(list(simple.graph.all_nodes())) < len(list(plain.graph.all_nodes()))
    assert_same(run(simple, graph, tmp_path), run(plain, graph, tmp_path), 1e-6)


def test_simplify_works_on_the_portable_graph(graph: Graph, tmp_path: Path) -> None:
    simple = graph.portable()
    Simplify()(simple)
    assert [node for node in simple.graph.all_nodes() if node.domain == DOMAIN]
    assert_same(run(simple, graph, tmp_path), run(graph.portable(), graph, tmp_path), 1e-6)


def test_simplify_is_idempotent(graph: Graph) -> None:
    model = graph.inlined()
    Simplify()(model)
    before = model_bytes(model)
    assert not Simplify()(model).modified
    assert model_bytes(model) == before


def assert_weights_untouched(model: ir.Model, before: dict[str, ir.TensorProtocol | None]) -> None:
    """The very objects that were there, and nothing new that could be a folded weight."""
    after = {name: value.const_value for name, value in model.graph.initializers.items()}
    for name, tensor in before.items():
        if name in after:  # what nothing uses may go
            assert after[name] is tensor
    added = [model.graph.initializers[name] for name in after.keys() - before.keys()]
    constants = [node.attributes["value"].as_tensor() for node in model.graph if "value" in node.attributes]
    for tensor in [value.const_value for value in added] + constants:
        assert tensor is not None
        assert tensor.size <= 8 or not np.issubdtype(tensor.numpy().dtype, np.floating)


@pytest.mark.parametrize("with_casts", [False, True])
def test_simplify_never_folds_weights(graph: Graph, with_casts: bool) -> None:
    """Nor casts of small ones, as half-precision graphs apply to norm weights."""
    model = graph.inlined()
    casts = _cast_every_norm(model) if with_casts else 0
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    used = {name for name, value in model.graph.initializers.items() if value.uses()}
    Simplify()(model)
    assert_weights_untouched(model, before)
    assert used <= set(model.graph.initializers)
    left = [node for node in model.graph if node.op_type == "Cast" and node.inputs[0].is_initializer()]
    assert len(left) == casts


def _cast_every_norm(model: ir.Model) -> int:
    """Puts a cast to float64 and back behind each norm weight; returns how many nodes read a weight by a cast."""
    norms = [value for name, value in model.graph.initializers.items() if "norm" in name and value.uses()]
    for value in norms:
        user = value.uses()[0].node
        there = ir.node("Cast", [value], {"to": ir.DataType.DOUBLE.value})
        back = ir.node("Cast", there.outputs, {"to": ir.DataType.FLOAT.value})
        model.graph.insert_before(user, [there, back])
        ir.convenience.replace_all_uses_with(value, back.outputs[0])
        there.replace_input_with(0, value)
    return len(norms)


def test_simplify_reads_no_weight(graph: Graph) -> None:
    """It runs where the files are not there at all."""
    model = graph.inlined()
    for name, value in model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.ExternalTensor(
                location="missing",
                offset=0,
                length=1,
                dtype=value.dtype,
                shape=value.shape,
                name=name,
                base_dir="/nowhere",
            )
    Simplify()(model)


def test_simplify_leaves_no_notes_behind(graph: Graph) -> None:
    model = graph.inlined()
    Simplify()(model)
    for node in model.graph.all_nodes():
        for value in (node, *node.outputs):
            assert not [key for key in value.metadata_props if "folded" in key.lower()]


def test_simplify_keeps_dimensions_dynamic(graph: Graph) -> None:
    model = graph.inlined()
    Simplify()(model)
    plain = graph.inlined()
    for ours, theirs in (
        (model.graph.inputs, plain.graph.inputs),
        (model.graph.outputs, plain.graph.outputs),
    ):
        assert [(v.name, v.dtype, str(v.shape)) for v in ours] == [(v.name, v.dtype, str(v.shape)) for v in theirs]


# --- CheckInPlace ---


@pytest.mark.parametrize("fault", ["second write", "second reader"])
def test_check_in_place_refuses_a_cache_that_would_be_copied(fault: str) -> None:
    past = ir.val("past_key_0", ir.DataType.FLOAT, [1, 1, 8, 4])
    rows = ir.val("rows", ir.DataType.FLOAT, [1, 1, 2, 4])
    start = ir.val("start", ir.DataType.INT64, [1])
    first = ir.node("TensorScatter", [past, rows, start], {"axis": 2})
    nodes = [first]
    if fault == "second write":
        nodes.append(ir.node("TensorScatter", [first.outputs[0], rows, start], {"axis": 2}))
    else:
        nodes.append(ir.node("Neg", [past]))
    present = nodes[-1].outputs[0] if fault == "second write" else first.outputs[0]
    present.name = "present_key_0"
    graph = ir.Graph([past, rows, start], [present], nodes=nodes, opset_imports={"": 24}, name="g")
    with pytest.raises(ExportError, match=r"past_key_0|present_key_0"):
        CheckInPlace()(ir.Model(graph, ir_version=10))


def bound(graph: Graph) -> ir.Model:
    model = graph.portable()
    BindPlugins(head_dims=(16,), attention_dtypes=(ir.DataType.FLOAT,))(model)
    return model


def test_check_in_place_takes_plugins_and_scatters(graph: Graph) -> None:
    simplified = graph.inlined()
    Simplify()(simplified)
    for model in (bound(graph), simplified):
        before = model_bytes(model)
        assert not CheckInPlace()(model).modified
        assert model_bytes(model) == before


def swap_caches(node: ir.Node, _: ir.Node) -> None:
    key, value = node.inputs[-2:]
    node.replace_input_with(len(node.inputs) - 2, value)
    node.replace_input_with(len(node.inputs) - 1, key)


def read_before(node: ir.Node, _: ir.Node) -> None:
    """Attention over the caches as they were."""
    attention = next(use.node for use in node.outputs[0].uses() if use.node.op_type == staircase_attention.NAME)
    attention.replace_input_with(1, node.inputs[-2])


def write_as_rows(node: ir.Node, _: ir.Node) -> None:
    """A cache that is the new rows, too."""
    node.replace_input_with(1, node.inputs[-1])


def take_anothers(node: ir.Node, other: ir.Node) -> None:
    node.replace_input_with(len(node.inputs) - 2, other.inputs[-2])


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (swap_caches, "present_key_0"),
        (read_before, r"past_key_0: is read by node .* \(StaircaseAttention\) besides its update"),
        (write_as_rows, r"past_value_0: is read by node .* \(KVInjection\) besides its update"),
        (take_anothers, "present_key_0"),
    ],
)
def test_check_in_place_refuses_plugins_that_would_copy(change: Callable, where: str) -> None:
    model = bound(small_pair().target)
    change(*injections(model)[:2])
    with pytest.raises(ExportError, match=where):
        CheckInPlace()(model)


def test_check_in_place_refuses_a_cache_without_its_output(graph: Graph) -> None:
    model = bound(graph)
    model.graph.outputs.remove(next(value for value in model.graph.outputs if value.name == "present_value_1"))
    with pytest.raises(ExportError, match="caches: 4 past inputs, 3 present outputs"):
        CheckInPlace()(model)
