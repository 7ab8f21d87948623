"""Writes the standard operators that an older TensorRT's ONNX parser lacks in operators that it has.

What is computed, in which order and in which dtypes, is what ONNX's own definition of each operator says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import onnx_ir as ir

from dflash_trt.backends.parser_ops import first_version, support
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.errors import ExportError

_PAST_THE_END = (1 << 63) - 1


class ExpandOperators(ir.passes.InPlacePass):
    """Requires: a graph without functions, plugin-bound or not. Ensures: every operator that `parser_ops` knows and
    this pass can write is one that the parser takes.

    New nodes have no dtypes and shapes yet, and equal ones are not shared: `Simplify` does both.
    """

    def __init__(self, parser: ParserVersion) -> None:
        super().__init__()
        self._parser = parser

    def requires(self, model: ir.Model) -> None:
        if model.functions:
            raise ir.passes.PreconditionError(f"functions must be inlined before: {list(model.functions)}")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if self._lacks(node)]
        self._refuse([node for node in nodes if node.op_type not in _EXPANSIONS])
        for node in nodes:
            _replace(node)
        return ir.passes.PassResult(model, bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in model.graph.all_nodes() if self._lacks(node)]
        if left:
            raise ir.passes.PostconditionError(f"nodes left that {self._parser} does not take: {left}")

    def _lacks(self, node: ir.Node) -> bool:
        """Operators that are not in the table are none of this pass's business."""
        known = node.domain == "" and first_version(node.op_type, self._parser.flavour) is not None
        return known and support(node.op_type, self._parser) is None

    def _refuse(self, nodes: Sequence[ir.Node]) -> None:
        """Raises if there are any."""
        if not nodes:
            return
        faults = []
        for op_type, count in Counter(node.op_type for node in nodes).items():
            first = next(node for node in nodes if node.op_type == op_type)
            since = first_version(op_type, self._parser.flavour)
            having = f"{count} nodes have it, the first is" if count > 1 else "the node that has it is"
            faults.append(f"{op_type} is there from {since} on; {having} {first.name}")
        mend = f"Use a later {self._parser.product}"
        if self._parser.flavour == "tensorrt":
            mend += ", or build with --plugins on"  # of what 10.14 and later lack, only cache updates come here
        what = faults[0] if len(faults) == 1 else "\n  ".join(("lacks what no other operators can do:", *faults))
        raise ExportError(what, where=str(self._parser), mend=mend)


class _Writer:
    """Collects the nodes that stand for one node, named after it."""

    def __init__(self, replaced: ir.Node) -> None:
        self.replaced = replaced
        self.nodes: list[ir.Node] = []

    def __call__(self, name: str, op_type: str, inputs: Sequence[ir.Value | None], **attributes: object) -> ir.Value:
        return self.several((name,), op_type, inputs, **attributes)[0]

    def several(
        self, names: Sequence[str], op_type: str, inputs: Sequence[ir.Value | None], **attributes: object
    ) -> Sequence[ir.Value]:
        """A node with as many outputs as names."""
        prefix = self.replaced.outputs[0].name
        outputs = [ir.Value(name=f"{prefix}/{name}") for name in names]
        node_name = f"{self.replaced.name or prefix}/{names[0]}"
        node = ir.node(op_type, inputs, attributes, outputs=outputs, name=node_name)  # type: ignore[arg-type]
        self.nodes.append(node)
        return node.outputs

    def integers(self, name: str, *values: int) -> ir.Value:
        """A constant int64 vector."""
        return self(name, "Constant", [], value_ints=values)


def _replace(node: ir.Node) -> None:
    write = _Writer(node)
    result = _EXPANSIONS[node.op_type](node, write)
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], write.nodes, node.outputs, [result])


def _rms_normalization(node: ir.Node, write: _Writer) -> ir.Value:
    """y = cast(x / sqrt(mean(x * x) + epsilon)) * scale, all but the last product in the stash type."""
    x, scale = node.inputs
    axis = node.attributes.get_int("axis", -1)
    if axis >= 0:
        axis -= _rank(node)
    stash = ir.DataType(node.attributes.get_int("stash_type", ir.DataType.FLOAT.value))
    epsilon = ir.tensor(node.attributes.get_float("epsilon", 1e-5), dtype=stash)
    wide = write("wide", "Cast", [x], to=stash.value)
    squares = write("squares", "Mul", [wide, wide])
    mean = write("mean", "ReduceMean", [squares, write.integers("axes", *range(axis, 0))])
    biased = write("biased", "Add", [mean, write("epsilon", "Constant", [], value=epsilon)])
    normalised = write("normalised", "Div", [wide, write("rms", "Sqrt", [biased])])
    narrow = write("narrow", "CastLike", [normalised, scale])
    return write("scaled", "Mul", [narrow, scale])


