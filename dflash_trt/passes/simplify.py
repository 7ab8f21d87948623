"""Folds what is constant and computes equal things once, without ever touching a weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import fold_constants

_SMALL = 1024  # elements; what is folded is shapes and index lists


@contextlib.contextmanager
def _weights_hidden(model: ir.Model) -> Iterator[None]:
    """Takes the data of weights away for a while: what has no data cannot be folded, nor read for shape inference."""
    hidden = {
        value: value.const_value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    for value in hidden:
        value.const_value = None
    try:
        yield
    finally:
        for value, data in hidden.items():
            value.const_value = data


class Simplify(ir.passes.InPlacePass):
    """Requires: nothing. Ensures: same outputs; initialisers keep their names and none is added that holds weights."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        passes = ir.passes.Sequential(
            common.IdentityEliminationPass(),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.ClearMetadataAndDocStringPass(),  # the tracer's stack traces are most of the file
        )
        with _weights_hidden(model):
            folded = fold_constants(
                model, onnx_shape_inference=True, input_size_limit=_SMALL, output_size_limit=_SMALL
            )
            modified = passes(model).modified or folded.modified
        return ir.passes.PassResult(model, modified)
