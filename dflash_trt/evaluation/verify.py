"""What a build checks of itself: numbers against the torch reference, losslessness, acceptance."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_trt.bundle import BundleInfo
from dflash_trt.evaluation.losslessness import compare_outputs
from dflash_trt.evaluation.numbers import compare_graphs
from dflash_trt.evaluation.probes import PROBES
from dflash_trt.loading import open_engine, open_info, reference_session
from dflash_trt.progress import Progress, SilentProgress
from dflash_trt.runtime.engine import Engine

MIN_TAU = 1.05
PROBE_TOKENS = 48
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1234})

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Check:
    """One check: what was measured, against which limit, or why it was not run."""

    name: str
    status: Status
    measured: dict[str, Any]
    limit: str
    reason: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """All checks of one bundle."""

    bundle: str
    backend: str
    precision: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    def failures(self) -> str:
        """The failed checks in one line."""
        return "; ".join(
            f"{check.name} ({check.reason}; limit: {check.limit})" for check in self.checks if check.status == "failed"
        )

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "passed": self.passed}, indent=2) + "\n"


def verify_folder(folder: Path, progress: Progress | None = None) -> VerifyReport:
    """Verifies the bundle in `folder`, after checking its files."""
    return verify(folder, open_info(folder), progress)


def verify(folder: Path, info: BundleInfo, progress: Progress | None = None) -> VerifyReport:
    """Verifies a bundle whose files were checked, or just written."""
    progress = progress or SilentProgress()
    engine = open_engine(folder, info)
    checks = []
    with progress.stage("Verifying numbers"):
        checks += list(_check_numbers(folder, info, engine))
    with progress.stage("Verifying losslessness", len(PROBES) * len(SETTINGS)) as advance:
        checks += list(_check_outputs(engine, advance))
    return VerifyReport(str(folder.name), info.backend, info.precision, tuple(checks))


def _check_numbers(folder: Path, info: BundleInfo, engine: Engine) -> Iterator[Check]:
    """Each graph output of the backend against the torch reference, on the same inputs."""
    for role in info.roles:
        limit = "no NaN or infinity; error <= 1e-3 of the output's largest magnitude; >= 99.5 % of ids agree"
        if info.backend == "torch":
            yield Check(f"numbers: {role}", "not run", {}, limit, "the torch backend is the reference")
        elif importlib.util.find_spec("torch") is None:
            yield Check(f"numbers: {role}", "not run", {}, limit, "torch is not installed")
        else:
            session = engine.target if role == "target" else engine.drafter
            reference = reference_session(folder, info, role)
            for result in compare_graphs(info, role, session, reference):
                status: Status = "passed" if result.passed else "failed"
                yield Check(f"numbers: {role}.{result.output}", status, result.measured, limit, result.reason)


def _check_outputs(engine: Engine, advance: Any) -> Iterator[Check]:
    """Speculative against token-by-token decoding on the probes, greedy and sampled; then tau of the greedy runs."""
    verdicts = {"equal": 0, "tie": 0, "different": 0}
    different = []
    steps: list[int] = []
    prompts = [ids for ids in map(engine.tokenizer.encode, PROBES) if ids]
    room = engine.limits.max_seq_len
    for prompt in prompts:
        ids = prompt[: min(engine.limits.max_input_len, max(1, room // 2))]
        for settings in SETTINGS:
            tokens = min(PROBE_TOKENS, room - len(ids))
            plain = engine.generate(ids, speculation=False, max_tokens=tokens, **settings)
            drafted = engine.generate(ids, max_tokens=tokens, **settings)
            comparison = compare_outputs(engine, ids, plain.token_ids, drafted.token_ids, **settings)
            verdicts[comparison.verdict] += 1
            if comparison.verdict == "different":
                different.append(f"{settings}, token {comparison.position}, margin {comparison.margin}")
            if settings["temperature"] == 0:
                steps += drafted.statistics.acceptance_lengths
            advance(1)
    yield Check(
        "losslessness",
        "failed" if different or not prompts else "passed",
        dict(verdicts),
        "token for token equal to token-by-token decoding, ties below 1e-4 excepted",
        "; ".join(different) or ("" if prompts else "the tokenizer encodes no probe"),
    )
    tau = float(np.mean(steps)) if steps else None
    yield Check(
        "acceptance",
        "not run" if tau is None else "passed" if tau > MIN_TAU else "failed",
        {"mean_acceptance_length": tau, "steps": len(steps)},
        f"tau > {MIN_TAU}",
        "no decoding step was needed"
        if tau is None
        else ""
        if tau > MIN_TAU
        else f"tau is {tau:.3f}: the drafter does not draft for this target",
    )
