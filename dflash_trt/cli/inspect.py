"""`dflash-trt inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Of a trace: the step to draw, from 1; by default where branches gained most.")
@click.option("--output", type=click.Path(path_type=Path), help="Of a trace: the pictures' folder, else beside it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: Path, step: int | None, output: Path | None, as_json: bool) -> None:
    """Show what a checkpoint, a graph or a bundle is, or what the drafts of a trace were worth.

    A trace (`run --trace FILE.json`) is drawn, too: the tree of a step, acceptance by position, calibration.
    """
    from dflash_trt.cli.tables import print_description
    from dflash_trt.description import describe, describe_trace, is_trace
    from dflash_trt.errors import UsageError

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
