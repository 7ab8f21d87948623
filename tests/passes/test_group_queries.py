"""Attentions of several queries, and exact ones: the same outputs, and rows that stand alone to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from export.small_pair import Graph, Kind, assert_same, copy_model, model_bytes, small_pair
from passes.running import KINDS, run, simplified

from dflash_trt.passes.exact_attention import ExactAttention
from dflash_trt.passes.group_queries import GroupQueries

HEADS = [(9, 3), (4, 4)]


def attention(heads: int, shared: int, *, exact: bool = False) -> onnxruntime.InferenceSession:
    """One attention over a cache, after the passes."""
    shapes = {"q": ["B", heads, "Q", 32], "k": ["B", shared, "C", 32], "v": ["B", shared, "C", 32]}
    inputs = [ir.val(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items()]
    inputs.append(ir.val("mask", ir.DataType.BOOL, ["B", 1, "Q", "C"]))
    node = ir.node("Attention", inputs, {"scale": 32**-0.5})
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(shapes["q"])
    back = ir.node("Identity", [y])  # an attention is never an output of ours
    z = back.outputs[0]
    z.name, z.type, z.shape = "z", y.type, y.shape
    graph = ir.Graph(inputs, [z], nodes=[node, back], opset_imports={"": 24}, name="g")
    model = ir.Model(graph, ir_version=11)
    assert GroupQueries()(model).modified
    assert not GroupQueries()(model).modified
    if exact:
        assert ExactAttention()(model).modified
        assert not ExactAttention()(model).modified
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def random_inputs(heads: int, shared: int, queries: int, slots: int = 160) -> dict[str, np.ndarray]:
    random = np.random.default_rng(heads)
    sizes = {"q": (1, heads, queries, 32), "k": (1, shared, slots, 32), "v": (1, shared, slots, 32)}
    found = {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    mask = np.arange(slots)[None] <= slots - queries + np.arange(queries)[:, None]
    return found | {"mask": mask[None, None]}


def in_float64(inputs: dict[str, np.ndarray]) -> np.ndarray:
    q, k, v = (inputs[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(array, q.shape[1] // k.shape[1], axis=1) for array in (k, v))
    scores = np.where(inputs["mask"], q @ k.swapaxes(2, 3) * 32**-0.5, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shares @ v / shares.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_it_is_attention(heads: int, shared: int, exact: bool) -> None:
    inputs = random_inputs(heads, shared, 7)
    (found,) = attention(heads, shared, exact=exact).run(None, inputs)
    np.testing.assert_allclose(found, in_float64(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_a_query_alone_is_the_query_among_others(heads: int, shared: int, exact: bool) -> None:
    inputs = random_inputs(heads, shared, 24)
    session = attention(heads, shared, exact=exact)
    (together,) = session.run(None, inputs)
    for width in (1, 2, 3, 8):
        for start in range(0, 24, width):
            rows = slice(start, start + width)
            part = inputs | {name: np.ascontiguousarray(inputs[name][:, :, rows]) for name in ("q", "mask")}
            np.testing.assert_array_equal(session.run(None, part)[0], together[:, :, rows])


@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_exact_attention_sees_no_difference_where_keys_lie(heads: int, shared: int) -> None:
    """What a path through a tree sees: the same keys in the same order, with hidden ones between them."""
    inputs = random_inputs(heads, shared, 1, slots=130)
    inputs["mask"] = inputs["mask"] | True
    apart = dict(inputs)
    slots = np.array([*range(110), *range(120, 130), *range(170, 180)])
    for name in "kv":
        apart[name] = np.full((1, shared, 192, 32), 3, np.float32)
        apart[name][:, :, slots] = inputs[name]
    apart["mask"] = np.isin(np.arange(192), slots)[None, None, None]
    session = attention(heads, shared, exact=True)
    np.testing.assert_array_equal(session.run(None, inputs)[0], session.run(None, apart)[0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("system", KINDS)
def test_outputs_stay(system: str, role: str, exact: bool, tmp_path: Path) -> None:
    graph: Graph = small_pair(KINDS[system]).graph(role)
    model = simplified(graph)
    expected = run(model, graph, tmp_path)
    changed = copy_model(model)
    graph.placed.bind(changed)
    GroupQueries()(changed)
    if exact:
        ExactAttention()(changed)
        assert "Attention" not in {node.op_type for node in changed.graph}
    before = model_bytes(changed)
    for again in (GroupQueries(), *([ExactAttention()] if exact else [])):
        assert not again(changed).modified
    assert model_bytes(changed) == before
    assert_same(run(changed, graph, tmp_path), expected, 1e-4)


def test_windowed_layers_have_masks_of_their_own() -> None:
    """One grouped mask for each mask there was, not one for each layer."""
    model = simplified(small_pair(Kind()).target)
    masks = {node.inputs[3] for node in model.graph if node.op_type == "Attention"}
    GroupQueries()(model)
    grouped = {node.inputs[3] for node in model.graph if node.op_type == "Attention"}
    assert len(masks) == len(grouped) == 2
    assert masks.isdisjoint(grouped)
