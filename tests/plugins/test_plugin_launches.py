"""What the plugins and the C API launch, recorded by a stand-in CUDA runtime: kernel, grid, block, shared memory and
every argument, against the rules written again here."""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import native
import pytest

from dflash_trt.plugins.kernels import tiling

SMS = 132
PROGRAMS_PER_SM = {16: 3, 64: 2, 128: 1}


def ceil_div(total: int, share: int) -> int:
    return -(-total // share)


class Variants:
    """The variants of a registry, chosen as the rule says."""

    def __init__(self, variants: Iterable[native.Variant]) -> None:
        self.by_key = {native.variant_key(v): v for v in variants}

    def choose(self, kernel: str, cc: int, dtype: str, dim: int, features: str, rows: int) -> native.Variant:
        """The smallest tile that holds the rows, else the largest."""
        tiles = sorted(key[-1] for key in self.by_key if key[:5] == (kernel, cc, dtype, dim, features))
        return self.by_key[kernel, cc, dtype, dim, features, next((t for t in tiles if t >= rows), tiles[-1])]

    def one(self, kernel: str, cc: int) -> native.Variant:
        (found,) = [v for v in self.by_key.values() if (v.kernel, v.compute_capability) == (kernel, cc)]
        return found


FAKE = Variants(native.fake_variants())


def splits_by_rule(programs: int, capacity: int, columns: int, slots: int) -> int:
    blocks = ceil_div(capacity, columns)
    best, best_cost = 1, None
    for s in range(1, min(64, blocks) + 1):
        cost = 4 * ceil_div(programs * s, slots) * (ceil_div(blocks, s) + 3) + (0 if s == 1 else 16 + s)
        if best_cost is None or cost < best_cost:
            best, best_cost = s, cost
    return best


def dims(*sizes: int | str) -> str:
    return ",".join(str(size) for size in sizes)


def events(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


@dataclass
class Staircase:
    """A call of StaircaseAttention."""

    dtype: str = "fp16"
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    queries: int = 16
    capacity: int = 4096
    dim: int = 128
    sinks: bool = False
    window: int = 0
    causal: int = 1
    softcap: float = 0.0
    scale: float = 0.125
    replace: dict[str, str] = field(default_factory=dict)  # a tensor's "type dims" instead of the right ones

    def create(self) -> str:
        return (
            f"create StaircaseAttention scale:f32={self.scale} sliding_window:i32={self.window} "
            f"causal:i32={self.causal} softcap:f32={self.softcap}"
        )

    def tensors(self) -> list[str]:
        b, q, cache = self.batch, self.queries, dims(self.batch, self.kv_heads, self.capacity, self.dim)
        shapes = {
            "query": f"{self.dtype} {dims(b, self.heads, q, self.dim)}",
            "key_cache": f"{self.dtype} {cache}",
            "value_cache": f"{self.dtype} {cache}",
            "context_len": f"int64 {dims(b)}",
            "visibility": f"bool {dims(b, q, q)}",
            **({"sinks": f"{self.dtype} {dims(self.heads)}"} if self.sinks else {}),
            "position_ids": f"int64 {dims(b, q)}",
            "output": f"{self.dtype} {dims(b, q, self.heads * self.dim)}",
        } | self.replace
        inputs = [f"input {tensor}" for name, tensor in shapes.items() if name != "output"]
        return ["tensors", *inputs, f"output {shapes['output']}"]

    def commands(self) -> list[str]:
        return [self.create(), *self.tensors(), "configure", "shape_change", "enqueue"]

    def expected(
        self, enqueued: dict[str, Any], sms: int = SMS, cc: int = 90, variants: Variants = FAKE
    ) -> list[dict[str, Any]]:
        group = self.heads // self.kv_heads
        rows = group * self.queries
        features = "softcap" if self.softcap else "window" if self.window else ""
        context = variants.choose("staircase_context", cc, self.dtype, self.dim, features, rows)
        m_tiles = ceil_div(rows, context.tile_rows)
        slots = sms * PROGRAMS_PER_SM[context.tile_rows]
        splits = splits_by_rule(self.batch * self.kv_heads * m_tiles, self.capacity, context.tile_columns, slots)
        *first, last = enqueued["inputs"]
        query, key_cache, value_cache, context_len, visibility = first[:5]
        sinks = first[5] if self.sinks else 0
        output, workspace = enqueued["outputs"][0], enqueued["workspace"]
        partial = workspace if splits > 1 else 0
        lse = workspace + 4 * self.batch * self.kv_heads * splits * rows * self.dim if splits > 1 else 0
        launches = [
            launch(
                context,
                [m_tiles * splits, self.kv_heads, self.batch],
                [
                    *(query, key_cache, value_cache, context_len, visibility, sinks, last, output, partial, lse),
                    *(self.queries, self.capacity, self.kv_heads, group, splits, self.window, self.causal),
                    *(int(self.sinks), pytest.approx(self.scale), pytest.approx(self.softcap)),
                ],
            )
        ]
        if splits > 1:
            merge = variants.choose("staircase_merge", cc, self.dtype, self.dim, "", rows)
            arguments = [partial, lse, sinks, output, self.queries, self.kv_heads, group, splits, int(self.sinks)]
            launches.append(launch(merge, [rows, self.kv_heads, self.batch], arguments))
        return launches


@dataclass
class KvInjection:
    """A call of KVInjection."""

    dtype: str = "fp16"
    batch: int = 1
    rows: int = 16
    kv_heads: int = 8
    dim: int = 128
    capacity: int = 4096
    max_positions: int = 5000
    rotary_half: int = 64
    norm: bool = True
    eps: float = 1e-6
    aliased: bool = True
    replace: dict[str, str] = field(default_factory=dict)

    def create(self) -> str:
        return f"create KVInjection eps:f32={self.eps}"

    def tensors(self) -> list[str]:
        new = f"{self.dtype} {dims(self.batch, self.rows, self.kv_heads, self.dim)}"
        cache = f"{self.dtype} {dims(self.batch, self.kv_heads, self.capacity, self.dim)}"
        table = f"fp32 {dims(self.max_positions, self.rotary_half)}"
        shapes = {
            "key": new,
            "value": new,
            **({"key_norm_weight": f"{self.dtype} {self.dim}"} if self.norm else {}),
            "position_ids": f"int64 {dims(self.batch, self.rows)}",
            "cos": table,
            "sin": table,
            "write_start": f"int64 {self.batch}",
            "key_cache": cache,
            "value_cache": cache,
        } | self.replace
        inputs = [f"input {tensor}" for name, tensor in shapes.items() if not name.startswith("output")]
        first_cache = len(inputs) - 2
        outputs = [
            f"output {self.replace.get(f'output {i}', cache)}" + (f" {first_cache + i}" if self.aliased else "")
            for i in range(2)
        ]
        return ["tensors", *inputs, *outputs]

    def commands(self) -> list[str]:
        return [self.create(), *self.tensors(), "configure", "shape_change", "enqueue"]

    def expected(self, enqueued: dict[str, Any], cc: int = 90, variants: Variants = FAKE) -> list[dict[str, Any]]:
        features = "" if 2 * self.rotary_half == self.dim else "partial"
        kernel = variants.choose("kv_injection", cc, self.dtype, self.dim, features, self.rows)
        addresses = enqueued["inputs"]
        key, value = addresses[:2]
        norm = addresses[2] if self.norm else 0
        position_ids, cos, sin, write_start, key_cache, value_cache = addresses[-6:]
        return [
            launch(
                kernel,
                [ceil_div(self.rows, kernel.tile_rows), self.kv_heads, self.batch],
                [
                    *(key, value, norm, position_ids, cos, sin, write_start, 0, key_cache, value_cache),
                    *(self.rows, self.capacity, self.kv_heads, self.max_positions, self.rotary_half),
                    *(int(self.norm), 0, pytest.approx(self.eps)),
                ],
            )
        ]


def launch(kernel: native.Variant, grid: list[int], arguments: list[Any]) -> dict[str, Any]:
    return {
        "event": "launch",
        "symbol": kernel.symbol,
        "image": kernel.image,
        "grid": grid,
        "block": [32 * kernel.num_warps, 1, 1],
        "shared_bytes": kernel.shared_bytes,
        "stream": 0,
        "arguments": [*arguments, 0, 0],
    }


STAIRCASES = [
    Staircase(),
    Staircase(queries=70),
    Staircase(queries=1),
    Staircase(queries=1, heads=8, sinks=True),
    Staircase(queries=128, batch=8, capacity=32768),
    Staircase(batch=3, queries=5, capacity=512, dim=64, scale=0.3),
    Staircase(dtype="bf16", window=1024, causal=0, sinks=True),
    Staircase(dtype="bf16", softcap=30.0, dim=256, heads=16, kv_heads=2, queries=17),
    Staircase(window=512, softcap=50.0, capacity=8192),
    Staircase(heads=36, kv_heads=4, queries=33, capacity=100),
    Staircase(queries=1, capacity=1),
    Staircase(batch=64, kv_heads=32, capacity=1024),
]


def test_staircase_attention_launches_what_the_rules_say(built: native.Built) -> None:
    splits = set()
    for case in STAIRCASES:
        lines = built.drive(case.commands())
        assert not events(lines, "log")
        assert events(lines, "launch") == case.expected(events(lines, "enqueue")[0]), case
        assert events(lines, "enqueue")[0]["status"] == 0
        splits.add(len(events(lines, "launch")))
    assert splits == {1, 2}  # one split, and several with a merge


@pytest.mark.parametrize("sms", [1, 28, 108, 148, 256])
def test_splits_follow_the_device(built: native.Built, sms: int) -> None:
    for case in (Staircase(), Staircase(queries=70, capacity=32768)):
        lines = built.drive(case.commands(), devices=f"90:{sms}")
        assert events(lines, "launch") == case.expected(events(lines, "enqueue")[0], sms)


def test_splits_follow_the_rule_over_many_shapes(built: native.Built) -> None:
    """Enough of them that every constant of the rule decides some."""
    shapes = itertools.product((1, 2, 3, 8), (1, 16, 70), range(96, 16_384, 832))
    cases = [Staircase(batch=b, queries=q, capacity=c, heads=8, kv_heads=2, dim=64) for b, q, c in shapes]
    for sms in (56, SMS):
        lines = built.drive([command for case in cases for command in case.commands()], devices=f"90:{sms}")
        enqueued, launched = events(lines, "enqueue"), events(lines, "launch")
        assert launched == [e for case, line in zip(cases, enqueued, strict=True) for e in case.expected(line, sms)]


def test_the_rules_are_those_of_the_kernels() -> None:
    """plugins/kernels launches by the same, from Python."""
    assert tiling.PROGRAMS_PER_SM == PROGRAMS_PER_SM
    for programs, capacity, columns, slots in itertools.product(
        (1, 8, 33, 264, 500), (1, 64, 4096, 40_000), (32, 128), (56, 264)
    ):
        expected = splits_by_rule(programs, capacity, columns, slots)
        assert tiling.choose_splits(programs, capacity, columns, slots) == expected


KV_INJECTIONS = [
    KvInjection(),
    KvInjection(norm=False, batch=4, rows=1),
    KvInjection(dtype="bf16", dim=64, rotary_half=32, kv_heads=3, rows=70),
    KvInjection(dtype="fp32", dim=96, rotary_half=48, rows=129, capacity=256, eps=1e-5),
    KvInjection(dim=256, rotary_half=32, rows=2048),
    KvInjection(dim=128, rotary_half=32, norm=False),
]


def test_kv_injection_launches_what_the_rules_say(built: native.Built) -> None:
    for case in KV_INJECTIONS:
        lines = built.drive(case.commands())
        assert not events(lines, "log")
        assert events(lines, "launch") == case.expected(events(lines, "enqueue")[0]), case


def test_nothing_to_do_is_no_launch(built: native.Built) -> None:
    for case in (Staircase(queries=0), Staircase(batch=0), KvInjection(rows=0), KvInjection(batch=0)):
        lines = built.drive(case.commands())
        assert events(lines, "enqueue")[0]["status"] == 0, lines
        assert not events(lines, "launch")


def test_kernels_are_loaded_once_per_device_and_before_enqueue(built: native.Built) -> None:
    case = Staircase()
    setup = [case.create(), *case.tensors(), "shape_change"]
    capture = ["setenv FAKE_CUDART_CAPTURING 1", "enqueue", "enqueue", "setenv FAKE_CUDART_CAPTURING 0"]
    lines = built.drive(
        [*setup, *capture, "clone", "enqueue", *setup, "enqueue", "device 1", *setup, "enqueue"], "90:132,90:132"
    )
    assert [e["status"] for e in events(lines, "enqueue")] == [0] * 5
    assert len(events(lines, "launch")) == 10  # context and merge
    assert [e["device"] for e in events(lines, "load_library")] == [0, 0, 1, 1]
    context = FAKE.choose("staircase_context", 90, "fp16", 128, "", 64)
    assert context.shared_bytes > 48 * 1024
    maximum_dynamic_shared_memory = 8
    preferred_carveout, percent = 9, 100
    asked = [(maximum_dynamic_shared_memory, context.shared_bytes), (preferred_carveout, percent)]
    assert events(lines, "set_attribute") == [
        {"event": "set_attribute", "symbol": context.symbol, "attribute": attribute, "value": value}
        for attribute, value in asked
    ] * 2


def test_small_shared_memory_is_not_asked_for(built: native.Built) -> None:
    assert not events(built.drive(KvInjection().commands()), "set_attribute")


@pytest.mark.parametrize("capability", [80, 86, 87, 89])
def test_every_device_of_generation_8_runs_the_cubins_for_80(built: native.Built, capability: int) -> None:
    lines = built.drive(Staircase().commands(), devices=f"{capability}:{SMS}")
    assert events(lines, "launch") == Staircase().expected(events(lines, "enqueue")[0], cc=80)


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


# ---- Workspace


def workspace(built: native.Built, cases: list[dict[str, str]], devices: str = f"90:{SMS}") -> list[int]:
    commands = []
    for ranges in cases:
        b, q, c = ranges["batch"], ranges["queries"], ranges["capacity"]
        cache = f"input fp16 {b},8,{c},128"
        commands += [Staircase().create(), "tensors", f"input fp16 {b},32,{q},128", cache, cache, f"input int64 {b}"]
        commands += [f"input bool {b},{q},{q}", f"input int64 {b},{q}", f"output fp16 {b},{q},4096", "workspace"]
    return [line["bytes"] for line in events(built.drive(commands, devices), "workspace")]


def needed(batch: int, queries: int, capacity: int, sms: int) -> int:
    rows = 4 * queries
    context = FAKE.choose("staircase_context", 90, "fp16", 128, "", rows)
    slots = sms * PROGRAMS_PER_SM[context.tile_rows]
    programs = batch * 8 * ceil_div(rows, context.tile_rows)
    splits = splits_by_rule(programs, capacity, context.tile_columns, slots)
    return 0 if splits == 1 else batch * 8 * splits * rows * (128 + 1) * 4


def test_the_workspace_holds_any_shape_of_the_profile_on_any_device(built: native.Built) -> None:
    """Of the profile's ranges only the upper ends count, but a smaller shape may need more."""
    ranges = [(1, 16, 4096), (8, 70, 4096), (4, 128, 32768), (1, 1, 512), (2, 16, 64)]
    found = workspace(built, [{"batch": f"1..{b}", "queries": f"1..{q}", "capacity": str(c)} for b, q, c in ranges])
    for (batch, queries, capacity), bytes_given in zip(ranges, found, strict=True):
        shapes = itertools.product(
            range(1, batch + 1), {1, 2, 4, 5, 16, 17, 32, 33, 64, 70, 128, queries}, (1, 7, 28, 108, 132, 148, 200)
        )
        most = max(needed(b, q, capacity, sms) for b, q, sms in shapes if q <= queries)
        assert most <= bytes_given <= 4 * most, (batch, queries, capacity)


def test_the_workspace_grows_with_the_profile(built: native.Built) -> None:
    batches = [{"batch": f"1..{b}", "queries": "1..70", "capacity": "4096"} for b in (1, 2, 4, 8)]
    queries = [{"batch": "1..2", "queries": f"1..{q}", "capacity": "4096"} for q in (1, 4, 16, 70, 128)]
    for cases in (batches, queries):
        found = workspace(built, cases)
        assert found == sorted(found)


def test_the_workspace_for_a_range_of_capacities_is_that_of_the_finest_split(built: native.Built) -> None:
    dynamic, more_queries_than_possible = workspace(
        built,
        [
            {"batch": "1..2", "queries": "1..16", "capacity": "64..32768"},
            {"batch": "1..2", "queries": "1..4096", "capacity": "64..32768"},
        ],
    )
    assert dynamic == 2 * 8 * 64 * (4 * 16) * (128 + 1) * 4
    assert more_queries_than_possible == 2 * 8 * 64 * (4 * 128) * (128 + 1) * 4


def test_kv_injection_needs_no_workspace(built: native.Built) -> None:
    case = KvInjection()
    lines = built.drive([case.create(), *case.tensors(), "workspace"])
    assert lines[-1] == {"event": "workspace", "bytes": 0}


# ---- The C API, as the runtime calls it: ctypes, raw pointers and a stream.

C_API = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.dflash_trt_last_error.restype = library.dflash_trt_version.restype = ctypes.c_char_p
print(json.dumps({"event": "version", "version": library.dflash_trt_version().decode()}), flush=True)
for function, arguments in json.loads(sys.argv[2]):
    values = [ctypes.c_void_p(v[0]) if isinstance(v, list) else ctypes.c_int(v) for v in arguments]
    status = getattr(library, "dflash_trt_" + function)(*values)
    error = library.dflash_trt_last_error().decode()
    print(json.dumps({"event": "call", "status": status, "error": error}), flush=True)
"""


def call(built: native.Built, calls: list[tuple[str, list[Any]]], **environment: str) -> list[dict[str, Any]]:
    """Pointers as one-element lists."""
    return built.run([sys.executable, "-c", C_API, built.library, json.dumps(calls)], **environment)


def pointers(count: int) -> list[list[int]]:
    return [[0x1000 * (i + 1)] for i in range(count)]


def check_the_c_api(built: native.Built, variants: Variants, cc: int) -> None:
    stream = [0x77]
    accept = pointers(7)
    move = pointers(4)
    gather = pointers(4)
    lines = call(
        built,
        [
            ("accept_path", [*accept, 3, 70, 16, stream]),
            ("move_rows", [move[0], 72, *move[1:], 3, 8, 4096, 256, 16, stream]),
            ("gather_features", [*gather, 3, 70, 5 * 4096 * 2, 16, 17, stream]),
            ("accept_path", [*accept, 0, 70, 16, stream]),
            ("move_rows", [move[0], 0, *move[1:], 3, 8, 4096, 256, 16, stream]),
        ],
        devices=f"{cc}:{SMS}",
    )
    assert all(line["status"] == 0 and line["error"] == "" for line in events(lines, "call"))
    words = 5 * 4096 * 2 // 4

    def flat(values: list[list[int]]) -> list[int]:
        return [value for (value,) in values]

    expected = [
        launch(variants.one("accept_path", cc), [3, 1, 1], [*flat(accept), 70, 16]),
        launch(variants.one("move_rows", cc), [72 * 8, 1, 3], [*flat(move), 4096, 8, 64, 16]),
        launch(
            variants.one("gather_features", cc),
            [17, math.ceil(words / 1024), 3],
            [*flat(gather), 70, words, 16, 17],
        ),
    ]
    assert events(lines, "launch") == [{**entry, "stream": 0x77} for entry in expected]


def test_the_c_api_launches_what_the_rules_say(built: native.Built) -> None:
    for cc in (80, 90):
        check_the_c_api(built, FAKE, cc)


def test_the_library_tells_its_version(built: native.Built) -> None:
    assert call(built, []) == [{"event": "version", "version": native.VERSION}]


def test_the_c_api_refuses_what_it_cannot_do(built: native.Built) -> None:
    good = pointers(7)
    lines = call(
        built,
        [
            ("accept_path", [*good, 1, 129, 16, [0]]),
            ("accept_path", [*good, 1, 70, 129, [0]]),
            ("accept_path", [*good, -1, 70, 16, [0]]),
            ("accept_path", [[0], *good[1:], 1, 70, 16, [0]]),
            ("accept_path", [*good[:6], [0x7008], 1, 70, 16, [0]]),
            ("move_rows", [good[0], 2, *good[1:4], 1, 8, 4096, 255, 16, [0]]),
            ("gather_features", [*good[:4], 70_000, 70, 64, 16, 17, [0]]),
            ("gather_features", [*good[:4], 1, 70, 64, 16, 17, [0]]),
        ],
    )
    assert [line["error"] for line in events(lines, "call")] == [
        "dflash_trt_accept_path: nodes is 129; it must be from 1 to 128",
        "dflash_trt_accept_path: path_capacity is 129; it must be from 1 to 128",
        "dflash_trt_accept_path: batch is -1; it must be at least 0",
        "dflash_trt_accept_path: tokens is null",
        "dflash_trt_accept_path: bonus is at 0x7008, which is not a multiple of 16",
        "dflash_trt_move_rows: row_bytes is 255; it must be a multiple of 4",
        "dflash_trt_gather_features: gather_features: a grid of 17 x 1 x 70000 is more than CUDA takes "
        "(2147483647 x 65535 x 65535)",
        "",
    ]
    assert [line["status"] for line in events(lines, "call")] == [1] * 7 + [0]


def test_a_failing_cuda_call_is_an_error_of_the_c_api(built: native.Built) -> None:
    (line,) = events(
        call(built, [("accept_path", [*pointers(7), 1, 70, 16, [0]])], FAKE_CUDART_FAIL="cudaLaunchKernel:2"), "call"
    )
    assert line["status"] == 1
    assert line["error"].startswith("dflash_trt_accept_path: launching accept_path_90 (grid 1 x 1 x 1, 256 threads")


# ---- With the compiled kernels, where they are


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> native.Built:
    return native.build_with_real_kernels(tmp_path_factory.mktemp("real"))


def test_the_compiled_kernels_are_launched_by_the_same_rules(real: native.Built) -> None:
    variants = Variants(real.variants)
    for cc in sorted({v.compute_capability for v in real.variants}):
        for staircase in [*STAIRCASES, Staircase(dim=96), Staircase(dim=96, dtype="bf16", window=3, queries=128)]:
            lines = real.drive(staircase.commands(), devices=f"{cc}:{SMS}")
            assert not events(lines, "log"), staircase
            expected = staircase.expected(events(lines, "enqueue")[0], cc=cc, variants=variants)
            assert events(lines, "launch") == expected, staircase
        for injection in KV_INJECTIONS:
            lines = real.drive(injection.commands(), devices=f"{cc}:{SMS}")
            expected = injection.expected(events(lines, "enqueue")[0], cc=cc, variants=variants)
            assert events(lines, "launch") == expected, injection
        check_the_c_api(real, variants, cc)


def test_the_compiled_kernels_take_the_arguments_that_are_passed(real: native.Built) -> None:
    sizes = {"P": 8, "i": 4, "f": 4}
    for variant in real.variants:
        found = parameter_sizes(
            (real.library.parent / "generated" / "cubins" / variant.file).read_bytes(), variant.symbol
        )
        assert found == [sizes[kind] for kind in native.SIGNATURES[variant.kernel]], variant


def parameter_sizes(cubin: bytes, symbol: str) -> list[int]:
    """From section .nv.info.<symbol>: records of kind 0x17 have a parameter's ordinal, offset and size."""
    table, entry_size, count, names_index = struct.unpack_from("<Q", cubin, 40) + struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names = sections[names_index][4]
    (info,) = [
        cubin[offset : offset + size]
        for name, _, _, _, offset, size in sections
        if cubin[names + name :].startswith(f".nv.info.{symbol}\0".encode())
    ]
    parameters = {}
    position = 0
    while position < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == 4:  # a sized record; in the others the size field is the value
            if kind == 0x17:
                _, ordinal, _, packed = struct.unpack_from("<IHHI", info, position)
                parameters[ordinal] = packed >> 18
            position += size
    return [parameters[i] for i in range(len(parameters))]
