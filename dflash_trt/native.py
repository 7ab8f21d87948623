"""The TensorRT plugin library: building it with CMake, and where it lies.

Nothing native is built when the package is installed; `build_library` does it when asked. What it needs: triton (the
kernels are compiled on a machine without a GPU too), cmake and a C++ compiler, the CUDA runtime's headers and library,
and TensorRT's headers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_trt import __version__
from dflash_trt.errors import BackendError, UsageError
from dflash_trt.plugins import SOURCES
from dflash_trt.plugins.kernels.tiling import SHARED_MEMORY

LIBRARY_NAME = "libdflash_trt_plugins.so"
COMPUTE_CAPABILITIES = tuple(SHARED_MEMORY)


def default_folder() -> Path:
    """Where the library goes unasked: $DFLASH_TRT_PLUGINS, else the user's cache, by version."""
    if chosen := os.environ.get("DFLASH_TRT_PLUGINS"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dflash-trt" / f"plugins-{__version__}"


def library_path(folder: Path | None = None) -> Path:
    """The built library.

    Raises:
        BackendError: it has not been built.
    """
    folder = default_folder() if folder is None else folder
    path = folder / LIBRARY_NAME
    if not path.is_file():
        raise BackendError(f"{LIBRARY_NAME} is not there", where=str(folder), mend="Build it: dflash-trt plugins build")
    return path


def library_facts(path: Path) -> dict[str, Any]:
    """What `build_library` wrote down about a library: versions, compute capabilities, sha256.

    Raises:
        BackendError: nothing was written down, or the file is not the one that was built.
    """
    facts_file = path.with_suffix(".json")
    mend = "Build it again: dflash-trt plugins build"
    if not facts_file.is_file():
        raise BackendError("what the library was built with is not there", where=str(facts_file), mend=mend)
    try:
        facts = json.loads(facts_file.read_text())
        missing = {"version", "tensorrt", "triton", "compute_capabilities", "sha256"} - facts.keys()
    except (ValueError, AttributeError):
        raise BackendError("is not what a build writes", where=str(facts_file), mend=mend) from None
    if missing:
        raise BackendError(f"lacks {', '.join(sorted(missing))}", where=str(facts_file), mend=mend)
    if facts["sha256"] != file_sha256(path):
        raise BackendError("is not the library that was built (sha256 differs)", where=str(path), mend=mend)
    return facts


def tensorrt_headers(root: Path | None = None) -> tuple[Path, str]:
    """The folder with TensorRT's headers, and their version.

    Args:
        root: of an SDK; else $TENSORRT_ROOT, else the headers that the package kernel-lens carries, if it is installed.

    Raises:
        BackendError: there are none.
    """
    if root is None and os.environ.get("TENSORRT_ROOT"):
        root = Path(os.environ["TENSORRT_ROOT"])
    if root is None:
        carried = importlib.util.find_spec("kernel_lens")
        folders = [] if carried is None else [Path(place) for place in carried.submodule_search_locations or ()]
        root = next((folder / "include" / "tensorrt" for folder in folders), None)
    mend = (
        "Give --tensorrt-root or set TENSORRT_ROOT to the folder of a TensorRT 10 or 11 SDK, or take those of 10.14.1: "
        "pip install --no-deps kernel-lens==2.0.1"
    )
    if root is None:
        raise BackendError("TensorRT's headers are needed", where="TENSORRT_ROOT", mend=mend)
    for include in (root / "include", root):
        if (include / "NvInferRuntime.h").is_file():
            return include, _header_version(include)
    raise BackendError("has no NvInferRuntime.h, nor include/NvInferRuntime.h", where=str(root), mend=mend)


def build_library(
    folder: Path | None = None,
    *,
    tensorrt_root: Path | None = None,
    compute_capabilities: Sequence[int] = COMPUTE_CAPABILITIES,
    jobs: int = 2,
) -> Path:
    """Compiles the kernels and the library into `folder` (see `default_folder`); what the tools say goes to stderr.

    Raises:
        UsageError: a compute capability there are no kernels for.
        BackendError: a missing tool, or one that failed; the folder then keeps the library it had.
    """
    folder = default_folder() if folder is None else folder
    unknown = [str(cc) for cc in compute_capabilities if cc not in COMPUTE_CAPABILITIES]
    if unknown or not compute_capabilities:
        known = ", ".join(map(str, COMPUTE_CAPABILITIES))
        raise UsageError(
            f"{', '.join(unknown) or 'none'}; must be of {known}", where="--compute-capability",
            mend="80 also serves 8.6 and 8.9",
        )  # fmt: skip
    headers, tensorrt = tensorrt_headers(tensorrt_root)
    if importlib.util.find_spec("triton") is None:
        raise BackendError("triton is not installed", where="dflash-trt plugins build", mend="pip install triton")
    cmake = _tool("cmake", "Install it, or: pip install cmake")
    _tool("c++", "Install a C++17 compiler")
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / "build"
    generated = folder / "generated"
    chosen = ",".join(map(str, dict.fromkeys(compute_capabilities)))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kernels = [sys.executable, "-m", "dflash_trt.plugins.aot", "--output", str(generated), "--jobs", str(jobs)]
    _run([*kernels, "--compute-capability", chosen], "the kernels", environment)
    settings = {
        "TENSORRT_ROOT": headers,
        "DFLASH_TRT_GENERATED": generated,
        "DFLASH_TRT_VERSION": __version__,
    }
    defines = [f"-D{name}={value}" for name, value in (settings | _cuda_runtime()).items()]
    _run([cmake, "-S", str(SOURCES), "-B", str(work), *defines], "cmake", environment)
    _run([cmake, "--build", str(work), "--parallel", str(jobs)], "the compiler", environment)
    facts = {
        "version": __version__,
        "tensorrt": tensorrt,
        "triton": json.loads((generated / "kernels.json").read_text())["versions"]["triton"],
        "compute_capabilities": list(dict.fromkeys(compute_capabilities)),
        "sha256": file_sha256(work / LIBRARY_NAME),
    }
    path = folder / LIBRARY_NAME
    facts_file = work / path.with_suffix(".json").name
    facts_file.write_text(json.dumps(facts, indent=1) + "\n")
    os.replace(facts_file, path.with_suffix(".json"))  # interrupted here, the library is found not to be the one built
    os.replace(work / LIBRARY_NAME, path)
    return path


def _cuda_runtime() -> dict[str, Path]:
    """CMake's settings for the CUDA runtime of PyPI's packages, for machines without a CUDA toolkit."""
    if os.environ.get("CUDA_PATH") or shutil.which("nvcc") or Path("/usr/local/cuda").exists():
        return {}
    spec = importlib.util.find_spec("nvidia")
    for root in [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]:
        for header in root.glob("cu*/include/cuda_runtime_api.h"):
            libraries = sorted(header.parents[1].glob("lib/libcudart.so.*"))
            if libraries:
                return {"CUDA_RUNTIME_INCLUDE_DIR": header.parent, "CUDA_RUNTIME_LIBRARY": libraries[0]}
    return {}


def _tool(name: str, mend: str) -> str:
    """Where a tool is: on the PATH, or beside the interpreter, where pip puts it."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise BackendError(f"{name} is not on the PATH", where="dflash-trt plugins build", mend=mend)
    return found


def _run(command: Sequence[str], what: str, environment: dict[str, str]) -> None:
    """Runs a tool with its output on stderr."""
    if subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode:
        raise BackendError(f"{what} failed; its messages are above", where="dflash-trt plugins build")


def _header_version(include: Path) -> str:
    """Major.minor.patch of NvInferVersion.h; TensorRT 10 names the numbers by way of a second set of macros."""
    file = include / "NvInferVersion.h"
    if not file.is_file():
        mend = "Give the folder of a whole TensorRT SDK"
        raise BackendError("NvInferVersion.h is missing beside NvInferRuntime.h", where=str(include), mend=mend)
    text = file.read_text()
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        found = re.search(rf"#define (?:NV_TENSORRT_{part}|TRT_{part}_ENTERPRISE) (\d+)", text)
        numbers.append(found.group(1) if found else "?")
    return ".".join(numbers)


def file_sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
