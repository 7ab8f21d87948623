"""Products by transposed weights: which are rewritten, and that they give the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from dflash_trt.passes.transposed_weights import TransposedWeights

RANDOM = np.random.default_rng(0)


def model_of(*, perm: list[int] | None = None, shape: tuple[int, ...] = (6, 4), from_input: bool = False) -> ir.Model:
    """`x @ transpose(w)`, whose product is an output, and a second product that shares the transpose."""
    weight = ir.Value(name="w", const_value=ir.tensor(RANDOM.standard_normal(shape).astype(np.float32), name="w"))
    weight.shape, weight.dtype = ir.Shape(shape), ir.DataType.FLOAT
    x = ir.Value(name="x", shape=ir.Shape(["B", "Q", shape[-1]]), type=ir.TensorType(ir.DataType.FLOAT))
    transpose = ir.node("Transpose", [weight], {"perm": perm or [1, 0]})
    product = ir.node("MatMul", [x, transpose.outputs[0]])
    doubled = ir.node("Add", [x, x])
    other = ir.node("MatMul", [doubled.outputs[0], transpose.outputs[0]])
    for name, node in (("y", product), ("z", other)):
        node.outputs[0].name, node.outputs[0].dtype = name, ir.DataType.FLOAT
    graph = ir.Graph(
        [x, weight] if from_input else [x], [product.outputs[0], other.outputs[0]],
        nodes=[transpose, product, doubled, other], opset_imports={"": 24}, name="g",
        initializers=[] if from_input else [weight],
    )  # fmt: skip
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_the_same_numbers(rows: int) -> None:
    model, x = model_of(), RANDOM.standard_normal((2, rows, 4)).astype(np.float32)
    weight = model.graph.initializers["w"].const_value.numpy()
    assert TransposedWeights()(model).modified
    assert [node.op_type for node in model.graph] == ["FusedMatMul", "Add", "FusedMatMul"]
    for found, expected in zip(run(model, x), (x @ weight.T, 2 * x @ weight.T), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not TransposedWeights()(model).modified


def test_what_is_no_weight_is_left_alone() -> None:
    model = model_of(from_input=True)
    assert not TransposedWeights()(model).modified
    assert "Transpose" in [node.op_type for node in model.graph]
    assert "com.microsoft" not in model.opset_imports


def test_other_ranks_are_left_alone() -> None:
    model = model_of(perm=[0, 2, 1], shape=(1, 6, 4))
    assert not TransposedWeights()(model).modified
