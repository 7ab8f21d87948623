"""How much the steps of one sequence draft and verify, by what passes take and how often drafts are right.

`AdaptiveBranches` weighs a step by its drafter's confidences and a table of pass times. Here both are corrected by what
decoding shows: a drafter may be too sure of itself, the machine may differ from the one that was measured. And where
drafts do not pay at all, steps go without for a while. No policy changes an output token: the target decides those.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from dflash_trt.runtime.branching import AdaptiveBranches, Branch, PassCosts, Tail
from dflash_trt.runtime.speculation_models import Part, StepTimes
from dflash_trt.runtime.staircase import Staircase
from dflash_trt.runtime.statistics import StepMeter

_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)  # of confidence
_INERTIA = 8.0  # drafts that a confidence itself counts for
_MOST = 500.0  # drafts that what was seen counts for at most
_REFRESH = 16  # steps for which a table stands

_HOST = 0.3e-3  # seconds of a step outside its passes, at first
_HOST_MEMORY = 0.1  # weight of the newest step in that
_INTERRUPTED = 5e-3  # seconds at most: what is more is not the step's own
_WINDOW = 24.0  # steps that say whether drafts pay
_TRIAL = 3  # steps that draft, at least, before the next rest
_FRESH = 16  # sequences: one of them begins without what was seen of branches
_REST, _LONGEST_REST = 8, 64  # steps: twice as many after each trial in vain


class Calibration:
    """The chance that a draft is right where those before it are, by the drafter's confidence in it.

    Within a range of confidences, the mean difference between what was said and what came true is added.
    """

    def __init__(self) -> None:
        ranges = len(_EDGES) + 1
        self._wrong_by, self._seen = [0.0] * ranges, [0.0] * ranges  # sums of right - said, and how many these are

    def chances(self, confidence: Sequence[float]) -> list[float]:
        """Each in 0..1."""
        chances = []
        for said in confidence:
            place = bisect_left(_EDGES, said)
            chance = said + self._wrong_by[place] / (self._seen[place] + _INERTIA)
            chances.append(min(1.0, max(0.0, chance)))
        return chances

    def observe(self, confidence: Sequence[float], right: int) -> None:
        """Takes in the first `right` of the verified drafts as right, and the one behind them, if any, as wrong."""
        for number, said in enumerate(confidence[: right + 1]):
            place = bisect_left(_EDGES, said)
            fade = min(1.0, _MOST / (self._seen[place] + 1))
            self._wrong_by[place] = (self._wrong_by[place] + (number < right) - said) * fade
            self._seen[place] = (self._seen[place] + 1) * fade


class Worth:
    """Whether steps that draft promise more tokens per second than others give, by those of late."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._weight = 0.0
        self._rest, self._resting, self._drafted = _REST, 0, 0

    def wants_drafts(self) -> bool:
        """Of the next step."""
        if self._resting:
            self._resting -= 1
            return False
        return True

    def observe(self, tokens: float, seconds: float, plain: float) -> None:
        """Takes in a step that drafted.

        Args:
            tokens: that were expected of it; those that came scatter far more.
            plain: seconds of a step that does not draft.
        """
        keep = 1 - 1 / _WINDOW
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds / plain
        self._weight = keep * self._weight + 1
        self._drafted += 1
        if self._drafted < _TRIAL or self._weight < _TRIAL:
            return
        if self._tokens >= self._seconds:
            self._rest = _REST
        else:
            self._resting, self._drafted = self._rest, 0
            self._rest = min(_LONGEST_REST, 2 * self._rest)

    def begin(self) -> None:
        """A new sequence: what is known of others counts for less."""
        self._tokens, self._seconds, self._weight = self._tokens / 2, self._seconds / 2, self._weight / 2
        self._resting = self._drafted = 0


class Experience:
    """What an engine has learnt; policies of sequences that follow one another share it.

    Attributes:
        trunk: chances of drafts of trunks.
        first, later: of the draft with which a branch leaves the trunk, and of those behind it.
        plain_host: seconds of a step without drafts outside its pass.
        tail: what tails promise, as `AdaptiveBranches` remembers it.
        sequences: how many there were.
    """

    def __init__(self, costs: PassCosts) -> None:
        self.trunk, self.first, self.later = Calibration(), Calibration(), Calibration()
        self.tail: Tail | None = None
        self.sequences = 0
        self.times = StepTimes(costs)
        self.plain_host = _HOST
        self.worth = Worth()


