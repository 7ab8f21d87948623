"""Measured ceilings of this device: copying memory, and multiplying matrices."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu.context import Context
from gpu.results import Result, Table
from gpu.roofline import Ceilings
from gpu.timing import event_seconds

_COPY_BYTES = 2 << 30
_SIZE = 8192
_CALLS = 5
_REPEATS = 7


def run(context: Context, result: Result) -> None:
    context.need_gpu()
    ceilings = context.ceilings = measure()
    result.data = {"bandwidth": ceilings.bandwidth, "flops": ceilings.flops}
    rows = [["copy bandwidth, read + written", f"{ceilings.bandwidth / 1e12:.2f} TB/s"]]
    rows += [[f"matmul {_SIZE}³, {dtype}", f"{flops / 1e12:.0f} TFLOP/s"] for dtype, flops in ceilings.flops.items()]
    note = "Copies of 2 GiB, or a quarter of the free memory."
    result.tables.append(Table("Ceilings", ["", "measured"], rows, note))


def of(context: Context) -> Ceilings:
    """What was measured before, else measured now."""
    if context.ceilings is None:
        context.ceilings = measure()
    return context.ceilings


def measure() -> Ceilings:
    free, _ = torch.cuda.mem_get_info()
    size = min(_COPY_BYTES, free // 4)
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * size / _seconds(partial(target.copy_, source))
    flops = {}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(_SIZE, _SIZE, dtype=dtype, device="cuda") for _ in range(2))
        flops[name] = 2 * _SIZE**3 / _seconds(partial(torch.mm, a, b, out=torch.empty_like(a)))
    return Ceilings(bandwidth, flops)


def _seconds(work: Callable[[], Any]) -> float:
    def several() -> None:
        for _ in range(_CALLS):
            work()

    several()
    return statistics.median(event_seconds(several) for _ in range(_REPEATS)) / _CALLS
