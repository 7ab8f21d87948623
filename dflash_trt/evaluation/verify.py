"""What a build checks of itself: numbers against the torch reference, losslessness, acceptance."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.bundle import BundleInfo
from dflash_trt.errors import BackendError
from dflash_trt.evaluation.engine_checks import engine_checks, network_checks, not_run_checks, preflight_checks
from dflash_trt.evaluation.losslessness import TIE, Comparison, compare_outputs
from dflash_trt.evaluation.numbers import ROW_LIMIT, compare_graphs, limit_of
from dflash_trt.evaluation.probes import PROBES, probe_prompts, room_behind_probes
from dflash_trt.evaluation.quantized_checks import quality_check, row_check, weight_checks
from dflash_trt.evaluation.report import Check, Status, VerifyReport
from dflash_trt.evaluation.trace_summary import StepView
from dflash_trt.loading import open_engine, open_info, reference_session
from dflash_trt.progress import Advance, Progress, SilentProgress
from dflash_trt.runtime.engine import Engine

MIN_TAU = 1.05
MIN_GAIN, MIN_BREAKS = 0.05, 20  # of branches; fewer breaks than that tell nothing
MAX_TIES = 0.1  # of the comparisons: on sixteen of them one tie can be chance, two or more are a sign
PROBE_TOKENS = 48
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1234})

def verify_folder(folder: Path, progress: Progress | None = None) -> VerifyReport:
    """Verifies the bundle in `folder`, after checking its files."""
    info = open_info(folder)
    return verify(folder, info, open_engine(folder, info), progress)


def verify(folder: Path, info: BundleInfo, engine: Engine, progress: Progress | None = None) -> VerifyReport:
    """Verifies a bundle whose files were checked, or just written, and its engine."""
    progress = progress or SilentProgress()
    checks = []
    if info.engines is not None:
        with progress.stage("Reading engines back"):
            checks += [*preflight_checks(info), *network_checks(info), *engine_checks(info, engine)]
    with progress.stage("Verifying numbers"):
        checks += list(_check_numbers(folder, info, engine))
    if info.weights != "float":
        with progress.stage("Verifying quantised weights"):
            checks += [*weight_checks(folder, info), row_check(info, engine), quality_check(folder, info, engine)]
    with progress.stage("Verifying losslessness", len(PROBES) * len(SETTINGS)) as advance:
        try:
            checks += list(_check_outputs(engine, info.precision, advance))
        except BackendError as error:  # NaN, for instance: what the numbers say of it must not be lost
            checks.append(Check("losslessness", "failed", {}, "decodes", f"{error.where}: {error.what}"))
    return VerifyReport(str(folder.name), info.backend, info.precision, info.weights, tuple(checks))


def report_not_run(folder: Path, info: BundleInfo, reason: str) -> VerifyReport:
    """What can be said of engines that are not run: their graphs and networks; the rest is not run, and why."""
    checks = (*preflight_checks(info), *network_checks(info), *not_run_checks(info, reason))
    return VerifyReport(folder.name, info.backend, info.precision, info.weights, checks)


def _check_numbers(folder: Path, info: BundleInfo, engine: Engine) -> Iterator[Check]:
    """Each graph output of the backend against the torch reference, on the same inputs."""
    share = f"{limit_of(info):g}"
    limit = (
        f"finite; error <= {share} of a value's magnitude or of the median's, <= {ROW_LIMIT} of a row's length; "
        "ids agree but for near ties"
    )
    for role in info.roles:
        if info.backend == "torch":
            yield Check(f"numbers: {role}", "not run", {}, limit, "the torch backend is the reference")
        elif importlib.util.find_spec("torch") is None:
            yield Check(f"numbers: {role}", "not run", {}, limit, "torch is not installed")
        else:
            reference = reference_session(folder, info, role)
            for result in compare_graphs(info, role, engine.sessions[role], reference):
                status: Status = "passed" if result.passed else "failed"
                yield Check(f"numbers: {role}.{result.output}", status, result.measured, limit, result.reason)


def _check_outputs(engine: Engine, precision: str, advance: Advance) -> Iterator[Check]:
    """Speculative against token-by-token decoding on the probes, greedy and sampled, alone and in a batch; then tau.

    Steps that run whole on a device leave no trace, so they are run as a batch, be it of one.
    """
    prompts, spare = probe_prompts(engine), room_behind_probes(engine.limits)
    comparisons: list[tuple[str, Comparison]] = []
    steps: list[StepView] = []
    for settings in SETTINGS:
        tokens = min(PROBE_TOKENS, spare)
        batched = engine.limits.max_batch_size > 1 or engine.device_step
        rows = engine.generate(prompts, max_tokens=tokens, **settings) if batched else []
        for number, ids in enumerate(prompts):
            plain = engine.generate(ids, speculation=False, max_tokens=tokens, **settings)
            drafted = engine.generate(ids, max_tokens=tokens, trace=True, **settings)
            for output in (drafted, *rows[number : number + 1]):
                comparison = compare_outputs(engine, ids, plain.token_ids, output.token_ids, **settings)
                comparisons.append((str(settings), comparison))
            if settings["temperature"] == 0:
                assert drafted.trace is not None
                steps += map(StepView, drafted.trace.steps)
            advance(1)
    yield _losslessness(comparisons, precision)
    yield _acceptance(steps, engine)


def _losslessness(comparisons: list[tuple[str, Comparison]], precision: str) -> Check:
    """Promised in float32 alone: elsewhere passes of different width round differently, which the figures then show."""
    verdicts = {name: sum(c.verdict == name for _, c in comparisons) for name in ("equal", "tie", "different")}
    limit = f"token for token equal to token-by-token decoding; ties below {TIE:g} in at most {MAX_TIES:.0%}"
    if precision != "float32":
        return Check("losslessness", "not run", verdicts, limit, f"promised in float32 alone, this is {precision}")
    different = [
        f"{settings}, token {c.position}, margin {c.margin}" for settings, c in comparisons if c.verdict == "different"
    ]
    if not comparisons:
        reason = "the tokenizer encodes no probe"
    elif different:
        reason = "; ".join(different)
    else:
        reason = "too many ties" if verdicts["tie"] > max(1, MAX_TIES * len(comparisons)) else ""
    return Check("losslessness", "failed" if reason else "passed", verdicts, limit, reason)


def _acceptance(steps: list[StepView], engine: Engine) -> Check:
    """tau over all steps of the greedy runs.

    Of D2SD, what the trunk alone would have accepted in these steps, and what the branches added where the trunk broke
    and one of them was there for it: either drafter can be worthless without the other's showing it.
    """
    limit = f"tau > {MIN_TAU}"
    if not steps:
        reason = "no decoding step was needed: max_seq_len is too small, or every probe ends at once"
        return Check("acceptance", "failed", {"steps": 0}, limit, reason)
    tau, trunk = (float(np.mean(n)) for n in ([len(v.step.emitted) for v in steps], [v.yielded([]) for v in steps]))
    measured: dict[str, Any] = {"mean_acceptance_length": tau, "steps": len(steps)}
    reason = "" if trunk > MIN_TAU else f"tau is {trunk:.3f}: the drafter does not draft for this target"
    if engine.limits.branches:
        limit += f" of the trunk alone; branches add > {MIN_GAIN} tokens per break they are there for"
        covered = [view for view in steps if view.breaks_at in {branch.kept for branch in view.ranked}]
        gained = sum(view.gain for view in covered)
        measured |= {"trunk_alone": trunk, "covered_breaks": len(covered), "gained_tokens": gained}
        if len(covered) >= MIN_BREAKS and gained <= MIN_GAIN * len(covered):
            reason = reason or "the VP drafter does not re-draft for this target"
    if reason and engine.limits.max_seq_len < 4 * engine.limits.block_size:
        reason += f", or max_seq_len {engine.limits.max_seq_len} is too short to tell"
    return Check("acceptance", "failed" if reason else "passed", measured, limit, reason)