class _Proposed(NamedTuple):
    """What a step put before the target; `nodes` of the staircase are verified."""

    staircase: Staircase = Staircase([], [], [])
    confidence: Sequence[float] = ()
    branches: Sequence[Branch] = ()
    nodes: Sequence[int] = ()

    def tail(self, breaks: int) -> Sequence[float]:
        """Confidences of the verified tail that leaves the trunk behind its first `breaks` drafts.

        Empty where there is no such tail, and where there are several: which of them came true is not known. The trunk
        counts as broken there, also where its next draft was less likely than the tail and so not verified.
        """
        draft = self.staircase.tokens[1 : 1 + len(self.confidence)]
        numbers = [number for number, branch in enumerate(self.branches) if branch.leaves(draft) == breaks]
        if len(numbers) != 1:
            return []
        branch, path = self.branches[numbers[0]], self.staircase.paths[1 + numbers[0]]
        verified = set(self.nodes).intersection(path[breaks + 1 :])
        return branch.confidence[breaks - branch.kept :][: len(verified)]


class AdaptiveDrafting(AdaptiveBranches):
    """A policy for one sequence at a time.

    Args:
        branches: at most.
        costs: seconds of passes, as measured when the bundle was built.
    """

    def __init__(self, branches: int, costs: PassCosts, experience: Experience) -> None:
        self._costs, self._known = costs, experience
        super().__init__(branches, self._table())
        self._steps = 0
        self._drafted: bool | None = None  # the last step
        self._proposed = _Proposed()
        experience.worth.begin()
        # Nothing is learnt of branches that are not asked for, so now and then they are thought as good as the trunk.
        self._tail = experience.tail if experience.sequences % _FRESH else None
        experience.sequences += 1

    def drafts(self, most: int) -> int:
        return most if self._known.worth.wants_drafts() else 0

    def chances(self, confidence: Sequence[float]) -> Sequence[float]:
        return self._known.trunk.chances(confidence)

    def tail_chances(self, confidence: Sequence[float]) -> Sequence[float]:
        return self._known.first.chances(confidence[:1]) + self._known.later.chances(confidence[1:])

    def prune(self, staircase: Staircase, confidence: Sequence[float], branches: Sequence[Branch]) -> Sequence[int]:
        nodes = super().prune(staircase, confidence, branches)
        self._proposed = _Proposed(staircase, confidence, branches, nodes)
        self._known.tail = self._tail
        return nodes

    def observe(self, meter: StepMeter, whole: float) -> None:
        """Takes in a step of the sequence, and the seconds of all of it."""
        self._steps += 1
        seconds, sizes, known = meter.seconds, meter.tokens, self._known
        parts: dict[Part, float] = {part: seconds[part] for part in ("draft", "redraft", "verify") if part in seconds}
        host, drafted = whole - sum(seconds.values()), "draft" in parts
        settled = drafted == self._drafted
        known.times.observe(1, {part: sizes[part] for part in parts}, parts, settled=settled)
        self._drafted = drafted
        if not drafted:
            known.plain_host += _HOST_MEMORY * (min(host, _INTERRUPTED) - known.plain_host)
        elif meter.trunk:
            self._learn_of_drafts(meter)
            if not settled:  # features waited for this pass: that is not the rule
                parts["draft"] = self._usual("draft", sizes["draft"])
            plain = self._usual("verify", 1) + known.plain_host
            known.worth.observe(self.expected, sum(parts.values()) + min(host, _INTERRUPTED), plain)
        if self._steps % _REFRESH == 0:
            self.reprice(self._table())

    def _learn_of_drafts(self, meter: StepMeter) -> None:
        known, (verified, right), (yielded,) = self._known, meter.trunk[0], meter.yielded
        known.trunk.observe(self._proposed.confidence[:verified], right)
        tail = self._proposed.tail(right)
        known.first.observe(tail[:1], min(1, yielded - 1 - right))
        if yielded - 1 > right:
            known.later.observe(tail[1:], yielded - 2 - right)

    def _usual(self, part: Part, tokens: int) -> float:
        """Seconds of a pass as the machine has it now."""
        return self._known.times.seconds(1, {part: tokens}) * self._known.times.pace

    def _table(self) -> PassCosts:
        """The costs as the machine has them now: between the sizes that were measured, as they were then."""
        times = self._known.times

        def now(part: Part, points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
            seconds = [times.seconds(1, {part: tokens}) for tokens, _ in points]
            return tuple(zip((tokens for tokens, _ in points), accumulate(seconds, max), strict=True))

        costs = self._costs
        return PassCosts(
            draft=now("draft", costs.draft), redraft=now("redraft", costs.redraft), verify=now("verify", costs.verify)
        )
