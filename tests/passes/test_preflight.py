"""Preflight: what TensorRT builds passes, every fault of a standard graph is refused by its place, nothing changes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import onnx_ir as ir
import pytest
from export.small_pair import copy_model, model_bytes, small_pair
from hypothesis import given
from hypothesis import strategies as st
from passes.preflight_graphs import (
    KINDS,
    LIMITS,
    NEW,
    OLD,
    RTX,
    Change,
    bound,
    cast,
    casts,
    end,
    first,
    plain,
    reads_a_cache,
    refused,
    renames,
    sets,
    small_target,
    target_for,
)
from rtx import Parser

from dflash_trt.backends.profiles import DimRange, Profile, profiles
from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN
from dflash_trt.passes.additive_masks import AdditiveMasks
from dflash_trt.passes.preflight import Preflight, PreflightTarget, preflight_faults
from dflash_trt.passes.simplify import Simplify
from dflash_trt.preflight.fault import Fault, grouped

# --- what is built ---


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_lowering_makes_passes(kind: str, role: str) -> None:
    graph = small_pair(KINDS[kind]).graph(role)
    for model, parser in (
        (plain(graph), RTX),
        (plain(graph), NEW),
        (bound(graph), NEW),
        (bound(graph, OLD), OLD),
    ):
        before = model_bytes(model)
        assert preflight_faults(model, target_for(graph, parser)) == []
        assert not Preflight(target_for(graph, parser))(model).modified
        assert model_bytes(model) == before


def test_the_parser_agrees() -> None:
    graph = small_pair(KINDS["bfloat16"]).drafter
    file = graph.folder / "preflight.onnx"
    ir.save(plain(graph), file)
    assert Parser().errors(file) == []


def test_a_vp_drafter_passes() -> None:
    """A drafter's graph, under profiles of its own."""
    limits = dataclasses.replace(LIMITS, vp_block_size=6, branches=2)
    graph = small_pair().drafter
    spec = dataclasses.replace(graph.spec, role="vp_drafter")
    model = plain(graph, limits.capacity)
    assert preflight_faults(model, PreflightTarget(RTX, spec, profiles("vp_drafter", limits))) == []


def test_a_graph_alone_passes() -> None:
    assert preflight_faults(plain(small_pair().target), PreflightTarget(RTX)) == []
    with pytest.raises(ValueError, match="give the graph"):
        PreflightTarget(RTX, profiles=())


def test_no_weight_is_read() -> None:
    model = plain(small_pair().target)
    for name, value in model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.ExternalTensor(
                "missing", 0, 1, value.dtype, shape=value.shape, name=name, base_dir="/nowhere"
            )
    assert preflight_faults(model, target_for(small_pair().target, RTX)) == []


# --- what is refused ---


def feeds(op_type: str, index: int, name: str) -> Callable[[ir.Model], ir.Node]:
    """An input of the first such node becomes one of the graph's."""

    def change(model: ir.Model) -> ir.Node:
        node = first(model, op_type)
        node.resize_inputs(max(len(node.inputs), index + 1))
        node.replace_input_with(index, end(model, name))
        return node

    return change


def doubles(model: ir.Model) -> str:
    cast(model, "MatMul", 0, ir.DataType.DOUBLE)
    return "node the_cast (Cast)"


def converts_a_weight(model: ir.Model) -> ir.Node:
    """The weight that is transposed for a projection."""
    node = next(node for node in model.graph if node.op_type == "Transpose" and node.inputs[0].is_initializer())
    weight, half = node.inputs[0], ir.DataType.FLOAT16
    weight.type, weight.const_value = ir.TensorType(half), None  # clones share types
    back = ir.node("Cast", node.outputs, {"to": ir.DataType.FLOAT.value}, name="back")
    back.outputs[0].name, back.outputs[0].dtype = "back", ir.DataType.FLOAT
    node.outputs[0].type = ir.TensorType(half)
    readers = [use for use in node.outputs[0].uses() if use.node is not back]
    model.graph.insert_after(node, back)
    for use in readers:
        use.node.replace_input_with(use.idx, back.outputs[0])
    return node


def share_masks(model: ir.Model) -> ir.Node:
    for node in model.graph:
        if node.op_type == "Attention":
            node.replace_input_with(3, node.inputs[3].producer().inputs[0])
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    shared = nodes[0].inputs[3]
    for node in nodes[1:]:
        node.replace_input_with(3, shared)
    return nodes[0]


