"""Gives every cache one fixed capacity: TensorRT updates a cache in place only where its length is no variable."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.backends.profiles import CAPACITY


class FixCapacity(ir.passes.InPlacePass):
    """Requires: caches among inputs and outputs that have the dimension "C". Ensures: it is `capacity` in all of them.

    Shapes inside the graph that were inferred with the variable are forgotten; a runtime infers them anew.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        ends = [*model.graph.inputs, *model.graph.outputs]
        for value in ends:
            dims = [self._capacity if _name(dim) == CAPACITY else dim for dim in value.shape or ()]
            if value.shape is not None and dims != list(value.shape):
                value.shape, modified = ir.Shape(dims), True
        if modified:
            for node in model.graph.all_nodes():
                for value in node.outputs:
                    if not value.is_graph_output():
                        value.shape = None
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        for value in (*model.graph.inputs, *model.graph.outputs):
            if any(_name(dim) == CAPACITY for dim in value.shape or ()):
                raise ir.passes.PostconditionError(f"{value.name} still has a variable capacity")


def _name(dim: int | ir.SymbolicDim) -> str | None:
    return dim.value if isinstance(dim, ir.SymbolicDim) else None
