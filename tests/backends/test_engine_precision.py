"""Reading back in which dtypes an engine computes: of what an inspector may tell, and of an engine that is open."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from backends.fake_engine import Built, FakeEngine, FakeInspector, api_of
from backends.inspector import FC, HALF, engine_json, fused, gemm, layer, tensor
from export.small_pair import small_pair
from rtx import tensorrt_rtx

from dflash_trt.backends.engine_precision import PrecisionCensus, census, float32_surplus, precision_faults
from dflash_trt.backends.profiles import profiles
from dflash_trt.backends.tensorrt_session import open_engine_session
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(max_batch_size=2, max_seq_len=20, max_input_len=19, block_size=4, prefill_chunk=12)
KEYS = ("Datatype", "Format/Datatype")


# -- what an inspector tells


def test_a_census() -> None:
    found = census(engine_json(*HALF, FC))
    assert found == PrecisionCensus(
        layers=6, outputs={"float16": 4, "float32": 2}, products={"float16": 2, "float32": 1}, float32_products=("fc",)
    )
    assert found.tells


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("Half", "float16"), ("Float", "float32"), ("BFloat16", "bfloat16"), ("BF16", "bfloat16"),
        ("Row major linear FP16 format", "float16"), ("Row major linear FP32", "float32"),
        ("Row major linear BFloat16 format", "bfloat16"), ("N/A due to dynamic shapes", "unknown"),
    ],
)  # fmt: skip
def test_names_of_dtypes(text: str, dtype: str, key: str) -> None:
    found = census(engine_json(gemm(text, key=key)))
    assert found.products == {dtype: 1}
    assert found.tells == (dtype != "unknown")


def test_a_format_may_be_told_apart() -> None:
    both = {"Format": "Format not available due to dynamic shapes", "Datatype": "Half"}
    operands = [{"Name": "a", "Dimensions": [-1, 64], **both}, {"Name": "b", "Dimensions": [64, 64], **both}]
    assert census(engine_json(layer("gemm", operands, "Half"))).products == {"float16": 1}


def test_operands_may_be_constants_and_have_dynamic_sizes_or_none() -> None:
    half = layer("MatrixMultiply", [tensor("Half", -1, -1)], "Half", Constants=[tensor("Half", 64, 64)])
    bare = layer("gemm", [{"Name": "a", "Datatype": "Half"}, {"Name": "b", "Datatype": "Half"}], "Half")
    assert census(engine_json(half, bare)).products == {"float16": 2}


def test_a_cast_that_is_fused_into_a_product() -> None:
    wide = layer("gemm", [tensor("Half", -1, -1)], "Half", Constants=[tensor("Float", 64, 64)])
    found = census(engine_json(wide, fused("Half"), fused("BFloat16")))
    assert found.products == {"float16 and float32": 2, "bfloat16 and float32": 1}
    assert found.float32_products == ()


def test_layers_that_are_only_named_are_unknown() -> None:
    found = census(engine_json("q_proj", FC))
    assert found.outputs == {"unknown": 1, "float32": 1}
    assert not census(engine_json("q_proj", "fc")).tells


# -- against what was asked


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ("float16", [*HALF, FC]),
        ("float16", [*HALF]),
        ("float32", [FC]),
        ("float16", [*HALF, *[FC] * 6]),  # casts may be fused into them
        ("float16", [FC, fused("Half")]),
        ("float16", [*HALF, gemm("N/A due to dynamic shapes")]),
        ("float16", [gemm("N/A due to dynamic shapes")]),  # nothing is told, so nothing is certain
        ("float16", ["q_proj", "fc"]),
        ("float16", []),
    ],
)
def test_precision_that_may_be_as_asked(asked: Any, layers: list[Any]) -> None:
    assert list(precision_faults(asked, census(engine_json(*layers)))) == []


@pytest.mark.parametrize(
    ("asked", "layers", "expected"),
    [
        ("float16", [FC, FC], ["no matrix product computes in float16: 2 in float32$"]),
        ("float16", [FC, gemm("N/A")], ["no matrix product computes in float16: 1 in float32$"]),
        ("bfloat16", [*HALF], ["no .* in bfloat16: 2 in float16", "2 matrix products compute in float16 instead"]),
        (
            "bfloat16",
            [*HALF, gemm("BFloat16"), fused("Half")],
            ["2 matrix products compute in float16 instead of bfloat16", "1 matrix products compute in float16 ins"],
        ),
        ("float32", [*HALF, FC], ["2 matrix products compute in float16 instead of float32"]),
        ("float32", [FC, fused("BFloat16")], ["1 matrix products compute in bfloat16 instead of float32"]),
    ],
)
def test_precision_other_than_asked(asked: Any, layers: list[Any], expected: list[str]) -> None:
    found = list(precision_faults(asked, census(engine_json(*layers))))
    assert len(found) == len(expected), found
    for fault, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, fault), fault


@pytest.mark.parametrize(
    ("asked", "layers", "expected"),
    [
        ("float16", [*HALF, FC], "^$"),
        ("float16", [*HALF, fused("Half")], "^$"),
        ("float32", [FC, FC], "^$"),
        ("float16", [*HALF, FC, gemm("Float", "up")], "^2 matrix products read float32 and the graph has 1, .*fc, up$"),
        ("float16", [*HALF, *[FC] * 6], "^6 matrix products .*: fc, fc, fc, fc, fc, [.]{3}$"),
    ],
)
def test_more_products_in_float32_than_the_graph_has(asked: Any, layers: list[Any], expected: str) -> None:
    assert re.search(expected, float32_surplus(asked, census(engine_json(*layers)), 1))


# -- of an engine


@pytest.mark.parametrize("rtx", [False, True], ids=["tensorrt", "rtx"])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_an_open_engine_is_read_at_the_shapes_of_its_first_profile(tmp_path: Path, role: Any, rtx: bool) -> None:
    graph = small_pair().graph(role)
    given = profiles(role, LIMITS)
    built = Built(graph.module, graph.spec, list(given), information=engine_json(*HALF))
    api, file = api_of(built, rtx), tmp_path / "rank0.engine"
    file.write_bytes(b"engine")
    session = open_engine_session(api, file, graph.spec, given, LIMITS.capacity, None, device="cpu")
    (engine,) = api.trt.engines
    assert len(engine.contexts) == len(given)  # none is made for reading before it is asked for
    assert session.precision is not None
    assert session.precision().products == {"float16": 2}
    context = engine.contexts[-1]
    assert context._execution.shapes == {
        spec.name: given[0].shapes(spec)[1] for spec in (*graph.spec.inputs, *graph.spec.past())
    }
    assert len({context.memory for context in engine.contexts}) == 1
    assert api.trt.calls == ["deserialize_cuda_engine"]


def test_without_shapes_an_inspector_tells_no_dtypes() -> None:
    graph = small_pair().graph("target")
    built = Built(graph.module, graph.spec, list(profiles("target", LIMITS)), information=engine_json(*HALF))
    api, engine = api_of(built), FakeEngine(built, False)
    context = api.context(engine, few_shapes=True)
    assert not census(api.layer_information(engine, context)).tells
    context.set_optimization_profile_async(0, 0)
    context.set_input_shape("input_ids", (1, 1))
    assert not census(api.layer_information(engine, context)).tells


def test_the_inspector_of_rtx_takes_a_context() -> None:
    members = {name for name in dir(FakeInspector(Built.__new__(Built))) if not name.startswith("_")}
    assert members == {"execution_context", "get_engine_information"}
    real = tensorrt_rtx().EngineInspector
    assert members <= set(dir(real))
    assert isinstance(real.execution_context, property)
    assert real.execution_context.fset is not None
