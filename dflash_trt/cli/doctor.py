"""`dflash-trt doctor`."""

from __future__ import annotations

import json

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what this machine can build and run."""
    from dflash_trt.cli.tables import print_doctor
    from dflash_trt.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    else:
        print_doctor(findings)
