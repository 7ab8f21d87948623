"""What the plugins refuse, and the reasons they log."""

from __future__ import annotations

import native
import pytest
from plugins.launches import FAKE, SMS, KvInjection, Staircase, events


def refusal(built: native.Built, commands: list[str], devices: str = f"90:{SMS}") -> str:
    """The one logged reason; the last command must have failed."""
    lines = built.drive(commands, devices)
    assert lines[-1]["status"] != 0, lines
    (message,) = events(lines, "log")
    return message["message"]


def prepare(case: Staircase | KvInjection) -> list[str]:
    return [case.create(), *case.tensors(), "shape_change"]


@pytest.mark.parametrize(
    ("case", "devices", "reason"),
    [
        (Staircase(window=64), "80:108", "compute capability 80, dtype fp16, head_dim 128, features 'window'"),
        (Staircase(dtype="bf16"), "80:108", "compute capability 80, dtype bf16, head_dim 128, features ''"),
        (Staircase(dim=96), "90:132", "compute capability 90, dtype fp16, head_dim 96, features ''"),
        (Staircase(), "100:148", "compute capability 100, dtype fp16, head_dim 128, features ''"),
    ],
)
def test_a_missing_variant_is_an_error_that_says_which(built, case, devices, reason):
    message = refusal(built, prepare(case), devices)
    start = (
        f"dflash_trt StaircaseAttention::onShapeChange: no variant of staircase_context for {reason}; this library has"
    )
    assert message.startswith(start)
    assert all(there in message for there in ("80/fp16/128/''", "90/bf16/64/'softcap'"))
    assert not any(other in message for other in ("kv_injection", "\n"))


