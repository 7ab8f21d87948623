"""Attention whose result does not depend on the slots that keys and values lie in.

In plain decoding a token's predecessors lie one behind the other; in a tree other branches lie between them, so that
float32 sums of the same numbers are rounded otherwise. Where activations are rounded to int8 behind it, such a last bit
can become another token. Summed in float64 and rounded once, the results are the same but about once in 2^28.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.passes.initializers import initializer, integers

DOMAIN = "com.microsoft"  # of FusedMatMul: the transposed keys are not written down
_LOWEST = float(np.finfo(np.float32).min)


class ExactAttention(ir.passes.InPlacePass):
    """Requires: float32 attentions with a boolean mask, heads of queries and of the cache one to one (`GroupQueries`).

    Ensures: no `Attention`; scores and their exponentials are float32, each on its own, and all sums of them float64.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "Attention" and not node.domain]
        for node in nodes:
            _write_out(model.graph, node)
        if nodes:
            model.opset_imports[DOMAIN] = 1
        return ir.passes.PassResult(model, bool(nodes))


def _write_out(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value, mask = node.inputs
    tape = ir.tape.Tape()
    lowest, last = initializer(graph, "lowest", np.float32(_LOWEST)), integers(graph, (-1,))
    scale = node.attributes["scale"].as_float()
    scores = tape.op("FusedMatMul", [query, key], {"transB": 1, "alpha": scale}, domain=DOMAIN)
    seen = tape.op("Where", [mask, scores, lowest])
    largest = tape.op("ReduceMax", [seen, last], {"keepdims": 1})
    shares = tape.op("Exp", [tape.op("Sub", [seen, largest])])
    exact, values = (tape.op("Cast", [part], {"to": ir.DataType.DOUBLE}) for part in (shares, value))
    total = tape.op("ReduceSum", [exact, last], {"keepdims": 1})
    mean = tape.op("Div", [tape.op("MatMul", [exact, values]), total])
    result = tape.op("Cast", [mean], {"to": ir.DataType.FLOAT})
    graph.insert_before(node, tape.nodes)
    old = node.outputs[0]
    for number, made in enumerate(tape.nodes):
        made.outputs[0].name = f"{old.name}_exact_{number}"
    ir.convenience.replace_all_uses_with(old, result)
    result.name, result.type, result.shape = old.name, old.type, old.shape
    graph.remove(node, safe=True)
