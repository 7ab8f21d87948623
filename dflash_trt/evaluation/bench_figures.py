"""From the runs of a set to its figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np

from dflash_trt.evaluation.bench_costs import explain, predict
from dflash_trt.evaluation.bench_measure import Measured
from dflash_trt.evaluation.bench_modes import PLAIN, EngineMode, Mode, Run
from dflash_trt.evaluation.bench_report import (
    HOST_STAGES,
    STEP_STAGES,
    AutoFigures,
    ModeFigures,
    PositionShare,
    PromptFigures,
    SetFigures,
    Spread,
    StepStages,
)
from dflash_trt.evaluation.losslessness import Verdict
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.statistics import GenerationStatistics, Walk, position_counts

Runs = Sequence[Sequence[Run]]
"""Of one mode: by task, then by turn."""

Judge = Callable[[Sequence[int], Sequence[int], Sequence[int]], Verdict]
"""Of a prompt's token ids, what token-by-token decoding gave, and an output."""


def set_figures(
    measured: Measured, modes: Sequence[Mode], costs: Mapping[str, PassCosts], judge: Judge
) -> SetFigures:
    """All figures of one set.

    Args:
        costs: by mode, of those that run a bundle, at the set's context.
    """
    runs = measured.runs
    verdicts = {mode.label: _verdicts(measured, runs[mode.label], judge) for mode in modes}
    figures = tuple(mode_figures(mode, runs, verdicts[mode.label], costs.get(mode.label)) for mode in modes)
    own = [mode for mode in modes if isinstance(mode, EngineMode)]
    timed = [one for one in figures[: len(own)] if one.ratio is not None]
    winner = max(timed, key=lambda one: one.ratio.median if one.ratio else 0.0, default=None)
    return SetFigures(
        name=measured.name,
        context=context_of(measured),
        modes=figures,
        auto=tuple(_auto(mode, own, runs) for mode in own if not mode.is_fixed and winner is not None),
        winner=None if winner is None else winner.label,
        why=explain(timed),
        prompts=tuple(
            PromptFigures(
                id=task.id,
                prompt_tokens=len(task.prompt),
                new_tokens={mode.label: len(_typical(runs[mode.label][n]).token_ids) for mode in modes},
                ms_per_token={mode.label: _per_token(_typical(runs[mode.label][n])) for mode in modes},
                lossless={mode.label: verdicts[mode.label][n] for mode in modes},
            )
            for n, task in enumerate(measured.tasks)
        ),
    )


def context_of(measured: Measured) -> int:
    """Tokens that are cached in the middle of an output, the median over the prompts."""
    middles = [
        len(task.prompt) + len(turns[0].token_ids) // 2
        for task, turns in zip(measured.tasks, measured.runs[PLAIN], strict=True)
    ]
    return int(statistics.median(middles))


def mode_figures(
    mode: Mode, runs: Mapping[str, Runs], verdicts: Sequence[Verdict], costs: PassCosts | None
) -> ModeFigures:
    """One mode on one set, against "plain" in `runs`."""
    own, plain = runs[mode.label], runs[PLAIN]
    typical, plainly = [[_typical(turns) for turns in one] for one in (own, plain)]
    counted = [run.statistics for turns in own for run in turns if run.statistics is not None]
    steps = [length for one in counted for length in one.acceptance_lengths]
    all_tokens = sum(len(run.token_ids) for turns in own for run in turns)
    proposed = sum(one.proposed_drafts for one in counted)
    reference = getattr(mode, "same_steps_as", None)
    return ModeFigures(
        label=mode.label,
        tokens=sum(len(run.token_ids) for run in typical),
        seconds=sum(run.seconds for run in typical),
        first_token_ms=1e3 * statistics.median(run.first_token_seconds for run in typical),
        ms_per_token=_spread([_per_token(run) for run in typical]),
        ratio=_spread(ratios(plain, own)),
        total_ratio=_seconds_per_token(plainly) / _seconds_per_token(typical),
        lossless={verdict: verdicts.count(verdict) for verdict in get_args(Verdict)},
        steps=len(steps) if counted else None,
        mean_acceptance_length=statistics.fmean(steps) if steps else None,
        mean_of_responses=_mean([one.mean_acceptance_length for one in counted]),
        acceptance_rate=sum(one.accepted_drafts for one in counted) / proposed if proposed else None,
        verified_per_step=proposed / len(steps) + 1 if steps else None,
        target_passes_per_token=sum(one.target_passes for one in counted) / all_tokens if counted else None,
        positions=_positions(counted),
        stages=_stages(typical),
        prediction=predict(costs, typical, plainly, counted),
        same_steps=None if reference is None else sum(map(_have_same_steps, own, runs[reference])),
    )


