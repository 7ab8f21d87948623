"""Generates text with a bundle, with speculation and without, and shows what speculation did."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import dflash_trt
from dflash_trt.runtime.engine import Engine, Generation

PROMPTS = (
    'class Stack:\n    """A last-in first-out container."""\n\n    def __init__(self):\n        ',
    "import unittest\n\n\nclass TestCase(unittest.TestCase):\n    def test_",
    "def read_lines(path):\n    with open(path) as f:\n        ",
)


def timed(engine: Engine, prompt: str, tokens: int, speculation: bool) -> tuple[Generation, float]:
    """A generation and its seconds."""
    started = time.perf_counter()
    generation = engine.generate(prompt, max_tokens=tokens, speculation=speculation)
    return generation, time.perf_counter() - started


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
    engine.generate(PROMPTS[0], max_tokens=8)  # the first pass of a session allocates
    table = Table(title="speculation against token by token, same output", title_justify="left")
    for name in ("prompt", "tokens", "steps", "acceptance length", "acceptance rate", "speedup", "identical"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for number, prompt in enumerate(PROMPTS, start=1):
        drafted, seconds = timed(engine, prompt, max_tokens, speculation=True)
        plain, plain_seconds = timed(engine, prompt, max_tokens, speculation=False)
        console.print(Panel(f"[dim]{prompt}[/dim]{drafted.text}", title=f"prompt {number}", highlight=False))
        statistics = drafted.statistics
        table.add_row(
            str(number),
            str(len(drafted.token_ids)),
            str(statistics.steps),
            _figure(statistics.mean_acceptance_length),
            _figure(statistics.acceptance_rate),
            f"{plain_seconds / seconds:.2f}x",
            "yes" if drafted.token_ids == plain.token_ids else "NO",
        )
    console.print(table)


if __name__ == "__main__":
    main()
