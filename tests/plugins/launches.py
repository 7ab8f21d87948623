"""What calls of the plugins must launch: kernel, grid, block, shared memory and every argument, by the rules written
again here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import native
import pytest

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


KV_INJECTIONS = [
    KvInjection(),
    KvInjection(norm=False, batch=4, rows=1),
    KvInjection(dtype="bf16", dim=64, rotary_half=32, kv_heads=3, rows=70),
    KvInjection(dtype="fp32", dim=96, rotary_half=48, rows=129, capacity=256, eps=1e-5),
    KvInjection(dim=256, rotary_half=32, rows=2048),
    KvInjection(dim=128, rotary_half=32, norm=False),
]