def ratios(slower: Runs, faster: Runs) -> list[float | None]:
    """How many times as fast one mode is per token behind the first, by task; None where nothing was decoded.

    The median over the turns, each run against that of the same turn: they ran one soon after the other.
    """
    return [_median([_ratio(*pair) for pair in zip(*turns, strict=True)]) for turns in zip(slower, faster, strict=True)]


def _ratio(slower: Run, faster: Run) -> float | None:
    if not slower.decode_tokens or not faster.decode_tokens:
        return None
    return slower.decode_seconds / slower.decode_tokens / (faster.decode_seconds / faster.decode_tokens)


def _typical(turns: Sequence[Run]) -> Run:
    """The run of the median turn by time; of an even number the faster one in the middle."""
    return sorted(turns, key=lambda run: run.decode_seconds)[(len(turns) - 1) // 2]


def _per_token(run: Run) -> float | None:
    return 1e3 * run.decode_seconds / run.decode_tokens if run.decode_tokens else None


def _seconds_per_token(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs) / sum(len(run.token_ids) for run in runs)


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, median, high = np.quantile(known, [0.25, 0.5, 0.75]).tolist()
    return Spread(median, low, high)


def _median(values: Sequence[float | None]) -> float | None:
    spread = _spread(values)
    return None if spread is None else spread.median


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _positions(counted: Sequence[GenerationStatistics]) -> tuple[PositionShare, ...]:
    walks: Counter[Walk] = Counter()
    for one in counted:
        walks.update(one.walks)
    return tuple(
        PositionShare(
            position=at.position,
            steps=at.proposed,
            accepted=at.accepted / at.proposed,
            trunk=at.trunk_accepted / at.trunk_proposed if at.trunk_proposed else None,
        )
        for at in position_counts(walks)
    )


def _stages(runs: Sequence[Run]) -> StepStages | None:
    """None without steps, and of a loop that does not time its stages."""
    counted = [run.statistics for run in runs if run.statistics is not None]
    steps = sum(one.steps for one in counted)
    totals = {stage: sum(one.seconds[stage] for one in counted) for stage in STEP_STAGES}
    whole = sum(totals.values())
    if not steps or not whole:
        return None
    besides = sum(run.decode_seconds for run in runs) - whole
    return StepStages(
        **{stage: 1e3 * seconds / steps for stage, seconds in totals.items()},
        inject=1e3 * besides / steps,
        host_share=sum(totals[stage] for stage in HOST_STAGES) / whole,
    )


def _auto(mode: EngineMode, modes: Sequence[EngineMode], runs: Mapping[str, Runs]) -> AutoFigures:
    """Against "plain" and the fixed modes of the same first drafter."""
    fixed = [
        other
        for other in modes
        if other.is_fixed and (other.label == PLAIN or other.bundle.drafter == mode.bundle.drafter)
    ]
    spent = {other.label: _decode_seconds_per_token(runs[other.label]) for other in (mode, *fixed)}
    best = min(fixed, key=lambda other: spent[other.label])
    ratio = _spread(ratios(runs[best.label], runs[mode.label]))
    assert ratio is not None
    return AutoFigures(mode.label, best.label, spent[best.label] / spent[mode.label], ratio)


def _decode_seconds_per_token(runs: Runs) -> float:
    typical = [_typical(turns) for turns in runs]
    return sum(run.decode_seconds for run in typical) / sum(run.decode_tokens for run in typical)


def _verdicts(measured: Measured, runs: Runs, judge: Judge) -> list[Verdict]:
    """Of each task the worst verdict of its turns."""
    worst: list[Verdict] = []
    for task, turns, plain in zip(measured.tasks, runs, measured.runs[PLAIN], strict=True):
        outputs = {run.token_ids for run in turns}
        found = [judge(task.prompt, plain[0].token_ids, output) for output in outputs]
        worst.append(max(found, key=get_args(Verdict).index))
    return worst


def _have_same_steps(ours: Sequence[Run], theirs: Sequence[Run]) -> bool:
    lengths = [run.statistics and run.statistics.acceptance_lengths for run in (*ours, *theirs)]
    return all(one == lengths[0] for one in lengths)
