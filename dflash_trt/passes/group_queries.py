"""Gives every attention at least two queries.

ONNX Runtime multiplies one row by other code than several, and its last bits differ. Where activations are rounded to
int8 behind it, such a bit can become a step of the rounding, and in the end another token; with two queries or more,
the result of a row does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_trt.passes.initializers import integers

_QUERY, _KEY, _MASK = 0, 1, 3  # inputs of Attention
_SEVERAL = "_several"  # behind the name of queries that were regrouped


class GroupQueries(ir.passes.InPlacePass):
    """Requires: a graph of standard operators, masks [B, 1, Q, C].

    Ensures: no `Attention` has a single query. Heads that share a head of the cache become queries of one head, which
    moves nothing; where each has its own, the last query is there twice.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        masks: dict[tuple[ir.Value, int], ir.Value] = {}
        modified = False
        for node in list(model.graph):
            if node.op_type != "Attention" or node.domain:
                continue
            query, key, mask = (node.inputs[index] for index in (_QUERY, _KEY, _MASK))
            assert query is not None
            assert key is not None
            assert mask is not None
            if str(query.name).endswith(_SEVERAL):
                continue
            heads, shared, size = _size(query, 1), _size(key, 1), _size(query, 3)
            group = heads // shared
            if (mask, group) not in masks:
                masks[mask, group] = _more_rows(model.graph, node, mask, group)
            node.replace_input_with(_MASK, masks[mask, group])
            after = node.outputs[0]
            if group > 1:
                more = _reshaped(model.graph, query, (0, shared, -1, size), f"{query.name}{_SEVERAL}", node)
                result = _reshaped(model.graph, after, (0, heads, -1, size), f"{after.name}_by_head", node, behind=True)
            else:
                more = _with_last_twice(model.graph, node, query, f"{query.name}{_SEVERAL}")
                result = _without_last(model.graph, node, after)
            node.replace_input_with(_QUERY, more)
            result.type, result.shape = after.type, after.shape
            after.shape = None
            for user, index in list(after.uses()):
                if user is not result.producer():
                    user.replace_input_with(index, result)
            modified = True
        return ir.passes.PassResult(model, modified)


def _size(value: ir.Value, axis: int) -> int:
    size = None if value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise ir.passes.PreconditionError(f"{value.name}: dimension {axis} is not known")
    return size


def _more_rows(graph: ir.Graph, before: ir.Node, mask: ir.Value, group: int) -> ir.Value:
    """The mask of regrouped queries."""
    name = f"{mask.name}_of_{group}"
    if group == 1:
        return _with_last_twice(graph, before, mask, name)
    return _add(graph, ir.node("Concat", [mask] * group, {"axis": 2}), mask, name, before)


def _reshaped(
    graph: ir.Graph, value: ir.Value, shape: Sequence[int], name: str, place: ir.Node, *, behind: bool = False
) -> ir.Value:
    node = ir.node("Reshape", [value, integers(graph, shape)])
    return _add(graph, node, value, name, place, behind=behind)


def _with_last_twice(graph: ir.Graph, before: ir.Node, value: ir.Value, name: str) -> ir.Value:
    pads = integers(graph, (0, 0, 0, 0, 0, 0, 1, 0))
    return _add(graph, ir.node("Pad", [value, pads], {"mode": "edge"}), value, name, before)


def _without_last(graph: ir.Graph, behind: ir.Node, value: ir.Value) -> ir.Value:
    start, end, axis = (integers(graph, (number,)) for number in (0, -1, 2))
    return _add(graph, ir.node("Slice", [value, start, end, axis]), value, f"{value.name}_cut", behind, behind=True)


def _add(
    graph: ir.Graph, node: ir.Node, like: ir.Value, name: str, place: ir.Node, *, behind: bool = False
) -> ir.Value:
    (graph.insert_after if behind else graph.insert_before)(place, node)
    result = node.outputs[0]
    result.name, result.type = name, like.type
    return result
