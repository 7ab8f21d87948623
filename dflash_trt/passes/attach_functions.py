"""Gives every call of a custom operator its function body: the graph becomes portable, any opset-24 runtime runs it."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN, VERSION, kv_injection_onnx, staircase_attention_onnx


def _overload(node: ir.Node) -> str:
    if node.op_type == kv_injection_onnx.NAME:
        return kv_injection_onnx.overload(has_norm=node.inputs[2] is not None, partial=rotates_partially(node))
    return staircase_attention_onnx.overload(
        has_sinks=node.inputs[5] is not None,
        sliding_window=node.attributes["sliding_window"].as_int(),
        softcap=node.attributes["softcap"].as_float(),
    )


def rotates_partially(node: ir.Node) -> bool:
    """Whether a KVInjection's tables `cos` [max_pos, R/2] rotate less than the heads of its cache [B, Hkv, C, D] have.

    Raises:
        ExportError: R or D is not known, or R is larger.
    """
    half, dim = (_static(node, index, axis) for index, axis in ((4, 1), (7, 3)))
    if 2 * half > dim:
        raise ExportError(f"tables that rotate {2 * half} of {dim} head dimensions", where=f"node {node.name}")
    return 2 * half < dim


def _static(node: ir.Node, index: int, axis: int) -> int:
    """One dimension of an input, which tracing must have left a number."""
    value = node.inputs[index]
    size = None if value is None or value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        name = None if value is None else value.name
        raise ExportError(f"dimension {axis} of input {name} is not known", where=f"node {node.name}")
    return size


_BODIES = {
    kv_injection_onnx.NAME: kv_injection_onnx.function_body,
    staircase_attention_onnx.NAME: staircase_attention_onnx.function_body,
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
