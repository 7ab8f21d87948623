"""Folds what is constant and computes equal things once, without ever touching a weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import FOLDED_FROM_KEY
from onnxscript.optimizer._constant_folding import FoldConstantsPass

_SMALL = 1024  # elements; what is folded is shapes and index lists


def _may_fold(node: ir.Node) -> bool | None:
    """Never fold a node that reads an initialiser: weights have no data here, and stay where they are on disk."""
    if any(value is not None and value.is_initializer() for value in node.inputs):
        return False
    return None


@contextlib.contextmanager
def _weights_hidden(model: ir.Model) -> Iterator[None]:
    """Takes the data of initialisers away for a while: folding would read them for shape inference."""
    hidden = {value: value.const_value for value in model.graph.initializers.values()}
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
            FoldConstantsPass(
                shape_inference=True, input_size_limit=_SMALL, output_size_limit=_SMALL, should_fold=_may_fold
            ),
            common.IdentityEliminationPass(),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
        )
        with _weights_hidden(model):
            modified = passes(model).modified
        for node in model.graph.all_nodes():
            for value in (node, *node.outputs):
                value.metadata_props.pop(FOLDED_FROM_KEY, None)
        return ir.passes.PassResult(model, modified)
