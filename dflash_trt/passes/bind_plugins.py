"""Makes every call of a custom operator a node that TensorRT's ONNX parser takes for a plugin of the library.

The parser looks a creator up by the node's operator name, `plugin_version` and `plugin_namespace`, and hands it those
attributes that the creator names. Function bodies have to go: the parser knows them by name alone, whatever their
overload, and that of TensorRT 10.1 prefers them to plugins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN, VERSION, kv_injection_onnx, staircase_attention_onnx
from dflash_trt.plugins.kernels.tiling import MAX_QUERIES, PLUGIN_HEAD_DIMS

PLUGIN_ATTRIBUTES = {"plugin_version": str(VERSION), "plugin_namespace": DOMAIN}
ATTENTION_DTYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

_SCHEMAS = {schema.name: schema for schema in (kv_injection_onnx.schema(), staircase_attention_onnx.schema())}
_ATTENTION = staircase_attention_onnx.NAME
_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
_KINDS = {
    onnx.defs.OpSchema.AttrType.INT: ir.AttributeType.INT,
    onnx.defs.OpSchema.AttrType.FLOAT: ir.AttributeType.FLOAT,
}
_DTYPES = {
    "tensor(int64)": ir.DataType.INT64,
    "tensor(bool)": ir.DataType.BOOL,
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
}


class BindPlugins(ir.passes.InPlacePass):
    """Requires: a portable graph. Ensures: each custom node is a plugin node, and no function of the domain is left.

    Overloads are cleared, and absent optional inputs left out: the plugins tell by the number of inputs. What else the
    graph holds stays as it is.
    """

    def __init__(
        self, head_dims: Sequence[int] = PLUGIN_HEAD_DIMS, attention_dtypes: Sequence[ir.DataType] = ATTENTION_DTYPES
    ) -> None:
        """`head_dims`, `attention_dtypes`: what there are kernels for, by default those in the plugin library."""
        super().__init__()
        self._head_dims = tuple(head_dims)
        self._attention_dtypes = tuple(attention_dtypes)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
        faults = [f"node {node.name} ({node.op_type}): {fault}" for node in nodes for fault in self._faults(node)]
        faults += _hidden_calls(model)
        if faults:
            raise ExportError(
                "\n  ".join(("not every call can become a plugin:", *faults)),
                where="bind_plugins",
                mend="A backend without plugins can run this graph",
            )
        modified = [_bind(node) for node in nodes]
        bodies = [identifier for identifier in model.functions if identifier[0] == DOMAIN]
        for identifier in bodies:
            del model.functions[identifier]
        return ir.passes.PassResult(model, bool(bodies) or any(modified))

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in model.graph.all_nodes() if node.domain == DOMAIN and not _is_bound(node)]
        left += ["::".join(identifier) for identifier in model.functions if identifier[0] == DOMAIN]
        if left:
            raise ir.passes.PostconditionError(f"calls or bodies left after binding: {left}")

    def _faults(self, node: ir.Node) -> Iterator[str]:
        """Why a node cannot become a plugin."""
        schema = _SCHEMAS.get(node.op_type)
        if schema is None:
            yield f"there is no such plugin; there are {', '.join(_SCHEMAS)}"
            return
        yield from _attribute_faults(node, schema)
        if len(node.outputs) != len(schema.outputs):
            yield f"has {len(node.outputs)} outputs; it must have {len(schema.outputs)}"
        names = _input_names(node, schema)
        if names is None:
            yield f"has {len(node.inputs)} inputs; it must have {len(schema.inputs)}, or one less without the optional"
            return
        inputs = dict(zip(names, node.inputs, strict=True))
        yield from _input_faults(inputs, schema)
        yield from self._kernel_faults(node.op_type, inputs)

    def _kernel_faults(self, op_type: str, inputs: dict[str, ir.Value | None]) -> Iterator[str]:
        """Sizes and dtypes without a kernel. Sizes that are not known now, the plugin checks."""
        query_or_key = next(iter(inputs.values()))
        if query_or_key is None:
            return
        head_dim = _size(query_or_key, 3)
        if head_dim not in self._head_dims:
            known = "not known" if head_dim is None else head_dim
            yield f"head_dim is {known}; it must be one of {', '.join(map(str, self._head_dims))}"
        if op_type != _ATTENTION:
            return
        queries = _size(query_or_key, 2)
        if queries is not None and queries > MAX_QUERIES:
            yield f"has {queries} queries; at most {MAX_QUERIES} are possible"
        if query_or_key.dtype not in self._attention_dtypes:
            yield f"dtype is {query_or_key.dtype}; it must be one of {', '.join(map(str, self._attention_dtypes))}"


def _attribute_faults(node: ir.Node, schema: onnx.defs.OpSchema) -> Iterator[str]:
    """A plugin's attributes have no defaults, and the parser cuts integers to 32 bits."""
    for name in schema.attributes.keys() - node.attributes.keys():
        yield f"attribute {name} is missing"
    for name, attribute in node.attributes.items():
        if name in PLUGIN_ATTRIBUTES:
            if attribute.value != PLUGIN_ATTRIBUTES[name]:
                yield f"attribute {name} is {attribute.value!r}; it must be {PLUGIN_ATTRIBUTES[name]!r}"
        elif name not in schema.attributes:
            yield f"attribute {name} is unknown; there are {', '.join(schema.attributes)}"
        elif attribute.is_ref():
            yield f"attribute {name} refers to an attribute of a function; it must be a value"
        elif attribute.type != _KINDS[schema.attributes[name].type]:
            yield f"attribute {name} is {attribute.type}; it must be {_KINDS[schema.attributes[name].type]}"
        elif attribute.type == ir.AttributeType.INT and not -(1 << 31) <= attribute.as_int() < 1 << 31:
            yield f"attribute {name} is {attribute.as_int()}, more than 32 bits hold"


