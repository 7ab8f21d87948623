"""`dflash-trt inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dflash_trt.backends.parser_version import Flavour


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Of a trace: the step to draw, from 1; by default where branches gained most.")
@click.option("--output", type=click.Path(path_type=Path), help="Of a trace: the pictures' folder, else beside it.")
@click.option("--preflight", is_flag=True, help="Of a graph or a bundle: would TensorRT build it, and at what cost?")
@click.option(
    "--backend",
    type=click.Choice(["tensorrt", "tensorrt-rtx"]),
    help="With --preflight.  [default: the bundle's, else tensorrt]",
)
@click.option(
    "--tensorrt-version",
    metavar="X.Y",
    help="With --preflight: whose parser.  [default: the bundle's, else the installed one]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    path: Path,
    step: int | None,
    output: Path | None,
    preflight: bool,
    backend: Flavour | None,
    tensorrt_version: str | None,
    as_json: bool,
) -> None:
    """Show what a checkpoint, a graph or a bundle is, or what the drafts of a trace were worth.

    A trace (`run --trace FILE.json`) is drawn, too: the tree of a step, acceptance by position, calibration. With
    --preflight the exit code is 1 where a graph has faults.
    """
    from dflash_trt.cli.tables import print_description
    from dflash_trt.description import describe, describe_trace, is_trace
    from dflash_trt.errors import UsageError

    for option, value in (("--backend", backend), ("--tensorrt-version", tensorrt_version)):
        if value is not None and not preflight:
            raise UsageError("is for --preflight", where=option, mend="Add that, or leave it out")
    if preflight:
        for option, given in (("--step", step), ("--output", output)):
            if given is not None:
                raise UsageError("is for traces, --preflight for graphs", where=option, mend="Leave one out")
        _preflight(path, backend, tensorrt_version, as_json)
        return
    if is_trace(path):
        from dflash_trt.evaluation.trace_drawing import draw_trace
        from dflash_trt.evaluation.trace_file import read_trace

        trace = read_trace(path)
        figures = [str(file) for file in draw_trace(trace, path, output, step)]
        description = {**describe_trace(path, trace), "figures": figures}
    else:
        description = describe(path)
        if step is not None or output is not None:
            option = "--output" if step is None else "--step"
            raise UsageError(f"is for traces; {path} is a {description['kind']}", where=option, mend="Leave it out")
    if as_json:
        click.echo(json.dumps(description, indent=2))
    else:
        print_description(description)


def _preflight(path: Path, flavour: Flavour | None, version: str | None, as_json: bool) -> None:
    from dflash_trt.cli.tables import print_preflight
    from dflash_trt.errors import CheckFailed
    from dflash_trt.preflight.report import run_preflight

    report = run_preflight(path, flavour, version)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_preflight(report)
    if not report.passed:
        raise CheckFailed(report.summary(), where=str(path))
