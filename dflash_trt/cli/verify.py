"""`dflash-trt verify`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.errors import CheckFailed


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(bundle: Path, as_json: bool) -> None:
    """Check a bundle: numbers against the torch reference, losslessness, acceptance. Exit code 1 when a check fails."""
    from dflash_trt.cli.tables import print_report
    from dflash_trt.evaluation.verify import verify_folder
    from dflash_trt.progress import RichProgress

    report = verify_folder(bundle, RichProgress())
    if as_json:
        click.echo(report.to_json(), nl=False)
    else:
        print_report(report)
    if not report.passed:
        raise CheckFailed(report.failures(), where=str(bundle))
