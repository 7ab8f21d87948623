"""What passes cost here and now, what that and acceptance say a mode should gain, and which mode wins and why."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dflash_trt.evaluation.bench_modes import PLAIN, Loaded, Run
from dflash_trt.evaluation.bench_report import STEP_STAGES, CostTable, ModeFigures, Prediction
from dflash_trt.evaluation.costs import measure_costs
from dflash_trt.progress import Advance
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.statistics import GenerationStatistics, Stage

_Points = tuple[tuple[int, float], ...]


def cost_tables(
    bundles: Sequence[Loaded], contexts: Sequence[int], turns: int, advance: Advance
) -> dict[Path, list[CostTable]]:
    """By bundle, a table for each context. Those that need the same capacity share one: attention costs what that is.

    Bundles take turns, and the least time counts.
    """
    tables: dict[tuple[Path, int], CostTable] = {}
    for _ in range(turns):
        for bundle in bundles:
            for capacity, context in {_capacity(bundle, context): context for context in contexts}.items():
                known, costs = tables.get((bundle.folder, capacity)), measure_costs(bundle.engine, context)
                costs = costs if known is None else _least(known.costs, costs)
                tables[bundle.folder, capacity] = CostTable(str(bundle.folder), context, capacity, costs)
        advance(1)
    return {
        bundle.folder: [tables[bundle.folder, _capacity(bundle, context)] for context in contexts]
        for bundle in bundles
    }


def _capacity(bundle: Loaded, context: int) -> int:
    limits = bundle.engine.limits
    return bundle.engine.target.capacity_for(context + limits.step_slots, limits.capacity)


def _least(first: PassCosts, second: PassCosts) -> PassCosts:
    def least(first: _Points, second: _Points) -> _Points:
        return tuple((one[0], min(one[1], other[1])) for one, other in zip(first, second, strict=True))

    return PassCosts(
        draft=least(first.draft, second.draft),
        redraft=least(first.redraft, second.redraft),
        verify=least(first.verify, second.verify),
    )


def predict(
    costs: PassCosts | None, runs: Sequence[Run], plain: Sequence[Run], counted: Sequence[GenerationStatistics]
) -> Prediction | None:
    """The prediction for a mode, and what it gained in `runs` over `plain`.

    Args:
        costs: None where passes cannot be told apart.
        counted: of all turns.

    Returns:
        None without a cost table or without passes that were counted.
    """
    passes = [(stage, tokens, count) for one in counted for (stage, tokens), count in one.passes.items()]
    steps = [length for one in counted for length in one.acceptance_lengths]
    if costs is None or not passes or not steps:
        return None
    tables: Mapping[Stage, Sequence[tuple[int, float]]] = {
        "draft": costs.draft, "redraft": costs.redraft, "verify": costs.verify
    }  # fmt: skip
    spent = dict.fromkeys(tables, 0.0)
    for stage, tokens, count in passes:
        spent[stage] += count * seconds_of(tables[stage], tokens)
    alone = seconds_of(costs.verify, 1) * len(steps)
    cost = sum(spent.values()) / alone
    predicted = statistics.fmean(steps) / cost
    measured = _step_seconds_per_token(plain) / _step_seconds_per_token(runs)
    return Prediction(
        draft=spent["draft"] / alone,
        redraft=spent["redraft"] / alone,
        verify=spent["verify"] / alone,
        step_cost=cost,
        predicted=predicted,
        measured=measured,
        share=measured / predicted,
    )


def seconds_of(table: Sequence[tuple[int, float]], tokens: int) -> float:
    """Seconds of a pass by a cost table, interpolated."""
    sizes, seconds = zip(*table, strict=True)
    return float(np.interp(tokens, sizes, seconds))


def explain(figures: Sequence[ModeFigures]) -> str:
    """One sentence on which of the bundles' modes wins, against the next best."""
    ranked = sorted(figures, key=lambda one: one.ratio.median if one.ratio else 0.0, reverse=True)
    if not ranked:
        return "Nothing was decoded: every output has one token."
    if len(ranked) == 1:
        return f"{ranked[0].label} is alone."
    best, second = ranked[:2]
    text = f"{best.label} wins{_speed(best)}"
    if best.label == PLAIN:
        return f"{text}: a step of {second.label}, the next best{_speed(second)}, {_step(second)}."
    text += f": a step {_step(best)}"
    if second.label == PLAIN:
        return f"{text}; no other mode is faster than token by token."
    return f"{text}; {second.label} comes next{_speed(second)}: its step {_step(second, best)}."


def _speed(one: ModeFigures) -> str:
    return "" if one.label == PLAIN or one.ratio is None else f" ({one.ratio.median:.2f}x)"


def _step(one: ModeFigures, than: ModeFigures | None = None) -> str:
    """What a step yields and costs, perhaps compared with another's."""
    tau, verified = one.mean_acceptance_length, one.verified_per_step
    if tau is None or verified is None:
        return "yields nothing that was counted"
    other = than.mean_acceptance_length if than else None
    yields = f"yields {tau:.2f} tokens" if other is None else f"yields {_more(tau, other)}, {tau:.2f},"
    if one.prediction is None:
        return f"{yields} and verifies {verified:.1f}"
    cost = f"{one.prediction.step_cost:.2f} single steps"
    if other is None or than is None or than.prediction is None:
        return f"{yields} and costs {cost} (verifies {verified:.1f} tokens)"
    joined = "but" if (tau > other) == (one.prediction.step_cost > than.prediction.step_cost) else "and"
    return f"{yields} {joined} costs {cost} (verifies {verified:.1f})"


def _more(value: float, other: float) -> str:
    return "as many" if f"{value:.2f}" == f"{other:.2f}" else "more" if value > other else "fewer"


def _step_seconds_per_token(runs: Sequence[Run]) -> float:
    """Seconds of the steps, what only injects left out, for a token behind the first."""
    counted = [run.statistics for run in runs if run.statistics is not None]
    seconds = sum(one.seconds[stage] for one in counted for stage in STEP_STAGES)
    return seconds / sum(length for one in counted for length in one.acceptance_lengths)
