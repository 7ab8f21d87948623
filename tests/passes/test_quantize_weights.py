"""Products with quantised weights: what replaces what, and what they compute."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from export.small_pair import assert_same, copy_model, model_bytes, run_passes, small_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from passes.running import KINDS, simplified

from dflash_trt.backends.torch import TorchSession
from dflash_trt.export.contract import drafter_graph
from dflash_trt.export.quantization import PACKED, SCALES, dequantize, packed_shape, quantize
from dflash_trt.export.trace import trace
from dflash_trt.modeling.dflare import DFlareDrafter
from dflash_trt.modeling.load import meta_drafter
from dflash_trt.passes.attach_functions import AttachFunctions
from dflash_trt.passes.inline import InlineFunctions
from dflash_trt.passes.quantize_weights import QuantizeWeights
from dflash_trt.passes.simplify import Simplify


def linear(rows: int, columns: int, bits: int) -> ir.Model:
    """y = x @ W^T as torch exports it, quantised; the initialisers have no data."""
    x = ir.val("x", ir.DataType.FLOAT, ["B", "Q", columns])
    weight = ir.val("w", ir.DataType.FLOAT, [rows, columns])
    transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
    product = ir.node("MatMul", [x, transpose.outputs[0]])
    y = product.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["B", "Q", rows])
    graph = ir.Graph([x], [y], nodes=[transpose, product], initializers=[weight], opset_imports={"": 24}, name="g")
    model = ir.Model(graph, ir_version=11)
    QuantizeWeights(bits)(model)
    return model


def opened(model: ir.Model, packed: np.ndarray, scales: np.ndarray, threads: int = 1) -> onnxruntime.InferenceSession:
    for name, array in (("w" + PACKED, packed), ("w" + SCALES, scales)):
        value = model.graph.initializers[name]
        assert value.shape is not None
        assert tuple(value.shape.numpy()) == array.shape
        value.const_value = ir.tensor(array, name=name)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def by_the_definition(packed: np.ndarray, scales: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Number by number, from the definition of the format."""
    weight = np.zeros((packed.shape[0], packed.shape[1] * 32))
    for (row, block, place), byte in np.ndenumerate(packed):
        numbers = [byte] if bits == 8 else [byte & 15, byte >> 4]
        for offset, number in enumerate(numbers):
            column = block * 32 + place * len(numbers) + offset
            weight[row, column] = (int(number) - (1 << bits - 1)) * float(scales[row, block])
    return weight[:, :columns]


