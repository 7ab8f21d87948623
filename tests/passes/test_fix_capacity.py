"""FixCapacity: one number for every cache, and nothing else that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from export.small_pair import Graph, assert_same, model_bytes, small_pair
from passes.running import KINDS, run, simplified

from dflash_trt.errors import BackendError
from dflash_trt.passes.fix_capacity import FixCapacity
from dflash_trt.passes.simplify import Simplify

CAPACITY = 24  # what `run_passes` makes its caches of


@pytest.fixture(params=[(kind, role) for kind in KINDS for role in ("target", "drafter")], ids="-".join)
def graph(request: pytest.FixtureRequest) -> Graph:
    kind, role = request.param
    return small_pair(KINDS[kind]).graph(role)


def fixed(model: ir.Model, capacity: int = CAPACITY) -> ir.Model:
    assert FixCapacity(capacity)(model).modified
    return model


def shapes(model: ir.Model) -> dict[str, list[int | str | None]]:
    """Of inputs and outputs."""
    ends = (*model.graph.inputs, *model.graph.outputs)
    return {str(v.name): [d if isinstance(d, int) else d.value for d in v.shape or ()] for v in ends}


def checked_run(model: ir.Model, graph: Graph, tmp_path: Path) -> list[dict[str, np.ndarray]]:
    onnx.shape_inference.infer_shapes(ir.to_proto(model), check_type=True, strict_mode=True, data_prop=True)
    return run(model, graph, tmp_path)


def test_every_cache_has_it_and_nothing_else_does(graph: Graph) -> None:
    before, after = shapes(simplified(graph)), shapes(fixed(simplified(graph)))
    caches = {spec.name for spec in (*graph.spec.past(), *graph.spec.present())}
    assert {name for name in before if "C" in before[name]} == caches
    for name, shape in after.items():
        assert shape == [CAPACITY if dim == "C" else dim for dim in before[name]]
        assert (shape[2] == CAPACITY) if name in caches else True
    assert {dim for shape in after.values() for dim in shape if isinstance(dim, str)} == (
        {"B", "Q", "R"} if graph.spec.role == "target" else {"B", "Q", "N"}
    )


def test_no_shape_inside_knows_the_variable(graph: Graph) -> None:
    def known(model: ir.Model) -> set[str]:
        values = [value for node in model.graph.all_nodes() for value in node.outputs]
        return {str(dim) for value in values for dim in value.shape or () if not isinstance(dim, int)}

    model = simplified(graph)
    assert any("C" in dim for dim in known(model))
    again = ir.passes.common.ShapeInferencePass()(fixed(model)).model
    assert not any("C" in dim for dim in known(model) | known(again))


def test_weights_stay_what_they_are(graph: Graph) -> None:
    model = simplified(graph)
    before = {name: (v.const_value, v.shape, v.dtype) for name, v in model.graph.initializers.items()}
    fixed(model)
    after = {name: (v.const_value, v.shape, v.dtype) for name, v in model.graph.initializers.items()}
    assert before.keys() == after.keys()
    for name, (tensor, *kept) in before.items():
        assert after[name][0] is tensor
        assert list(after[name][1:]) == kept


def test_it_changes_no_output(graph: Graph, tmp_path: Path) -> None:
    results = [checked_run(model, graph, tmp_path) for model in (fixed(simplified(graph)), simplified(graph))]
    assert_same(*results, 0)


def test_another_capacity_is_refused_at_run_time(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=f"Got: {CAPACITY} Expected: 32"):
        checked_run(fixed(simplified(graph), 32), graph, tmp_path)


def test_a_second_run_changes_nothing(graph: Graph) -> None:
    model = fixed(simplified(graph))
    Simplify()(model)
    before = model_bytes(model)
    for capacity in (CAPACITY, 99):
        assert not FixCapacity(capacity)(model).modified
    assert model_bytes(model) == before


def test_a_graph_without_caches_keeps_its_shapes() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ["B", "CC", None])
    inner = ir.node("Neg", [x])
    inner.outputs[0].shape = ir.Shape(["B", "CC", 4])
    last = ir.node("Neg", inner.outputs)
    last.outputs[0].name = "y"
    graph = ir.Graph([x], last.outputs, nodes=[inner, last], opset_imports={"": 24}, name="g")
    model = ir.Model(graph, ir_version=10)
    before = model_bytes(model)
    assert not FixCapacity(8)(model).modified
    assert model_bytes(model) == before


def test_a_cache_that_is_passed_on() -> None:
    """Shapes of outputs are of the contract, and stay; one without a shape has none to change."""
    past = ir.val("past", ir.DataType.FLOAT, ["B", 2, "C", 4])
    inner = ir.node("Neg", [past])
    inner.outputs[0].shape = ir.Shape(["B", 2, "C", 4])
    last = ir.node("Neg", inner.outputs)
    last.outputs[0].name, last.outputs[0].shape = "present", ir.Shape(["B", 2, "C", 4])
    bare = ir.node("Abs", [past])
    bare.outputs[0].name = "bare"
    outputs: list[Any] = [*last.outputs, *bare.outputs]
    graph = ir.Graph([past], outputs, nodes=[inner, last, bare], opset_imports={"": 24}, name="g")
    model = fixed(ir.Model(graph, ir_version=10), 8)
    assert shapes(model) == {"past": ["B", 2, 8, 4], "present": ["B", 2, 8, 4], "bare": []}
    assert inner.outputs[0].shape is None
    assert bare.outputs[0].shape is None
