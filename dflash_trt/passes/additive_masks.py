"""Makes the boolean masks of `Attention` numbers that are added to its scores.

The compiler of TensorRT-RTX 1.7 cannot compile two `Attention` nodes that share a boolean mask ("Graph contains more
than one op named ..."). One mask for all layers of a kind keeps the graphs small, so it becomes an additive one, once.
ONNX Runtime makes numbers of it in every layer anew otherwise: 3 % of a pass of 30 small layers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from dflash_trt.passes.initializers import initializer

_MASK = 3  # input of Attention


class AdditiveMasks(ir.passes.InPlacePass):
    """Requires: queries of known dtype. Ensures: no `Attention` has a boolean mask.

    What is hidden gets half of the dtype's most negative number: with a score added, or scaled for powers of two, it
    must not become -inf, since a kernel that meets a tile of that alone computes inf - inf. After the maximum is
    subtracted it leaves exactly 0 as -inf would, since every query sees itself.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        additive: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        for node in list(model.graph.all_nodes()):
            if node.op_type != "Attention" or node.domain or len(node.inputs) <= _MASK:
                continue
            query, mask = node.inputs[0], node.inputs[_MASK]
            if query is None or mask is None or mask.dtype != ir.DataType.BOOL:
                continue
            if query.dtype is None:
                raise ir.passes.PreconditionError(f"node {node.name}: the dtype of its query is not known")
            key = (mask, query.dtype)
            if key not in additive:
                additive[key] = _add(model.graph, node, mask, query.dtype)
            node.replace_input_with(_MASK, additive[key])
        return ir.passes.PassResult(model, bool(additive))


def _add(graph: ir.Graph, before: ir.Node, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """`Where(mask, 0, lowest)` in front of a node."""
    name, numpy_dtype = f"{mask.name}_additive_{dtype.name.lower()}", dtype.numpy()
    lowest = float(ml_dtypes.finfo(numpy_dtype).min) / 2
    constants = [
        initializer(graph, f"{name}_{part}", np.array(number, numpy_dtype))
        for part, number in (("seen", 0.0), ("hidden", lowest))
    ]
    node = ir.Node("", "Where", inputs=[mask, *constants], name=name, num_outputs=1)
    result = node.outputs[0]
    result.name, result.dtype = name, dtype
    graph.insert_before(before, node)
    return result
