"""Preflight of plugins: what keeps a custom node from its plugin is refused, and the real registries say the same."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from export.small_pair import copy_model, small_pair
from passes.preflight_graphs import (
    KINDS,
    LIMITS,
    NEW,
    RTX,
    Change,
    bound,
    casts,
    first,
    reads_a_cache,
    refused,
    renames,
    sets,
    small_target,
    target_for,
)

from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.ops import DOMAIN
from dflash_trt.passes.fix_capacity import FixCapacity
from dflash_trt.passes.preflight import preflight_faults
from dflash_trt.preflight.plugins import LibraryRegistry
from plugins import native


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


def swaps_a_plugins_caches(model: ir.Model) -> str:
    node = first(model, "KVInjection")
    key, value = node.inputs[-2:]
    node.replace_input_with(len(node.inputs) - 2, value)
    node.replace_input_with(len(node.inputs) - 1, key)
    return str(node.outputs[0].name)


def keeps_a_function(model: ir.Model) -> str:
    text = f'<domain: "{DOMAIN}", opset_import: ["": 24]> KVInjection (x) => (y) {{ y = Neg (x) }}'
    function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    model.functions[function.identifier()] = function
    return f"function {DOMAIN}::KVInjection"


def loses_a_dtype(model: ir.Model) -> str:
    """Of what an operator of no known schema makes."""
    node = first(model, "StaircaseAttention")
    node.outputs[0].type = None
    return f"node {node.outputs[0].uses()[0].node.name} ("


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


def test_refuses_every_plugin_on_rtx() -> None:
    graph = small_pair().drafter
    model = bound(graph)
    calls = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    faults = preflight_faults(model, target_for(graph, RTX))
    assert [fault.where for fault in faults] == [f"node {node.name} ({node.op_type})" for node in calls]
    assert {fault.rule for fault in faults} == {"plugin"}


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
