"""A benchmark's tables, on stdout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dflash_trt.evaluation.bench_report import BenchReport, CostTable, ModeFigures, SetFigures, Spread

_DASH = "-"
_SPEED = ("tokens", "ms/token", "speed", "quartiles", "in all", "outputs as plain")
_ACCEPTANCE = ("steps", "tau", "rate", "verified", "passes")
_STAGES = ("draft", "redraft", "verify", "accept", "move", "host", "inject", "host share")
_PREDICTION = ("draft", "redraft", "verify", "step", "tau", "predicted", "measured", "ratio")


def print_bench(report: BenchReport) -> None:
    """Speed, acceptance, stages, costs of passes and predictions by set and mode; then who wins, and why."""
    machine, settings, sets = report.machine, report.settings, report.sets
    threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    turns = f"{settings['turns']} turn{'s' if settings['turns'] != 1 else ''}"
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    _say(f"{machine['cpu']}, {threads}, {turns}, {settings['max_tokens']} new tokens at most, {how}")
    _say("Speed per token behind the first against plain, medians over the prompts; in all, first tokens too")
    _print_by_mode(sets, _SPEED, _speed, lambda mode: True)
    for one in sets:
        for mode in one.modes:
            if mode.same_steps is not None:
                outputs = f"{mode.same_steps} of {len(one.prompts)} outputs"
                _say(f"{one.name}: the steps of {mode.label} are those of the DFlash mode on {outputs}")
    _say("Acceptance: tokens a step (tau), accepted drafts, tokens verified a step, target passes for a token")
    _print_by_mode(sets, _ACCEPTANCE, _acceptance, lambda mode: bool(mode.steps))
    deepest = max((len(mode.positions) for one in sets for mode in one.modes), default=0)
    if deepest:
        _say("Share of steps whose path gets to a position, of those that verified a draft there")
        positions = [str(position) for position in range(1, deepest + 1)]
        _print_by_mode(sets, positions, _positions, lambda mode: bool(mode.positions))
    _say("Milliseconds of a step; host share: what is neither draft, redraft nor verify")
    _print_by_mode(sets, _STAGES, _stages, lambda mode: mode.stages is not None)
    for table in report.costs:
        _print_costs(table)
    if any(_is_predicted(mode) for one in sets for mode in one.modes):
        _say("A step in single target passes, and the speed that predicts: tau / step")
        _print_by_mode(sets, _PREDICTION, _prediction, _is_predicted)
    for one in sets:
        _say(f"{one.name}: {one.why}")
        for auto in one.auto:
            speeds = f"{auto.total_ratio:.2f}x in all, {auto.ratio.median:.2f}x by prompt"
            _say(f"{one.name}: {auto.label} against the best fixed setting, {auto.best_fixed}: {speeds}.")


def _print_by_mode(
    sets: Sequence[SetFigures],
    columns: Sequence[str],
    cells: Callable[[ModeFigures], Sequence[str]],
    has_any: Callable[[ModeFigures], bool],
) -> None:
    """A section for each set, a row for each mode that has anything to show."""
    table = _table("mode", *columns)
    for one in sets:
        count = len(one.prompts)
        table.add_row(f"{one.name}, {count} prompt{'s' if count != 1 else ''}")
        for mode in filter(has_any, one.modes):
            table.add_row(f"  {mode.label}", *cells(mode))
        table.add_section()
    _print(table)


def _speed(mode: ModeFigures) -> list[str]:
    equal, total = mode.lossless["equal"], sum(mode.lossless.values())
    others = [f"{count} {name}" for name, count in mode.lossless.items() if count and name != "equal"]
    return [
        str(mode.tokens),
        _DASH if mode.ms_per_token is None else f"{mode.ms_per_token.median:.2f}",
        _DASH if mode.ratio is None else f"{mode.ratio.median:.2f}x",
        _quartiles(mode.ratio),
        f"{mode.total_ratio:.2f}x",
        ", ".join([f"{equal} of {total}", *others]),
    ]


def _quartiles(spread: Spread | None) -> str:
    return _DASH if spread is None else f"{spread.low:.2f}-{spread.high:.2f}"


def _acceptance(mode: ModeFigures) -> list[str]:
    rate, tau = _fixed(mode.acceptance_rate), _fixed(mode.mean_acceptance_length)
    return [str(mode.steps), tau, rate, _fixed(mode.verified_per_step, 1), _fixed(mode.target_passes_per_token)]


def _positions(mode: ModeFigures) -> list[str]:
    return [f"{at.accepted:.2f}" for at in mode.positions]


def _stages(mode: ModeFigures) -> list[str]:
    stages = mode.stages
    assert stages is not None
    passes = [_fixed(value or None) for value in (stages.draft, stages.redraft)]
    others = [_fixed(value) for value in (stages.verify, stages.accept, stages.move, stages.host, stages.inject)]
    return [*passes, *others, f"{stages.host_share:.1%}"]


def _is_predicted(mode: ModeFigures) -> bool:
    return mode.prediction is not None and mode.label != "plain"


def _prediction(mode: ModeFigures) -> list[str]:
    found = mode.prediction
    assert found is not None
    parts = [_fixed(value or None) for value in (found.draft, found.redraft, found.verify)]
    speeds = [f"{found.predicted:.2f}x", f"{found.measured:.2f}x", f"{found.share:.2f}"]
    return [*parts, _fixed(found.step_cost), _fixed(mode.mean_acceptance_length), *speeds]


def _print_costs(found: CostTable) -> None:
    costs = found.costs
    alone = costs.verify[0][1]
    columns = {name: dict(getattr(costs, name)) for name in ("draft", "redraft", "verify") if getattr(costs, name)}
    _say(f"{found.bundle}: a pass by its new tokens, behind {found.context} cached ones, in ms (single target passes)")
    table = _table("tokens", *columns)
    for tokens in sorted({tokens for column in columns.values() for tokens in column}):
        cells = [column.get(tokens) for column in columns.values()]
        shown = (_DASH if cell is None else f"{1e3 * cell:.2f} ({cell / alone:.2f})" for cell in cells)
        table.add_row(str(tokens), *shown)
    _print(table)


def _table(first: str, *columns: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print(table: Table) -> None:
    """Whole, however narrow the terminal."""
    console = _console()
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(markup=False, emoji=False, width=max(console.width, width)).print(table)


def _say(line: str) -> None:
    """On one line, however long. Not as a table's title, which would be folded to its width."""
    _console().print(line, soft_wrap=True, highlight=False)


def _console() -> Console:
    return Console(markup=False, emoji=False)  # a path may hold "[x]" or ":x:"


def _fixed(value: float | None, decimals: int = 2) -> str:
    return _DASH if value is None else f"{value:.{decimals}f}"
