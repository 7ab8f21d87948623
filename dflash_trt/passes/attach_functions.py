"""Gives every call of a custom operator its function body: the graph becomes portable, any opset-24 runtime runs it."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN, VERSION, kv_injection, staircase_attention


def _overload(node: ir.Node) -> str:
    if node.op_type == kv_injection.NAME:
        return kv_injection.overload(has_norm=node.inputs[2] is not None)
    return staircase_attention.overload(
        has_sinks=node.inputs[5] is not None,
        sliding_window=node.attributes["sliding_window"].as_int(),
        softcap=node.attributes["softcap"].as_float(),
    )


_BODIES = {
    kv_injection.NAME: kv_injection.function_body,
    staircase_attention.NAME: staircase_attention.function_body,
}


class AttachFunctions(ir.passes.InPlacePass):
    """Requires: custom nodes with all their attributes. Ensures: each names an overload that the model defines."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph.all_nodes():
            if node.domain != DOMAIN:
                continue
            if node.op_type not in _BODIES:
                raise ExportError(
                    f"operator {DOMAIN}::{node.op_type} has no function body",
                    where=f"node {node.name}",
                    mend=f"Known operators: {', '.join(_BODIES)}",
                )
            overload = _overload(node)
            identifier = (DOMAIN, node.op_type, overload)
            if identifier not in model.functions:
                model.functions[identifier] = ir.serde.deserialize_function(_BODIES[node.op_type](overload))
                modified = True
            if node.overload != overload:
                node.overload = overload
                modified = True
        model.opset_imports[DOMAIN] = VERSION
        return ir.passes.PassResult(model, modified)
