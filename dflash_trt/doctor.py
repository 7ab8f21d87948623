"""What this machine has: packages, compilers, GPUs, and which backends that makes usable."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from typing import Any

from dflash_trt import __version__

PACKAGES = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "tokenizers",
    "safetensors",
    "polygraphy",
    "numpy",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "tensorrt-llm",
    "tritonclient",
)


def examine() -> dict[str, Any]:
    """Versions, devices and backends as plain data; never raises."""
    return {
        "dflash_trt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tools": {name: shutil.which(name) for name in ("nvcc", "cmake", "g++")},
        "gpus": _gpus(),
        "backends": _backends(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, str]]:
    """Name, compute capability and driver of each NVIDIA GPU, as nvidia-smi tells."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(("name", "compute_capability", "driver"), row, strict=True)) for row in rows if len(row) == 3]


def _backends() -> dict[str, dict[str, str | bool]]:
    """Each backend: whether it can be used here, and if not what is missing and how to mend it."""
    found = {name: importlib.util.find_spec(name) is not None for name in ("onnxruntime", "torch")}
    backends: dict[str, dict[str, str | bool]] = {
        name: {"usable": present, "note": "" if present else f"pip install {name}"} for name, present in found.items()
    }
    for name in ("tensorrt", "tensorrt-rtx"):
        backends[name] = {"usable": False, "note": "not part of this version"}
    return backends
