"""Tracing: the I/O of the contract, on modules without memory; one graph serves every batch and length."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from export.small_pair import (
    LAYERS,
    POSITIONS,
    TAPS,
    Kind,
    assert_same,
    random_inputs,
    run_passes,
    small_pair,
)

from dflash_trt.errors import ExportError
from dflash_trt.export.contract import GraphSpec, TensorSpec, target_graph
from dflash_trt.export.trace import _check_io, trace
from dflash_trt.modeling.load import meta_target
from dflash_trt.ops import DOMAIN, kv_injection, staircase_attention

VOCAB, HIDDEN, KV_HEADS, HEAD_DIM = 320, 32, 2, 16
LLAMA = Kind(family="llama", tie=False, windows=False, stored="bfloat16")

# The contract, written out once more
CACHE = ("FLOAT", ("B", KV_HEADS, "C", HEAD_DIM))
INPUTS: dict[str, dict[str, tuple[str, tuple[Any, ...]]]] = {
    "target": {
        "input_ids": ("INT64", ("B", "Q")),
        "position_ids": ("INT64", ("B", "Q")),
        "visibility": ("BOOL", ("B", "Q", "Q")),
        "context_len": ("INT64", ("B",)),
        "logit_rows": ("INT64", ("B", "R")),
    },
    "drafter": {
        "context_features": ("FLOAT", ("B", "N", len(TAPS) * HIDDEN)),
        "feature_len": ("INT64", ("B",)),
        "context_len": ("INT64", ("B",)),
        "block_ids": ("INT64", ("B", "Q")),
        "block_position_ids": ("INT64", ("B", "Q")),
        "visibility": ("BOOL", ("B", "Q", "Q")),
    },
}
OUTPUTS: dict[str, dict[str, tuple[str, tuple[Any, ...]]]] = {
    "target": {
        "logits": ("FLOAT", ("B", "R", VOCAB)),
        "token_ids": ("INT64", ("B", "R")),
        "context_features": ("FLOAT", ("B", "Q", len(TAPS) * HIDDEN)),
    },
    "drafter": {
        "draft_ids": ("INT64", ("B", "Q")),
        "confidence": ("FLOAT", ("B", "Q")),
        "logits": ("FLOAT", ("B", "Q", VOCAB)),
    },
}
ROLES = ("target", "drafter")


def io_of(values: Any) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """name -> (dtype, dimensions), in order."""
    dims = {value.name: tuple(d if isinstance(d, int) else str(d.value) for d in value.shape) for value in values}
    return {value.name: (str(value.dtype), dims[value.name]) for value in values}


@pytest.mark.parametrize("role", ROLES)
def test_io_is_the_contract(role: str) -> None:
    graph = small_pair().graph(role).traced.graph
    pairs = [(kind, layer) for layer in range(LAYERS) for kind in ("key", "value")]
    inputs = INPUTS[role] | {f"past_{kind}_{layer}": CACHE for kind, layer in pairs}
    outputs = OUTPUTS[role] | {f"present_{kind}_{layer}": CACHE for kind, layer in pairs}
    assert list(io_of(graph.inputs).items()) == list(inputs.items())
    assert list(io_of(graph.outputs).items()) == list(outputs.items())


@pytest.mark.parametrize("role", ROLES)
def test_the_traced_graph_holds_no_weights(role: str) -> None:
    graph = small_pair().graph(role)
    model, placed = graph.traced, graph.placed.entries
    weights = [value for name, value in model.graph.initializers.items() if name in placed]
    assert len(weights) > 20
    assert all(value.const_value is None for value in weights)
    constants = [node for node in model.graph if node.op_type == "Constant"]
    assert all(node.outputs[0].const_value is None or node.outputs[0].const_value.size <= 8 for node in constants)


@pytest.mark.parametrize("role", ROLES)
def test_the_traced_graph_calls_both_operators_and_carries_no_bodies(role: str) -> None:
    model = small_pair().graph(role).traced
    calls = [node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN]
    assert calls.count(kv_injection.NAME) == LAYERS
    assert calls.count(staircase_attention.NAME) == LAYERS
    assert len(calls) == 2 * LAYERS
    assert not [key for key in model.functions if key[0] == DOMAIN]


def test_initialisers_have_the_names_of_the_checkpoint() -> None:
    pair = small_pair(LLAMA)
    target = set(pair.target.traced.graph.initializers) & set(pair.target.placed.entries)
    assert target == set(pair.target_checkpoint.tensors) | {"rope_cos", "rope_sin"}
    drafter = set(pair.drafter.traced.graph.initializers) & set(pair.drafter.placed.entries)
    shared = {f"target.{name}" for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert drafter == set(pair.drafter_checkpoint.tensors) | shared | {"rope_cos", "rope_sin"}


@pytest.mark.parametrize("role", ROLES)
def test_checker_accepts_the_saved_graphs(tmp_path: Path, role: str) -> None:
    """On a copy: onnx refuses external data with several hard links, which is how bundles hold weights."""
    shutil.copytree(small_pair().graph(role).folder, tmp_path / role)
    for name in ("portable.onnx", "model.onnx"):
        onnx.checker.check_model(str(tmp_path / role / name), full_check=True)


@pytest.mark.parametrize("kind", [Kind(), LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize("role", ROLES)
def test_portable_and_inlined_graphs_equal_the_reference(role: str, kind: Kind) -> None:
    graph = small_pair(kind).graph(role)
    expected = run_passes(graph.reference(), VOCAB)
    for name in ("portable.onnx", "model.onnx"):
        assert_same(run_passes(graph.ort(name), VOCAB), expected, 1e-4)


@pytest.mark.parametrize("role", ROLES)
def test_one_graph_for_every_batch_and_length(role: str) -> None:
    graph = small_pair().graph(role)
    ours, reference = graph.ort(), graph.reference()
    for batch, sizes in ((1, (1,)), (1, (7, 1)), (2, (1, 1, 2)), (3, (2, 6, 1))):
        assert_same(run_passes(ours, VOCAB, batch, sizes), run_passes(reference, VOCAB, batch, sizes), 1e-4)


@pytest.mark.slow
def test_a_float16_graph_runs_near_the_reference() -> None:
    pair = small_pair(Kind(dtype="float16"))
    for role in ROLES:
        graph = pair.graph(role)
        assert_same(run_passes(graph.ort(), VOCAB), run_passes(graph.reference(), VOCAB), 3e-2)


def test_a_bfloat16_graph_says_so_at_its_borders() -> None:
    spec = small_pair().target_checkpoint.spec
    model = trace(meta_target(spec, TAPS, POSITIONS, "bfloat16"), target_graph(spec, len(TAPS), "bfloat16"))
    kinds = {name: dtype for name, (dtype, _) in io_of([*model.graph.inputs, *model.graph.outputs]).items()}
    assert {kinds["logits"], model.graph.initializers["rope_cos"].dtype.name} == {"FLOAT"}
    halves = {kinds["context_features"], kinds["past_key_0"], kinds["present_value_1"]}
    assert halves == {"BFLOAT16"}
    placed = small_pair().target.placed  # float32
    with pytest.raises(ExportError, match="F32"):
        placed.bind(model)


def changed(graph: GraphSpec, **changes: Any) -> GraphSpec:
    return replace(graph, **changes)


def mismatches() -> dict[str, Any]:
    x = TensorSpec(name="x", dtype="int64", shape=("B",))
    return {
        "another number of taps": lambda g: changed(g, outputs=(*g.outputs[:2], _reshaped(g.outputs[2], 2, 96))),
        "an output more": lambda g: changed(g, outputs=(*g.outputs, x)),
        "an output less": lambda g: changed(g, outputs=g.outputs[:2]),
        "another name": lambda g: changed(g, outputs=(*g.outputs[:2], x)),
        "another dtype": lambda g: changed(g, dtype="float16"),
        "another fixed dimension": lambda g: changed(g, outputs=(_reshaped(g.outputs[0], 1, 3), *g.outputs[1:])),
        "a layer more": lambda g: changed(g, num_layers=LAYERS + 1),
        "other heads": lambda g: changed(g, num_kv_heads=1),
    }  # fmt: skip


def _reshaped(spec: TensorSpec, axis: int, size: int) -> TensorSpec:
    return replace(spec, shape=(*spec.shape[:axis], size, *spec.shape[axis + 1 :]))


@pytest.mark.parametrize("name", mismatches())
def test_io_that_is_not_the_contract_is_an_error(name: str) -> None:
    pair = small_pair()
    with pytest.raises(ExportError):
        _check_io(pair.target.traced, mismatches()[name](pair.target.spec))


TINY = GraphSpec(
    role="target",
    inputs=(TensorSpec(name="ids", dtype="int64", shape=("B", "Q")),),
    outputs=(TensorSpec(name="out", dtype="int64", shape=("B", "Q")),),
    num_layers=1,
    num_kv_heads=2,
    head_dim=4,
    dtype="float32",
)


class Tiny(torch.nn.Module):
    """A module of few operations, to be traced with `TINY`."""

    def forward(self, ids: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.answer(ids), *(cache + 1 for cache in caches))

    def answer(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + 1


class FixedSize(Tiny):
    """Gives the size of the example."""

    def answer(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.new_zeros((2, 5))


class Branching(Tiny):
    """Decides by a length: the trace follows one branch, for lengths above 3 alone."""

    def answer(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + 1 if ids.shape[1] > 3 else ids


class Bounded(Tiny):
    """Serves lengths up to a bound alone."""

    def answer(self, ids: torch.Tensor) -> torch.Tensor:
        torch._check(ids.shape[1] < 100)
        return ids + 1


class Failing(Tiny):
    """Decides by a value, which tracing does not know."""

    def answer(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + 1 if ids.sum() > 3 else ids


def test_a_proper_module_traces() -> None:
    assert list(io_of(trace(Tiny(), TINY).graph.outputs)) == ["out", "present_key_0", "present_value_0"]


@pytest.mark.parametrize(
    ("module", "message"),
    [(FixedSize, "out"), (Branching, "narrowed"), (Bounded, "narrowed"), (Failing, "cannot trace")],
)
def test_a_specialised_or_failed_trace_is_an_error(module: type[Tiny], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        trace(module(), TINY)


def test_caches_of_other_heads_are_an_error() -> None:
    module = meta_target(small_pair().target_checkpoint.spec, TAPS, POSITIONS, "float32")
    with pytest.raises(ExportError, match="heads"):
        trace(module, changed(small_pair().target.spec, head_dim=8))


def test_progress_counts_layers() -> None:
    """All of them equally often, whatever torch does in which order; and counting changes no graph."""
    spec, told = small_pair().target_checkpoint.spec, []
    graph = target_graph(spec, len(TAPS), "float32")
    counted, plain = (
        trace(meta_target(spec, TAPS, POSITIONS, "float32"), graph, *advance) for advance in ([told.append], [])
    )
    assert set(told) == {1}
    assert len(told) > 0
    assert len(told) % LAYERS == 0
    assert ir.to_proto(counted).graph.node == ir.to_proto(plain).graph.node


@pytest.mark.parametrize("role", ROLES)
def test_saved_graphs_are_small(role: str) -> None:
    """The weights are beside the graph, not in it."""
    folder = small_pair().graph(role).folder
    for name in ("portable.onnx", "model.onnx"):
        values = [value.const_value for value in ir.load(folder / name).graph.initializers.values()]
        assert sum(value.size for value in values if value and not isinstance(value, ir.ExternalTensor)) < 256


def test_random_inputs_are_the_contract() -> None:
    """A test of the tests: what they feed has the dtypes the contract names."""
    for role in ROLES:
        graph = small_pair().graph(role).spec
        inputs = random_inputs(graph, 0, 3, VOCAB, 2, 4)
        assert {name: array.dtype for name, array in inputs.items()} == {
            spec.name: np.dtype(spec.dtype) for spec in graph.inputs
        }
