"""Ahead-of-time compilation of the kernels: `python -m dflash_trt.plugins.aot --output DIR`. No GPU is needed.

Writes into DIR: `cubins/`, `kernels.json` (the registry: what each variant is for, how it is launched, what it uses of
a multiprocessor), and `embedded_kernels.S` and `.cpp`, which put both into the plugin library
(`tensorrt/kernel_variant.h` declares them).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

# Read when triton is imported. Without line numbers a cubin has half the size.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
os.environ.pop("TRITON_INTERPRET", None)  # interpreted functions cannot be compiled

import triton
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .kernels import accepted_path, kv_injection, staircase_attention
from .kernels.tiling import MAX_QUERIES, PLUGIN_HEAD_DIMS, SHARED_MEMORY, block_dim, tiles
from .resource_table import resource_table

ARCHITECTURES = tuple(SHARED_MEMORY)
HALVES = ("fp16", "bf16")
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_REGISTERS = 255
SOFTCAP_ROWS = 64  # capped logits are rare enough for one tile size

_FLOATS = {"eps", "scale", "softcap"}
_POINTERS = {
    "position_ids": "*i64", "write_start": "*i64", "row_count": "*i64", "context_len": "*i64", "tokens": "*i64",
    "choices": "*i64", "parents": "*i64", "path": "*i64", "path_len": "*i64", "bonus": "*i64", "buffers": "*i64",
    "cos": "*fp32", "sin": "*fp32", "partial": "*fp32", "lse": "*fp32", "visibility": "*i1", "features": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One kernel compiled for one use; the fields up to `num_warps` are those of `KernelVariant` in C++."""

    kernel: str
    compute_capability: int
    dtype: str = ""
    head_dim: int = 0
    features: str = ""
    tile_rows: int = 0
    tile_columns: int = 0
    num_warps: int = 4
    num_stages: int = 1
    constexprs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        parts = (self.kernel, f"sm{self.compute_capability}", self.dtype, self.head_dim, self.features, self.tile_rows)
        return "-".join(str(part) for part in parts if part) + ".cubin"


def variants(cc: int) -> Iterator[Variant]:
    """Everything the plugin library carries for one architecture."""
    for dim in PLUGIN_HEAD_DIMS:
        shape = {"HEAD_DIM": dim, "BLOCK_DIM": block_dim(dim)}
        for dtype in ITEMSIZE:
            for features in ("", "partial"):
                rows = kv_injection.tile_rows(dim, ITEMSIZE[dtype], features == "partial")
                constexprs = {**shape, "TILE_ROWS": rows, "PARTIAL": features == "partial"}
                yield Variant("kv_injection", cc, dtype, dim, features, rows, constexprs=constexprs)
        for dtype in HALVES:
            for features in ("", "window", "softcap"):
                for tile in tiles(cc, dim, masked=features != ""):
                    if features == "softcap" and tile.rows != SOFTCAP_ROWS:
                        continue
                    constexprs = {
                        **shape, "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns,
                        "LOCAL_COLUMNS": tile.local_columns, "WINDOW": features != "", "SOFTCAP": features == "softcap",
                    }  # fmt: skip
                    yield Variant(
                        "staircase_context", cc, dtype, dim, features, tile.rows, tile.columns,
                        tile.num_warps, tile.num_stages, constexprs,
                    )  # fmt: skip
            splits = {"BLOCK_SPLITS": staircase_attention.MERGE_SPLITS}
            yield Variant("staircase_merge", cc, dtype, dim, tile_rows=1, constexprs={**shape, **splits})
    yield Variant("accept_path", cc, constexprs={"BLOCK_NODES": MAX_QUERIES, "CHUNK": accepted_path.NODE_CHUNK})
    move = {"PATH_ROWS": accepted_path.PATH_ROWS, "MOVE_WORDS": accepted_path.MOVE_WORDS}
    yield Variant("move_rows", cc, tile_rows=accepted_path.PATH_ROWS, constexprs=move)
    yield Variant("gather_features", cc, tile_rows=1, constexprs={"GATHER_WORDS": accepted_path.GATHER_WORDS})


_FUNCTIONS = {
    "kv_injection": kv_injection.kv_injection,
    "staircase_context": staircase_attention.staircase_context,
    "staircase_merge": staircase_attention.staircase_merge,
    "accept_path": accepted_path.accept_path,
    "move_rows": accepted_path.move_rows,
    "gather_features": accepted_path.gather_features,
}


def signature(variant: Variant) -> dict[str, str]:
    """The type of every parameter, as triton spells types."""
    types = {}
    function = _FUNCTIONS[variant.kernel]
    for name in function.arg_names:
        if name in variant.constexprs:
            types[name] = "constexpr"
        elif name in function.do_not_specialize:
            types[name] = "i32"
        elif name in _FLOATS:
            types[name] = "fp32"
        elif name == "output" and not variant.dtype:
            types[name] = "*i32"
        else:
            types[name] = _POINTERS.get(name, f"*{variant.dtype}")
    return types


