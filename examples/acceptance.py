"""Measures bundles on prompts: acceptance, target passes, losslessness, and speed against token-by-token decoding."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dflash_trt
from dflash_trt.evaluation.losslessness import compare_outputs
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.trace import Branches


@dataclass
class Measured:
    """One row of the table; `speedup` is the median over the prompts, each with and without speculation in turns."""

    system: str
    branches: Branches
    mean_acceptance_length: float = 0.0
    mean_of_responses: float = 0.0
    acceptance_rate: float = 0.0
    target_passes_per_token: float = 0.0
    verified_per_step: float = 0.0
    speedup: float = 0.0
    lossless: dict[str, int] = field(default_factory=lambda: {"equal": 0, "tie": 0, "different": 0})


def measure(engine: Engine, texts: list[str], branches: Branches | None, **settings: Any) -> Measured:
    """Generates from all prompts, each twice."""
    row = Measured(engine.system, engine.limits.branches if branches is None else branches)
    engine.generate(texts[0], branches=branches, **settings)  # the first pass of a session allocates
    steps: list[int] = []
    responses, ratios = [], []
    proposed = accepted = passes = tokens = 0
    for text in track(texts, f"{row.system}, {row.branches} branches", console=Console(stderr=True)):
        ids = engine.tokenizer.encode(text)
        started = time.perf_counter()
        drafted = engine.generate(ids, branches=branches, **settings)
        half = time.perf_counter()
        plain = engine.generate(ids, speculation=False, **settings)
        ratios.append((time.perf_counter() - half) / (half - started))
        row.lossless[compare_outputs(engine, ids, plain.token_ids, drafted.token_ids, **settings).verdict] += 1
        counted = drafted.statistics
        if counted.mean_acceptance_length is not None:
            steps += counted.acceptance_lengths
            responses.append(counted.mean_acceptance_length)
        proposed += counted.proposed_drafts
        accepted += counted.accepted_drafts
        passes += counted.target_passes
        tokens += len(drafted.token_ids)
    row.mean_acceptance_length, row.mean_of_responses = statistics.fmean(steps), statistics.fmean(responses)
    row.acceptance_rate, row.target_passes_per_token = accepted / proposed, passes / tokens
    row.verified_per_step, row.speedup = proposed / len(steps) + 1, statistics.median(ratios)
    return row


@click.command()
@click.argument("bundles", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help='JSONL with a field "prompt".',
)
@click.option("--branches", multiple=True, help="For D2SD bundles; may be given several times.  [default: as built]")
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=0, help="CPU threads; 0 lets the backend choose.")
@click.option("--json", "as_json", is_flag=True)
def main(
    bundles: tuple[Path, ...], prompts: Path, branches: tuple[str, ...], threads: int, as_json: bool, **settings: Any
) -> None:
    """Measure BUNDLES on a file of prompts."""
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        texts = [json.loads(line)["prompt"] for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise click.BadParameter('every line must be a JSON object with "prompt"', param_hint="--prompts") from error
    if not texts:
        raise click.BadParameter("the file has no prompts", param_hint="--prompts")
    rows = []
    for bundle in bundles:
        engine = dflash_trt.load(bundle, threads=threads)
        choices = branches if branches and engine.vp_drafter is not None else (None,)
        rows += [measure(engine, texts, _branches(choice), **settings) for choice in choices]
    if as_json:
        click.echo(json.dumps({"prompts": len(texts), **settings, "rows": [asdict(row) for row in rows]}))
        return
    table = Table(title=f"{len(texts)} prompts of {prompts.name}", title_justify="left")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="left" if name == "system" else "right")
    for row in rows:
        table.add_row(*(_shown(value) for value in asdict(row).values()))
    Console().print(table)


def _branches(choice: str | None) -> Branches | None:
    if choice is None or choice == "auto":
        return choice
    try:
        return int(choice)
    except ValueError as error:
        raise click.BadParameter(f"{choice} is neither a number nor auto", param_hint="--branches") from error


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items() if count)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
