"""`dflash-trt bench`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.branch_count import BranchCount
from dflash_trt.cli.output_file import output_fault
from dflash_trt.errors import CheckFailed, UsageError


@click.command("bench")
@click.argument("bundles", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="BUNDLE...")
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE|NAME",
    help="A JSONL file with a field \"prompt\", humaneval, a set that comes with the package, or mixed (all of those "
    "sets in turns); several joined by commas are one set. May be given several times.  [default: each set that comes "
    "with the package]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Prompts of each set.  [default: all]")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="New tokens at most.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put prompts into the chat template.  [default: as a record's \"chat\" says, else where there is a template]",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all outputs.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Of everything.  [default: physical cores]")
@click.option("--turns", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each mode and prompt.")
@click.option(
    "--branches",
    type=BranchCount(),
    multiple=True,
    help="Branches per step (D2SD), or auto; may be given several times.  [default: as built, and auto]",
)
@click.option(
    "--drafts",
    type=BranchCount(),
    multiple=True,
    help="Drafts of a block to verify, or auto, besides whole blocks; may be given several times.",
)
@click.option("--target", type=click.Path(path_type=Path), help="Its checkpoint: adds transformers' generate().")
@click.option("--drafter", type=click.Path(path_type=Path), help="And DFlash's: adds the loop of DFlash's authors.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundles: tuple[Path, ...], plot: Path | None, as_json: bool, **settings: Any) -> None:
    """Measure bundles of one target on prompts: speculation on, off and per system, in turns, on the same threads.

    Exit code 1 when outputs differ from token-by-token decoding.
    """
    if plot is not None:
        _check_plot(plot, bundles)

    from dflash_trt.cli.bench_tables import print_bench
    from dflash_trt.evaluation.bench import BenchSettings, run_bench
    from dflash_trt.progress import RichProgress

    report = run_bench(bundles, BenchSettings(**settings), RichProgress())
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        print_bench(report)
    if plot is not None:
        from dflash_trt.evaluation.bench_plot import write_figure

        write_figure(report, plot)
    if not report.passed:
        raise CheckFailed(report.failures(), where=", ".join(map(str, bundles)))


def _check_plot(file: Path, bundles: tuple[Path, ...]) -> None:
    """Refuses, before anything is measured, a picture that could not be drawn or would damage a bundle."""
    if file.suffix != ".png":
        what, mend = "must end in .png", "Name it so"
    elif (fault := output_fault(file, bundles)) is not None:
        what, mend = fault
    elif importlib.util.find_spec("matplotlib") is None:
        what, mend = "needs the package matplotlib", "Install it: pip install matplotlib"
    else:
        return
    raise UsageError(what, where=f"--plot {file}", mend=mend)
