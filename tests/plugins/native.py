"""Building the plugin library and its test programs, once per checkout, and running them.

A registry of a few variants with text for cubins stands for the compiled kernels, so that what is built does not
depend on the compiler of the kernels.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "plugin-tests"
VERSION = "1.2.3-test"

# Parameters of each kernel, the two hidden pointers included: pointer, int, float.
SIGNATURES = {
    "kv_injection": "P" * 10 + "i" * 7 + "f" + "PP",
    "staircase_context": "P" * 10 + "i" * 8 + "ff" + "PP",
    "staircase_merge": "P" * 4 + "i" * 5 + "PP",
    "accept_path": "P" * 7 + "ii" + "PP",
    "move_rows": "P" * 4 + "iiii" + "PP",
    "gather_features": "P" * 4 + "iiii" + "PP",
}


@dataclass(frozen=True)
class Variant:
    """A row of the fake registry; fields as in kernel_variant.h."""

    kernel: str
    compute_capability: int
    dtype: str = ""
    head_dim: int = 0
    features: str = ""
    tile_rows: int = 0
    tile_columns: int = 0
    num_warps: int = 4
    shared_bytes: int = 0
    symbol: str = ""
    file: str = ""
    image: int = 0  # checksum of the cubin


def fake_variants() -> list[Variant]:
    """The fake registry: complete for capability 90 but for a head size; 80 lacks windows, soft caps and bf16."""
    variants = []
    for cc in (80, 90):
        for dtype in ("fp16", "bf16", "fp32") if cc == 90 else ("fp16",):
            for dim, features in itertools.product((64, 96, 128, 256), ("", "partial")):
                variants.append(Variant("kv_injection", cc, dtype, dim, features, 8192 // dim // 4, 0, 4, 0))
        for dtype in ("fp16", "bf16") if cc == 90 else ("fp16",):
            for dim in (64, 128, 256):
                for features in ("", "window", "softcap") if cc == 90 else ("",):
                    for rows in (64, 16) if dim == 256 else (64, 16, 128):  # any order must do
                        columns = 32 if dim == 256 else 64 if rows < 128 else 128
                        shared = 1024 + rows * dim * 2 + columns * dim * 4
                        variants.append(
                            Variant("staircase_context", cc, dtype, dim, features, rows, columns, rows // 16, shared)
                        )
                variants.append(Variant("staircase_merge", cc, dtype, dim, "", 1, 0, 4, 1024))
        for kernel in ("accept_path", "move_rows", "gather_features"):
            variants.append(Variant(kernel, cc, num_warps=8 if kernel == "accept_path" else 4))
    named = [replace(v, symbol="_".join(str(part) for part in variant_key(v) if part)) for v in variants]
    return [replace(v, image=zlib.crc32(_cubin(v))) for v in named]


def _cubin(v: Variant) -> bytes:
    return f"a cubin of {v.symbol}".encode()


def write_fake_registry(folder: Path) -> None:
    """In the format of the ahead-of-time step. Files that stay the same keep their time, so nothing is rebuilt."""
    (folder / "cubins").mkdir(parents=True, exist_ok=True)
    assembly = ["    .section .rodata"]
    declarations, rows = [], []
    for i, v in enumerate(fake_variants()):
        _write(folder / "cubins" / f"{v.symbol}.cubin", _cubin(v).decode() + "\0")
        assembly += [f"    .global fake_cubin_{i}", "    .balign 16", f"fake_cubin_{i}:"]
        assembly += [f'    .incbin "cubins/{v.symbol}.cubin"']
        declarations.append(f"extern const unsigned char fake_cubin_{i}[];")
        rows.append(
            f'  {{"{v.kernel}", {v.compute_capability}, "{v.dtype}", {v.head_dim}, "{v.features}", {v.tile_rows}, '
            f'{v.tile_columns}, "{v.symbol}", {v.num_warps}, {v.shared_bytes}, fake_cubin_{i}, 1}},'
        )
    assembly.append('    .section .note.GNU-stack,"",@progbits')
    _write(folder / "embedded_kernels.S", "\n".join(assembly) + "\n")
    source = ['#include "kernel_variant.h"', 'extern "C" {', *declarations, "}", "namespace dflash_trt {"]
    source += ["const KernelVariant kKernelVariants[] = {", *rows, "};"]
    source += [f"const std::size_t kKernelVariantCount = {len(rows)};", "}  // namespace dflash_trt"]
    _write(folder / "embedded_kernels.cpp", "\n".join(source) + "\n")
    signatures = [f"{v.symbol} {SIGNATURES[v.kernel]}" for v in fake_variants()]
    _write(folder / "signatures.txt", "\n".join(signatures) + "\n")


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def tensorrt_headers() -> Path:
    """TENSORRT_ROOT, else where `make setup` puts the headers."""
    given = os.environ.get("TENSORRT_ROOT")
    folder = Path(given) if given else ROOT / "build" / "kernel-lens" / "kernel_lens" / "include" / "tensorrt"
    if not given and not folder.exists():
        pytest.skip(f"there are no TensorRT headers in {folder.relative_to(ROOT)}, and TENSORRT_ROOT is not set")
    return folder


def variant_key(v: Variant) -> tuple[str, int, str, int, str, int]:
    """By which the library looks variants up."""
    return v.kernel, v.compute_capability, v.dtype, v.head_dim, v.features, v.tile_rows


@dataclass(frozen=True)
class Built:
    """The folder of the built programs, and of a library and its kernels."""

    folder: Path
    library: Path
    signatures: Path
    variants: tuple[Variant, ...]

    def run(
        self, command: list[str | Path], stdin: str = "", devices: str = "90:132", **environment: str
    ) -> list[dict[str, Any]]:
        """Runs a program with the stand-in CUDA runtime; what it and the stand-in print, line by line."""
        done = subprocess.run(
            [str(part) for part in command],
            input=stdin,
            text=True,
            capture_output=True,
            check=False,
            env={
                **os.environ,
                "LD_PRELOAD": str(self.folder / "tests" / "libfake_cudart.so"),
                "LD_LIBRARY_PATH": str(self.library.parent),
                "FAKE_CUDART_DEVICES": devices,
                "FAKE_CUDART_SIGNATURES": str(self.signatures),
                **environment,
            },
        )
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}\n{done.stdout[-2000:]}"
        assert not done.stderr, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def drive(self, commands: list[str], devices: str = "90:132") -> list[dict[str, Any]]:
        """plugin_driver's commands; see plugins/tests/plugin_driver.cpp."""
        return self.run([self.folder / "tests" / "plugin_driver"], "\n".join(commands) + "\n", devices)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def build() -> Built:
    """Builds what is out of date. Workers of a test run share the folder and wait for each other."""
    headers = tensorrt_headers()
    with _lock(BUILD.with_suffix(".lock")):
        write_fake_registry(BUILD / "generated")
        configure = ["cmake", "-S", str(ROOT / "plugins"), "-B", str(BUILD), f"-DTENSORRT_ROOT={headers}"]
        configure += [f"-DDFLASH_TRT_GENERATED={BUILD / 'generated'}", f"-DDFLASH_TRT_VERSION={VERSION}"]
        # Optimised as what is shipped: an optimiser has broken calls that worked without.
        configure += ["-DDFLASH_TRT_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-Werror"]
        for command in (configure, ["cmake", "--build", str(BUILD), "--parallel", "2"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    library = BUILD / "libdflash_trt_plugins.so"
    return Built(BUILD, library, BUILD / "generated" / "signatures.txt", tuple(fake_variants()))


def build_with_real_kernels(scratch: Path) -> Built:
    """The library of build/plugins, where `make plugins` builds it with the compiled kernels."""
    folder = ROOT / "build" / "plugins"
    library = folder / "libdflash_trt_plugins.so"
    if not library.exists():
        pytest.skip(f"the library with the compiled kernels is not in {folder.relative_to(ROOT)}")
    variants = []
    for entry in json.loads((folder / "generated" / "kernels.json").read_text())["variants"]:
        known = {name: value for name, value in entry.items() if name in Variant.__dataclass_fields__}
        cubin = folder / "generated" / "cubins" / entry["file"]
        variants.append(Variant(**known, image=zlib.crc32(cubin.read_bytes())))
    signatures = scratch / "signatures.txt"
    signatures.write_text("".join(f"{v.symbol} {SIGNATURES[v.kernel]}\n" for v in variants))
    return Built(build().folder, library, signatures, tuple(variants))


def nvcc() -> str:
    """The CUDA compiler, which compiles no device code here."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("there is no nvcc")
    return found
