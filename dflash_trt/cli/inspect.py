"""`dflash-trt inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: Path, as_json: bool) -> None:
    """Show what a checkpoint, a graph or a bundle is."""
    from dflash_trt.cli.tables import print_description
    from dflash_trt.description import describe

    description = describe(path)
    if as_json:
        click.echo(json.dumps(description, indent=2))
    else:
        print_description(description)
