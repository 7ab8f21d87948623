"""What this machine has: packages, compilers, GPUs, and which backends that makes usable."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from typing import Any

from dflash_trt import __version__
from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.base import BACKENDS
from dflash_trt.backends.engine_record import dotted, gpu_compute_capability
from dflash_trt.backends.parser_version import Flavour
from dflash_trt.bundle import installed_version
from dflash_trt.errors import BackendError
from dflash_trt.native import library_facts, library_path

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
    "triton",
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
        "packages": {name: installed_version(name) for name in PACKAGES},
        "tools": {name: shutil.which(name) for name in ("nvcc", "cmake", "g++")},
        "gpus": _gpus(),
        "backends": _backends(),
        "plugins": _plugins(),
    }


def _plugins() -> dict[str, Any]:
    """The TensorRT plugin library, if it was built, and what with."""
    try:
        path = library_path()
        return {"built": True, "path": str(path), **library_facts(path)}
    except BackendError as error:
        return {"built": False, "note": error.message()}


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
    backends: dict[str, dict[str, str | bool]] = {}
    for name in ("onnxruntime", "torch"):
        module, _ = BACKENDS[name]
        present = importlib.util.find_spec(module) is not None
        backends[name] = {"usable": present, "note": "" if present else f"pip install {module}"}
    return {**backends, "tensorrt": _engines("tensorrt"), "tensorrt-rtx": _engines("tensorrt-rtx")}


def _engines(flavour: Flavour) -> dict[str, str | bool]:
    """Whether engines can be built here; running them takes a GPU."""
    try:
        api = tensorrt_api.load(flavour)
    except BackendError as error:
        lower = "; `build --stop-after lower` writes everything up to the engines"
        return {"usable": False, "note": f"{error.what}: {error.mend}{lower}"}
    gpu = gpu_compute_capability()
    if gpu is not None:
        return {"usable": True, "note": f"{api}, compute capability {dotted(gpu)}"}
    if api.compiles_ahead:
        there = ", ".join(map(str, api.compute_capabilities))
        return {"usable": True, "note": f"{api}; builds for compute capability {there}, runs where a GPU is"}
    return {"usable": False, "note": f"{api}, which builds for the GPU at hand, and torch sees none"}
