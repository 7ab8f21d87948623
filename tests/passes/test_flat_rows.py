"""Products by weights as they lie: which are rewritten, that they give the same, and that rows stay flat."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime
import pytest

from dflash_trt.passes.flat_rows import FlatRows

RANDOM = np.random.default_rng(0)
HIDDEN, WIDE = 4, 6
SHAPES = ((WIDE, HIDDEN), (HIDDEN, WIDE), (HIDDEN,), (1, 1, HIDDEN))
UP, DOWN, SCALE, ONE_ROW = (RANDOM.standard_normal(shape).astype(np.float32) for shape in SHAPES)


def model_of(text: str, **weights: np.ndarray) -> ir.Model:
    """A graph in ONNX's text format with weights as initialisers, shapes inferred."""
    model = ir.from_onnx_text(text)
    for name, data in weights.items():
        value = ir.Value(name=name, const_value=ir.tensor(data, name=name), shape=ir.Shape(data.shape))
        value.dtype = ir.DataType.FLOAT
        for node in model.graph:
            for index, used in enumerate(node.inputs):
                if used is not None and used.name == name:
                    node.replace_input_with(index, value)
        model.graph.register_initializer(value)
        model.graph.inputs[:] = [each for each in model.graph.inputs if each.name != name]
    common.ShapeInferencePass()(model)
    return model


def run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


BLOCK = """
<ir_version: 10, opset_import: ["" : 24]>
block (float[B,Q,4] x, float[6,4] up, float[4,6] down, float[4] scale, float[1,1,4] row)
    => (float[B,Q,4] y, float[B,Q,6] wide) {
    up_t = Transpose<perm = [1, 0]>(up)
    down_t = Transpose<perm = [1, 0]>(down)
    normal = RMSNormalization<axis = -1, epsilon = 0.00001>(x, scale)
    gate = MatMul(normal, up_t)
    share = Sigmoid(gate)
    wide = Mul(gate, share)
    narrow = MatMul(wide, down_t)
    sum = Add(x, narrow)
    again = RMSNormalization<axis = -1, epsilon = 0.00001>(sum, scale)
    moved = Add(again, row)
    y = Add(moved, sum)
}
"""


def expected_block(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def normal(rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * SCALE

    gate = normal(x) @ UP.T
    wide = gate / (1 + np.exp(-gate))
    total = x + wide @ DOWN.T
    return normal(total) + ONE_ROW + total, wide


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_block_gives_the_same_and_stays_flat(rows: int) -> None:
    model, x = model_of(BLOCK, up=UP, down=DOWN, scale=SCALE, row=ONE_ROW), RANDOM.standard_normal((2, rows, 4))
    assert FlatRows()(model).modified
    found = operators(model)
    assert "MatMul" not in found
    assert found["Gemm"] == 2
    # x and the normalised x become matrices; of the matrices come back both outputs and what a broadcast needs
    assert found["Reshape"] <= 7
    for name, axis_sizes in (("y", 4), ("wide", 6)):
        (output,) = (value for value in model.graph.outputs if value.name == name)
        assert [str(size) for size in output.shape] == ["B", "Q", str(axis_sizes)]
    for one, other in zip(run(model, x.astype(np.float32)), expected_block(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_twice_is_once() -> None:
    model = model_of(BLOCK, up=UP, down=DOWN, scale=SCALE, row=ONE_ROW)
    assert FlatRows()(model).modified
    before = [(node.op_type, node.outputs[0].name) for node in model.graph]
    assert not FlatRows()(model).modified
    assert [(node.op_type, node.outputs[0].name) for node in model.graph] == before


PRODUCT = """
<ir_version: 10, opset_import: ["" : 24]>
product ({input} x{weight}) => (float{output} y) {{
    turned = Transpose<perm = {perm}>(w)
    y = MatMul(x, turned)
}}
"""


@pytest.mark.parametrize(
    ("text", "initialised"),
    [
        (dict(input="float[B,Q,4]", weight=", float[6,4] w", output="[B,Q,6]", perm="[1, 0]"), False),
        (dict(input="float[B,4]", weight=", float[6,4] w", output="[B,6]", perm="[1, 0]"), True),
        (dict(input="float[?,Q,4]", weight=", float[6,4] w", output="[?,Q,6]", perm="[1, 0]"), True),
        (dict(input="float[1,B,4]", weight=", float[1,6,4] w", output="[1,B,6]", perm="[0, 2, 1]"), True),
    ],
    ids=["no weight", "a matrix already", "rows without a name", "a weight of three dimensions"],
)
def test_what_is_left_alone(text: dict[str, str], initialised: bool) -> None:
    weight = RANDOM.standard_normal((1, 6, 4) if "1,6,4" in text["weight"] else (6, 4)).astype(np.float32)
    model = model_of(PRODUCT.format(**text), **({"w": weight} if initialised else {}))
    assert not FlatRows()(model).modified
    assert operators(model) == {"Transpose": 1, "MatMul": 1}


HEADS = """
<ir_version: 10, opset_import: ["" : 24]>
heads (float[B,Q,4] x, float[6,4] up) => (float[b,q,h,d] y) {{
    up_t = Transpose<perm = [1, 0]>(up)
    linear = MatMul(x, up_t)
    size = Shape<end = 2>(x)
    heads = Constant<value = int64[2] {{2, 3}}>()
    shape = Concat<axis = 0>(size, heads)
    y = Reshape{attribute}(linear, shape)
}}
"""


@pytest.mark.parametrize(("attribute", "reshapes"), [("<allowzero = 1>", 2), ("", 3)])
def test_a_reshape_reads_the_matrix_where_that_is_the_same(attribute: str, reshapes: int) -> None:
    model, x = model_of(HEADS.format(attribute=attribute), up=UP), RANDOM.standard_normal((2, 3, 4)).astype(np.float32)
    assert FlatRows()(model).modified
    assert operators(model)["Reshape"] == reshapes
    np.testing.assert_allclose(run(model, x)[0], (x @ UP.T).reshape(2, 3, 2, 3), rtol=1e-5, atol=1e-6)
