"""One graph in two sessions on the same inputs, through polygraphy: how far apart their outputs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_trt.backends.base import Session
from dflash_trt.bundle import BundleInfo
from dflash_trt.evaluation.compare_functions import CompareIds, CompareRows, Index, largest_error, row_lengths
from dflash_trt.evaluation.graph_passes import graph_passes, slots_written
from dflash_trt.export.contract import Role

if TYPE_CHECKING:
    from polygraphy.comparator import AccuracyResult, RunResults

# Of every element |found - wanted| <= limit * max(|wanted|, the output's median magnitude): polygraphy takes what is
# within the relative or within the absolute tolerance. A few channels of real hidden states are thousands of times
# larger than the rest, so the largest magnitude would excuse anything. Of ids, a mismatch is excused where the
# reference's own logits lie within the limit times their median magnitude.
LIMITS = {"float32": 1e-2, "float16": 0.3, "bfloat16": 1.0}
# With quantised weights the reference has what they stand for, and only the session rounds activations to int8: where a
# few channels are large, the rest of a block has few steps, and rows must tell.
QUANTIZED_LIMIT = 4.0
IDS_LIMIT = 1.0  # the most of any
# The same of every row along the last dimension, by its length: the limit of bfloat16's elements lets zeros pass.
ROW_LIMIT = 0.5
CACHES = "present_key_*, present_value_*"
_IDS_OF = {"token_ids": "logits", "draft_ids": "logits"}
_PAIR = _SESSION, _REFERENCE = ("session", "reference")


@dataclass(frozen=True)
class OutputComparison:
    """One output of one graph, or its caches."""

    output: str
    passed: bool
    measured: dict[str, Any]
    reason: str


def limit_of(info: BundleInfo) -> float:
    """The largest error of a bundle's outputs: see `LIMITS`."""
    return LIMITS[info.precision] if info.weights == "float" else QUANTIZED_LIMIT


def compare_graphs(info: BundleInfo, role: Role, session: Session, reference: Session) -> Iterator[OutputComparison]:
    """Runs the passes of `graph_passes` in both sessions; yields a comparison for every output, and one for the caches.

    Caches are compared as they are after the last pass. Each of them, and of the features what each tap gives, has its
    own median, for they differ in magnitude; the figures are those of the one that is furthest off.
    """
    from polygraphy.comparator import Comparator

    from dflash_trt.evaluation.session_runner import SessionRunner, quiet

    spec, passes, limit = info.graphs[role].spec, graph_passes(info, role), limit_of(info)
    slots, outputs = slots_written(passes), {output.name: [output.name] for output in spec.outputs}
    if role == "target":
        outputs["context_features"] = [f"context_features of tap {tap}" for tap in info.taps]
    groups = outputs | {CACHES: [present.name for present in spec.present()]}
    with quiet():
        runners = [
            SessionRunner(name, own, outputs, slots=slots, limit=info.limits.capacity, num_passes=len(passes))
            for name, own in zip(_PAIR, (session, reference), strict=True)
        ]
        results = Comparator.run(runners, data_loader=passes)
        faults = ((name, _fault(results, name)) for names in groups.values() for name in names)
        compared = {name: fault for name, fault in faults if fault}
        sound = [name for names in groups.values() for name in names if name not in compared]
        compared |= _compare_values(results, [name for name in sound if name not in _IDS_OF], limit)
        compared |= _compare_ids(results, [name for name in sound if name in _IDS_OF], min(limit, IDS_LIMIT))
    for group, names in groups.items():
        worst = max((compared[name] for name in names), key=_badness)
        yield OutputComparison(group, worst.passed, worst.measured, worst.reason)


def _badness(result: OutputComparison) -> tuple[bool, float]:
    """Failed is worse than passed, and worst is what has no figures."""
    return not result.passed, result.measured.get("max_relative_error", np.inf)


def _fault(results: RunResults, name: str) -> OutputComparison | None:
    """What makes an output impossible to compare: another shape than the reference's, NaN, infinity."""
    from polygraphy.comparator import Comparator

    for number, found, wanted in _passes(results, name):
        if found.shape != wanted.shape:
            reason = f"{name} of pass {number} has shape {found.shape} instead of {wanted.shape}"
            return OutputComparison(name, False, {}, reason)
    for runner, who in ((_SESSION, ""), (_REFERENCE, "the reference has ")):
        if not Comparator.validate(_only(results, [name], [runner]), check_nan=True, check_inf=True):
            number, index = next(
                (number, tuple(map(int, bad[0])))
                for number, *pair in _passes(results, name)
                if len(bad := np.argwhere(~np.isfinite(pair[_PAIR.index(runner)])))
            )
            reason = f"{who}NaN or infinity: {_instead(results, name, index, number)}"
            return OutputComparison(name, False, {"finite": False}, reason)
    return None


