"""Multiplies by weights of few bits: `com.microsoft::MatMulNBits` in the place of each product with a weight."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from dflash_trt.export.quantization import BLOCK, PACKED, SCALES, packed_shape

DOMAIN, OPERATOR = "com.microsoft", "MatMulNBits"
# Each row's activations become int8, in blocks with scales of their own, and products sums of integers: the result of a
# row does not depend on which rows are beside it.
INT8_ACTIVATIONS = 4


class QuantizeWeights(ir.passes.InPlacePass):
    """Requires: a graph whose linear layers are `MatMul(x, Transpose(weight))`, weight an initialiser [N, K].

    Ensures: each of them is a MatMulNBits over the initialisers `WEIGHT.quantized` uint8 [N, blocks, bytes] and
    `WEIGHT.scales` float32 [N, blocks], which have no data yet; a weight that nothing else reads is gone. An embedding
    is no product and stays, a tied head's too.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._bits = bits

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        products = [node for node in model.graph if _weight(node) is not None]
        for node in products:
            self._replace(model.graph, node)
        if products:
            model.opset_imports[DOMAIN] = 1
            common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, bool(products))

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in model.graph.all_nodes() if _weight(node) is not None]
        if left:
            raise ir.passes.PostconditionError(f"products left after quantising: {left}")

    def _replace(self, graph: ir.Graph, node: ir.Node) -> None:
        weight = _weight(node)
        assert weight is not None
        assert weight.shape is not None
        rows, columns = (int(size) for size in weight.shape.numpy())
        packed = packed_shape((rows, columns), self._bits)
        quantized = (
            _initializer(graph, f"{weight.name}{PACKED}", ir.DataType.UINT8, packed),
            _initializer(graph, f"{weight.name}{SCALES}", ir.DataType.FLOAT, packed[:2]),
        )
        attributes = {"K": columns, "N": rows, "bits": self._bits, "block_size": BLOCK}
        attributes["accuracy_level"] = INT8_ACTIVATIONS
        product = ir.node(OPERATOR, [node.inputs[0], *quantized], attributes, domain=DOMAIN, name=node.name)
        graph.insert_before(node, product)
        ir.convenience.replace_all_uses_with(node.outputs[0], product.outputs[0], replace_graph_outputs=True)
        old, new = node.outputs[0], product.outputs[0]
        new.name, new.type, new.shape = old.name, old.type, old.shape
        graph.remove(node, safe=True)


def _initializer(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    """A new one without data, or what another product made."""
    if name not in graph.initializers:
        graph.initializers[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    return graph.initializers[name]


def _weight(node: ir.Node) -> ir.Value | None:
    """The weight [N, K] that a product multiplies by, None for every other node."""
    if node.op_type != "MatMul" or node.domain:
        return None
    factor = node.inputs[1]
    transpose = None if factor is None else factor.producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    weight = transpose.inputs[0]
    if weight is None or not weight.is_initializer() or weight.shape is None or len(weight.shape) != 2:
        return None
    return weight