def compile_variant(variant: Variant, registers: int | None = None) -> tuple[bytes, dict[str, Any]]:
    """The cubin, and its entry of the registry.

    Args:
        registers: what a thread may use; None leaves it to the compiler.

    Raises:
        RuntimeError: what the launch by hand relies on does not hold, or the variant does not fit.
    """
    types = signature(variant)
    # memory comes from allocators that align to far more; without saying so, loads would be element by element
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(_FUNCTIONS[variant.kernel], types, constexprs=dict(variant.constexprs), attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    if registers is not None:
        options["maxnreg"] = registers
    compiled = triton.compile(source, target=GPUTarget("cuda", variant.compute_capability, 32), options=options)
    image, metadata = compiled.asm["cubin"], compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, name, 0):
            raise RuntimeError(f"{variant.file_name} wants scratch memory ({name})")
    if metadata.shared > SHARED_MEMORY[variant.compute_capability]:
        limit = SHARED_MEMORY[variant.compute_capability]
        raise RuntimeError(f"{variant.file_name} wants {metadata.shared} bytes of shared memory, there are {limit}")
    entry = asdict(variant)
    del entry["constexprs"], entry["num_stages"]
    entry |= {"symbol": metadata.name, "shared_bytes": metadata.shared, "file": variant.file_name, "bytes": len(image)}
    return image, entry


def resource_usage(cubin: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, which a kernel of ours has for spilled registers alone."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(cuobjdump), "--dump-resource-usage", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of {cubin.name}: {text!r}")
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spill_bytes": stack + local}


def _build(work: tuple[Variant, Path]) -> dict[str, Any]:
    variant, folder = work
    path = folder / variant.file_name
    for registers in (None, MAX_REGISTERS):
        image, entry = compile_variant(variant, registers)
        path.write_bytes(image)
        usage = resource_usage(path)
        # left alone, the compiler may spill some bytes for the sake of one more program on a multiprocessor
        if not usage["spill_bytes"]:
            break
    return entry | usage


def write_sources(output: Path, entries: list[dict[str, Any]]) -> None:
    """The assembly and the C++ that embed the cubins."""
    assembly = [".section .rodata"]
    rows = []
    for index, entry in enumerate(entries):
        symbol = f"dflash_trt_cubin_{index}"
        cubin = (output / "cubins" / entry["file"]).resolve().as_posix()
        assembly += [f".balign 64\n.globl {symbol}\n.hidden {symbol}\n{symbol}:", f'.incbin "{cubin}"']
        rows.append(
            f'    {{"{entry["kernel"]}", {entry["compute_capability"]}, "{entry["dtype"]}", {entry["head_dim"]}, '
            f'"{entry["features"]}", {entry["tile_rows"]}, {entry["tile_columns"]}, "{entry["symbol"]}", '
            f"{entry['num_warps']}, {entry['shared_bytes']}, {symbol}, {entry['bytes']}}},"
        )
    assembly.append('.section .note.GNU-stack,"",%progbits')
    declarations = "\n".join(f"extern const unsigned char dflash_trt_cubin_{i}[];" for i in range(len(entries)))
    (output / "embedded_kernels.S").write_text("\n".join(assembly) + "\n")
    (output / "embedded_kernels.cpp").write_text(
        f"""// Written by dflash_trt.plugins.aot.
#include "kernel_variant.h"

extern "C" {{
{declarations}
}}

namespace dflash_trt {{

const KernelVariant kKernelVariants[] = {{
{chr(10).join(rows)}
}};
const size_t kKernelVariantCount = {len(entries)};

}}  // namespace dflash_trt
"""
    )


def build(
    output: Path, architectures: tuple[int, ...], jobs: int, wanted: Callable[[Variant], bool] = lambda variant: True
) -> list[dict[str, Any]]:
    """Compiles the variants that are wanted into `output` and returns the registry.

    Raises:
        RuntimeError: a variant that cannot be launched by hand or does not fit.
    """
    folder = output / "cubins"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = [(variant, folder) for cc in architectures for variant in variants(cc) if wanted(variant)]
    console = Console(stderr=True)
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(_build, work)
        entries = list(track(results, "compiling kernels", len(work), console=console, disable=not console.is_terminal))
    spilling = [entry["file"] for entry in entries if entry["spill_bytes"]]
    if spilling:
        click.echo(f"warning: slow for want of registers (with this triton): {', '.join(spilling)}", err=True)
    versions = {"triton": triton.__version__}
    (output / "kernels.json").write_text(json.dumps({"versions": versions, "variants": entries}, indent=1) + "\n")
    write_sources(output, entries)
    return entries


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--compute-capability", default=",".join(map(str, ARCHITECTURES)), show_default=True, help="Which to compile for."
)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True)
@click.option("--table", type=click.Path(path_type=Path), help="Also write what each variant uses, as markdown.")
def main(output: Path, compute_capability: str, jobs: int, table: Path | None) -> None:
    """Compiles the kernels of the plugin library."""
    asked = dict.fromkeys(re.split("[,;]", compute_capability))
    unknown = [cc for cc in asked if cc not in map(str, ARCHITECTURES)]
    if unknown:
        known = ", ".join(map(str, ARCHITECTURES))
        raise click.UsageError(f"--compute-capability: {', '.join(unknown)} must be of {known}")
    try:
        entries = build(output, tuple(map(int, asked)), jobs)
    except (OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if table is not None:
        table.write_text(resource_table(entries))
    click.echo(f"{len(entries)} kernels, {sum(entry['bytes'] for entry in entries) / 1e6:.1f} MB", err=True)


if __name__ == "__main__":
    main()
