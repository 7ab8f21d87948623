"""Multiplies by weights as they lie in the checkpoint, [out, in], instead of by their transposes.

ONNX Runtime computes the transpose of a constant when it opens the graph: a copy of every weight, which it then copies
again into the layout of its kernel. Its own operator `FusedMatMul` packs the rows as they are.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

DOMAIN, OPERATOR = "com.microsoft", "FusedMatMul"


class TransposedWeights(ir.passes.InPlacePass):
    """Requires: nothing. Ensures: no product has a transposed initialiser as its right factor."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph:
            if node.op_type == "MatMul" and not node.domain and (weight := _transposed(node.inputs[1])) is not None:
                node.domain, node.op_type = DOMAIN, OPERATOR
                node.replace_input_with(1, weight)
                node.attributes.add(ir.AttrInt64("transB", 1))
                modified = True
        if modified:
            model.opset_imports[DOMAIN] = 1
            common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified)


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """The initialiser [N, K] whose transpose this is."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose" or node.domain:
        return None
    source = node.inputs[0]
    if source is None or not source.is_initializer() or source.shape is None or len(source.shape) != 2:
        return None
    return source
