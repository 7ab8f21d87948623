"""Speed of kv_injection: bytes per second against the copy's, and against the operator's eager reference in torch."""

from __future__ import annotations

import itertools

import torch

from dflash_trt.ops.kv_injection import kv_injection_reference_
from dflash_trt.plugins.kernels.kv_injection import kv_injection_
from gpu import injection_cases
from gpu.context import Context, Options
from gpu.injection_cases import Injection
from gpu.results import Result, Table
from gpu.roofline import injection_bytes
from gpu.sections import ceilings
from gpu.timing import COLD, graph_seconds, l2_bytes, rotation, wall_seconds

ROWS = (16, 70, 128, 2048)
BATCHES = (1, 8)
_SECONDS = 2.0
_MOST_INPUTS = 64
_SPARE_SLOTS = 128


def run(context: Context, result: Result) -> None:
    context.need_gpu()
    bandwidth = ceilings.of(context).bandwidth
    columns = ["rows", "batch", "kernel, µs", "GB/s", "of copy bandwidth", "eager torch, µs", "eager / kernel"]
    table = Table("kv_injection, 8 KV heads of 128, bf16, with norm", columns)
    table.note = (
        f"As for attention; inputs and caches in rotation take at least {COLD} times the L2 cache "
        f"({l2_bytes() / 1e6:.0f} MB) or are {_MOST_INPUTS}. Eager torch: the operator's reference, wall time with its "
        "launches and its wait for the lengths."
    )
    result.tables.append(table)
    cases = result.data["cases"] = []
    for rows, batch in itertools.product(ROWS, BATCHES):
        name = f"{rows} rows, batch {batch}"
        if not context.budget.allows(_SECONDS):
            result.skipped.append(f"{name}: time")
            continue
        context.note(name)
        size = injection_bytes(rows, batch)
        first = _inputs(rows, batch, context.options)
        inputs = [first, *(_copy(first) for _ in range(rotation(size, _MOST_INPUTS) - 1))]
        seconds = graph_seconds([lambda own=own: kv_injection_(*own.arguments()) for own in inputs])
        eager = wall_seconds(lambda own=first: kv_injection_reference_(*own.arguments()), repeats=7)
        cases.append({"rows": rows, "batch": batch, "bytes": size, "kernel": seconds, "eager": eager})
        speed = size / seconds
        shown = [f"{seconds * 1e6:.2f}", f"{speed / 1e9:.0f}", f"{speed / bandwidth:.0%}"]
        table.rows.append([rows, batch, *shown, f"{eager * 1e6:.0f}", f"{eager / seconds:.0f}"])
        del inputs, first
        torch.cuda.empty_cache()
    if cases:
        best = max(case["bytes"] / case["kernel"] for case in cases) / bandwidth
        result.facts["highest fraction of the copy bandwidth (aim: 60 %)"] = f"{best:.0%}"


def _inputs(rows: int, batch: int, options: Options) -> Injection:
    shape = {"kv_heads": 8, "dim": 128, "capacity": rows + _SPARE_SLOTS, "positions": 4096, "inside": True}
    return injection_cases.make(options.seed, torch.bfloat16, options.device, batch=batch, rows=rows, **shape)


def _copy(case: Injection) -> Injection:
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(case).items()}
    return Injection(**copies)
