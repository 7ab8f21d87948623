"""Speed of staircase attention, Qwen3-8B's heads, against torch's masked attention and against the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu import tuning
from gpu.attention_cases import DTYPES
from gpu.attention_speed_cases import WAYS, Inputs
from gpu.context import Context
from gpu.results import Result, Table
from gpu.roofline import AttentionShape, Ceilings, attention_floor
from gpu.sections import ceilings
from gpu.timing import COLD, MOST_INPUTS, graph_seconds, l2_bytes, rotation

CONTEXTS = (512, 2048, 4096, 8192, 16384, 32768)
QUERIES = (16, 70)
BATCHES = (1, 8)
COLUMNS = [
    "dtype", "Q", "context", "batch", "tile", "splits", "kernel, µs", "roofline, µs", "of roofline", "SDPA, µs", "way",
    "SDPA / kernel", "folded SDPA, µs", "folded / kernel",
]  # fmt: skip
_SECONDS = 1.5  # what a case may take
_FEWEST_CALLS = 4
_AGREE = 0.02  # relative distance of two results, each rounded several times


def run(context: Context, result: Result) -> None:
    context.need_gpu()
    measured = ceilings.of(context)
    table = Table("Staircase attention, 32 query and 8 KV heads of 128", COLUMNS, note=_note())
    result.tables.append(table)
    cases = result.data["cases"] = []
    for dtype, shape in _shapes(context.options.quick):
        name = f"{dtype}, Q {shape.queries}, context {shape.context}, batch {shape.batch}"
        if not context.budget.allows(_SECONDS):
            result.skipped.append(f"{name}: time")
            continue
        context.note(name)
        case = measure(shape, dtype, measured, context.options.device)
        cases.append(case)
        table.rows.append(row(case))
        apart = case["distance"]
        result.check(f"agrees with SDPA: {name}", apart <= _AGREE, f"relative distance {apart:.4f}")
        torch.cuda.empty_cache()
    result.facts = targets(cases)
    if context.options.tune:
        tuning.run(context, result)


def _shapes(quick: bool) -> Iterator[tuple[str, AttentionShape]]:
    for dtype in ("bf16",) if quick else ("bf16", "fp16"):
        for batch in BATCHES:
            for queries in QUERIES:
                for length in CONTEXTS[::2] if quick else CONTEXTS:
                    yield dtype, AttentionShape(batch, queries, length)


def _note() -> str:
    return (
        "GPU time of a call: several calls in one CUDA graph, median of replays. Caches are rotated, together at least "
        f"{COLD} times the L2 cache ({l2_bytes() / 1e6:.0f} MB) or {MOST_INPUTS} of them, so that the context comes "
        "from memory. Roofline: the larger of bytes / copy bandwidth and operations / matmul peak. SDPA: the faster of "
        "enable_gqa and of heads expanded beforehand (not timed); folded: the queries of a group as more queries of "
        "its KV head."
    )


def measure(shape: AttentionShape, dtype: str, measured: Ceilings, device: str) -> dict[str, Any]:
    """Kernel and torch's ways on one shape; seconds."""
    inputs = [Inputs.random(shape, DTYPES[dtype], device) for _ in range(rotation(shape.bytes))]
    tile, splits = inputs[0].plan()
    case: dict[str, Any] = {
        "dtype": dtype, "queries": shape.queries, "context": shape.context, "batch": shape.batch,
        "tile": f"{tile.rows}x{tile.columns}", "splits": splits, "rotated": len(inputs),
        "roofline": attention_floor(shape, measured, dtype),
        "kernel": graph_seconds(_enough([own.kernel() for own in inputs])),
    }  # fmt: skip
    found = inputs[0].kernel()().float()
    mask = inputs[0].mask()
    wanted = inputs[0].sdpa_folded(mask)().float()
    group = shape.heads // shape.kv_heads
    wanted = wanted.view(shape.batch, shape.kv_heads * group, shape.queries, shape.dim).transpose(1, 2).flatten(2)
    case["distance"] = float((found - wanted).norm() / wanted.norm())
    for name, way in WAYS.items():
        # expanded caches are four times as large, so that fewer of them are enough
        few = rotation(shape.bytes * group) if name == "expanded" else len(inputs)
        try:
            case[name] = graph_seconds(_enough([way(own, mask) for own in inputs[:few]]), replays=5)
        except Exception as error:  # a way that torch does not have for this
            case[name] = None
            case[f"{name} error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        torch.cuda.empty_cache()
    return case


def _enough(calls: list[Any]) -> list[Any]:
    return calls * -(-_FEWEST_CALLS // len(calls))


def row(case: dict[str, Any]) -> list[Any]:
    """Of the table, in the order of COLUMNS."""
    kernel = case["kernel"]
    plain = {name: case[name] for name in ("enable_gqa", "expanded") if case[name] is not None}
    way = min(plain, key=lambda name: plain[name]) if plain else None
    shown = [case[name] for name in ("dtype", "queries", "context", "batch", "tile", "splits")]
    shown += [f"{kernel * 1e6:.1f}", f"{case['roofline'] * 1e6:.1f}", f"{case['roofline'] / kernel:.0%}"]
    shown += [f"{plain[way] * 1e6:.1f}", way, f"{plain[way] / kernel:.1f}"] if way else [None, None, None]
    folded = case["folded"]
    return shown + ([f"{folded * 1e6:.1f}", f"{folded / kernel:.1f}"] if folded else [None, None])


def targets(cases: list[dict[str, Any]]) -> dict[str, str]:
    """The two figures that are aimed at: the worst of each."""
    long = [case["roofline"] / case["kernel"] for case in cases if case["context"] >= 4096]
    wide = [
        min(case[name] for name in ("enable_gqa", "expanded") if case[name]) / case["kernel"]
        for case in cases
        if case["queries"] == 70 and (case["enable_gqa"] or case["expanded"])
    ]
    found = {}
    if long:
        found["lowest fraction of the roofline, context >= 4096 (aim: 60 %)"] = f"{min(long):.0%}"
    if wide:
        found["lowest ratio to SDPA, Q 70 (aim: 3)"] = f"{min(wide):.1f}"
    return found
