"""Correctness of the kv_injection kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dflash_trt.plugins.kernels.kv_injection import kv_injection_
from dflash_trt.plugins.kernels.tiling import HEAD_DIMS
from gpu import injection_cases
from gpu.attention_cases import DTYPES
from gpu.context import Context
from gpu.results import Result

_SECONDS = 2.0  # what a case may take, compilation included


def shapes(on_gpu: bool, quick: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, dtype, shape): norm and count with one dtype, every dtype and head size with one of them.

    The interpreter cuts bfloat16 off where a device rounds, so there is none on a CPU.
    """
    half = "bf16" if on_gpu else "fp16"
    options = list(itertools.product((True, False), (False, True)))
    dims = HEAD_DIMS if on_gpu else (32, 96)
    for norm, counted in options:
        name = f"{half}, head 128, {'norm' if norm else 'no norm'}{', count' if counted else ''}"
        yield name, half, {"norm": norm, "counted": counted, "inside": not counted, "rows": 70 if on_gpu else 7}
    yield f"{half}, one row", half, {"rows": 1, "batch": 4}
    if on_gpu:
        yield "bf16, many rows", "bf16", {"rows": 2048, "batch": 2, "kv_heads": 8, "capacity": 4096, "inside": True}
    combinations = itertools.product(dims, DTYPES, (0, 5))
    for number, (dim, dtype, passing) in enumerate(combinations):
        if (quick and number % 3) or (dtype == "bf16" and not on_gpu):
            continue
        norm, counted = options[number % 4]
        shape = {"dim": dim, "passing": passing, "norm": norm, "counted": counted, "rows": 21 if on_gpu else 5}
        yield f"{dtype}, head {dim}{', part rotated' if passing else ''}", dtype, shape


def check_injection(context: Context, result: Result) -> None:
    seed, device = context.options.seed, context.options.device
    for number, (short, dtype, shape) in enumerate(shapes(context.on_gpu, context.options.quick)):
        name = f"kv_injection: {short}"
        if not context.budget.allows(_SECONDS):
            result.skipped.append(f"{name}: time")
            continue
        context.note(name)
        try:
            case = injection_cases.make(seed + number, DTYPES[dtype], device, **shape)
            before = replace(case, key_cache=case.key_cache.clone(), value_cache=case.value_cache.clone())
            kv_injection_(*case.arguments())
            problem = injection_cases.wrong(case, before)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        result.check(name, not problem, problem)
        if problem and context.on_gpu:
            torch.cuda.synchronize()
