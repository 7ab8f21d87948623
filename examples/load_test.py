"""Requests and tokens per second of concurrent clients, with speculation on, off and auto, measured side by side.

Clients are closed-loop: each sends its next request when its last one is answered. In each turn they answer all
prompts once; turns of what is compared alternate, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
from load_clients import InProcess, LoadTestError, Target, server
from load_report import Answer, Row, plot, ratios, show
from rich.console import Console
from rich.progress import Progress

import dflash_trt
from dflash_trt.errors import DflashError
from dflash_trt.runtime.speculation import Speculation
from dflash_trt.runtime.trace import Branches

MODES: tuple[Speculation, ...] = ("on", "off", "auto")


async def ask(target: Target, prompt: str, sampling: Mapping[str, Any]) -> Answer:
    """One request, to its end."""
    started = time.perf_counter()
    text, tokens, first_tokens, length = "", 0, 0, None
    first = last = 0.0
    async for piece in target.stream(prompt, sampling):
        last = time.perf_counter() - started
        if piece.tokens and not tokens:
            first, first_tokens = last, piece.tokens
        text, tokens = text + piece.text, tokens + piece.tokens
        length = piece.acceptance_length or length
    if not tokens:
        raise LoadTestError(f"{target.name}: an answer without tokens")
    per_token = (last - first) / (tokens - first_tokens) if tokens > first_tokens else None
    return Answer(text, tokens, first, last, per_token, (tokens - 1) / length if length else 0.0)


async def turn(
    target: Target, prompts: Sequence[str], clients: int, sampling: Mapping[str, Any]
) -> tuple[list[Answer], float]:
    """The answers to all prompts, in their order, and the seconds that took."""
    waiting: Iterator[tuple[int, str]] = iter(enumerate(prompts))
    answers: dict[int, Answer] = {}

    async def client() -> None:
        for number, prompt in waiting:
            answers[number] = await ask(target, prompt, sampling)

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [answers[number] for number in range(len(prompts))], time.perf_counter() - started


async def measure(
    targets: Sequence[Target], prompts: Sequence[str], concurrency: Sequence[int], turns: int,
    sampling: Mapping[str, Any],
) -> tuple[list[Row], int]:  # fmt: skip
    """One row for each concurrency and target, and how many answers were not those of the first target's first turn."""
    rows = {(clients, target.name): Row(clients, target.name) for clients in concurrency for target in targets}
    expected: list[str] = []
    different = 0
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("warming up", total=(turns + 1) * len(rows))
        async with AsyncExitStack() as serving:
            for target in targets:
                await serving.enter_async_context(target)
            for number in range(turns + 1):
                for clients in concurrency:
                    first = number % len(targets)
                    for target in [*targets[first:], *targets[:first]]:
                        answers, seconds = await turn(target, prompts, clients, sampling)
                        texts = [answer.text for answer in answers]
                        expected = expected or texts
                        different += sum(text != other for text, other in zip(texts, expected, strict=True))
                        if number:
                            rows[clients, target.name].add(answers, seconds)
                        progress.update(task, advance=1, description=f"{target.name}, {clients} clients")
    return list(rows.values()), different


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), help="Serve it in this process, once for each speculation.")
@click.option("--speculation", type=click.Choice(MODES), multiple=True, help="Of --bundle.  [default: all]")
@click.option("--branches", help="Of a D2SD bundle.  [default: as built]")
@click.option("--threads", default=0, help="CPU threads of each engine of --bundle; 0 lets the backend choose.")
@click.option("--url", "urls", multiple=True, help="[NAME=]http://HOST:PORT or grpc://HOST:PORT of a running server.")
@click.option("--model", default="ensemble", show_default=True, help="Of the servers.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=Path(__file__).parent / "tiny/heldout.jsonl",
    help='JSONL with a field "prompt".  [default: tiny/heldout.jsonl]',
)
@click.option("--concurrency", type=click.IntRange(min=1), multiple=True, default=(1, 4, 16), show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=64, show_default=True, help="Per turn.")
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Besides one to warm up.")
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--require-auto", type=float, help="Exit with 1 where auto / better is below.")
@click.option("--plot", "png", type=click.Path(path_type=Path, dir_okay=False), help="PNG of rates and latencies.")
@click.option("--json", "as_json", is_flag=True)
def main(
    bundle: Path | None, speculation: tuple[Speculation, ...], branches: str | None, threads: int,
    urls: tuple[str, ...], model: str, prompts: Path, concurrency: tuple[int, ...], requests: int, turns: int,
    max_tokens: int, temperature: float, seed: int, require_auto: float | None, png: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a bundle, or running servers, under the load of concurrent clients."""
    if (bundle is None) == (not urls):
        raise click.UsageError("Give --bundle, or --url")
    sampling = {"max_tokens": max_tokens} | ({"temperature": temperature, "seed": seed} if temperature else {})
    texts = list(islice(cycle(_prompts(prompts)), requests))
    modes, most = speculation or MODES, _branches(branches)
    servers = [server(url, model) for url in urls]
    names = [target.name for target in servers] or list(modes)
    if len(set(names)) < len(names):
        raise click.UsageError(f"There are two of a name: {', '.join(names)}")
    if require_auto is not None and not set(names) >= set(MODES):
        raise click.UsageError(f"--require-auto compares auto, on and off, but there is {', '.join(names)}")
    try:
        # An engine for each, so that what one has learnt or allocated is not the next one's.
        engines = [InProcess(dflash_trt.load(bundle, threads=threads), mode, most) for mode in modes if bundle]
        rows, different = asyncio.run(measure(servers or engines, texts, concurrency, turns, sampling))
    except DflashError as error:
        raise LoadTestError(str(error)) from error
    found = ratios(rows)
    if png is not None:
        plot(rows, png)
    settings = {"requests": requests, "turns": turns, "threads": threads, **sampling}
    if as_json:
        compared = [{**asdict(ratio), "median": ratio.median} for ratio in found]
        results = {"rows": [row.to_dict() for row in rows], "auto_over_better": compared, "different": different}
        click.echo(json.dumps(settings | results))
    else:
        show(rows, found, settings)
        if different:
            click.echo(f"{different} answers differ from those of the first turn", err=True)
    low = [ratio for ratio in found if require_auto is not None and ratio.median < require_auto]
    for ratio in low:
        click.echo(f"{ratio.clients} clients: auto is {ratio.median:.3f} of {ratio.better}", err=True)
    if low:
        raise SystemExit(1)


def _prompts(file: Path) -> list[str]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        texts = [json.loads(line)["prompt"] for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise click.BadParameter('every line must be a JSON object with "prompt"', param_hint="--prompts") from error
    if not texts:
        raise click.BadParameter("the file has no prompts", param_hint="--prompts")
    return texts


def _branches(choice: str | None) -> Branches | None:
    if choice is None:
        return None
    if choice == "auto":
        return "auto"
    try:
        return int(choice)
    except ValueError as error:
        raise click.BadParameter(f"{choice} is neither a number nor auto", param_hint="--branches") from error


if __name__ == "__main__":
    main()
