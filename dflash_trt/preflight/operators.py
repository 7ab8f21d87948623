"""Standard operators against what a parser takes, and dtypes as a strongly typed network wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from dflash_trt.backends.parser_ops import Dtypes, Support, first_version, support
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.ops import DOMAIN, OPSET, VERSION
from dflash_trt.preflight.fault import Fault, lowering, place
from dflash_trt.preflight.interface import is_cache
from dflash_trt.preflight.plugins import SCHEMAS, is_custom

_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_DTYPES = {
    "tensor(bool)": ir.DataType.BOOL,
    "tensor(int32)": ir.DataType.INT32,
    "tensor(int64)": ir.DataType.INT64,
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
}
_REPLACED_BY_PLUGINS = ("Attention", "TensorScatter")  # nothing else does their work where there is none of them


def operator_faults(model: ir.Model, parser: ParserVersion) -> Iterator[Fault]:
    """Opsets, domains, and every node of the standard domain."""
    for domain, version in model.opset_imports.items():
        expected = {"": OPSET, DOMAIN: VERSION}.get(domain)
        if expected is None:
            yield Fault(f"opset import {domain}", "opset", "the domain is unknown. Use standard operators instead")
        elif version != expected:
            name = domain or "ai.onnx"
            text = f"is of version {version}; what is known of {parser} is of {expected}. Build it again, or convert it"
            yield Fault(f"opset import {name}", "opset", text)
    if "" not in model.opset_imports:
        yield Fault("opset import ai.onnx", "opset", f"is missing; what is known of {parser} is of {OPSET}")
    for node in model.graph.all_nodes():
        if is_custom(node):
            continue
        if node.domain:
            text = f"is of domain {node.domain}, which {parser} does not know. Use standard operators instead"
            yield Fault(place(node), "domain", text)
            continue
        known = support(node.op_type, parser)
        if known is None:
            if node.op_type not in SCHEMAS:  # plugins without a domain: named by their own rule
                yield Fault(place(node), "operator", _unknown(node.op_type, parser))
            continue
        yield from _support_faults(node, known, parser)


def _unknown(op_type: str, parser: ParserVersion) -> str:
    first = first_version(op_type, parser.flavour)
    if first is None:
        return f"{op_type} is not known to be taken by {parser}. Use other operators instead"
    options = "--plugins on" if op_type in _REPLACED_BY_PLUGINS and parser.flavour == "tensorrt" else ""
    return f"{parser} does not take {op_type}, {first} does. {lowering(parser, options)}"


def _support_faults(node: ir.Node, known: Support, parser: ParserVersion) -> Iterator[Fault]:
    """Numbers and dtypes of inputs and outputs, constants, ranks, fixed dimensions, attributes."""

    def fault(rule: str, text: str) -> Fault:
        return Fault(place(node), rule, text)

    for kind, values, dtypes in (("input", node.inputs, known.inputs), ("output", node.outputs, known.outputs)):
        for index, value in enumerate(values):
            if value is None or not value.name:
                continue
            if index >= len(dtypes) and not known.variadic:
                yield fault("operator", f"has {kind} {index} ({value.name}), which {parser} does not take")
                continue
            yield from _dtype_faults(node, f"{kind} {index}", value, dtypes[min(index, len(dtypes) - 1)])
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        if index in known.constant_inputs and not _is_constant(value):
            yield fault("constant", f"input {index} ({value.name}) must be a constant for {parser}")
        rank = known.ranks.get(index)
        if rank is not None and value.shape is not None and len(value.shape) != rank:
            yield fault("shape", f"input {index} ({value.name}) has {len(value.shape)} dimensions; it must have {rank}")
    for index, axis in known.static_dimensions:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None or (value.is_graph_input() and is_cache(value)):  # said of all caches at once
            continue
        if value.shape is not None and len(value.shape) > axis:
            size = value.shape[axis]
            if not isinstance(size, int):
                text = f"dimension {axis} of input {index} ({value.name}) is {size}; it must be a number"
                yield fault("capacity", f"{text}. {lowering(parser)}")
    for name, attribute in node.attributes.items():
        allowed = known.attributes.get(name)
        if allowed is not None and attribute.value not in allowed:
            choice = " or ".join(map(str, allowed))
            rule = f"it must be {choice}, or absent" if allowed else "it must be absent"
            yield fault("attribute", f"attribute {name} is {attribute.value}; {rule} for {parser}")


def _dtype_faults(node: ir.Node, what: str, value: ir.Value, allowed: Dtypes) -> Iterator[Fault]:
    if value.dtype is None:
        text = f"{what} is of no known dtype, and none can be inferred. Give it one in the graph's value_info"
        yield Fault(place(node), "dtype", text)
    elif value.dtype not in allowed:
        names = " or ".join(sorted(map(str, allowed)))
        yield Fault(place(node), "dtype", f"{what} ({value.name}) is {value.dtype}; it must be {names}. Cast it")


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    if producer is not None:
        return producer.op_type == "Constant"
    return value.is_initializer() and not value.is_graph_input()


def typing_faults(model: ir.Model) -> Iterator[Fault]:
    """Inputs of a node that must be of one dtype and are not: a strongly typed network casts nothing by itself."""
    for node in model.graph.all_nodes():
        schema = SCHEMAS.get(node.op_type) if is_custom(node) else _standard_schema(node)
        if schema is None:
            continue
        names = _formal(node, schema)
        if names is None:
            text = f"has {len(node.inputs)} inputs; it must have {len(schema.inputs)}, or one less without the optional"
            yield Fault(place(node), "plugin", text)
            continue
        yield from _group_faults(node, schema, names)


def _standard_schema(node: ir.Node) -> onnx.defs.OpSchema | None:
    known = node.domain == "" and onnx.defs.has(node.op_type)
    return onnx.defs.get_schema(node.op_type, OPSET) if known else None


def _formal(node: ir.Node, schema: onnx.defs.OpSchema) -> Sequence[onnx.defs.OpSchema.FormalParameter] | None:
    """The parameter of each input; a plugin's optional inputs are left out where they are absent."""
    every = list(schema.inputs)
    if is_custom(node):
        required = [parameter for parameter in every if parameter.option != _OPTIONAL]
        return next((some for some in (every, required) if len(some) == len(node.inputs)), None)
    while every and every[-1].option == _VARIADIC and len(every) < len(node.inputs):
        every.append(every[-1])
    return every


