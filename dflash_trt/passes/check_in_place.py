"""Checks that a runtime can update every cache in place."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.errors import ExportError


class CheckInPlace(ir.passes.InPlacePass):
    """Requires: an inlined graph. Ensures: each `present_*` is one TensorScatter into its `past_*`, its only reader.

    A second write, or any other reader of the past, makes a runtime copy the whole cache at every pass.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        pasts = {value.name: value for value in model.graph.inputs if value.name and value.name.startswith("past_")}
        presents = [value for value in model.graph.outputs if value.name and value.name.startswith("present_")]
        if len(pasts) != len(presents):
            raise ExportError(f"{len(pasts)} past inputs, {len(presents)} present outputs", where="caches")
        for present in presents:
            past = pasts.get("past_" + str(present.name).removeprefix("present_"))
            node = present.producer()
            if past is None or node is None or node.op_type != "TensorScatter" or node.inputs[0] is not past:
                raise ExportError("is not one TensorScatter into its past", where=str(present.name))
            readers = [use.node.op_type for use in past.uses() if use.node is not node and use.node.op_type != "Shape"]
            if readers:
                raise ExportError(f"is read by {', '.join(readers)} besides its update", where=str(past.name))
        return ir.passes.PassResult(model, False)
