"""Generates text with a bundle, with speculation and without, and shows what speculation did."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import dflash_trt
from dflash_trt.runtime.engine import Engine, Generation

# (prompt, sampling): greedy, and sampled with a seed
PROMPTS: tuple[tuple[str, dict], ...] = (
    ("import unittest\nfrom test import support\n\n\nclass ParserTest(unittest.TestCase):\n", {}),
    ('def read_config(path):\n    """Read a configuration file."""\n', {}),
    ("class Stack:\n    def __init__(self):\n        self.items = []\n", {"temperature": 0.5, "seed": 1}),
)
COLUMNS = ("prompt", "drafting", "steps", "acceptance\nlength", "acceptance\nrate", "speed", "same\ntokens")


def timed(engine: Engine, prompt: str, **options: Any) -> tuple[Generation, float]:
    """A generation and its seconds."""
    started = time.perf_counter()
    generation = engine.generate(prompt, **options)
    return generation, time.perf_counter() - started


def draftings(engine: Engine) -> dict[str, dict[str, Any]]:
    """The ways the bundle can draft: by name, the options of `generate`."""
    if engine.vp_drafter is None:
        return {engine.system: {}}
    built = engine.limits.branches
    return {"chain": {"branches": 0}, f"{built} branches": {"branches": built}}


def _figure(value: float | None) -> str:
    """A prompt that ends at its first token has no steps."""
    return "-" if value is None else f"{value:.2f}"


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--max-tokens", default=96, show_default=True)
def main(bundle: Path, max_tokens: int) -> None:
    """Generate from a few prompts with BUNDLE."""
    console = Console()
    engine = dflash_trt.load(bundle)
    for options in draftings(engine).values():
        engine.generate("import", max_tokens=8, **options)  # the first pass of a session allocates
    title = f"speculation against token by token, {max_tokens} new tokens at most"
    table = Table(title=title, title_justify="left", caption_justify="left")
    if engine.vp_drafter is not None:
        table.caption = "Branches save steps, that is, target passes; on a CPU every verified token costs."
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:2] else "right")
    for number, (prompt, sampling) in enumerate(PROMPTS, start=1):
        sampling = sampling | {"max_tokens": max_tokens}
        plain, plain_seconds = timed(engine, prompt, speculation=False, **sampling)
        console.print(Panel(Text.assemble((prompt, "dim"), plain.text), title=f"prompt {number}"))
        for name, options in draftings(engine).items():
            drafted, seconds = timed(engine, prompt, **options, **sampling)
            statistics = drafted.statistics
            table.add_row(
                f"{number} {'sampled' if 'seed' in sampling else 'greedy'}",
                name,
                str(statistics.steps),
                _figure(statistics.mean_acceptance_length),
                _figure(statistics.acceptance_rate),
                f"{plain_seconds / seconds:.2f}x",
                "yes" if drafted.token_ids == plain.token_ids else "NO",
            )
    console.print(table)


if __name__ == "__main__":
    main()