def _group_faults(
    node: ir.Node, schema: onnx.defs.OpSchema, parameters: Sequence[onnx.defs.OpSchema.FormalParameter]
) -> Iterator[Fault]:
    """Parameters of one type by the schema; and of a plugin, whose dtypes are in no table, each dtype."""
    first: dict[str, ir.Value] = {}
    custom = is_custom(node)
    for value, parameter in zip(node.inputs, parameters, strict=False):
        if value is None or value.dtype is None:
            continue
        group = _group(node, value, parameter)
        other = first.setdefault(group, value)
        if other.dtype != value.dtype:
            yield _two_dtypes(node, value, other)
        elif custom and value.dtype not in (allowed := _allowed(group)):
            names = " or ".join(sorted(map(str, allowed)))
            text = f"input {parameter.name} ({value.name}) is {value.dtype}; it must be {names}. Cast it"
            yield Fault(place(node), "dtype", text)
    for value, parameter in zip(node.outputs, schema.outputs, strict=False):
        source = first.get(_group(node, value, parameter))
        if source is not None and value.dtype not in (None, source.dtype):
            yield _two_dtypes(node, value, source)


def _group(node: ir.Node, value: ir.Value, parameter: onnx.defs.OpSchema.FormalParameter) -> str:
    """Attention alone wants more than the standard says: queries, keys, values and an additive mask of one dtype."""
    floats = node.op_type == "Attention" and value.dtype is not None and value.dtype.is_floating_point()
    return "floats" if floats else parameter.type_str


def _allowed(group: str) -> Dtypes:
    return frozenset({_DTYPES[group]}) if group in _DTYPES else _FLOATS


def _two_dtypes(node: ir.Node, value: ir.Value, other: ir.Value) -> Fault:
    text = f"{value.name} is {value.dtype}, and {other.name} is {other.dtype}; they must be of one dtype"
    return Fault(place(node), "dtype", f"{text}. Cast one of them")


def weight_faults(model: ir.Model, dtype: ir.DataType) -> Iterator[Fault]:
    """Floating-point weights are of the graph's dtype or float32; others only a Cast may read."""
    for value in model.graph.initializers.values():
        if value.dtype is None or not value.dtype.is_floating_point() or value.dtype in (dtype, ir.DataType.FLOAT):
            continue
        for node in dict.fromkeys(use.node for use in value.uses()):
            if node.op_type not in ("Cast", "CastLike"):
                text = f"reads weight {value.name}, which is {value.dtype} in a graph of {dtype}. Cast it"
                yield Fault(place(node), "weights", text)


def mask_faults(model: ir.Model, parser: ParserVersion) -> Iterator[Fault]:
    """Boolean masks of several nodes: the compiler of TensorRT-RTX 1.7 fails with "Graph contains more than one op
    named ..."."""
    if parser.flavour != "tensorrt-rtx":
        return
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph.all_nodes():
        mask = node.inputs[3] if node.op_type == "Attention" and len(node.inputs) > 3 else None
        if mask is not None and mask.dtype == ir.DataType.BOOL:
            readers.setdefault(mask, []).append(node)
    for mask, nodes in readers.items():
        if len(nodes) > 1:
            names = ", ".join(str(node.name) for node in nodes[1:])
            text = f"shares its boolean mask {mask.name} with {names}, which {parser.product} cannot compile"
            yield Fault(place(nodes[0]), "mask", f"{text}. {lowering(parser)}")
