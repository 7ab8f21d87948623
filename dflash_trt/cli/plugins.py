"""`dflash-trt plugins`."""

from __future__ import annotations

from pathlib import Path

import click


@click.group("plugins")
def command() -> None:
    """Build the TensorRT plugin library, or show where it is."""


@command.command("build")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder of the library.")
@click.option(
    "--tensorrt-root", type=click.Path(path_type=Path, file_okay=False), help="Folder of a TensorRT SDK (headers only)."
)
@click.option("--compute-capability", default="80,90,100,120", show_default=True, help="GPUs to compile kernels for.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Compilers at once.")
def build(output: Path | None, tensorrt_root: Path | None, compute_capability: str, jobs: int) -> None:
    """Compile the kernels and the library; no GPU is needed. Prints the library's path."""
    from dflash_trt.errors import UsageError
    from dflash_trt.native import build_library

    try:
        capabilities = [int(part) for part in compute_capability.split(",")]
    except ValueError:
        mend = "Give numbers like 80,90"
        raise UsageError(f"{compute_capability!r} is no list", where="--compute-capability", mend=mend) from None
    click.echo(build_library(output, tensorrt_root=tensorrt_root, compute_capabilities=capabilities, jobs=jobs))


@command.command("path")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder of the library.")
def path(output: Path | None) -> None:
    """Print the path of the built library."""
    from dflash_trt.native import library_path

    click.echo(library_path(output))
