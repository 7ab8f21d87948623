"""Measures a bundle on prompts: acceptance, losslessness, and speculation against token-by-token decoding in turns."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dflash_trt
from dflash_trt.evaluation.losslessness import compare_outputs


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help='JSONL with a field "prompt".',
)
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=0, help="CPU threads; 0 lets the backend choose.")
@click.option("--json", "as_json", is_flag=True)
def main(
    bundle: Path, prompts: Path, max_tokens: int, temperature: float, seed: int, threads: int, as_json: bool
) -> None:
    """Measure BUNDLE on a file of prompts."""
    engine = dflash_trt.load(bundle, threads=threads)
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        texts = [json.loads(line)["prompt"] for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise click.BadParameter('every line must be a JSON object with "prompt"', param_hint="--prompts") from error
    if not texts:
        raise click.BadParameter("the file has no prompts", param_hint="--prompts")
    settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    engine.generate(texts[0], **settings)  # the first pass of a session allocates
    steps: list[int] = []
    per_response, ratios = [], []
    verdicts = {"equal": 0, "tie": 0, "different": 0}
    proposed = accepted = 0
    for text in track(texts, "Generating", console=Console(stderr=True)):
        ids = engine.tokenizer.encode(text)
        seconds = {}
        outputs = {}
        for speculation in (True, False):
            started = time.perf_counter()
            outputs[speculation] = engine.generate(ids, speculation=speculation, **settings)
            seconds[speculation] = time.perf_counter() - started
        drafted, plain = outputs[True], outputs[False]
        verdicts[compare_outputs(engine, ids, plain.token_ids, drafted.token_ids, **settings).verdict] += 1
        ratios.append(seconds[False] / seconds[True])
        if drafted.statistics.steps:
            steps += drafted.statistics.acceptance_lengths
            per_response.append(statistics.fmean(drafted.statistics.acceptance_lengths))
        proposed += drafted.statistics.proposed_drafts
        accepted += drafted.statistics.accepted_drafts
    result = {
        "prompts": len(texts),
        "block_size": engine.limits.block_size,
        "temperature": temperature,
        "mean_acceptance_length": statistics.fmean(steps),
        "mean_of_responses": statistics.fmean(per_response),
        "acceptance_rate": accepted / proposed,
        "speedup_median": statistics.median(ratios),
        "lossless": verdicts,
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    table = Table(title=f"{bundle} on {prompts}", title_justify="left", show_header=False)
    for name, value in result.items():
        table.add_row(name.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
