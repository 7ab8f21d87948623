"""What a load test measured: figures of each row, ratios, a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

COLUMNS = ("clients", "mode", "requests/s", "tokens/s", "first\ntoken, ms", "per\ntoken, ms", "acceptance\nlength")


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it; seconds since it was sent, of the first and of the last token.

    `steps`: what gave the tokens behind the first; 0 where it is not known.
    """

    text: str
    tokens: int
    first: float
    last: float
    per_token: float | None
    steps: float


@dataclass
class Row:
    """What one target did at one concurrency: rates of each turn, and all answers."""

    clients: int
    name: str
    requests_per_second: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def add(self, answers: list[Answer], seconds: float) -> None:
        """Takes in a turn."""
        self.requests_per_second.append(len(answers) / seconds)
        self.tokens_per_second.append(sum(answer.tokens for answer in answers) / seconds)
        self.answers += answers

    @property
    def seconds_to_first_token(self) -> list[float]:
        return [answer.first for answer in self.answers]

    @property
    def seconds_per_token(self) -> list[float]:
        return [answer.per_token for answer in self.answers if answer.per_token is not None]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, the bonus included."""
        counted = [answer for answer in self.answers if answer.steps]
        return sum(a.tokens - 1 for a in counted) / sum(a.steps for a in counted) if counted else None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data; seconds."""
        return {
            "clients": self.clients,
            "name": self.name,
            "requests_per_second": _spread(self.requests_per_second),
            "tokens_per_second": _spread(self.tokens_per_second),
            "seconds_to_first_token": _percentiles(self.seconds_to_first_token),
            "seconds_per_token": _percentiles(self.seconds_per_token),
            "acceptance_length": self.acceptance_length,
            "requests": len(self.answers),
            "tokens": sum(answer.tokens for answer in self.answers),
        }


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of auto over those of the better of on and off, turn by turn.

    The better one is that of the higher median.
    """

    clients: int
    better: str
    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """One for each concurrency, where on, off and auto were measured."""
    found = []
    for clients in dict.fromkeys(row.clients for row in rows):
        rates = {row.name: row.tokens_per_second for row in rows if row.clients == clients}
        if rates.keys() >= {"on", "off", "auto"}:
            better = max(("on", "off"), key=lambda name: statistics.median(rates[name]))
            turns = tuple(auto / other for auto, other in zip(rates["auto"], rates[better], strict=True))
            found.append(Ratio(clients, better, turns))
    return found


def show(rows: Sequence[Row], found: Sequence[Ratio], settings: Mapping[str, Any]) -> None:
    """Prints a table, and the ratios."""
    title = ", ".join(f"{name} {value}" for name, value in settings.items())
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in rows:
        rate = "{median:.0f} ({lowest:.0f} - {highest:.0f})".format(**_spread(row.tokens_per_second))
        latencies = row.seconds_to_first_token, row.seconds_per_token
        length = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        requests = f"{statistics.median(row.requests_per_second):.1f}"
        table.add_row(str(row.clients), row.name, requests, rate, *map(_shown_ms, latencies), length)
    table.caption = "rates: median (lowest - highest turn); latencies: 50th / 95th percentile"
    console = Console(highlight=False, width=max(Console().width, 100))
    console.print(table)
    for ratio in found:
        of = f"auto / {ratio.better} = {ratio.median:.3f} ({min(ratio.turns):.3f} - {max(ratio.turns):.3f})"
        console.print(f"{ratio.clients} clients: {of}")


def _shown_ms(values: Sequence[float]) -> str:
    return " / ".join(f"{1000 * np.percentile(values, p):.1f}" for p in (50, 95)) if values else "-"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draws tokens per second (the lowest and the highest turn, too) and how long requests take."""
    from matplotlib.figure import Figure

    figure, ticks = Figure(figsize=(10, 4), layout="constrained"), sorted({row.clients for row in rows})
    rate, latency = figure.subplots(1, 2)
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        clients = [row.clients for row in own]
        spreads = [_spread(row.tokens_per_second) for row in own]
        medians = [spread["median"] for spread in spreads]
        errors = [[s["median"] - s["lowest"] for s in spreads], [s["highest"] - s["median"] for s in spreads]]
        rate.errorbar(clients, medians, errors, marker="o", capsize=3, label=name)
        waits = [_percentiles([answer.last for answer in row.answers]) or {} for row in own]
        (line,) = latency.plot(clients, [wait["p50"] for wait in waits], marker="o", label=f"{name}, median")
        latency.plot(clients, [wait["p95"] for wait in waits], "--", color=line.get_color(), label=f"{name}, 95 %")
    for axes, title in ((rate, "tokens per second"), (latency, "seconds per request")):
        axes.set(title=title, xlabel="clients", xscale="log", ylim=(0, None))
        axes.set_xticks(ticks, labels=ticks)
        axes.minorticks_off()
        axes.legend()
    figure.savefig(file, dpi=150)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 95, 99)} if values else None
