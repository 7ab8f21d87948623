"""The plugin library and its driver, built where the check runs: nvcc, TensorRT's headers, no cmake."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu.context import NotRunError

_TIMEOUT = 240  # seconds, of one compilation


@dataclass(frozen=True)
class Toolchain:
    """nvcc, and the folder with NvInferRuntime.h."""

    nvcc: Path
    headers: Path

    @property
    def libraries(self) -> list[Path]:
        """Where the toolkit may have libcudart; nvcc may be a link into it, or a script elsewhere."""
        toolkits = (self.nvcc.resolve().parents[1], Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
        folders = [kit / name for kit in toolkits for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
        return [folder for folder in folders if any(folder.glob("libcudart.so*"))]


@dataclass(frozen=True)
class Programs:
    """What was built: plugin_driver, whose device memory is poisoned, and the library."""

    driver: Path
    library: Path
    generated: Path
    environment: dict[str, str]


def toolchain(tensorrt_root: str | None, root: Path) -> Toolchain:
    """What a build needs. Raises NotRunError: it is not all here."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{toolkit}/bin")
    if nvcc is None:
        raise NotRunError(f"there is no nvcc on PATH or in {toolkit}/bin")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        raise NotRunError("there is no C++ compiler for nvcc to use")
    folders = _header_folders(tensorrt_root, root)
    headers = next((folder for folder in folders if (folder / "NvInferRuntime.h").is_file()), None)
    if headers is None:
        given = tensorrt_root or os.environ.get("TENSORRT_ROOT")
        raise NotRunError(f"no NvInferRuntime.h in {given}" if given else "no TensorRT headers: give --tensorrt-root")
    return Toolchain(Path(nvcc), headers)


def _header_folders(tensorrt_root: str | None, root: Path) -> Iterator[Path]:
    """Given ones alone, else the package kernel_lens, installed or in build/."""
    given = tensorrt_root or os.environ.get("TENSORRT_ROOT")
    if given:
        yield from (Path(given), Path(given) / "include")
        return
    spec = importlib.util.find_spec("kernel_lens")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield Path(folder) / "include" / "tensorrt"
    yield root / "build/kernel-lens/kernel_lens/include/tensorrt"


def compile_kernels(root: Path, generated: Path, cc: int, dims: Sequence[int], dtypes: Sequence[str]) -> None:
    """Cubins of an architecture for some head sizes and dtypes, as C++ sources in `generated`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "scripts")])
    arguments = [str(generated), str(cc), ",".join(map(str, dims)), ",".join(dtypes), str(min(16, os.cpu_count() or 1))]
    _run([sys.executable, "-m", "gpu.compile_kernels", *arguments], environment)


def build(root: Path, tools: Toolchain, folder: Path, generated: Path) -> Programs:
    """Compiles all sources side by side, then links."""
    plugins = root / "plugins"
    sources = [*plugins.glob("tensorrt/*.cpp"), *plugins.glob("tensorrt/*/*.cpp")]
    sources += [generated / "embedded_kernels.cpp", generated / "embedded_kernels.S"]
    tests = [plugins / "tests" / "plugin_driver.cpp", plugins / "tests" / "poisoned_malloc.cpp"]
    flags = ["-std=c++17", "-O2", "-Xcompiler", "-fPIC", "-I", str(plugins / "tensorrt"), "-I", str(plugins / "tests")]
    flags += ["-isystem", str(tools.headers), '-DDFLASH_TRT_VERSION="gpu-check"']
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> str:
        target = folder / f"{source.parent.name}-{source.name}.o"
        _run([str(tools.nvcc), *flags, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compiled, [*sources, *tests]))
    driver, library = folder / "plugin_driver", folder / "libdflash_trt_plugins.so"
    link = ["-cudart", "shared", "-ldl"]
    for path in tools.libraries:
        link += ["-Xlinker", f"-rpath={path}"]
    _run([str(tools.nvcc), "-o", str(driver), *objects, "-Xlinker", "--wrap=cudaMalloc", *link])
    _run([str(tools.nvcc), "-shared", "-o", str(library), *objects[: len(sources)], *link])
    paths = [*map(str, tools.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return Programs(driver, library, generated, {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))})


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Raises RuntimeError with the end of what the program said, where it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    if done.returncode:
        said = (done.stdout + done.stderr)[-1500:]
        raise RuntimeError(f"{Path(command[0]).name} failed ({' '.join(command[-3:])}): {said}")