def copies_a_cache(model: ir.Model) -> str:
    past, present = end(model, "past_value_0"), end(model, "present_value_0")
    node = present.producer()
    new = ir.node("Identity", [past], name="copy")
    new.outputs[0].name, new.outputs[0].dtype, new.outputs[0].shape = "copied", past.dtype, past.shape
    model.graph.insert_before(node, new)
    node.replace_input_with(list(node.inputs).index(past), new.outputs[0])
    return "present_value_0"


def renames_an_input(model: ir.Model) -> str:
    end(model, "position_ids").name = "positions"
    return "input positions"


def drops_an_output(model: ir.Model) -> str:
    model.graph.outputs.remove(end(model, "token_ids"))
    return "output token_ids"


def reorders_inputs(model: ir.Model) -> str:
    values = list(model.graph.inputs)
    model.graph.inputs.clear()
    model.graph.inputs.extend([values[1], values[0], *values[2:]])
    return "input position_ids"


def reshapes(name: str, shape: list[int | str]) -> Callable[[ir.Model], str]:
    def change(model: ir.Model) -> str:
        value = end(model, name)
        value.shape = ir.Shape(shape)
        return f"put {name}"  # input or output

    return change


def retypes_an_output(model: ir.Model) -> str:
    end(model, "token_ids").type = ir.TensorType(ir.DataType.INT32)
    return "output token_ids"


def imports(domain: str, version: int | None) -> Callable[[ir.Model], str]:
    def change(model: ir.Model) -> str:
        model.opset_imports.pop(domain, None)
        if version is not None:
            model.opset_imports[domain] = version
        return f"opset import {domain or 'ai.onnx'}"

    return change


def types_a_sum(model: ir.Model) -> ir.Node:
    """As what it is not; what reads it agrees."""
    node = cast(model, "MatMul", 0, ir.DataType.FLOAT).inputs[0].producer()
    node.op_type, total = "Add", node.outputs[0]
    node.attributes.clear()
    node.resize_inputs(2)
    node.replace_input_with(1, node.inputs[0])
    total.type = ir.TensorType(ir.DataType.FLOAT16)
    back = ir.node("Cast", [total], {"to": ir.DataType.FLOAT.value}, name="back")
    back.outputs[0].name, back.outputs[0].dtype = "back", ir.DataType.FLOAT
    model.graph.insert_after(node, back)
    for use in list(total.uses()):
        if use.node is not back:
            use.node.replace_input_with(use.idx, back.outputs[0])
    return node


PLAIN: list[tuple[str, Change, set[str], str]] = [
    ("float64", doubles, {"dtype"}, "output 0 (the_cast_output) is DOUBLE; it must be"),
    ("mixed addition", casts("Add", 1, "FLOAT16"), {"dtype"}, "is FLOAT16, and"),
    ("mixed product", casts("MatMul", 0, "FLOAT16"), {"dtype"}, "they must be of one dtype"),
    ("output of its own dtype", types_a_sum, {"dtype"}, "is FLOAT16, and"),
    ("mixed mask", casts("Attention", 3, "FLOAT16"), {"dtype"}, "the_cast_output is FLOAT16, and"),
    ("converted weight", converts_a_weight, {"weights"}, "which is FLOAT16 in a graph of FLOAT"),
    ("unknown operator", renames("Sigmoid", "Erf"), {"operator"}, "Erf is not known to be taken by TensorRT-RTX 1.7"),
    ("unheard operator", renames("Sigmoid", "Unheard"), {"operator"}, "is not known to be taken"),
    ("unknown domain", renames("Sigmoid", "Gelu", "com.other"), {"domain"}, "is of domain com.other"),
    ("plugin's name", renames("Sigmoid", "KVInjection"), {"name"}, "has the name of a plugin and no domain"),
    ("custom on RTX", renames("Sigmoid", "Own", DOMAIN), {"plugin"}, "TensorRT-RTX takes no plugins"),
    ("causal", sets("Attention", "is_causal", 1), {"attribute"}, "is_causal is 1; it must be 0, or absent"),
    ("circular", sets("TensorScatter", "mode", "circular"), {"attribute"}, "mode is circular; it must be linear"),
    ("softmax", sets("Attention", "softmax_precision", 1), {"attribute"}, "is 1; it must be absent"),
    ("past input", feeds("Attention", 4, "past_key_0"), {"operator", "in-place"}, "has input 4 (past_key_0)"),
    ("axes", feeds("ReduceSum", 1, "context_len"), {"constant"}, "input 1 (context_len) must be a constant"),
    ("rank", feeds("Attention", 3, "visibility"), {"shape"}, "has 3 dimensions; it must have 4"),
    ("shared mask", share_masks, {"mask"}, "shares its boolean mask"),
    ("second reader", reads_a_cache, {"in-place"}, "besides its update"),
    ("copied cache", copies_a_cache, {"in-place"}, "is not one TensorScatter into its past"),
    ("renamed input", renames_an_input, {"interface"}, "position_ids: is missing from the target graph"),
    ("dropped output", drops_an_output, {"interface"}, "is missing from the target graph"),
    ("order", reorders_inputs, {"interface"}, "is input 0, where input_ids must be"),
    ("shape", reshapes("visibility", ["B", "Q", "K"]), {"interface"}, "is [B, Q, K]; it must be [B, Q, Q]"),
    ("dimension", reshapes("logits", ["B", "R", 77]), {"interface"}, "is [B, R, 77]; it must be [B, R, 320]"),
    ("output dtype", retypes_an_output, {"interface", "dtype"}, "is INT32; it must be INT64"),
    ("capacity", reshapes("past_key_1", ["B", 2, "C", 16]), {"capacity"}, "varies (dimension 2 is C). Lower it"),
    ("capacities", reshapes("past_key_1", ["B", 2, 99, 16]), {"capacity"}, "has 99 slots, input past_key_0 has"),
    ("opset", imports("", 21), {"opset"}, "is of version 21"),
    ("imported domain", imports("com.other", 1), {"opset"}, "the domain is unknown"),
    ("no import", imports("", None), {"opset"}, "is missing; what is known of TensorRT-RTX 1.7 is of 24"),
]


