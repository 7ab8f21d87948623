"""Replaces the calls of the custom operators by their bodies: a graph of standard opset-24 ops alone."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from dflash_trt.ops import DOMAIN


class InlineFunctions(ir.passes.InPlacePass):
    """Requires: a portable graph (every custom call has its body). Ensures: no node of the custom domain."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        passes = ir.passes.Sequential(
            common.InlinePass(criteria=lambda function: function.domain == DOMAIN),
            common.RemoveUnusedFunctionsPass(),
            common.RemoveUnusedOpsetsPass(),
        )
        return ir.passes.PassResult(model, passes(model).modified)

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in model.graph.all_nodes() if node.domain == DOMAIN]
        if left:
            raise ir.passes.PostconditionError(f"custom nodes left after inlining: {left}")
