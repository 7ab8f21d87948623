"""Custom operators against a registry of plugins: name, version, namespace, fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import onnx
import onnx_ir as ir

from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.ops import DOMAIN, kv_injection_onnx, staircase_attention_onnx
from dflash_trt.passes.bind_plugins import PLUGIN_ATTRIBUTES
from dflash_trt.preflight.fault import Fault, lowering, place

SCHEMAS = {schema.name: schema for schema in (kv_injection_onnx.schema(), staircase_attention_onnx.schema())}
_WITH_PLUGINS = "--plugins on"
# what the parser makes of an attribute, whatever the creator says of the field; integers it cuts to 32 bits
_INTEGERS = frozenset({"INT32", "INT64"})
_KINDS = {
    ir.AttributeType.FLOAT: frozenset({"FLOAT32"}),
    ir.AttributeType.FLOATS: frozenset({"FLOAT32"}),
    ir.AttributeType.INT: _INTEGERS,
    ir.AttributeType.INTS: _INTEGERS,
    ir.AttributeType.STRING: frozenset({"CHAR"}),
}
_FIELD_TYPES = {onnx.defs.OpSchema.AttrType.FLOAT: "FLOAT32", onnx.defs.OpSchema.AttrType.INT: "INT32"}


class Registry(Protocol):
    """What TensorRT knows of plugins."""

    def creator_fields(self, name: str, version: str, namespace: str) -> Mapping[str, str] | None:
        """The fields (name -> type, such as FLOAT32) of a registered creator; None where there is none."""


class LibraryRegistry:
    """What the plugin library registers by the operators' schemas: for machines without TensorRT."""

    def creator_fields(self, name: str, version: str, namespace: str) -> Mapping[str, str] | None:
        ours = {"plugin_version": version, "plugin_namespace": namespace} == PLUGIN_ATTRIBUTES
        if not ours or name not in SCHEMAS:
            return None
        return {field: _FIELD_TYPES[attribute.type] for field, attribute in SCHEMAS[name].attributes.items()}


def is_custom(node: ir.Node) -> bool:
    """Whether only a plugin can run a node."""
    return node.domain == DOMAIN or not PLUGIN_ATTRIBUTES.keys().isdisjoint(node.attributes)


def plugin_faults(model: ir.Model, parser: ParserVersion, registry: Registry) -> Iterator[Fault]:
    """What keeps custom nodes from reaching their plugins, and names that lead others there."""
    for domain, name, overload in model.functions:
        where = f"function {domain}::{name}" + (f" (overload {overload})" if overload else "")
        mend = lowering(parser) if domain == DOMAIN else "Inline it"
        yield Fault(where, "function", f"a parser takes its body for every node of that name. {mend}")
    for node in model.graph.all_nodes():
        yield from _name_faults(node)
        if not is_custom(node):
            continue
        if parser.flavour == "tensorrt-rtx":
            yield Fault(place(node), "plugin", f"{parser.product} takes no plugins. {lowering(parser)}")
            continue
        unbound = list(_unbound(node))
        for reason in unbound:
            yield Fault(place(node), "unbound", f"{reason}. {lowering(parser, _WITH_PLUGINS)}")
        if not unbound:
            yield from _creator_faults(node, parser, registry)


def _name_faults(node: ir.Node) -> Iterator[Fault]:
    """Parsers look operators up by name alone, native ones first."""
    if node.domain == "" and node.op_type in SCHEMAS:
        text = f"has the name of a plugin and no domain; plugins are of domain {DOMAIN}. Set it"
        yield Fault(place(node), "name", text)
    if is_custom(node) and onnx.defs.has(node.op_type):
        text = "is named like a standard operator, which the parser would take it for. Give it a name of its own"
        yield Fault(place(node), "name", text)


def _unbound(node: ir.Node) -> Iterator[str]:
    missing = [name for name in PLUGIN_ATTRIBUTES if name not in node.attributes]
    if missing:
        yield f"is a call and no plugin: it has no attribute {' and no '.join(missing)}"
    for name in (name for name in PLUGIN_ATTRIBUTES if name in node.attributes):
        if node.attributes[name].type != ir.AttributeType.STRING:
            yield f"attribute {name} is {node.attributes[name].type}; it must be a string"
    if node.overload:
        yield f"is a call and no plugin: it has the overload {node.overload}"
    if None in node.inputs:
        yield "has an absent input among its inputs; plugins tell by the number of inputs"


def _creator_faults(node: ir.Node, parser: ParserVersion, registry: Registry) -> Iterator[Fault]:
    version, namespace = (node.attributes[name].as_string() for name in PLUGIN_ATTRIBUTES)
    fields = registry.creator_fields(node.op_type, version, namespace)
    if fields is None:
        what = f"no plugin creator {node.op_type} of version {version!r} and namespace {namespace!r} is registered"
        yield Fault(place(node), "plugin", f"{what}. {_mend(node.op_type, version, namespace, parser)}")
        return
    given = {name: value for name, value in node.attributes.items() if name not in PLUGIN_ATTRIBUTES}
    for name in (name for name in fields if name not in given):
        text = f"field {name} ({fields[name]}) of the plugin is not given. Add the attribute"
        yield Fault(place(node), "field", text)
    for name, attribute in given.items():
        reason = _field_fault(attribute, fields.get(name))
        if reason is not None:
            mend = f"The plugin has the fields {', '.join(f'{n} ({kind})' for n, kind in fields.items()) or 'none'}"
            yield Fault(place(node), "field", f"attribute {name} {reason}. {mend}")


def _mend(name: str, version: str, namespace: str, parser: ParserVersion) -> str:
    """Which of the three is not what the library registers."""
    if name not in SCHEMAS:
        return f"The plugin library has {', '.join(SCHEMAS)}"
    ours = " and ".join(PLUGIN_ATTRIBUTES.values())
    if (version, namespace) != tuple(PLUGIN_ATTRIBUTES.values()):
        return f"The plugin library registers version and namespace {ours}. {lowering(parser, _WITH_PLUGINS)}"
    return "Load the plugin library, or build it: dflash-trt plugins build"


def _field_fault(attribute: ir.Attr, field: str | None) -> str | None:
    """Why the value of an attribute cannot be that of a field; None if it can."""
    if field is None:
        return "is no field of the plugin, which never sees it"
    if attribute.is_ref():
        return "refers to an attribute of a function; it must be a value"
    if field not in _KINDS.get(attribute.type, ()):
        return f"is {attribute.type}; the field is {field}"
    values = [attribute.value] if attribute.type == ir.AttributeType.INT else attribute.value
    if field in _INTEGERS and any(not -(1 << 31) <= value < 1 << 31 for value in values):
        return f"is {attribute.value}, more than 32 bits hold"
    return None