@pytest.mark.parametrize(("change", "rules", "text"), [row[1:] for row in PLAIN], ids=[row[0] for row in PLAIN])
def test_refuses_faults_of_a_standard_graph(change: Change, rules: set[str], text: str) -> None:
    graph, model = small_pair().target, copy_model(small_target())
    refused(model, target_for(graph, RTX), change(model), rules, text)


def test_a_variable_capacity_is_said_once() -> None:
    graph = small_pair().target
    model = graph.inlined()
    Simplify()(model)
    AdditiveMasks()(model)
    (fault,) = preflight_faults(model, target_for(graph, RTX))
    assert str(fault).startswith("input past_key_0: has a capacity that varies (dimension 2 is C), and so do 7 others")


def test_a_capacity_must_be_the_profiles() -> None:
    graph = small_pair().target
    faults = preflight_faults(plain(graph, LIMITS.capacity - 1), target_for(graph, RTX))
    assert {fault.rule for fault in faults} == {"capacity"}
    assert len(faults) == 2 * 2 * len(graph.spec.past())  # inputs and outputs, in two profiles


def test_refuses_operators_newer_than_the_parser() -> None:
    graph = small_pair().target
    model = plain(graph)
    late = [n for n in model.graph if n.op_type in ("RMSNormalization", "RotaryEmbedding", "TensorScatter")]
    faults = preflight_faults(model, target_for(graph, OLD))
    assert [fault.where for fault in faults] == [f"node {node.name} ({node.op_type})" for node in late]
    command = "build --backend tensorrt --stop-after lower --tensorrt-version 10.14"
    groups = grouped(faults)
    assert [(group.rule, group.text, len(group.places)) for group in groups] == [
        (
            "operator",
            f"TensorRT 10.14 does not take {op_type}, TensorRT 10.15 does. Lower it for TensorRT 10.14: {mend}",
            len([node for node in late if node.op_type == op_type]),
        )
        for op_type, mend in {
            "RMSNormalization": command, "RotaryEmbedding": command, "TensorScatter": f"{command} --plugins on",
        }.items()
    ]  # fmt: skip
    assert groups[0].where == f"{len(groups[0].places)} nodes, the first is {late[0].name} (RMSNormalization)"
    with pytest.raises(ExportError) as error:
        Preflight(target_for(graph, OLD))(model)
    assert error.value.what.splitlines()[1:] == [f"  {group}" for group in groups]


def test_boolean_masks_may_be_shared_elsewhere() -> None:
    graph = small_pair().target
    model = plain(graph)
    share_masks(model)
    assert preflight_faults(model, target_for(graph, NEW)) == []


