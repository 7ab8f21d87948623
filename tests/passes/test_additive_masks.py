"""AdditiveMasks: every boolean mask becomes numbers, once, and ONNX Runtime computes what it did."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from export.small_pair import Graph, assert_same, model_bytes, small_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from ops.op_cases import ort_session
from passes.running import KINDS, run, simplified

from dflash_trt.ops import OPSET
from dflash_trt.passes.additive_masks import AdditiveMasks

DTYPES = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}


def ir_dtype(name: str) -> ir.DataType:
    return ir.DataType(DTYPES[name][0])


def nodes_of(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.op_type == op_type]


def mask_of(node: ir.Node) -> ir.Value | None:
    return node.inputs[3] if len(node.inputs) > 3 else None


# --- single nodes


@dataclass(frozen=True)
class Case:
    """A model of Attention nodes, `y0`, `y1`, ..., and inputs for it."""

    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    masks: int

    def additive(self) -> ir.Model:
        model = ir.from_proto(self.model)
        assert AdditiveMasks()(model).modified
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
        return model

    def evaluate(self, model: onnx.ModelProto) -> list[np.ndarray]:
        return ort_session(model).run(None, self.inputs)


def attentions(
    shapes: dict[str, list[int]],
    readers: list[str | None],
    seed: int,
    *,
    dtype: str = "float32",
    spread: float = 1.0,
    **attributes: Any,
) -> Case:
    """One node for each of `readers`, the mask it reads; `shapes` of q, k, v and of the masks m0, m1, ..."""
    rng = np.random.default_rng(seed)
    kind, numpy_dtype = DTYPES[dtype]
    inputs: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if name.startswith("m"):
            inputs[name] = rng.random(shape) < rng.random()
            seen = rng.integers(0, shape[-1], shape[:-1])
            np.put_along_axis(inputs[name], seen[..., None], True, axis=-1)
        else:
            inputs[name] = (spread * rng.standard_normal(shape)).astype(numpy_dtype)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if name.startswith("m") else kind, shape)
        for name, shape in shapes.items()
    ]
    outputs = [
        helper.make_tensor_value_info(f"y{number}", kind, [*shapes["q"][:3], shapes["v"][3]])
        for number in range(len(readers))
    ]
    nodes = [
        helper.make_node("Attention", ["q", "k", "v", *([mask] if mask else [])], [f"y{n}"], f"n{n}", **attributes)
        for n, mask in enumerate(readers)
    ]
    graph = helper.make_graph(nodes, "attentions", infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    return Case(model, inputs, len(set(readers) - {None}))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Grouped heads, masks of two to four dimensions, shared and not."""
    batch, kv_heads, group, queries, keys, dim, value_dim = (draw(st.integers(1, n)) for n in (3, 2, 3, 6, 9, 8, 8))
    heads = kv_heads * group
    shapes = {
        "q": [batch, heads, queries, dim], "k": [batch, kv_heads, keys, dim], "v": [batch, kv_heads, keys, value_dim],
    }  # fmt: skip
    count = draw(st.integers(1, 3))
    for number in range(count):
        full = [draw(st.sampled_from((1, batch))), draw(st.sampled_from((1, heads))), queries, keys]
        shapes[f"m{number}"] = full[draw(st.integers(0, 2)) :]
    readers = [f"m{draw(st.integers(0, count - 1))}" for _ in range(draw(st.integers(0, 3)))]
    attributes = draw(st.sampled_from(({}, {"scale": 0.3}, {"softcap": 5.0})))
    spread = draw(st.sampled_from((0.1, 1.0, 30.0)))
    return attentions(
        shapes, [*(f"m{n}" for n in range(count)), *readers, *draw(st.sampled_from(([], [None])))],
        draw(st.integers(0, 99)), spread=spread, **attributes,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_nodes(case: Case) -> None:
    model = case.additive()
    found, wanted = case.evaluate(ir.to_proto(model)), case.evaluate(case.model)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    masks = [mask for mask in map(mask_of, nodes_of(model, "Attention")) if mask is not None]
    assert {mask.dtype for mask in masks} == {ir.DataType.FLOAT}
    assert len(nodes_of(model, "Where")) == len(set(masks)) == case.masks


def test_against_a_loop() -> None:
    """Of one head: a softmax over what each query sees, and nothing else."""
    case = attentions({"q": [1, 1, 5, 4], "k": [1, 1, 7, 4], "v": [1, 1, 7, 3], "m0": [5, 7]}, ["m0"], 3)
    q, k, v, mask = (case.inputs[name] for name in ("q", "k", "v", "m0"))
    (found,) = case.evaluate(ir.to_proto(case.additive()))
    for query in range(5):
        seen = [key for key in range(7) if mask[query, key]]
        weights = np.exp([q[0, 0, query] @ k[0, 0, key] / math.sqrt(4) for key in seen])
        expected = sum(w * v[0, 0, key] for w, key in zip(weights / weights.sum(), seen, strict=True))
        np.testing.assert_allclose(found[0, 0, query], expected, rtol=1e-5, atol=1e-6)


SHAPES = {"q": [1, 2, 3, 8], "k": [1, 1, 4, 8], "v": [1, 1, 4, 8], "m0": [3, 4]}


@pytest.mark.parametrize(
    ("dtype", "lowest"), [("float32", -1.7014118e38), ("float16", -32752), ("bfloat16", -1.695e38)]
)
def test_what_is_hidden_gets_half_of_the_most_negative_number_of_the_dtype(dtype: str, lowest: float) -> None:
    model = attentions(SHAPES, ["m0"], 0, dtype=dtype).additive()
    (where,) = nodes_of(model, "Where")
    condition, seen, hidden = where.inputs
    assert condition is model.graph.inputs[3]
    for value, number in ((seen, 0.0), (hidden, lowest)):
        assert value is not None
        assert (value.shape, value.dtype) == (ir.Shape([]), ir_dtype(dtype))
        assert value.const_value is not None
        array = value.const_value.numpy()
        assert array.dtype == DTYPES[dtype][1]
        assert float(array) == pytest.approx(number, rel=2e-3)
        assert np.isfinite(array.astype(np.float64))
    # twice as much is still a number, as it is after a score is added or all is scaled for powers of two
    assert np.isfinite(array * array.dtype.type(2))


def test_what_is_hidden_counts_exactly_nothing() -> None:
    """Whatever its values are."""
    case = attentions(SHAPES, ["m0"], 5)
    (before,) = case.evaluate(ir.to_proto(case.additive()))
    for query, key in np.argwhere(~case.inputs["m0"]):
        loud = {name: case.inputs[name].copy() for name in ("k", "v")}
        for array in loud.values():
            array[:, :, key] = 1e6 * np.sign(array[:, :, key])
        (after,) = replace(case, inputs=case.inputs | loud).evaluate(ir.to_proto(case.additive()))
        np.testing.assert_array_equal(after[:, :, query], before[:, :, query])


def test_other_masks_are_left_alone() -> None:
    """None at all, one of numbers, and a node of another domain with the same name."""
    case = attentions(SHAPES, ["m0", None], 0)
    model = ir.from_proto(case.model)
    numbers = ir.val("numbers", ir.DataType.FLOAT, [3, 4])
    model.graph.inputs.append(numbers)
    masked, plain = nodes_of(model, "Attention")
    masked.replace_input_with(3, numbers)
    before = model_bytes(model)
    assert not AdditiveMasks()(model).modified
    assert model_bytes(model) == before
    masked.replace_input_with(3, model.graph.inputs[3])
    masked.domain = "somebody"
    assert not AdditiveMasks()(model).modified
    masked.domain = ""
    assert AdditiveMasks()(model).modified
    assert len(plain.inputs) == 3


def test_a_mask_that_queries_of_two_dtypes_read() -> None:
    model = ir.from_proto(attentions(SHAPES, ["m0", "m0", "m0"], 0).model)
    casts = [ir.node("Cast", [value], {"to": TensorProto.FLOAT16}) for value in model.graph.inputs[:3]]
    nodes = nodes_of(model, "Attention")
    model.graph.insert_before(nodes[0], casts)
    for index, cast in enumerate(casts):
        cast.outputs[0].name, cast.outputs[0].dtype = f"half_{index}", ir.DataType.FLOAT16
        nodes[1].replace_input_with(index, cast.outputs[0])
    model.graph.outputs[1].dtype = ir.DataType.FLOAT16
    assert AdditiveMasks()(model).modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    first, second, third = (mask_of(node) for node in nodes)
    assert first is third
    assert (first.dtype, second.dtype) == (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def test_a_query_of_unknown_dtype_is_refused() -> None:
    model = ir.from_proto(attentions(SHAPES, ["m0"], 0).model)
    query = model.graph.inputs[0]
    query.type = None
    with pytest.raises(ir.passes.PassError) as caught:
        ir.passes.Sequential(AdditiveMasks())(model)
    assert "node n0: the dtype of its query is not known" in f"{caught.value} {caught.value.__cause__}"


# --- whole graphs


@pytest.fixture(params=[(kind, role) for kind in KINDS for role in ("target", "drafter")], ids="-".join)
def graph(request: pytest.FixtureRequest) -> Graph:
    kind, role = request.param
    return small_pair(KINDS[kind]).graph(role)


def additive(graph: Graph) -> ir.Model:
    model = simplified(graph)
    assert AdditiveMasks()(model).modified
    return model


def test_each_mask_becomes_numbers_once(graph: Graph) -> None:
    before, after = simplified(graph), additive(graph)
    masks = [mask_of(node) for node in nodes_of(before, "Attention")]
    assert all(mask is not None and mask.dtype == ir.DataType.BOOL for mask in masks)
    found = [mask_of(node) for node in nodes_of(after, "Attention")]
    assert {mask.dtype for mask in found if mask is not None} == {ir.DataType.FLOAT}
    # layers that shared a mask share its numbers
    assert [masks.index(mask) for mask in masks] == [found.index(mask) for mask in found]
    assert len(nodes_of(after, "Where")) - len(nodes_of(before, "Where")) == len(set(masks))
    names = [value.name for node in after.graph for value in node.outputs]
    assert len(names) == len(set(names))


def test_it_changes_no_output(graph: Graph, tmp_path: Path) -> None:
    assert_same(run(additive(graph), graph, tmp_path), run(simplified(graph), graph, tmp_path), 1e-6)


def test_a_second_run_changes_nothing(graph: Graph) -> None:
    model = additive(graph)
    before = model_bytes(model)
    assert not AdditiveMasks()(model).modified
    assert model_bytes(model) == before


def test_weights_stay_what_they_are(graph: Graph) -> None:
    model = simplified(graph)
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    AdditiveMasks()(model)
    after = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert all(after[name] is tensor for name, tensor in before.items())
    added = [tensor for name, tensor in after.items() if name not in before]
    assert added
    assert all(tensor is not None and tensor.size == 1 for tensor in added)
