"""What both operators owe to torch (custom op rules, export) and to ONNX (schema, function bodies, mixed graphs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch
from onnx import helper
from op_cases import (
    attention_case,
    attention_model,
    attention_reference,
    injection_case,
    injection_model,
    one_node_model,
    ort_session,
)

from dflash_trt.ops import DOMAIN, OPSET, VERSION, kv_injection, kv_injection_onnx, staircase_attention_onnx

OVERLOADS: list[tuple[Any, str]] = [
    *((kv_injection_onnx, overload) for overload in ("", "no_norm", "partial", "no_norm_partial")),
    *(
        (staircase_attention_onnx, staircase_attention_onnx.overload(sinks, window, softcap))
        for sinks in (False, True)
        for window in (0, 1)
        for softcap in (0.0, 1.0)
    ),
]


def injection_arguments(norm: bool = True) -> tuple[Any, ...]:
    case = injection_case(0, 2, 2, 3, 8, 4, 1, norm)
    return (*(None if array is None else torch.from_numpy(array.copy()) for array in case.inputs()), case.eps)


def attention_arguments(sinks: bool = False, window: int = 0, softcap: float = 0.0) -> tuple[Any, ...]:
    case = attention_case(0, sinks=sinks, window=window, softcap=softcap)
    tensors = (None if array is None else torch.from_numpy(array.copy()) for array in case.inputs())
    return (*tensors, *case.attributes().values())


@pytest.mark.parametrize("norm", [True, False])
def test_kv_injection_is_a_proper_custom_op(norm: bool) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.dflash_trt.kv_injection.default, injection_arguments(norm), test_utils=tests)


@pytest.mark.parametrize("counted", [True, False])
def test_kv_injection_in_place_is_a_proper_custom_op(counted: bool) -> None:
    arguments = (*injection_arguments(), torch.tensor([3, 1]) if counted else None)
    torch.library.opcheck(torch.ops.dflash_trt.kv_injection_.default, arguments)


@pytest.mark.parametrize("name", ["kv_injection_", "kv_injection"])
def test_keys_that_do_not_fit_the_cache_are_refused_while_tracing(name: str) -> None:
    arguments = [value.to("meta") if torch.is_tensor(value) else value for value in injection_arguments()]
    arguments[0] = arguments[0][:, :, :1]
    with pytest.raises(ValueError, match="do not fit a cache of 2 heads of size 8"):
        getattr(torch.ops.dflash_trt, name)(*arguments)


@pytest.mark.parametrize("sinks", [True, False])
def test_staircase_attention_is_a_proper_custom_op(sinks: bool) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = attention_arguments(sinks, window=5, softcap=2.0)
    torch.library.opcheck(torch.ops.dflash_trt.staircase_attention.default, arguments, test_utils=tests)


class Injecting(torch.nn.Module):
    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_injection.kv_injection(*args, 1e-5)  # type: ignore[call-arg, arg-type]


def test_kv_injection_is_functional_when_exported() -> None:
    """The exported program takes caches and gives caches; it mutates nothing."""
    *tensors, _ = injection_arguments()
    program = torch.export.export(Injecting(), tuple(tensors))
    assert not program.graph_signature.user_inputs_to_mutate
    before = [tensor.clone() for tensor in tensors]
    keys, values = program.module()(*tensors)
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now, then)
    expected_keys, expected_values = kv_injection.kv_injection(*tensors, 1e-5)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    assert not torch.equal(tensors[7], before[7])


def test_kv_injection_writes_in_place_when_eager() -> None:
    arguments = injection_arguments()
    key_cache, value_cache = arguments[7], arguments[8]
    before = key_cache.clone(), value_cache.clone()
    keys, values = kv_injection.kv_injection(*arguments)
    assert keys is key_cache
    assert values is value_cache
    assert not torch.equal(key_cache, before[0])
    assert not torch.equal(value_cache, before[1])


def test_kv_injection_writes_through_views() -> None:
    """A sequence's prefill runs on a view of its own row of the cache."""
    arguments = list(injection_arguments())
    caches = [torch.zeros(3, *arguments[index].shape[1:]) for index in (7, 8)]
    single = [argument[:1] if torch.is_tensor(argument) else argument for argument in arguments]
    single[2], single[4], single[5] = arguments[2], arguments[4], arguments[5]
    kv_injection.kv_injection(*single[:7], caches[0][1:2], caches[1][1:2], single[9])
    for cache in caches:
        assert cache[1].any()
        assert not cache[0].any()
        assert not cache[2].any()


