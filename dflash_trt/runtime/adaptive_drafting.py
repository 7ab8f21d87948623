"""How much the steps of one sequence draft and verify, by what passes take and how often drafts are right.

`AdaptiveBranches` weighs a step by its drafter's confidences and a table of pass times. Here both are corrected by what
decoding shows: a drafter may be too sure of itself, the machine may differ from the one that was measured. And where
drafts do not pay at all, steps go without for a while. No policy changes an output token: the target decides those.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.runtime.branching import AdaptiveBranches, Branch, PassCosts
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.speculation_models import Part, StepTimes
from dflash_trt.runtime.staircase import FloatArray
from dflash_trt.runtime.statistics import StepMeter
from dflash_trt.runtime.tree import CandidateTree

_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])  # of confidence
_INERTIA = 8.0  # drafts that a confidence itself counts for
_MOST = 500.0  # drafts that what was seen counts for at most
_REFRESH = 16  # steps for which a table stands

_WINDOW = 24.0  # steps that say whether drafts pay
_CAUTION = 0.98  # times what decoding token by token yields: below, drafts do not pay
_TRIAL = 4  # steps that draft, at least, before the next rest
_REST, _LONGEST_REST = 8, 64  # steps: twice as many after each trial in vain


class Calibration:
    """The chance that a draft is right where those before it are, by the drafter's confidence in it.

    Within a range of confidences, the mean difference between what was said and what came true is added.
    """

    def __init__(self) -> None:
        self._said, self._right, self._seen = np.zeros((3, len(_EDGES) + 1))

    def chances(self, confidence: FloatArray) -> FloatArray:
        """f64 [n] in 0..1."""
        places = np.searchsorted(_EDGES, confidence)
        wrong_by = (self._right - self._said) / (self._seen + _INERTIA)
        return np.clip(confidence + wrong_by[places], 0.0, 1.0)

    def observe(self, confidence: FloatArray, right: int) -> None:
        """Takes in the first `right` of the verified drafts as right, and the one behind them, if any, as wrong."""
        tested = confidence[: right + 1]
        places = np.searchsorted(_EDGES, tested)
        np.add.at(self._seen, places, 1)
        np.add.at(self._said, places, tested)
        np.add.at(self._right, places[:right], 1)
        scale = np.minimum(1.0, _MOST / np.maximum(self._seen, 1.0))
        for counts in (self._seen, self._said, self._right):
            counts *= scale


class Worth:
    """Whether steps that draft yield more tokens per second than others, by those of late."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._weight = 0.0
        self._rest, self._resting, self._drafted = _REST, 0, 0

    def wants_drafts(self) -> bool:
        """Of the next step."""
        if self._resting:
            self._resting -= 1
            return False
        return True

    def observe(self, tokens: int, seconds: float, plain: float) -> None:
        """Takes in a step that drafted; `plain` are the seconds of one that does not."""
        keep = 1 - 1 / _WINDOW
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds / plain
        self._weight = keep * self._weight + 1
        self._drafted += 1
        if self._drafted < _TRIAL or self._weight < _TRIAL:
            return
        if self._tokens >= _CAUTION * self._seconds:
            self._rest = _REST
        else:
            self._resting, self._drafted = self._rest, 0
            self._rest = min(_LONGEST_REST, 2 * self._rest)

    def begin(self) -> None:
        """A new sequence: what is known of others counts for less."""
        self._tokens, self._seconds, self._weight = self._tokens / 2, self._seconds / 2, self._weight / 2
        self._resting = self._drafted = 0


class Experience:
    """What an engine has learnt; policies of sequences that follow one another share it."""

    def __init__(self, costs: PassCosts) -> None:
        self.calibration = Calibration()
        self.times = StepTimes(costs)
        self.worth = Worth()


class AdaptiveDrafting:
    """A `BranchPolicy` for one sequence at a time.

    Args:
        branches: at most.
        costs: seconds of passes, as measured when the bundle was built.
    """

    def __init__(self, limits: Limits, branches: int, costs: PassCosts, experience: Experience) -> None:
        self._most, self._costs, self._known = branches, costs, experience
        self._block = limits.block_size
        self._steps = 0
        self._inner = AdaptiveBranches(branches, self._table())
        self._confidence: FloatArray = np.zeros(0)
        self._known.worth.begin()

    def drafts(self, most: int) -> int:
        return most if self._known.worth.wants_drafts() else 0

    def chances(self, confidence: FloatArray) -> FloatArray:
        return self._known.calibration.chances(confidence)

    def choose(self, confidence: FloatArray, size: int) -> list[int]:
        return self._inner.choose(self.chances(confidence), size)

    def prune(
        self, tree: CandidateTree, reach: FloatArray, confidence: FloatArray, branches: Sequence[Branch]
    ) -> CandidateTree:
        self._confidence = confidence
        return self._inner.prune(tree, reach, confidence, branches)

    def observe(self, meter: StepMeter) -> None:
        """Takes in a step of the sequence."""
        self._steps += 1
        seconds, sizes = meter.seconds, meter.tokens
        parts: dict[Part, float] = {part: seconds[part] for part in ("draft", "redraft", "verify") if part in seconds}
        self._known.times.observe(1, {part: sizes[part] for part in parts}, parts, settled=self._steps > 1)
        if "draft" in parts and meter.trunk:
            (verified, right), (yielded,) = meter.trunk[0], meter.yielded
            self._known.calibration.observe(self._confidence[:verified], right)
            plain = self._known.times.seconds(1, {"verify": 1}) * self._known.times.pace
            self._known.worth.observe(yielded, sum(parts.values()), plain)
        if self._steps % _REFRESH == 0:
            self._inner.reprice(self._table())

    def _table(self) -> PassCosts:
        """The costs as the machine has them now: between the sizes that were measured, as they were then."""
        times = self._known.times

        def now(part: Part, points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
            seconds = [times.seconds(1, {part: tokens}) for tokens, _ in points]
            return tuple(zip((tokens for tokens, _ in points), np.maximum.accumulate(seconds).tolist(), strict=True))

        costs = self._costs
        return PassCosts(
            draft=now("draft", costs.draft), redraft=now("redraft", costs.redraft), verify=now("verify", costs.verify)
        )