def test_no_mend_is_an_internal_pass() -> None:
    """Users have commands, not passes: of everything that a portable graph lacks, and an old parser."""
    graph = small_pair().target
    for parser in (RTX, OLD, NEW):
        for fault in preflight_faults(graph.portable(), target_for(graph, parser)):
            for name in ("Expand", "Simplify", "FixCapacity", "BindPlugins", "AdditiveMasks", "Inline"):
                assert name not in fault.text


def test_faults_are_grouped_by_rule_and_text() -> None:
    faults = [
        Fault("node b (Add)", "dtype", "x"),
        Fault("input a", "interface", "x"),
        Fault("node a (Add)", "dtype", "x"),
        Fault("output a", "interface", "x"),
        Fault("node c (Add)", "dtype", "y"),
    ]
    assert [(group.rule, group.where, group.text) for group in grouped(faults)] == [
        ("dtype", "2 nodes, the first is b (Add)", "x"),
        ("interface", "2 places, the first is input a", "x"),
        ("dtype", "node c (Add)", "y"),
    ]
    assert [place for group in grouped(faults) for place in group.places] == [
        faults[index].where for index in (0, 2, 1, 3, 4)
    ]


# --- inference ---


def without_types(model: ir.Model) -> ir.Model:
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    return model


def test_dtypes_are_inferred() -> None:
    graph = small_pair().target
    assert preflight_faults(without_types(copy_model(small_target())), target_for(graph, NEW)) == []


def test_a_domain_that_is_not_imported_hides_what_it_makes_alone(caplog: pytest.LogCaptureFixture) -> None:
    graph, model = small_pair().target, without_types(copy_model(small_target()))
    before = dict(model.opset_imports)
    node = [node for node in model.graph if node.op_type == "Sigmoid"][-1]  # of the last layer
    node.domain = "com.other"
    faults = preflight_faults(model, target_for(graph, NEW))
    assert [fault.where for fault in faults if fault.rule == "domain"] == [f"node {node.name} (Sigmoid)"]
    after = list(model.graph)[list(model.graph).index(node) :]
    unknown = {fault.where for fault in faults if fault.rule == "dtype"}
    assert unknown
    assert unknown <= {f"node {each.name} ({each.op_type})" for each in after}
    assert dict(model.opset_imports) == before
    assert caplog.records == []


def test_inference_that_fails_is_a_fault_and_logs_no_stack(caplog: pytest.LogCaptureFixture) -> None:
    graph, model = small_pair().target, without_types(copy_model(small_target()))
    del model.opset_imports[""]
    faults = preflight_faults(model, target_for(graph, NEW))
    assert "opset import ai.onnx" in {fault.where for fault in faults}
    assert caplog.records == []
    logging.getLogger("onnx_ir.passes.common.shape_inference").warning("heard")
    assert caplog.messages == ["heard"]


# --- profiles ---


def profile_faults(given: tuple[Profile, ...]) -> list[str]:
    graph = small_pair().target
    faults = preflight_faults(small_target(), target_for(graph, RTX, profiles=given))
    assert {fault.rule for fault in faults} <= {"profile"}
    return [str(fault) for fault in faults]


def with_range(name: str, **sizes: int) -> tuple[Profile, ...]:
    decode, prefill = profiles("target", LIMITS)
    return dataclasses.replace(decode, dims=decode.dims | {name: DimRange(**sizes)}), prefill


def test_refuses_profiles() -> None:
    decode, prefill = profiles("target", LIMITS)
    without = {name: range_ for name, range_ in decode.dims.items() if name != "R"}
    assert profile_faults(()) == ["target graph: has no optimisation profile, and its dimensions are dynamic"]
    place = "target graph, profile decode: "
    missing = profile_faults((dataclasses.replace(decode, dims=without), prefill))
    assert missing == [f"{place}input logit_rows has no range for dimension 1 (R)"]
    (order,) = profile_faults(with_range("Q", min=1, opt=9, max=8))
    assert order == f"{place}dimension Q has min 1, opt 9, max 8; they must be in this order"
    (zero,) = profile_faults(with_range("Q", min=0, opt=1, max=8))
    assert zero == f"{place}dimension Q has min 0; it must be at least 1"


@given(st.tuples(*[st.integers(-1, 4)] * 3))
def test_ranges_are_ordered_and_positive(sizes: tuple[int, int, int]) -> None:
    least, opt, most = sizes
    found = profile_faults(with_range("Q", min=least, opt=opt, max=most))
    assert bool(found) == (sorted(sizes) != list(sizes) or least <= 0)