def _input_names(node: ir.Node, schema: onnx.defs.OpSchema) -> list[str] | None:
    """What the inputs are, with the optional one or, in a bound node, without; None for another number of inputs."""
    every = [parameter.name for parameter in schema.inputs]
    required = [parameter.name for parameter in schema.inputs if parameter.option != _OPTIONAL]
    return next((names for names in (every, required) if len(names) == len(node.inputs)), None)


def _input_faults(inputs: dict[str, ir.Value | None], schema: onnx.defs.OpSchema) -> Iterator[str]:
    """`T` is the type of the first input."""
    allowed = {_DTYPES[name] for constraint in schema.type_constraints for name in constraint.allowed_type_strs}
    element = None
    for parameter in schema.inputs:
        if parameter.name not in inputs:
            continue
        value = inputs[parameter.name]
        if value is None:
            if parameter.option != _OPTIONAL:
                yield f"input {parameter.name} is missing"
            continue
        if parameter.type_str != "T":
            expected = {_DTYPES[parameter.type_str]}
        else:
            expected = allowed if element is None else {element}
            element = element or value.dtype
        if value.dtype not in expected:
            names = " or ".join(sorted(map(str, expected)))
            yield f"input {parameter.name} ({value.name}) is {value.dtype or 'of no known dtype'}; it must be {names}"


def _size(value: ir.Value, axis: int) -> int | None:
    """A dimension where it is a number."""
    size = None if value.shape is None or len(value.shape) <= axis else value.shape[axis]
    return size if isinstance(size, int) else None


def _hidden_calls(model: ir.Model) -> Iterator[str]:
    """Calls in functions of others, which stay as they are."""
    for (domain, name, _), function in model.functions.items():
        if domain != DOMAIN:
            for node in function.all_nodes():
                if node.domain == DOMAIN:
                    yield f"node {node.name} ({node.op_type}): is in function {domain}::{name}, which must be inlined"


def _bind(node: ir.Node) -> bool:
    """Makes a call a plugin node; whether it was none."""
    if _is_bound(node):
        return False
    present = [value for value in node.inputs if value is not None]
    for index, value in enumerate(present):
        node.replace_input_with(index, value)
    node.resize_inputs(len(present))
    node.overload = ""
    for name, text in PLUGIN_ATTRIBUTES.items():
        node.attributes[name] = ir.AttrString(name, text)
    return True


def _is_bound(node: ir.Node) -> bool:
    return PLUGIN_ATTRIBUTES.keys() <= node.attributes.keys() and not node.overload and None not in node.inputs
