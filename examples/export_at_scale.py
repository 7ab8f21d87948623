"""Builds bundles of an 8B target's shape, and measures what that takes: time, memory, and bytes beside the weights.

The checkpoints are holes (`make_shape.py`): nothing is downloaded, the disk stays empty; builds read, hash and link
them like any others. Bundles are not verified: no machine with less memory than the model could do that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from make_shape import Unusable, make_shape
from published_shapes import SHAPES
from rich.console import Console
from rich.table import Table

from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.errors import DflashError

TARGET, DRAFTERS = "qwen3-8b", ("qwen3-8b-dflash-b16", "qwen3-8b-dflare-b16")
# By backend, the dtype whose weights stay where they are, and what makes the build end before a GPU is needed.
BACKENDS: dict[str, tuple[Dtype, tuple[str, ...]]] = {
    "onnxruntime": ("float32", ()),
    "tensorrt": ("bfloat16", ("--stop-after", "lower")),
}
LONGEST = 40960  # tokens these models were trained for: rotary tables grow with it


@dataclass(frozen=True)
class Limits:
    """The most a build may take."""

    seconds: float
    memory_bytes: float
    overhead_bytes: float


@dataclass(frozen=True)
class Row:
    """What one build took.

    Attributes:
        seconds, cpu_seconds: on the wall, and of all its threads.
        memory_bytes: the peak resident memory of its process, mapped files included.
        linked_bytes, overhead_bytes: of the bundle's files, those that are the checkpoints' own, and all others; each
            file once, holes at their full length.
    """

    backend: str
    precision: str
    drafter: str
    seconds: float
    cpu_seconds: float
    memory_bytes: int
    linked_bytes: int
    overhead_bytes: int

    def broken(self, limits: Limits) -> Iterator[str]:
        """The limits it did not keep, in words."""
        for name, found, most, unit, scale in (
            ("time", self.seconds, limits.seconds, "s", 1.0),
            ("memory", self.memory_bytes, limits.memory_bytes, "GB", 1e9),
            ("overhead", self.overhead_bytes, limits.overhead_bytes, "MB", 1e6),
        ):
            if found > most:
                yield f"{self.backend}, {self.drafter}: {name} {found / scale:.2f} {unit}, of {most / scale:g} {unit}"


def measure(backend: str, target: Path, drafter: Path, name: str, length: int, output: Path) -> Row:
    """Builds one bundle in a process of its own; raises Unusable where that fails."""
    precision, options = BACKENDS[backend]
    command = [sys.executable, "-m", "dflash_trt", "build", "--backend", backend, "--dtype", precision, *options]
    command += ["--target", str(target), "--drafter", str(drafter), "--output", str(output), "--no-verify"]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--max-seq-len", str(length)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Unusable(f"{backend}, {name}: the build ended with {process.returncode}")
    linked, overhead = _bytes(output, (target, drafter))
    memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Row(backend, precision, name, seconds, usage.ru_utime + usage.ru_stime, memory, linked, overhead)


def _bytes(bundle: Path, checkpoints: Iterable[Path]) -> tuple[int, int]:
    """Of a bundle's files: those that are files of the checkpoints, and others."""
    files = [path.stat() for path in bundle.rglob("*") if path.is_file()]
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in files}
    theirs = {(stat.st_dev, stat.st_ino) for folder in checkpoints for stat in map(os.stat, folder.iterdir())}
    linked = sum(size for file, size in sizes.items() if file in theirs)
    return linked, sum(sizes.values()) - linked


def run(shapes: list[Path | str], backends: Iterable[str], length: int, work: Path) -> Iterator[Row]:
    """The rows of a target's shape, the first, with each drafter's, the others."""
    for backend in backends:
        folders = []
        for number, shape in enumerate(shapes):
            folders.append(work / f"{backend}-{number}")
            make_shape(shape, folders[-1], dtype=BACKENDS[backend][0])
        target, *drafters = folders
        for shape, drafter in zip(shapes[1:], drafters, strict=True):
            yield measure(backend, target, drafter, str(shape), length, work / f"{drafter.name}-bundle")


def show(rows: Iterable[Row], limits: Limits) -> None:
    """Prints the table."""
    table = Table(title=f"on {os.cpu_count()} processors", title_justify="left", caption_justify="left")
    for name in ("backend\ndrafter", "seconds", "of CPU", "peak\nmemory", "weights\nin place", "beside\nthem"):
        table.add_column(name, justify="left" if "drafter" in name else "right")
    for row in rows:
        times = (f"{row.seconds:.0f}", f"{row.cpu_seconds:.0f}")
        memory, linked = f"{row.memory_bytes / 1e9:.2f} GB", f"{row.linked_bytes / 1e9:.1f} GB"
        overhead = f"{row.overhead_bytes / 1e6:.1f} MB"
        table.add_row(f"{row.backend} {row.precision}\n{row.drafter}", *times, memory, linked, overhead)
    most = f"{limits.memory_bytes / 1e9:g} GB of memory, {limits.overhead_bytes / 1e6:g} MB beside the weights"
    table.caption = f"at most {limits.seconds:g} seconds, {most}"
    Console().print(table)


def _shape(context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...]) -> list[Path | str]:
    values = (value,) if isinstance(value, str) else value
    return [name if name in SHAPES else Path(name) for name in values]


@click.command()
@click.option("--target", default=TARGET, callback=_shape, show_default=True, help="Published shape, or config.json.")
@click.option("--drafter", "drafters", multiple=True, default=DRAFTERS, callback=_shape, show_default=True)
@click.option("--backend", "backends", type=click.Choice(list(BACKENDS)), multiple=True, default=list(BACKENDS))
@click.option("--max-seq-len", default=LONGEST, show_default=True, help="Prompt and output, in tokens.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Folder to work in.")
@click.option("--most-seconds", default=300.0, show_default=True)
@click.option("--most-gb", default=4.0, show_default=True, help="Of memory.")
@click.option("--most-mb", default=100.0, show_default=True, help="Beside the weights.")
@click.option("--json", "as_json", is_flag=True)
def main(
    target: list[Path | str], drafters: list[Path | str], backends: tuple[str, ...], max_seq_len: int,
    work: Path | None, most_seconds: float, most_gb: float, most_mb: float, as_json: bool,
) -> None:  # fmt: skip
    """Build bundles of shapes without weights; exit with 1 where a build takes more than it may."""
    limits = Limits(most_seconds, most_gb * 1e9, most_mb * 1e6)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        try:
            rows = list(run([*target, *drafters], backends, max_seq_len, Path(folder)))
        except (DflashError, OSError) as error:
            raise Unusable(str(error)) from error
    broken = [text for row in rows for text in row.broken(limits)]
    if as_json:
        setting = {"limits": asdict(limits), "processors": os.cpu_count(), "max_seq_len": max_seq_len}
        click.echo(json.dumps({**setting, "rows": [asdict(row) for row in rows], "broken": broken}))
    else:
        show(rows, limits)
    for text in broken:
        click.echo(text, err=True)
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
