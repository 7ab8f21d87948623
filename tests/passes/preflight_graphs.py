"""Graphs for the tests of the preflight, changes to them, and what must be said of each change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
from export.small_pair import Graph, Kind, model_bytes, small_pair

from dflash_trt.backends.lowering import lower_tensorrt
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.backends.profiles import profiles
from dflash_trt.errors import ExportError
from dflash_trt.passes.bind_plugins import BindPlugins
from dflash_trt.passes.expand_operators import ExpandOperators
from dflash_trt.passes.fix_capacity import FixCapacity
from dflash_trt.passes.preflight import Preflight, PreflightTarget, preflight_faults
from dflash_trt.passes.simplify import Simplify
from dflash_trt.preflight.fault import grouped
from dflash_trt.runtime.limits import Limits

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


def reads_a_cache(model: ir.Model) -> str:
    past = end(model, "past_key_1")
    model.graph.append(ir.node("Abs", [past], name="second_reader"))
    model.graph.node(-1).outputs[0].name = "read"
    model.graph.node(-1).outputs[0].dtype = past.dtype
    return "past_key_1: is read by node second_reader (Abs)"


Change = Callable[[ir.Model], ir.Node | str]


def refused(model: ir.Model, target: PreflightTarget, where: ir.Node | str, rules: set[str], text: str) -> None:
    before = model_bytes(model)
    faults = preflight_faults(model, target)
    assert {fault.rule for fault in faults} == rules
    with pytest.raises(ExportError) as error:
        Preflight(target)(model)
    place = where if isinstance(where, str) else f"node {where.name} ({where.op_type}): "
    lines = [line.strip() for line in error.value.what.splitlines()[1:]]
    assert lines == [str(group) for group in grouped(faults)]
    told = [str(fault) for fault in faults]
    assert any(place in each for each in told), told
    assert any(text in each for each in told), told
    assert model_bytes(model) == before
