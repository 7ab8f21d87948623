"""Multiplies by weights as they lie in the checkpoint, [out, in], instead of by their transposes.

ONNX Runtime computes the transpose of a constant when it opens a graph: a copy of every weight, which it then copies
again into the layout of its kernel. `Gemm` packs the rows as they are, but takes matrices only; so between two
attentions all rows [B, Q, H] are one matrix [B*Q, H].
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from dflash_trt.passes.initializers import integers

_ROW_BY_ROW = {"Add", "Mul", "Sigmoid"}
_Rows = tuple[ir.SymbolicDim | int, ir.SymbolicDim | int]  # [B, Q] of a value [B, Q, N]


class FlatRows(ir.passes.InPlacePass):
    """Requires: a graph of standard operators with known shapes, in order.

    Ensures: no product of rows [B, Q, K] has the transpose of an initialiser as its right factor.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        flat = _Flat(model.graph)
        for node in list(model.graph):
            if node.domain:
                continue
            if node.op_type == "MatMul":
                flat.multiply(node)
            elif node.op_type in _ROW_BY_ROW or node.op_type == "RMSNormalization":
                flat.row_by_row(node)
            elif node.op_type == "Reshape":
                flat.reshape(node)
        if flat.modified:
            common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, flat.modified)


class _Flat:
    """The matrices that stand for values [B, Q, N]; what wants such a value itself finds a Reshape of its matrix."""

    def __init__(self, graph: ir.Graph) -> None:
        self.modified = False
        self._graph = graph
        self._matrices: dict[ir.Value, ir.Value] = {}
        self._counts: dict[_Rows, ir.Value] = {}  # B and Q, i64 [2]
        self._shapes: dict[tuple[_Rows, int], ir.Value] = {}  # B, Q and N, i64 [3]

    def multiply(self, node: ir.Node) -> None:
        x, weight = node.inputs[0], _transposed(node.inputs[1])
        if x is None or weight is None or (rows := _rows(x)) is None:
            return
        node.replace_input_with(0, self._matrix(x, rows, node))
        node.replace_input_with(1, weight)
        node.op_type = "Gemm"
        node.attributes.add(ir.AttrInt64("transB", 1))
        self._result(node, rows)

    def row_by_row(self, node: ir.Node) -> None:
        """A node whose result for a row depends on that row alone."""
        values = [value for value in node.inputs if value is not None]
        if node.op_type == "RMSNormalization":
            del values[1:]
        rows, axis = _rows(values[0]), node.attributes.get_int("axis", -1)
        if rows is None or axis != -1 or not any(value in self._matrices for value in values):
            return
        if any(_rows(value) != rows or _width(value) != _width(values[0]) for value in values):
            return  # it broadcasts
        for index, value in enumerate(values):
            node.replace_input_with(index, self._matrix(value, rows, node))
        self._result(node, rows)

    def reshape(self, node: ir.Node) -> None:
        """With `allowzero` it takes no size from its input, so that it may read the matrix as well."""
        x = node.inputs[0]
        if x in self._matrices and node.attributes.get_int("allowzero"):
            node.replace_input_with(0, self._matrices[x])

    def _matrix(self, value: ir.Value, rows: _Rows, before: ir.Node) -> ir.Value:
        if value not in self._matrices:
            maker = value.producer()
            source = maker.inputs[0] if maker is not None and maker.op_type == "Reshape" else value
            node = ir.node("Reshape", [source, integers(self._graph, (-1, _width(value)))])
            self._graph.insert_before(before, node)
            self._matrices[value] = _described(node, value, f"{value.name}_rows")
            if rows not in self._counts:
                count = ir.node("Shape", [value], {"end": 2})
                self._graph.insert_before(before, count)
                self._counts[rows] = _described(count, integers(self._graph, (0, 0)), f"{value.name}_rows_of")
        return self._matrices[value]

    def _result(self, node: ir.Node, rows: _Rows) -> None:
        """The node yields a matrix now: what it did yield is a Reshape behind it."""
        matrix = node.outputs[0]
        back = ir.node("Reshape", [matrix, self._shape(rows, _width(matrix), node)])
        self._graph.insert_after(node, back)
        value, name = back.outputs[0], str(matrix.name)
        value.type, value.shape = matrix.type, matrix.shape
        for user, index in list(matrix.uses()):
            if user is not back:
                user.replace_input_with(index, value)
        for index, output in enumerate(self._graph.outputs):
            if output is matrix:
                self._graph.outputs[index] = value
        matrix.name, value.name = f"{name}_rows", name
        matrix.shape = ir.Shape([None, _width(value)])
        self._matrices[value] = matrix
        self.modified = True

    def _shape(self, rows: _Rows, width: int, before: ir.Node) -> ir.Value:
        if (rows, width) not in self._shapes:
            node = ir.node("Concat", [self._counts[rows], integers(self._graph, (width,))], {"axis": 0})
            self._graph.insert_before(before, node)
            like = integers(self._graph, (0, 0, width))
            self._shapes[rows, width] = _described(node, like, f"{self._counts[rows].name}_{width}")
        return self._shapes[rows, width]


def _rows(value: ir.Value) -> _Rows | None:
    """B and Q of a value [B, Q, N], where each has a number or a name."""
    shape = value.shape
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int):
        return None
    named = all(isinstance(size, int) or size.value is not None for size in shape[:2])
    return (shape[0], shape[1]) if named else None


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """The initialiser [N, K] whose transpose this is."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose" or node.domain:
        return None
    source = node.inputs[0]
    if source is None or not source.is_initializer() or source.shape is None or len(source.shape) != 2:
        return None
    return source


def _width(value: ir.Value) -> int:
    assert value.shape is not None
    width = value.shape[-1]
    assert isinstance(width, int)
    return width


def _described(node: ir.Node, like: ir.Value, name: str) -> ir.Value:
    """The node's output, of the type of another value."""
    result = node.outputs[0]
    result.name, result.type = name, like.type
    return result
