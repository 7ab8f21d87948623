"""Checks that a runtime can update every cache in place."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from dflash_trt.errors import ExportError
from dflash_trt.ops import DOMAIN, kv_injection

_PAST, _PRESENT = "past_", "present_"


class CheckInPlace(ir.passes.InPlacePass):
    """Requires: an inlined or plugin-bound graph. Ensures: each `present_*` is one update of its `past_*`, whose only
    reader that is: a TensorScatter, or half of a KVInjection.

    A second write, or any other reader of the past, makes a runtime copy the whole cache at every pass.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for where, text in cache_faults(model.graph):
            raise ExportError(text, where=where)
        return ir.passes.PassResult(model, False)


def cache_faults(graph: ir.Graph) -> Iterator[tuple[str, str]]:
    """Caches that cannot be updated in place: which, and why."""
    pasts = {value.name: value for value in graph.inputs if value.name and value.name.startswith(_PAST)}
    presents = [value for value in graph.outputs if value.name and value.name.startswith(_PRESENT)]
    if len(pasts) != len(presents):
        yield "caches", f"{len(pasts)} past inputs, {len(presents)} present outputs"
    for present in presents:
        past = pasts.get(_PAST + str(present.name).removeprefix(_PRESENT))
        update = _update(present)
        if past is None or update is None or update[0].inputs[update[1]] is not past:
            yield str(present.name), "is not one TensorScatter into its past, nor KVInjection's"
            continue
        others = [use.node for use in past.uses() if (use.node, use.idx) != update and use.node.op_type != "Shape"]
        if others:
            readers = ", ".join(f"node {node.name} ({node.op_type})" for node in others)
            yield str(past.name), f"is read by {readers} besides its update"


def _update(present: ir.Value) -> tuple[ir.Node, int] | None:
    """The node that writes a cache, and which of its inputs the old one is."""
    node = present.producer()
    if node is None:
        return None
    if node.op_type == "TensorScatter" and node.domain == "":
        return node, 0
    if (node.op_type, node.domain) == (kv_injection.NAME, DOMAIN):
        return node, len(node.inputs) - len(node.outputs) + node.outputs.index(present)
    return None