def rounding_of_activations(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The most that int8 activations, in blocks of 32 with a scale each, can change in x @ weight^T."""
    columns = x.shape[-1]
    padding = -columns % 32
    blocks = np.pad(np.abs(x), ((0, 0), (0, 0), (0, padding))).reshape(*x.shape[:2], -1, 32).max(axis=-1)
    reach = np.pad(np.abs(weight), ((0, 0), (0, padding))).reshape(len(weight), -1, 32).sum(axis=-1)
    return blocks @ reach.T / 254


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 70),
    columns=st.sampled_from([1, 7, 31, 32, 33, 64, 100, 192, 259]),
    bits=st.sampled_from([8, 4]),
    queries=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_a_product_is_that_with_the_dequantised_weight(
    rows: int, columns: int, bits: int, queries: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((rows, columns)).astype(np.float32)
    x = random.standard_normal((2, queries, columns)).astype(np.float32)
    packed, scales = quantize(weight, bits)
    meant = by_the_definition(packed, scales, bits, columns)
    (found,) = opened(linear(rows, columns, bits), packed, scales).run(None, {"x": x})
    assert (np.abs(found - x @ meant.T) <= rounding_of_activations(x, meant) * 1.01 + 1e-5).all()
    np.testing.assert_allclose(dequantize(packed, scales, columns), meant, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns"), [(192, 576), (64, 100)])
def test_a_row_alone_is_the_row_among_others(bits: int, rows: int, columns: int) -> None:
    """To the last bit, whatever their number and the threads': speculation rests on it."""
    random = np.random.default_rng(0)
    packed, scales = quantize(random.standard_normal((rows, columns)).astype(np.float32), bits)
    sessions = [opened(linear(rows, columns, bits), packed, scales, threads) for threads in (1, 2)]
    x = random.standard_normal((1, 70, columns)).astype(np.float32)
    alone = np.concatenate([sessions[0].run(None, {"x": x[:, i : i + 1]})[0] for i in range(70)], axis=1)
    for session in sessions:
        for width in (1, 2, 3, 8, 17, 70):
            np.testing.assert_array_equal(session.run(None, {"x": x[:, :width]})[0], alone[:, :width])


def lowered(system: str, role: str) -> ir.Model:
    """A graph before the pass; DFlare's drafter as it is traced to be quantised."""
    pair = small_pair(KINDS[system])
    if (system, role) != ("dflare", "drafter"):
        return simplified(pair.graph(role))
    spec = pair.drafter_checkpoint.spec
    module = meta_drafter(spec, pair.target_checkpoint.spec, 64, "float32", quantized=True)
    model = trace(module, drafter_graph(spec, "float32"))
    for change in (AttachFunctions(), InlineFunctions(), Simplify()):
        change(model)
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("system", KINDS)
def test_every_linear_layer_and_nothing_else(system: str, role: str, bits: int) -> None:
    model = copy_model(lowered(system, role))
    shapes = {name: value.shape for name, value in model.graph.initializers.items()}
    matrices = {name for name, shape in shapes.items() if shape is not None and len(shape) == 2}
    gathers = [node.inputs[0] for node in model.graph if node.op_type == "Gather"]
    (embedding,) = {value for value in gathers if value.name in matrices}
    tables = {"rope_cos", "rope_sin", "fusion_shares"} & matrices
    tied = KINDS[system].tie
    layers = matrices - tables - (set() if tied else {embedding.name})
    kept = {node.op_type for node in model.graph} - {"MatMul"}
    assert QuantizeWeights(bits)(model).modified
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert {node.inputs[1].name.removesuffix(PACKED) for node in products} == layers
    assert len(products) == len(layers)
    for node in products:
        assert node.domain == "com.microsoft"
        rows, columns = node.attributes["N"].as_int(), node.attributes["K"].as_int()
        name = node.inputs[1].name.removesuffix(PACKED)
        assert (rows, columns) == tuple(shapes[name].numpy())
        assert node.inputs[2].name == name + SCALES
        assert node.inputs[0].shape is None or node.inputs[0].shape[-1] == columns
        assert {key: node.attributes[key].as_int() for key in ("bits", "block_size", "accuracy_level")} == {
            "bits": bits, "block_size": 32, "accuracy_level": 4,
        }  # fmt: skip
        packed = model.graph.initializers[name + PACKED]
        assert (packed.dtype, tuple(packed.shape.numpy())) == (ir.DataType.UINT8, packed_shape((rows, columns), bits))
        scales = model.graph.initializers[name + SCALES]
        assert scales.dtype == ir.DataType.FLOAT
        assert tuple(scales.shape.numpy()) == packed_shape((rows, columns), bits)[:2]
    assert model.opset_imports["com.microsoft"] == 1
    left = {name for name, value in model.graph.initializers.items() if len(value.shape) == 2 and value.uses()}
    assert {name for name in left if not name.endswith(SCALES)} == tables | {embedding.name}
    assert {node.op_type for node in model.graph} - {"MatMulNBits", "MatMul"} <= kept
    before = model_bytes(model)
    assert not QuantizeWeights(bits)(model).modified
    assert model_bytes(model) == before


def test_what_is_left_is_told() -> None:
    model = lowered("dflash", "target")
    with pytest.raises(ir.passes.PostconditionError, match="products left"):
        QuantizeWeights(8).ensures(model)


def test_dflare_projects_layer_by_layer_what_it_projects_at_once() -> None:
    graph = small_pair(KINDS["dflare"]).drafter
    module = copy.deepcopy(graph.module)
    assert isinstance(module, DFlareDrafter)
    assert module.one_product
    module.one_product = False
    assert_same(run_passes(TorchSession(module, graph.spec), 320), run_passes(graph.reference(), 320), 1e-5)