def _compare_values(results: RunResults, names: Sequence[str], limit: float) -> dict[str, OutputComparison]:
    """Outputs that are not ids: polygraphy's rule for elements and ours for rows."""
    from polygraphy.comparator import Comparator, SimpleCompareFunc

    if not names:
        return {}
    wanted = {name: [values for _, _, values in _passes(results, name)] for name in names}
    typical = {name: _median([np.abs(values) for values in wanted[name]]) for name in names}
    rows = CompareRows({name: _median([row_lengths(values) for values in wanted[name]]) for name in names}, ROW_LIMIT)
    elements = SimpleCompareFunc(atol={name: limit * typical[name] for name in names}, rtol=limit)
    accuracy = Comparator.compare_accuracy(_only(results, names), compare_func=[elements, rows])
    compared = {}
    for name in names:
        by_element, by_row = (_verdicts(result, name) for result in accuracy)
        passes = _passes(results, name)
        error, index, number = max(
            (*largest_error(np.abs(found - own), np.abs(own), typical[name]), number) for number, found, own in passes
        )
        row_error, row, row_number = max(
            (verdict.error, verdict.row, number) for verdict, (number, *_) in zip(by_row, passes, strict=True)
        )
        measured = {
            "max_relative_error": error,
            "max_abs_error": max(verdict.max_absdiff for verdict in by_element),
            "median_abs_value": typical[name],
            "max_row_error": row_error,
        }
        if name == "logits":
            measured["top1_agreement"] = _top1_agreement(results)
        reason = ""
        if not all(by_element):
            reason = f"relative error {error:.3g}: {_instead(results, name, index, number)}"
        elif not all(by_row):
            reason = f"{_place(name, row, row_number)} is off by {row_error:.3g} of its length"
        compared[name] = OutputComparison(name, not reason, measured, reason)
    return compared


def _compare_ids(results: RunResults, names: Sequence[str], limit: float) -> dict[str, OutputComparison]:
    from polygraphy.comparator import Comparator

    compare = CompareIds({name: _IDS_OF[name] for name in names}, limit)
    (accuracy,) = Comparator.compare_accuracy(results, compare_func=[compare])
    compared = {}
    for name in names:
        verdicts = _verdicts(accuracy, name)
        measured = {key: sum(getattr(verdict, key) for verdict in verdicts) for key in ("agree", "near_ties", "differ")}
        wrong = [(number, verdict.first) for number, verdict in enumerate(verdicts) if not verdict]
        reason = ""
        if wrong:
            number, index = wrong[0]
            reason = f"{measured['differ']} ids differ: {_instead(results, name, index, number)}"
        compared[name] = OutputComparison(name, not wrong, measured, reason)
    return compared


def _top1_agreement(results: RunResults) -> float:
    """The share of rows of logits whose largest is the same one; of equal ones polygraphy takes any."""
    from polygraphy.comparator import Comparator, TopKPostprocessFunc

    tops = Comparator.postprocess(_only(results, ["logits"]), TopKPostprocessFunc((1, -1)))
    return float(np.mean(np.concatenate([(found == wanted).ravel() for _, found, wanted in _passes(tops, "logits")])))


def _only(results: RunResults, names: Sequence[str], runners: Sequence[str] = _PAIR) -> RunResults:
    """Some outputs of some runners; of a pass that has none of them, nothing."""
    from polygraphy.comparator import IterationResult, RunResults

    return RunResults(
        [
            (runner, [IterationResult({name: run[name] for name in names if name in run}) for run in results[runner]])
            for runner in runners
        ]
    )


def _passes(results: RunResults, name: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Of every pass that gave an output: its number, what the session and what the reference found."""
    runs = zip(results[_SESSION], results[_REFERENCE], strict=True)
    return [(number, found[name], wanted[name]) for number, (found, wanted) in enumerate(runs) if name in found]


def _verdicts(accuracy: AccuracyResult, name: str) -> list[Any]:
    """Those of `_passes`, in the same order."""
    return [verdicts[name] for verdicts in accuracy[_PAIR] if name in verdicts]


def _median(arrays: Sequence[np.ndarray]) -> float:
    return float(np.median(np.concatenate([array.ravel() for array in arrays])))


def _place(name: str, index: Index, number: int) -> str:
    """An element or a row, as in "logits[0, 3, 17] of pass 1"; passes are counted from 0."""
    return f"{name}{list(index)} of pass {number}"


def _instead(results: RunResults, name: str, index: Index, number: int) -> str:
    """What the session has at a place, and the reference."""
    found, wanted = (results[runner][number][name][index] for runner in _PAIR)
    return f"{_place(name, index, number)} is {found} instead of {wanted}"
