"""Estimates: above what was measured, but not by much; sizes of buffers counted another way."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from export.small_pair import Kind, small_pair
from hypothesis import given
from hypothesis import strategies as st
from rtx import tensorrt_rtx

from dflash_trt.backends import estimate as module
from dflash_trt.backends.estimate import available_memory, estimate, weight_bytes
from dflash_trt.backends.profiles import profiles
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(max_batch_size=3, max_seq_len=40, max_input_len=30, block_size=4, prefill_chunk=8)


def products(sizes: list[int], save: Path | None = None) -> ir.Model:
    """x [B, K] times matrices [K, K] of random float32, as an .onnx file where asked for."""
    x = ir.val("x", ir.DataType.FLOAT, ["B", sizes[0]])
    nodes, initializers, last = [], [], x
    for index, size in enumerate(sizes):
        array = np.random.default_rng(index).standard_normal((size, size), np.float32) if save else np.zeros(1)
        tensor = ir.tensor(array, name=f"w{index}") if save else None
        weight = ir.Value(
            name=f"w{index}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size, size]), const_value=tensor
        )
        initializers.append(weight)
        nodes.append(ir.node("MatMul", [last, weight], name=f"product_{index}"))
        last = nodes[-1].outputs[0]
        last.name, last.dtype, last.shape = f"y{index}", ir.DataType.FLOAT, ir.Shape(["B", size])
    graph = ir.Graph([x], [last], nodes=nodes, initializers=initializers if save else (), opset_imports={"": 24})
    if not save:
        for weight in initializers:
            graph.initializers.add(weight)
    model = ir.Model(graph, ir_version=11)
    if save:
        ir.save(model, save, external_data=f"{save.name}.data")
    return model


MEASURED = [  # MB: weights, peak, plan
    (3.7, 258, 11.0),
    (6.6, 295, 14.9),
    (261.1, 1019, 269.2),
    (517.0, 1801, 528.7),
    (1193.2, 4386, 1217.9),
    (1193.2, 5430, 1217.9),  # and exported in the same process
]


@pytest.mark.parametrize(("weights", "peak", "plan"), MEASURED)
def test_lies_above_what_was_measured(weights: float, peak: float, plan: float) -> None:
    found = estimate(products([round(math.sqrt(weights * 1e6 / 4))]))
    assert found.weights_bytes == pytest.approx(weights * 1e6, rel=1e-3)
    assert peak <= found.build_bytes / 1e6 <= 1.67 * peak
    assert plan <= found.engine_bytes / 1e6 <= 1.3 * plan


BUILD = """
import json, re, sys
from pathlib import Path
from rtx import tensorrt_rtx

trt = tensorrt_rtx()
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
assert parser.parse_from_file(sys.argv[1])
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM86, 0)
profile = builder.create_optimization_profile()
shape = network.get_input(0).shape
profile.set_shape("x", *[(size, shape[1]) for size in (1, 8, 16)])
config.add_optimization_profile(profile)
plan = builder.build_serialized_network(network, config)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]  # getrusage knows the parent's, too
print(json.dumps({"peak": int(peak) * 1024, "plan": plan.nbytes}))
"""


@pytest.mark.slow
def test_lies_above_a_build_of_tensorrt_rtx(tmp_path: Path) -> None:
    """Of 128 MB of weights, in a process of its own."""
    tensorrt_rtx()
    file = tmp_path / "model.onnx"
    found = estimate(products([2048] * 8, save=file))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(file)], env=environment, capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["peak"] <= found.build_bytes <= 2 * measured["peak"]
    assert measured["plan"] <= found.engine_bytes <= 1.3 * measured["plan"]


@pytest.mark.parametrize("kind", [Kind(), Kind(dtype="bfloat16"), Kind(family="llama", tie=False, windows=False)])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_weights_are_those_that_nodes_read(kind: Kind, role: str) -> None:
    """Counted from the tensors; a tied head is one with the embedding."""
    model = small_pair(kind).graph(role).inlined()
    read = {value for node in model.graph.all_nodes() for value in node.inputs if value is not None}
    tensors = {value.name: value.const_value for value in model.graph.initializers.values() if value in read}
    assert weight_bytes(model) == sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)
    for value in model.graph.initializers.values():
        value.const_value = None
    assert weight_bytes(model) == sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_of_the_target(dtype: str) -> None:
    graph = small_pair(Kind(dtype=dtype)).target  # type: ignore[arg-type]
    found = estimate(graph.inlined(), graph.spec, profiles("target", LIMITS))
    spec, item = graph.spec, 4 if dtype == "float32" else 2
    batch, tree, chunk = LIMITS.max_batch_size, LIMITS.tree_size, LIMITS.prefill_chunk
    slots = batch * spec.num_kv_heads * LIMITS.capacity * spec.head_dim
    assert found.cache_bytes == 2 * spec.num_layers * slots * item
    new_tokens, rows = max(batch * tree, chunk), batch * tree
    features = spec.outputs[2].shape[2]
    assert found.io_bytes == (
        8 * 2 * new_tokens  # ids, positions
        + max(batch * tree**2, chunk**2)  # visibility
        + 8 * batch  # context_len
        + 8 * rows * 2  # logit_rows, token_ids
        + 4 * rows * 320  # logits
        + item * new_tokens * features
    )


@given(st.integers(1, 8), st.integers(1, 64))
def test_buffers_grow_with_the_limits(batch: int, more: int) -> None:
    graph = small_pair().drafter
    wider = dataclasses.replace(LIMITS, max_batch_size=batch)
    longer = dataclasses.replace(wider, max_seq_len=LIMITS.max_seq_len + more)
    small, large = (estimate(graph.traced, graph.spec, profiles("drafter", each)) for each in (wider, longer))
    assert small.cache_bytes is not None
    assert large.cache_bytes is not None
    assert large.cache_bytes * wider.capacity == small.cache_bytes * longer.capacity
    assert large.io_bytes == small.io_bytes


def test_buffers_are_unknown_without_profiles() -> None:
    found = estimate(small_pair().target.traced)
    assert (found.cache_bytes, found.io_bytes) == (None, None)
    assert not [line for line in found.lines() if "caches" in line]


def test_warns_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, meminfo = products([4096]), tmp_path / "meminfo"
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    needed = estimate(model).build_bytes
    for kilobytes, short in ((needed // 1024 - 1, True), (needed // 1024 + 1, False)):
        meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {kilobytes} kB\n")
        found = estimate(model)
        assert found.available_bytes == kilobytes * 1024
        assert (found.warning is not None) == short == ("warning" in found.lines()[-1])
        assert found.to_dict()["warning"] == found.warning


def test_memory_that_nobody_tells_is_not_compared(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "nothing") is None
    (tmp_path / "old").write_text("MemTotal: 1 kB\n")
    assert available_memory(tmp_path / "old") is None
    found = dataclasses.replace(estimate(products([8])), available_bytes=None)
    assert found.warning is None
    assert "available" not in found.lines()[0]


def test_available_memory_is_less_than_all_there_is() -> None:
    found = available_memory()
    if found is None:
        pytest.skip("no /proc/meminfo")
    assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
