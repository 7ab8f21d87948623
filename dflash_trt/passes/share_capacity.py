"""Asks one cache for the capacity that all of them have, so that what follows from it is equal and computed once."""

from __future__ import annotations

import onnx_ir as ir


class ShareCapacity(ir.passes.InPlacePass):
    """Requires: an inlined graph whose caches are `past_*` inputs, scattered into `present_*` outputs, of one capacity.

    Ensures: every Shape of a cache that reads its capacity (dimension 2) alone reads it from the first one.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        values = [*model.graph.inputs, *model.graph.outputs]
        caches = [value for value in values if value.name and value.name.startswith(("past_", "present_"))]
        if not caches:
            return ir.passes.PassResult(model, False)
        modified = False
        for cache in caches[1:]:
            for node, index in list(cache.uses()):
                if node.op_type == "Shape" and _dimensions(node) == (2, 3):
                    node.replace_input_with(index, caches[0])
                    modified = True
        return ir.passes.PassResult(model, modified)


def _dimensions(node: ir.Node) -> tuple[int, int | None]:
    """`start` and `end` of a Shape."""
    end = node.attributes.get("end")
    return node.attributes.get_int("start", 0), None if end is None else end.as_int()
