"""What the figures are of: device, driver, compilers, libraries."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from typing import Any

import torch
import triton

from gpu.context import Context
from gpu.results import Result, Table


def run(context: Context, result: Result) -> None:
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "C compiler, for Triton": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "not found",
        "nvcc": _said(["nvcc", "--version"], -1),
        "TensorRT-RTX": "installed" if importlib.util.find_spec("tensorrt_rtx") else "not installed",
        "seed": context.options.seed,
    }
    if context.on_gpu:
        facts = _device() | facts
    result.facts = facts
    result.tables.append(Table("Environment", ["", ""], [[name, value] for name, value in facts.items()]))


def _device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    l2 = getattr(properties, "L2_cache_size", 0)
    return {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory, GB": round(properties.total_memory / 1e9, 1),
        "L2 cache, MB": round(l2 / 1e6, 1) if l2 else "unknown",
        "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 0),
        "clocks, SM and memory": _said(
            ["nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.memory", "--format=csv,noheader"], 0
        ),
    }


def _said(command: list[str], line: int) -> str:
    """One line of what a program prints, where there is such a program."""
    if shutil.which(command[0]) is None:
        return "not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return "no answer"
    lines = done.stdout.strip().splitlines()
    return lines[line].strip() if lines else f"exit {done.returncode}"
