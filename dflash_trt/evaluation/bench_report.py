"""What a benchmark found. `BenchReport.to_dict` gives what `bench --json` prints: these fields by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.evaluation.losslessness import Verdict
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.statistics import Stage

STEP_STAGES: tuple[Stage, ...] = ("draft", "redraft", "verify", "accept", "move", "host")
HOST_STAGES: tuple[Stage, ...] = ("accept", "move", "host")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the prompts of a set."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class PositionShare:
    """Acceptance at one position behind the anchor.

    Attributes:
        steps: that verified a draft there.
        accepted: share of them whose path got there.
        trunk: share of those that verified a draft of the trunk there whose trunk was right so far; None without any.
    """

    position: int
    steps: int
    accepted: float
    trunk: float | None


@dataclass(frozen=True)
class StepStages:
    """Milliseconds of a step on average.

    Attributes:
        draft, redraft, verify: passes; of a step that runs whole on a device all is "verify".
        accept: the target's choices along the path, sampling included.
        move: bringing the path's cache rows into place, and taking its features.
        host: all other work between passes.
        inject: besides steps: passes that only inject features that waited (a prompt's), and handing out the tokens.
        host_share: (accept + move + host) / all of the step, inject left out.
    """

    draft: float
    redraft: float
    verify: float
    accept: float
    move: float
    host: float
    inject: float
    host_share: float


@dataclass(frozen=True)
class Prediction:
    """What acceptance and the cost table say a mode should gain over token-by-token decoding, and what it gained.

    Attributes:
        draft, redraft, verify: what the passes of a step cost on average, in token-by-token passes: by the table, at
            the sizes they had, interpolated. What the host does is not in it.
        step_cost: their sum.
        predicted: mean acceptance length / step_cost.
        measured: time of the steps for a token, token by token / with this mode; prompts are left out.
        share: measured / predicted.
    """

    draft: float
    redraft: float
    verify: float
    step_cost: float
    predicted: float
    measured: float
    share: float


@dataclass(frozen=True)
class ModeFigures:
    """One mode on one set. Times, and `tokens`, are those of each prompt's median turn; other counts are of all turns.

    Attributes:
        label: "plain" is token by token.
        tokens: new ones.
        seconds: of them, with the prompts.
        first_token_ms: from a prompt to its first new token, the median over the prompts.
        ms_per_token: behind the first new token; None where no output has a second one.
        ratio: how many times as fast as "plain" per token behind the first; of each prompt the median over the turns,
            each against the run of the same turn.
        total_ratio: the same for all prompts together, their first tokens included.
        steps: verifications. None, as all below, of modes that have no statistics.
        mean_acceptance_length: tau: tokens of a step, the bonus token included, over all steps.
        mean_of_responses: tau of each output, averaged.
        acceptance_rate: accepted drafts / proposed drafts.
        verified_per_step: tokens put before the target in a step, the anchor included.
        target_passes_per_token: those that prefill included.
        lossless: outputs by what they are against those of "plain"; a "tie" parts where two choices lie within 1e-4.
        same_steps: of the authors' loop: outputs whose acceptance lengths are those of the DFlash mode, step by step.
    """

    label: str
    tokens: int
    seconds: float
    first_token_ms: float
    ms_per_token: Spread | None
    ratio: Spread | None
    total_ratio: float
    lossless: dict[Verdict, int]
    steps: int | None = None
    mean_acceptance_length: float | None = None
    mean_of_responses: float | None = None
    acceptance_rate: float | None = None
    verified_per_step: float | None = None
    target_passes_per_token: float | None = None
    positions: tuple[PositionShare, ...] = ()
    stages: StepStages | None = None
    prediction: Prediction | None = None
    same_steps: int | None = None


@dataclass(frozen=True)
class AutoFigures:
    """A mode that chooses by itself, against the fastest of its bundle's fixed ones, "plain" among them.

    Attributes:
        best_fixed: the one with the least time per token behind the first, over all prompts.
        total_ratio: how many times as fast it is, over all prompts.
        ratio: and prompt by prompt.
    """

    label: str
    best_fixed: str
    total_ratio: float
    ratio: Spread


@dataclass(frozen=True)
class PromptFigures:
    """One prompt: by mode, new tokens, milliseconds per token behind the first (None without any), and the verdict."""

    id: str
    prompt_tokens: int
    new_tokens: dict[str, int]
    ms_per_token: dict[str, float | None]
    lossless: dict[str, Verdict]


@dataclass(frozen=True)
class SetFigures:
    """One set of prompts.

    Attributes:
        context: cached tokens of a step, the median over the prompts.
        winner: the fastest of the bundles' modes by the median ratio; None where nothing was decoded.
        why: a sentence.
    """

    name: str
    context: int
    modes: tuple[ModeFigures, ...]
    auto: tuple[AutoFigures, ...]
    winner: str | None
    why: str
    prompts: tuple[PromptFigures, ...]


@dataclass(frozen=True)
class CostTable:
    """What passes of a bundle's graphs take by their number of new tokens, behind `context` cached ones."""

    bundle: str
    context: int
    capacity: int
    costs: PassCosts


@dataclass(frozen=True)
class BenchReport:
    """All of it.

    Attributes:
        machine: "cpu", "threads" that everything ran with, "versions" of packages.
        settings: what was asked for.
        bundles: path, system, backend, precision, how weights are quantised, sizes.
        modes: label, bundle and options of each.
        passed: whether outputs are lossless where that is promised: in float32.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    bundles: tuple[dict[str, Any], ...]
    modes: tuple[dict[str, Any], ...]
    sets: tuple[SetFigures, ...]
    costs: tuple[CostTable, ...]
    passed: bool

    def failures(self) -> str:
        """The outputs that are different, by set and mode."""
        found = [
            f"{mode.lossless['different']} of {mode.label} on {one.name}"
            for one in self.sets
            for mode in one.modes
            if mode.lossless["different"]
        ]
        return f"outputs differ from token-by-token decoding: {', '.join(found)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"kind": "dflash-trt bench", "version": 1, **asdict(self)}
