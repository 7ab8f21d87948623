"""A decode step, eager against captured in a CUDA graph; and whether captured steps change any output."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dflash_trt.runtime.device_step import DeviceStep
from gpu import pairs
from gpu.context import Context
from gpu.results import Result, Table

CONTEXT = 1024
_ROOM = 512  # tokens behind the context that a run of steps may generate
_STEPS, _WARM_UP = 20, 3
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 4, 64, 48  # a sequence fits into one pass, for looking at ties
_SECONDS = 8.0  # what a tiny model may take, compilation included
_LARGE_SECONDS = 25.0
_SPARE_BYTES = 6 << 30  # beside the weights: caches, logits, graphs


def run(context: Context, result: Result) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for system in pairs.SYSTEMS:
        if _fits(context, result, f"lossless, {system}", _SECONDS):
            check_lossless(context, result, system)
    if not context.on_gpu:
        result.skipped.append("latency: needs a GPU")
        return
    columns = ["models", "system", "dtype", "eager, ms", "captured, ms", "eager / captured"]
    table = Table(f"One step, batch 1, context {CONTEXT}", columns)
    table.note = (
        "Wall time of a step with the host's reading of its outcome: median of "
        f"{_STEPS}. Qwen3-8B's shape: random weights, 5-layer drafters, blocks of 16; D2SD has 4 branches."
    )
    result.tables.append(table)
    for system in pairs.SYSTEMS:
        for dtype in ("float32", "bfloat16"):
            if _fits(context, result, f"tiny {system}, {dtype}", _SECONDS):
                _measure(context, result, f"tiny {system}", dtype, partial(_tiny, context, system, dtype))
    if steps := result.data.get("steps"):
        worst = min(step["eager"] / step["captured"] for step in steps)
        result.facts["lowest eager / captured, tiny models (aim: 2)"] = f"{worst:.1f}"
    _measure_large(context, result)


def _fits(context: Context, result: Result, name: str, seconds: float) -> bool:
    if context.budget.allows(seconds):
        context.note(name)
        return True
    result.skipped.append(f"{name}: time")
    return False


def _tiny(context: Context, system: str, dtype: Any) -> pairs.Models:
    return pairs.tiny(context.root / "examples/tiny", system, dtype, context.options.device, CONTEXT + _ROOM)


def _measure_large(context: Context, result: Result) -> None:
    name = "Qwen3-8B shape"
    if context.options.quick:
        result.skipped.append(f"{name}: --quick")
        return
    if not _fits(context, result, name, _LARGE_SECONDS):
        return
    torch.cuda.empty_cache()
    needed = pairs.bytes_of(pairs.QWEN3_8B, pairs.QWEN3_8B_DFLASH) + _SPARE_BYTES
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        result.skipped.append(f"{name}: needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free")
        return
    models = pairs.random_pair(pairs.QWEN3_8B, pairs.QWEN3_8B_DFLASH, context.options.device, CONTEXT + _ROOM)
    for system, own in (("dflash", pairs.without_branches(models)), ("d2sd", models)):
        if _fits(context, result, f"{name}, {system}", _SECONDS):
            _measure(context, result, f"{name} {system}", "bfloat16", partial(replace, own))


def _measure(context: Context, result: Result, name: str, dtype: str, models: Callable[[], pairs.Models]) -> None:
    """A row of the table; what fails is a failed check, and the next models follow."""
    label = f"step: {name}, {dtype}"
    try:
        eager, captured, finite = latencies(models(), context.options.seed)
    except Exception as error:
        result.check(label, False, f"{type(error).__name__}: {error}")
        torch.cuda.synchronize()
        return
    result.check(label, finite, "" if finite else "logits or confidences are not finite")
    shown, system = name.rsplit(" ", 1)
    result.tables[-1].rows.append(
        [shown, system, dtype, f"{eager * 1e3:.3f}", f"{captured * 1e3:.3f}", f"{eager / captured:.1f}"]
    )
    result.data.setdefault("steps", []).append({"name": name, "dtype": dtype, "eager": eager, "captured": captured})


def latencies(models: pairs.Models, seed: int) -> tuple[float, float, bool]:
    """Seconds of a step eager and captured, and whether all in it was finite."""
    branches = models.limits.branches
    step = DeviceStep(
        models.target, models.drafter, models.limits, models.mask_token_id, 1,
        vp_drafter=models.vp_drafter, branches=branches,
    )  # fmt: skip
    torch.manual_seed(seed)
    for cache in step.caches:
        for buffer in cache.buffers:
            buffer.normal_()
    eager, finite = _median(step, models.limits)
    step.capture()
    captured, also_finite = _median(step, models.limits)
    return eager, captured, finite and also_finite


def _median(step: DeviceStep, limits: Any) -> tuple[float, bool]:
    times, finite = [], True
    for number in range(_WARM_UP + _STEPS):
        # anew each time, so that every step has the same context
        step.load([CONTEXT], [1], [limits.max_seq_len - CONTEXT - 1], [True])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        (outcome,) = step.run()
        seconds = time.perf_counter() - begin
        if number >= _WARM_UP:
            times.append(seconds)
        finite &= not outcome.not_finite and -1 not in outcome.tokens
    return statistics.median(times), finite


def check_lossless(context: Context, result: Result, system: str) -> None:
    """Device steps == host loop == token by token, in float32; where outputs part at a tie, the tie is said."""
    from dflash_trt.evaluation.losslessness import compare_outputs

    folder = context.root / "examples/tiny"
    prompts = [json.loads(line)["prompt"] for line in (folder / "heldout.jsonl").read_text().splitlines()]
    few = 1 if not context.on_gpu else _PROMPTS
    tokens = 12 if not context.on_gpu else _NEW_TOKENS
    engine = pairs.engine(pairs.tiny(folder, system, "float32", context.options.device, 256), folder / "target", system)
    steps = produced = 0
    for number in range(few):
        ids = engine.tokenizer.encode(prompts[(context.options.seed + number) % len(prompts)])[:_PROMPT_TOKENS]
        engine.device_step = True
        on_device = engine.generate(ids, max_tokens=tokens, temperature=0.0)
        engine.device_step = False
        by_host = engine.generate(ids, max_tokens=tokens, temperature=0.0)
        plain = engine.generate(ids, max_tokens=tokens, temperature=0.0, speculation=False)
        steps += on_device.statistics.steps
        produced += len(on_device.token_ids)
        for name, other in (("host loop", by_host), ("token by token", plain)):
            found = compare_outputs(engine, ids, on_device.token_ids, other.token_ids, temperature=0.0)
            detail = f"{found.verdict} at token {found.position}, margin {found.margin}"
            label = f"lossless: {system}, prompt {number}, device steps = {name}"
            result.check(label, found.verdict != "different", "" if found.verdict == "equal" else detail)
    result.facts[f"tokens a device step, {system}"] = round(produced / max(1, steps), 2)
