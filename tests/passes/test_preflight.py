"""Preflight: what TensorRT builds passes, each kind of fault is refused by the name of its node, nothing is changed."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from export.small_pair import Graph, Kind, copy_model, model_bytes, small_pair
from hypothesis import given
from hypothesis import strategies as st
from rtx import Parser

from dflash_trt.backends.lowering import lower_tensorrt
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.backends.profiles import DimRange, Profile, profiles
from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN
from dflash_trt.passes.additive_masks import AdditiveMasks
from dflash_trt.passes.bind_plugins import BindPlugins
from dflash_trt.passes.expand_operators import ExpandOperators
from dflash_trt.passes.fix_capacity import FixCapacity
from dflash_trt.passes.preflight import Preflight, PreflightTarget, preflight_faults
from dflash_trt.passes.simplify import Simplify
from dflash_trt.preflight.plugins import LibraryRegistry
from dflash_trt.runtime.limits import Limits
from plugins import native

LIMITS = Limits(max_batch_size=2, max_seq_len=40, max_input_len=30, block_size=4, prefill_chunk=8)
RTX = ParserVersion.parse("1.7", "tensorrt-rtx")
NEW, OLD = ParserVersion.parse("10.16"), ParserVersion.parse("10.14")
ALL_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
KINDS = {
    "dflash": Kind(),
    "bfloat16": Kind(dtype="bfloat16"),
    "dflare": Kind(system="dflare"),
    "dflare-float16": Kind(system="dflare", dtype="float16", stored="bfloat16"),
    "llama": Kind(family="llama", windows=False, tie=False),
}


def plain(graph: Graph, capacity: int = LIMITS.capacity) -> ir.Model:
    """Of standard operators, as for TensorRT-RTX."""
    return lower_tensorrt(graph.portable(), capacity, RTX, plugins=False)


def bound(graph: Graph, parser: ParserVersion = NEW) -> ir.Model:
    """Of plugins, as if there were kernels for the small pair."""
    model = graph.portable()
    bind = BindPlugins(head_dims=(16,), attention_dtypes=ALL_FLOATS)
    for each in (bind, Simplify(), ExpandOperators(parser), Simplify(), FixCapacity(LIMITS.capacity)):
        each(model)
    return model


@functools.cache
def small_target(with_plugins: bool = False) -> ir.Model:
    """Treat it as read-only."""
    graph = small_pair().target
    return bound(graph) if with_plugins else plain(graph)


def target_for(graph: Graph, parser: ParserVersion, **changes: Any) -> PreflightTarget:
    whole = PreflightTarget(parser, graph.spec, profiles(graph.spec.role, LIMITS))
    return dataclasses.replace(whole, **changes)


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


def first(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph.all_nodes() if node.op_type == op_type)


def end(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in (*model.graph.inputs, *model.graph.outputs) if value.name == name)


def cast(model: ir.Model, op_type: str, index: int, dtype: ir.DataType) -> ir.Node:
    """Puts a Cast in front of an input of the first such node, which is returned."""
    node = first(model, op_type)
    new = ir.node("Cast", [node.inputs[index]], {"to": dtype.value}, name="the_cast")
    new.outputs[0].name, new.outputs[0].dtype = "the_cast_output", dtype
    model.graph.insert_before(node, new)
    node.replace_input_with(index, new.outputs[0])
    return node


def sets(op_type: str, name: str, value: Any) -> Callable[[ir.Model], ir.Node]:
    """Sets an attribute of the first such node, None to take it away."""

    def change(model: ir.Model) -> ir.Node:
        node = first(model, op_type)
        if value is None:
            del node.attributes[name]
        else:
            node.attributes[name] = ir.convenience.convert_attribute(name, value)
        return node

    return change


def casts(op_type: str, index: int, dtype: str) -> Callable[[ir.Model], ir.Node]:
    return lambda model: cast(model, op_type, index, ir.DataType[dtype])


def renames(op_type: str, name: str, domain: str | None = None) -> Callable[[ir.Model], ir.Node]:
    def change(model: ir.Model) -> ir.Node:
        node = first(model, op_type)
        node.op_type = name
        node.domain = node.domain if domain is None else domain
        return node

    return change


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


def overloads(model: ir.Model) -> ir.Node:
    node = first(model, "KVInjection")
    node.overload = "window"
    return node


def feeds_integers(model: ir.Model) -> ir.Node:
    node = first(model, "StaircaseAttention")
    for index in range(3):
        assert node.inputs[index] is not None
        new = ir.node("Cast", [node.inputs[index]], {"to": ir.DataType.INT32.value}, name=f"cast_{index}")
        new.outputs[0].name, new.outputs[0].dtype = f"cast_output_{index}", ir.DataType.INT32
        model.graph.insert_before(node, new)
        node.replace_input_with(index, new.outputs[0])
    return node


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


def reads_a_cache(model: ir.Model) -> str:
    past = end(model, "past_key_1")
    model.graph.append(ir.node("Abs", [past], name="second_reader"))
    model.graph.node(-1).outputs[0].name = "read"
    model.graph.node(-1).outputs[0].dtype = past.dtype
    return "past_key_1: is read by node second_reader (Abs)"


def copies_a_cache(model: ir.Model) -> str:
    past, present = end(model, "past_value_0"), end(model, "present_value_0")
    node = present.producer()
    new = ir.node("Identity", [past], name="copy")
    new.outputs[0].name, new.outputs[0].dtype, new.outputs[0].shape = "copied", past.dtype, past.shape
    model.graph.insert_before(node, new)
    node.replace_input_with(list(node.inputs).index(past), new.outputs[0])
    return "present_value_0"


def swaps_a_plugins_caches(model: ir.Model) -> str:
    node = first(model, "KVInjection")
    key, value = node.inputs[-2:]
    node.replace_input_with(len(node.inputs) - 2, value)
    node.replace_input_with(len(node.inputs) - 1, key)
    return str(node.outputs[0].name)


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


def imports(domain: str, version: int) -> Callable[[ir.Model], str]:
    def change(model: ir.Model) -> str:
        model.opset_imports[domain] = version
        return f"opset import {domain or 'ai.onnx'}"

    return change


def keeps_a_function(model: ir.Model) -> str:
    text = f'<domain: "{DOMAIN}", opset_import: ["": 24]> KVInjection (x) => (y) {{ y = Neg (x) }}'
    function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    model.functions[function.identifier()] = function
    return f"function {DOMAIN}::KVInjection"


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


def loses_a_dtype(model: ir.Model) -> str:
    """Of what an operator of no known schema makes."""
    node = first(model, "StaircaseAttention")
    node.outputs[0].type = None
    return f"node {node.outputs[0].uses()[0].node.name} ("


Change = Callable[[ir.Model], ir.Node | str]
PLAIN: list[tuple[str, Change, set[str], str]] = [
    ("float64", doubles, {"dtype"}, "output 0 (the_cast_output) is DOUBLE; it must be"),
    ("mixed addition", casts("Add", 1, "FLOAT16"), {"dtype"}, "is FLOAT16, and"),
    ("mixed product", casts("MatMul", 0, "FLOAT16"), {"dtype"}, "they must be of one dtype"),
    ("output of its own dtype", types_a_sum, {"dtype"}, "is FLOAT16, and"),
    ("mixed mask", casts("Attention", 3, "FLOAT16"), {"dtype"}, "the_cast_output is FLOAT16, and"),
    ("converted weight", converts_a_weight, {"weights"}, "which is FLOAT16 in a graph of FLOAT"),
    ("unknown operator", renames("Sigmoid", "Erf"), {"operator"}, "is not known to be taken by TensorRT-RTX 1.7"),
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
    ("capacity", reshapes("past_key_1", ["B", 2, "C", 16]), {"capacity"}, "varies (dimension 2 is C). Fix it"),
    ("capacities", reshapes("past_key_1", ["B", 2, 99, 16]), {"capacity"}, "has 99 slots, input past_key_0 has"),
    ("opset", imports("", 21), {"opset"}, "is of version 21"),
    ("imported domain", imports("com.other", 1), {"opset"}, "the domain is unknown"),
]
BOUND: list[tuple[str, Change, set[str], str]] = [
    ("version", sets("KVInjection", "plugin_version", "2"), {"plugin"}, "KVInjection of version '2' and namespace"),
    ("namespace", sets("KVInjection", "plugin_namespace", ""), {"plugin"}, "of version '1' and namespace ''"),
    ("version as a number", sets("KVInjection", "plugin_version", 1), {"unbound"}, "is INT; it must be a string"),
    ("unbound", sets("StaircaseAttention", "plugin_version", None), {"unbound"}, "it has no attribute plugin_version"),
    ("overload", overloads, {"unbound"}, "it has the overload window"),
    ("creator", renames("StaircaseAttention", "Unheard"), {"plugin"}, "no plugin creator Unheard of version '1'"),
    ("native name", renames("StaircaseAttention", "Attention"), {"name", "plugin"}, "is named like a standard"),
    ("missing field", sets("KVInjection", "eps", None), {"field"}, "field eps (FLOAT32) of the plugin is not given"),
    ("extra field", sets("KVInjection", "epsilon", 1e-6), {"field"}, "attribute epsilon is no field of the plugin"),
    ("field type", sets("KVInjection", "eps", 1), {"field"}, "attribute eps is INT; the field is FLOAT32"),
    ("field size", sets("StaircaseAttention", "causal", 1 << 31), {"field"}, "is 2147483648, more than 32 bits hold"),
    ("input dtype", casts("StaircaseAttention", 3, "INT32"), {"dtype"}, "(the_cast_output) is INT32; it must be INT64"),
    ("query dtype", casts("StaircaseAttention", 0, "FLOAT16"), {"dtype"}, "they must be of one dtype"),
    ("integers", feeds_integers, {"dtype"}, "query (cast_output_0) is INT32; it must be BFLOAT16 or"),
    ("unknown dtype", loses_a_dtype, {"dtype"}, "is of no known dtype"),
    ("function", keeps_a_function, {"function"}, "a parser takes its body for every node of that name"),
    ("plugin's caches", swaps_a_plugins_caches, {"in-place"}, "is not one TensorScatter into its past"),
    ("second reader", reads_a_cache, {"in-place"}, "besides its update"),
]


def refused(model: ir.Model, target: PreflightTarget, where: ir.Node | str, rules: set[str], text: str) -> None:
    before = model_bytes(model)
    faults = preflight_faults(model, target)
    assert {fault.rule for fault in faults} == rules
    with pytest.raises(ExportError) as error:
        Preflight(target)(model)
    place = where if isinstance(where, str) else f"node {where.name} ({where.op_type}): "
    lines = error.value.what.splitlines()[1:]
    assert [line.strip() for line in lines] == [str(fault) for fault in faults]
    assert any(place in line for line in lines), lines
    assert any(text in line for line in lines), lines
    assert model_bytes(model) == before


@pytest.mark.parametrize(("change", "rules", "text"), [row[1:] for row in PLAIN], ids=[row[0] for row in PLAIN])
def test_refuses_faults_of_a_standard_graph(change: Change, rules: set[str], text: str) -> None:
    graph, model = small_pair().target, copy_model(small_target())
    refused(model, target_for(graph, RTX), change(model), rules, text)


@pytest.mark.parametrize(("change", "rules", "text"), [row[1:] for row in BOUND], ids=[row[0] for row in BOUND])
def test_refuses_faults_of_a_bound_graph(change: Change, rules: set[str], text: str) -> None:
    graph, model = small_pair().target, copy_model(small_target(with_plugins=True))
    refused(model, target_for(graph, NEW), change(model), rules, text)


def test_refuses_calls_and_bodies() -> None:
    """The portable graph, with all that keeps it from being built."""
    graph = small_pair().target
    model = graph.portable()
    FixCapacity(LIMITS.capacity)(model)
    calls = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    faults = preflight_faults(model, target_for(graph, NEW))
    unbound = [fault.where for fault in faults if fault.rule == "unbound" and "plugin_version" in fault.text]
    assert unbound == [f"node {node.name} ({node.op_type})" for node in calls]
    assert len([fault for fault in faults if fault.rule == "function"]) == len(model.functions)


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
    assert {fault.rule for fault in faults} == {"operator"}
    assert "TensorRT 10.14 does not take it, TensorRT 10.15 does" in faults[0].text


def test_refuses_every_plugin_on_rtx() -> None:
    graph = small_pair().drafter
    model = bound(graph)
    calls = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    faults = preflight_faults(model, target_for(graph, RTX))
    assert [fault.where for fault in faults] == [f"node {node.name} ({node.op_type})" for node in calls]
    assert {fault.rule for fault in faults} == {"plugin"}


def test_boolean_masks_may_be_shared_elsewhere() -> None:
    graph = small_pair().target
    model = plain(graph)
    share_masks(model)
    assert preflight_faults(model, target_for(graph, NEW)) == []


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


# --- the registry of TensorRT ---


class DumpedRegistry:
    """What the registry of a TensorRT answered in its own process."""

    def __init__(self, creators: list[list[Any]]) -> None:
        self.creators = {tuple(identity): fields for identity, fields in creators}

    def creator_fields(self, name: str, version: str, namespace: str) -> Mapping[str, str] | None:
        return self.creators.get((name, version, namespace))


@functools.cache
def real_registry(version: str, kernels: str) -> DumpedRegistry:
    folder = Path(os.environ.get("TENSORRT_LEAN", native.ROOT / "build")) / f"tensorrt-lean-{version}"
    if not folder.exists():
        pytest.skip(f"the lean runtime of TensorRT {version} is not in {folder}")
    library = native.build().library
    if kernels == "compiled":
        library = native.ROOT / "build" / "plugins" / library.name
        if not library.exists():
            pytest.skip(f"the library with the compiled kernels is not in {library.parent}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(native.ROOT)])}
    command = [sys.executable, str(Path(__file__).with_name("registry_dump.py")), str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return DumpedRegistry(json.loads(done.stdout.splitlines()[-1]))


real = pytest.mark.parametrize(
    ("version", "kernels"), [("10.16", "stand-ins"), ("11.4", "stand-ins"), ("10.16", "compiled"), ("11.4", "compiled")]
)


@real
@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("kind", ["bfloat16", "dflare-float16"])
def test_bound_graphs_pass_with_the_real_registry(version: str, kernels: str, kind: str, role: str) -> None:
    registry = real_registry(version, kernels)
    graph = small_pair(KINDS[kind]).graph(role)
    parser = ParserVersion.parse(version)
    assert preflight_faults(bound(graph, parser), target_for(graph, parser, registry=registry)) == []


@real
@pytest.mark.parametrize("row", [row for row in BOUND if row[2] <= {"plugin", "field"}], ids=lambda row: row[0])
def test_the_real_registry_refuses_the_same(version: str, kernels: str, row: tuple[Any, ...]) -> None:
    _, change, rules, text = row
    graph, model = small_pair().target, copy_model(small_target(with_plugins=True))
    refused(model, target_for(graph, NEW, registry=real_registry(version, kernels)), change(model), rules, text)


@real
def test_what_is_said_without_a_registry_is_what_it_says(version: str, kernels: str) -> None:
    registry = real_registry(version, kernels)
    ours = {identity: fields for identity, fields in registry.creators.items() if identity[2] == DOMAIN}
    assert {identity[0] for identity in ours} == {"KVInjection", "StaircaseAttention"}
    for identity, fields in ours.items():
        assert LibraryRegistry().creator_fields(*identity) == fields


def test_a_registry_without_the_library_refuses_every_plugin() -> None:
    graph = small_pair().target
    model = bound(graph)
    calls = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    faults = preflight_faults(model, target_for(graph, NEW, registry=DumpedRegistry([])))
    assert [fault.where for fault in faults] == [f"node {node.name} ({node.op_type})" for node in calls]
    assert all("dflash-trt plugins build" in fault.text for fault in faults)