@pytest.mark.parametrize(("op", "overload"), OVERLOADS)
def test_function_body_declares_what_the_schema_does(op: Any, overload: str) -> None:
    function, schema = op.function_body(overload), op.schema()
    assert (function.domain, function.name, function.overload) == (schema.domain, schema.name, overload)
    assert list(function.input) == [parameter.name for parameter in schema.inputs]
    assert len(function.output) == len(schema.outputs)
    assert sorted(function.attribute) == sorted(schema.attributes)
    assert not function.attribute_proto
    assert [(entry.domain, entry.version) for entry in function.opset_import] == [("", OPSET)]
    assert {node.domain for node in function.node} == {""}
    onnx.checker.check_function(function)


@pytest.fixture
def registered() -> Any:
    """Both schemas known to onnx, so that its checker holds calls against them."""
    for op in (kv_injection_onnx, staircase_attention_onnx):
        onnx.defs.register_schema(op.schema())
    yield
    for op in (kv_injection_onnx, staircase_attention_onnx):
        onnx.defs.deregister_schema(op.NAME, VERSION, DOMAIN)


def models() -> list[Callable[[], onnx.ModelProto]]:
    return [
        lambda: injection_model("", 1e-5, "float32"),
        lambda: injection_model("no_norm_partial", 1e-5, "float16"),
        lambda: attention_model("", 0.5, 0, 1, 0.0, "float32"),
        lambda: attention_model("window_softcap_sinks", 0.5, 4, 0, 2.0, "bfloat16"),
    ]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.usefixtures("registered")
def test_checker_accepts_calls(index: int) -> None:
    onnx.checker.check_model(models()[index](), full_check=True)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        (kv_injection_onnx, {}),
        (staircase_attention_onnx, {"scale": 1.0, "sliding_window": 0, "causal": 1}),
        (staircase_attention_onnx, {"scale": 1.0, "sliding_window": 0, "causal": 1, "softcap": 0.0, "unknown": 1}),
    ],
)
@pytest.mark.usefixtures("registered")
def test_checker_refuses_missing_and_unknown_attributes(op: Any, attributes: dict[str, Any]) -> None:
    model = one_node_model(op.schema(), op.function_body(""), "", None, attributes)
    del model.functions[:]  # a call with a body is not held against the schema
    with pytest.raises(onnx.checker.ValidationError, match="attribute"):
        onnx.checker.check_model(model)


@pytest.mark.parametrize("inlined", [False, True])
def test_overloads_mix_in_one_graph(inlined: bool) -> None:
    """A model with windowed and full layers carries two bodies of one operator."""
    schema = staircase_attention_onnx.schema()
    names = ["" if parameter.name == "sinks" else f"in_{parameter.name}" for parameter in schema.inputs]
    common = {"domain": DOMAIN, "scale": 0.7, "causal": 0, "softcap": 0.0}
    nodes = [
        helper.make_node(schema.name, names, ["full"], overload="", sliding_window=0, **common),
        helper.make_node(schema.name, names, ["windowed"], overload="window", sliding_window=3, **common),
    ]
    single = attention_model("", 0.7, 0, 0, 0.0, "float32")
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 3) for name in ("full", "windowed")]
    model = helper.make_model(
        helper.make_graph(nodes, "mixed", single.graph.input, outputs),
        functions=[staircase_attention_onnx.function_body(overload) for overload in ("", "window")],
        opset_imports=single.opset_import,
        ir_version=11,
    )
    onnx.checker.check_model(model)
    if inlined:
        model = onnx.inliner.inline_local_functions(model)
        assert {node.domain for node in model.graph.node} == {""}
    full, windowed = (attention_case(1, queries=5, window=window, causal=0) for window in (0, 3))
    inputs = zip(schema.inputs, full.inputs(), strict=True)
    found = ort_session(model).run(None, {f"in_{p.name}": array for p, array in inputs if array is not None})
    assert not np.allclose(found[0], found[1])
    for out, case in zip(found, (full, windowed), strict=True):
        np.testing.assert_allclose(out, attention_reference(case), rtol=1e-5, atol=1e-5)
