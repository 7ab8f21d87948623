"""The command line of `scripts/gpu_check.py`."""

from __future__ import annotations

import datetime
import re
import secrets
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from gpu import sections
from gpu.context import Options
from gpu.report import ON_A_CPU, Report
from gpu.results import exit_code
from gpu.runner import Runner

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 445.0  # in all, without what the last section had begun
_NO_GPU = "error: there is no CUDA GPU here that torch can use"


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results.json and results.md.  [default: docs/gpu/<date>-<device>]",
)
@click.option("--sections", "chosen", help=f"Only these, separated by commas: {', '.join(sections.SECONDS)}.")
@click.option("--tensorrt-root", type=click.Path(exists=True, file_okay=False), help="TensorRT's headers.")
@click.option("--engine", type=click.Path(exists=True, dir_okay=False), help="A TensorRT-RTX engine to load.")
@click.option("--quick", is_flag=True, help="Fewer cases, and no large models.")
@click.option("--tune", is_flag=True, help="Also try other tiles and splits; takes four minutes more.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Of all inputs.  [default: another every time]")
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", hidden=True)
def main(
    output: Path | None,
    chosen: str | None,
    tensorrt_root: str | None,
    engine: str | None,
    quick: bool,
    tune: bool,
    seed: int | None,
    device: str,
) -> None:
    """Checks and measures the kernels, decode steps and plugins on this machine's GPU, in under 8 minutes.

    Exit code 0 when all that ran is right, 1 when a check failed, 2 when there is no CUDA GPU.
    """
    names = _names(chosen)
    if tensorrt_root and not any(Path(tensorrt_root).glob(f"{place}NvInferRuntime.h") for place in ("", "include/")):
        raise click.UsageError(f"--tensorrt-root: {tensorrt_root} has neither NvInferRuntime.h nor include/")
    seed = secrets.randbelow(2**31) if seed is None else seed
    name = _device_name(device)
    console = Console(stderr=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    folder = output or ROOT / "docs" / "gpu" / f"{date}-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}"
    about = {"device": name, "date": date, "seed": seed, "sections": ", ".join(names), "quick": quick, "tune": tune}
    report = Report(folder, about, device == "cuda")
    try:
        report.write()  # before anything has taken time
    except OSError as error:
        raise click.UsageError(f"--output: {folder} cannot be written to: {error.strerror}") from error
    console.print(f"seed {seed}, device {escape(name)}, results in {escape(str(folder))}", soft_wrap=True)
    if device == "cpu":
        console.print(ON_A_CPU, soft_wrap=True)
    options = Options(device, seed, quick, tune, tensorrt_root, engine)
    with console.status("starting") as status:
        runner = Runner(
            [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--worker"],
            options,
            on_result=lambda result: _on_result(console, report, result),
            on_event=lambda section, note: status.update(escape(f"{section}: {note}" if note else section)),
        )
        runner.run(names, SECONDS + (sections.TUNING_SECONDS if tune else 0.0))
    _print_summary(report)
    sys.exit(exit_code(report.results))


def _names(chosen: str | None) -> list[str]:
    """In the order they run."""
    if chosen is None:
        return list(sections.SECONDS)
    asked = {name.strip() for name in chosen.split(",") if name.strip()}
    unknown = sorted(asked - set(sections.SECONDS))
    if unknown or not asked:
        known = ", ".join(sections.SECONDS)
        raise click.UsageError(f"--sections: {', '.join(unknown) or 'nothing'} must be of {known}")
    return [name for name in sections.SECONDS if name in asked]


def _device_name(device: str) -> str:
    if device == "cpu":
        return "CPU"
    try:
        import torch
    except ModuleNotFoundError:
        click.echo("error: torch is not installed", err=True)
        sys.exit(2)
    if not torch.cuda.is_available():
        click.echo(_NO_GPU, err=True)
        sys.exit(2)
    return torch.cuda.get_device_name(0)


def _on_result(console: Console, report: Report, result: Any) -> None:
    report.add(result)
    shown = f"{result.section}: {result.status}" + (f" ({result.reason})" if result.reason else "")
    console.print(escape(f"{shown}, {result.seconds:.0f} s"), soft_wrap=True)
    for check in result.checks:
        if not check.ok:
            console.print(escape(f"  FAILED {check.name}: {check.detail}"), soft_wrap=True)


def _print_summary(report: Report) -> None:
    summary = report.summary()
    console = Console()
    for table in [table for result in report.results for table in result.tables if table.rows] + [summary]:
        shown = RichTable(*table.columns, title=table.title)
        for row in table.rows:
            shown.add_row(*("-" if cell is None else escape(str(cell)) for cell in row))
        console.print(shown)
    console.print(escape(str(report.folder / "results.md")), soft_wrap=True)