def _rotary_embedding(node: ir.Node, write: _Writer) -> ir.Value:
    """Rotates the pairs (x1, x2) of the first `rotary_embedding_dim` of each head's dimensions, by default all.

    x [batch, heads, length, head_dim], or [batch, length, heads * head_dim] with `num_heads`; caches
    [positions, rotary / 2] with position_ids [batch, length], else [batch, length, rotary / 2].
    """
    x, cos, sin, *rest = node.inputs
    heads = node.attributes.get_int("num_heads", 0)
    flat = heads > 0 and _rank(node) == 3
    by_head = write("by_head", "Reshape", [x, write.integers("head_shape", 0, 0, heads, -1)]) if flat else x
    if rest and rest[0] is not None:
        cos, sin = (
            write(name, "Gather", [cache, rest[0]], axis=0) for name, cache in (("cos_rows", cos), ("sin_rows", sin))
        )
    head_axis = write.integers("head_axis", 2 if flat else 1)
    cos, sin = (write(name, "Unsqueeze", [rows, head_axis]) for name, rows in (("cos", cos), ("sin", sin)))

    rotary = node.attributes.get_int("rotary_embedding_dim", 0)
    last = write.integers("last_axis", -1)
    turning, passing = by_head, None
    if rotary > 0:
        start, end = write.integers("rotary_start", 0), write.integers("rotary_end", rotary)
        turning = write("turning", "Slice", [by_head, start, end, last])
        past = write.integers("past_the_end", _PAST_THE_END)
        passing = write("passing", "Slice", [by_head, end, past, last])

    turned = (_turn_pairs if node.attributes.get_int("interleaved", 0) else _turn_halves)(write, turning, cos, sin)
    whole = turned if passing is None else write("whole", "Concat", [turned, passing], axis=-1)
    return write("joined", "Reshape", [whole, write("shape", "Shape", [x])]) if flat else whole


def _turn_halves(write: _Writer, x: ir.Value | None, cos: ir.Value | None, sin: ir.Value | None) -> ir.Value:
    """Pairs are a dimension of the first half and the same of the second."""
    x1, x2 = write.several(("x1", "x2"), "Split", [x], axis=-1, num_outputs=2)
    return write("turned", "Concat", _rotated(write, x1, x2, cos, sin), axis=-1)


def _turn_pairs(write: _Writer, x: ir.Value | None, cos: ir.Value | None, sin: ir.Value | None) -> ir.Value:
    """Pairs are neighbours; x has four dimensions."""
    last, step, past = write.integers("axis", -1), write.integers("step", 2), write.integers("past", _PAST_THE_END)
    x1, x2 = (
        write(name, "Slice", [x, write.integers(f"{name}_start", start), past, last, step])
        for name, start in (("x1", 0), ("x2", 1))
    )
    columns = [
        write(name, "Unsqueeze", [half, last])
        for name, half in zip(("real_column", "imaginary_column"), _rotated(write, x1, x2, cos, sin), strict=True)
    ]
    pairs = write("pairs", "Concat", columns, axis=-1)
    return write("turned", "Reshape", [pairs, write.integers("turned_shape", 0, 0, 0, -1)])


def _rotated(
    write: _Writer, x1: ir.Value, x2: ir.Value, cos: ir.Value | None, sin: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    """(x1 + i x2) * (cos + i sin)."""
    real = write("real", "Sub", [write("cos_x1", "Mul", [cos, x1]), write("sin_x2", "Mul", [sin, x2])])
    imaginary = write("imaginary", "Add", [write("sin_x1", "Mul", [sin, x1]), write("cos_x2", "Mul", [cos, x2])])
    return real, imaginary


def _rank(node: ir.Node) -> int:
    """Of the first input.

    Raises:
        ExportError: it is not known.
    """
    value = node.inputs[0]
    if value is None or value.shape is None:
        name = None if value is None else value.name
        raise ExportError(f"the rank of input {name} is not known", where=f"node {node.name} ({node.op_type})")
    return len(value.shape)


_EXPANSIONS: dict[str, Callable[[ir.Node, _Writer], ir.Value]] = {
    "RMSNormalization": _rms_normalization,
    "RotaryEmbedding": _rotary_embedding,
}