@pytest.mark.parametrize("capability", [75, 103, 121, 91, 110])
def test_a_device_without_kernels_is_an_error_that_says_which(built: native.Built, capability: int) -> None:
    message = refusal(built, prepare(KvInjection()), f"{capability}:{SMS}")
    shown = f"{capability // 10}.{capability % 10}"
    assert message.endswith(f"device 0 has compute capability {shown}; there are kernels for 8.x, 9.0, 10.0 and 12.0")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Staircase(heads=30), "query has 30 heads, which is not a multiple of the 8 heads of key_cache"),
        (Staircase(queries=129), "query has 129 queries; at most 128 are possible"),
        (Staircase(capacity=15), "query has 16 queries, but key_cache only 15 slots"),
        (Staircase(dim=80), "head_dim is 80; it must be 64, 96, 128 or 256"),
        (Staircase(dtype="fp32"), "query must be fp16 or bf16, not fp32"),
        (Staircase(replace={"key_cache": "bf16 1,8,4096,128"}), "key_cache must be fp16 like query, not bf16"),
        (
            Staircase(replace={"value_cache": "fp16 1,8,4095,128"}),
            "value_cache: dimension 2 (C) is 4095, but 4096 in key_cache",
        ),
        (Staircase(replace={"context_len": "int32 1"}), "context_len must be int64, not int32"),
        (Staircase(replace={"context_len": "int64 2"}), "context_len: dimension 0 (B) is 2, but 1 in query"),
        (Staircase(replace={"visibility": "int32 1,16,16"}), "visibility must be bool, not int32"),
        (Staircase(replace={"visibility": "bool 1,16,17"}), "visibility: dimension 2 (Q) is 17, but 16 in query"),
        (Staircase(replace={"visibility": "bool 16,16"}), "visibility has 2 dimensions; it must be [B Q Q]"),
        (Staircase(sinks=True, replace={"sinks": "fp16 8"}), "sinks: dimension 0 (Hq) is 8, but 32 in query"),
        (Staircase(replace={"output": "fp16 1,16,128"}), "output: dimension 2 is 128, but heads * head_dim is 4096"),
        (Staircase(replace={"output": "bf16 1,16,4096"}), "output must be fp16 like query, not bf16"),
        (KvInjection(dim=32, rotary_half=16), "head_dim is 32; it must be 64, 96, 128 or 256"),
        (KvInjection(rotary_half=65), "cos has 65 columns; twice that must not exceed head_dim, which is 128"),
        (KvInjection(rotary_half=0), "cos has 0 columns; it must have some"),
        (KvInjection(replace={"cos": "fp16 5000,64"}), "cos must be fp32, not fp16"),
        (KvInjection(replace={"sin": "fp32 5000,32"}), "sin: dimension 1 (R) is 32, but 64 in cos"),
        (KvInjection(replace={"write_start": "int32 1"}), "write_start must be int64, not int32"),
        (KvInjection(replace={"value": "fp16 1,17,8,128"}), "value: dimension 1 (N) is 17, but 16 in key"),
        (KvInjection(replace={"key_norm_weight": "fp16 64"}), "key_norm_weight: dimension 0 (D) is 64, but 128 in key"),
        (KvInjection(replace={"key_norm_weight": "fp32 128"}), "key_norm_weight must be fp16 like key, not fp32"),
        (
            KvInjection(replace={"output 1": "fp16 1,8,9,128"}),
            "output value_cache: dimension 2 (C) is 9, but 4096 in key_cache",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_tensors_are_refused_with_the_reason(built, case, reason):
    name = "KVInjection" if isinstance(case, KvInjection) else "StaircaseAttention"
    assert refusal(built, prepare(case)) == f"dflash_trt {name}::onShapeChange: {reason}"


def test_a_builder_hears_of_wrong_shapes_too(built: native.Built) -> None:
    case = Staircase(heads=30)
    message = refusal(built, [case.create(), *case.tensors(), "configure"])
    assert message.startswith("dflash_trt StaircaseAttention::configurePlugin: query has 30 heads")


def test_a_copied_cache_is_an_error(built: native.Built) -> None:
    message = refusal(built, [*prepare(KvInjection(aliased=False)), "enqueue"])
    assert message.startswith(
        "dflash_trt KVInjection::enqueue: output 0 is not the same buffer as input key_cache; "
        "the cache must be updated in place"
    )


def test_enqueue_needs_the_shapes_first(built: native.Built) -> None:
    case, other = Staircase(), Staircase(queries=17)
    assert refusal(built, [case.create(), *case.tensors(), "enqueue"]) == (
        "dflash_trt StaircaseAttention::enqueue: onShapeChange has not prepared these shapes"
    )
    assert refusal(built, [*prepare(case), *other.tensors(), "enqueue"]) == (
        "dflash_trt StaircaseAttention::enqueue: query has not the shape and type of the last onShapeChange"
    )
    # A failed onShapeChange leaves nothing to run with.
    lines = built.drive([*prepare(case), *Staircase(heads=30).tensors(), "shape_change", *case.tensors(), "enqueue"])
    assert lines[-1]["status"] != 0


FAILING = {
    "cudaGetDevice": "current device",
    "cudaDeviceGetAttribute": "device 0, compute capability",
    "cudaLibraryLoadData": "loading cubin {symbol} on device 0",
    "cudaLibraryGetKernel": "finding kernel {symbol} in its cubin",
    "cudaFuncGetAttributes": "loading kernel {symbol} on device 0",
    "cudaFuncSetAttribute": "asking for {shared} bytes of shared memory for kernel {symbol}",
    "cudaLaunchKernel": "launching {symbol} (grid",
}


@pytest.mark.parametrize("function", FAILING)
def test_a_failing_cuda_call_is_told_of(built: native.Built, function: str) -> None:
    case = Staircase()
    commands = [f"setenv FAKE_CUDART_FAIL {function}:719", *prepare(case)]
    message = refusal(built, [*commands, "enqueue"] if function == "cudaLaunchKernel" else commands)
    kernel = FAKE.choose("staircase_context", 90, "fp16", 128, "", 64)
    assert FAILING[function].format(symbol=kernel.symbol, shared=kernel.shared_bytes) in message
    assert message.endswith("cudaErrorOfTheStandIn (error 719)")


def test_a_failed_load_is_tried_again(built: native.Built) -> None:
    case = Staircase()
    commands = ["setenv FAKE_CUDART_FAIL cudaLibraryLoadData:2", *prepare(case), "setenv FAKE_CUDART_FAIL none"]
    lines = built.drive([*commands, "shape_change", "enqueue"])
    assert [e["status"] == 0 for e in events(lines, "shape_change")] == [False, True]
    assert lines[-1]["status"] == 0
