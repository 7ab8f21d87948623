"""What a step is expected to take and to yield, learnt from those that ran."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from dflash_trt.runtime.branching import PassCosts

Part = Literal["draft", "redraft", "verify"]

REACH = 4  # how many times larger than the largest pass that was measured another may be
_TICK = 1e-9  # seconds: the least that is taken for a time
_SLACK = 1.05  # times what a larger pass takes is the most that one is thought to take
_REFIT = 32  # passes after which a line is drawn anew
# Variances of the logarithm of a time:
_UNKNOWN = 0.25  # of a pass that was never measured
_SURE = 0.01  # at most, of one that was measured a few times
_SEEDED = 0.05  # of one that was measured when the bundle was built
_DRIFT = 1e-5  # what a pass takes, from one step to the next
_PACE_DRIFT = 2e-3  # the pace of the machine, from one step to the next
_NOISE = 0.02  # at first: one time, from the next
_NOISE_RATE = 0.02  # of learning what it is here
_LEAST_NOISE = 0.002
_UNSETTLED = 10  # times as much have passes that are new, or behind others: they allocate, and caches are cold
_OUTLIER = 3.0  # standard deviations that a surprise counts for at most


@dataclass
class _Time:
    """Seconds of one pass at the usual pace, and the variance of their logarithm after a step."""

    seconds: float
    variance: float
    step: int


class _Curve:
    """Seconds of passes of one kind by their sequences and the new tokens of each.

    Those not measured lie on a rising line over rows * (size + 1): a sequence costs about as much as another token,
    since it has a context of its own to read. Between two that were measured the line runs midway between their chord
    and the least possible, which is that a larger pass does more tokens per second; beyond the largest it rises half as
    much. So what is not known looks worth a try.
    """

    def __init__(self, seeds: Sequence[tuple[int, float]]) -> None:
        self.times: dict[int, dict[int, _Time]] = {}  # by rows and size
        self.largest = 0
        self._line: tuple[list[int], list[float]] = [], []
        self._until_fit = 0
        for tokens, seconds in seeds:
            self.put(1, tokens, _Time(max(seconds, _TICK), _SEEDED, 0))

    def put(self, rows: int, size: int, time: _Time) -> None:
        """Notes what a pass takes that was not measured before."""
        self.times.setdefault(rows, {})[size] = time
        self.largest = max(self.largest, rows * (size + 1))
        self._until_fit = 0

    def seconds(self, rows: int, size: int) -> float:
        """Of such a pass at the usual pace: hardly more than a larger one of as many sequences."""
        times = self.times.get(rows, {})
        usual = times[size].seconds if size in times else self._on_line(rows * (size + 1))
        larger = min((time.seconds for other, time in times.items() if other > size), default=math.inf)
        return min(usual, _SLACK * larger)

    def _on_line(self, x: int) -> float:
        if self._until_fit == 0:
            self._line, self._until_fit = self._fit(), _REFIT
        self._until_fit -= 1
        xs, ys = self._line
        at = bisect_left(xs, x)
        if at == 0:
            return ys[0]
        if at == len(xs):
            return ys[-1] + ((ys[-1] - ys[0]) / (xs[-1] - xs[0]) / 2 * (x - xs[-1]) if at > 1 else 0.0)
        (x0, x1), (y0, y1) = xs[at - 1 : at + 1], ys[at - 1 : at + 1]
        return (y0 + (y1 - y0) * (x - x0) / (x1 - x0) + max(y0, y1 * x / x1)) / 2

    def _fit(self) -> tuple[list[int], list[float]]:
        """What was measured, made rising: halfway between the least that is above it and the greatest below."""
        at: dict[int, list[float]] = {}
        for rows, times in self.times.items():
            for size, time in times.items():
                at.setdefault(rows * (size + 1), []).append(time.seconds)
        xs = sorted(at)
        means = [sum(at[x]) / len(at[x]) for x in xs]
        above, below = accumulate(means, max), list(accumulate(reversed(means), min))[::-1]
        return xs, [(high + low) / 2 for high, low in zip(above, below, strict=True)]


class StepTimes:
    """Seconds of the passes of a step, at the usual pace of the machine.

    A pass takes its own time, which hardly changes, times the pace of the machine, which does when others use it. A
    surprise is put down to either by how uncertain it is (a Kalman filter of the logarithms, without covariances). So
    plans compare well that ran at different times, and one slow step changes little.
    """

    def __init__(self, costs: PassCosts | None) -> None:
        """`costs`: of passes over one sequence."""
        self._curves: dict[Part, _Curve] = {
            "draft": _Curve(costs.draft if costs else ()),
            "redraft": _Curve(costs.redraft if costs else ()),
            "verify": _Curve(costs.verify if costs else ()),
        }
        self._step = 0
        self._noise = _NOISE
        self._pace, self._pace_variance = 0.0, _PACE_DRIFT

    @property
    def pace(self) -> float:
        """How many times as long as usual everything takes."""
        return math.exp(self._pace)

    def knows(self, part: Part) -> bool:
        """Whether any such pass was measured."""
        return self._curves[part].largest > 0

    def seconds(self, rows: int, sizes: Mapping[Part, int]) -> float:
        """Of passes over so many sequences, with so many new tokens of each."""
        return sum(self._curve(part).seconds(rows, size) for part, size in sizes.items())

    def reaches(self, rows: int, sizes: Mapping[Part, int]) -> bool:
        """Whether none of these passes is far larger than the largest that was measured."""
        return all(rows * (size + 1) <= REACH * self._curve(part).largest for part, size in sizes.items())

    def observe(
        self, rows: int, sizes: Mapping[Part, int], seconds: Mapping[Part, float], *, settled: bool = True
    ) -> None:
        """Takes in passes of one step, those of `seconds`; settled where the steps before it were alike."""
        self._step += 1
        self._pace_variance += _PACE_DRIFT
        whole = sum(seconds.values())
        for part, took in seconds.items():
            took = max(took, _TICK)
            curve, size, noise = self._curves[part], sizes[part], self._noise * whole / took
            time = curve.times.get(rows, {}).get(size)
            if time is None:
                first = self._curve(part).seconds(rows, size) if self.knows(part) else took / self.pace
                time = _Time(first, _UNKNOWN, self._step)
                curve.put(rows, size, time)
                settled = False
            self._learn(time, took, noise if settled else _UNSETTLED * noise)

    def _learn(self, time: _Time, seconds: float, noise: float) -> None:
        """One pass; the noise of a short one is larger, since it tells little of the pace."""
        own = time.variance + _DRIFT * (self._step - time.step)
        variance = own + self._pace_variance + noise
        most = _OUTLIER * math.sqrt(variance)
        surprise = max(-most, min(most, math.log(seconds / time.seconds) - self._pace))
        if time.variance < _SURE:
            self._noise *= math.exp(_NOISE_RATE * (surprise * surprise / variance - 1))
            self._noise = max(_LEAST_NOISE, self._noise)
        time.seconds *= math.exp(own / variance * surprise)
        time.variance, time.step = own * (1 - own / variance), self._step
        self._pace += self._pace_variance / variance * surprise
        self._pace_variance *= 1 - self._pace_variance / variance

    def _curve(self, part: Part) -> _Curve:
        """As long as nothing is known of re-drafts, they cost what first drafts of as many tokens do."""
        return self._curves["draft" if part == "redraft" and not self.knows(part) else part]


_MOST = 400  # observations that what is known of drafts counts for at most
_INERTIA = 8.0  # those that a guess counts for
_GAIN_INERTIA = 16.0  # of branches, whose gains scatter more
_RECENT = 0.95  # per step: what is remembered of surprises
_CHANGE = 3.5  # standard deviations of recent surprises that are no chance
_SPREAD = 0.5  # least variance of the drafts that are right
_REFRESH = 8  # steps for which what is expected stands
_END_MEMORY = 0.99  # per step, of what the ends of requests cut off


@dataclass
class _Mean:
    """A mean that forgets what is older than `_MOST` observations."""

    value: float
    weight: float
    inertia: float = _INERTIA

    def add(self, total: float, count: int) -> None:
        if not count:  # and perhaps no weight to divide by
            return
        self.weight = min(self.weight + count, _MOST)
        self.value += (total - count * self.value) / self.weight

    def doubt(self) -> None:
        """What is known counts for much less; again and again, for no more than a guess."""
        self.weight = min(self.weight, max(self.inertia / 2, self.weight / 4))

    def pulled(self, value: float) -> float:
        """The mean, drawn to a value the more the less it rests on."""
        return (self.value * self.weight + value * self.inertia) / (self.weight + self.inertia)


class StepYield:
    """Tokens that a step is expected to give a sequence.

    A draft is right with a chance that depends on its position, given that those before it are. It is learnt only where
    those were, so that shorter drafts do not bias it. What few drafts came to leans on the position before. All is
    remembered for long, since few steps tell little; but when recent ones cannot be chance, it is soon learnt anew.
    """

    def __init__(self, drafts: int, branches: int) -> None:
        """Of so many drafts and branches at most."""
        self._right = [_Mean(0.8, 2.0) for _ in range(drafts)]
        self._gain = _Mean(1.5, 8.0, _GAIN_INERTIA)  # of all branches, over the trunk
        self._gains = [_Mean(0.0, 0.0, _GAIN_INERTIA) for _ in range(branches)]
        self._surprise, self._variance = 0.0, 0.0
        self._uncut = 1.0  # part of what drafts are expected to yield that the ends of requests leave
        self._expected: list[tuple[float, float]] = []
        self._until_refresh = 0

    def observe(self, drafts: int, branches: int, trunk: Sequence[tuple[int, int]], yielded: Sequence[int]) -> bool:
        """Takes in a step that drafts.

        Args:
            drafts, branches: as planned.
            trunk: of each sequence, drafts and those of them that were right.
            yielded: all its tokens.

        Returns:
            Whether drafts have become better or worse than was known.
        """
        changed = self._is_surprised(drafts, trunk)
        for proposed, agreed in trunk:
            for mean in self._right[:agreed]:
                mean.add(1.0, 1)
            if agreed < proposed:
                self._right[agreed].add(0.0, 1)
        if branches:
            rows = zip(trunk, yielded, strict=True)
            gains = [max(0, tokens - 1 - agreed) for (proposed, agreed), tokens in rows if proposed]
            self._gain.add(sum(gains) / self._share(branches), len(gains))
            self._gains[branches - 1].add(sum(gains), len(gains))
        return changed

    def tokens(self, drafts: int, branches: int) -> float:
        """Expected of one sequence, the bonus included."""
        gain = self._gains[branches - 1].pulled(self._gain.value * self._share(branches)) if branches else 0.0
        return 1 + (sum(self._reaches(drafts)) + gain) * self._uncut

    def _reaches(self, drafts: int) -> list[float]:
        """The chances that so many drafts, and those before them, are right."""
        right, reach, reaches = self._right[0].value, 1.0, []
        for mean in self._right[:drafts]:
            right = mean.pulled(right)
            reach *= right
            reaches.append(reach)
        return reaches

    def _is_surprised(self, drafts: int, trunk: Sequence[tuple[int, int]]) -> bool:
        """Whether the drafts that are right differ from those expected by more than chance; then all is in doubt."""
        if self._until_refresh == 0:
            self._expected, self._until_refresh = self._expectations(), _REFRESH
        self._until_refresh -= 1
        surprise = variance = means = 0.0
        for proposed, agreed in trunk:
            mean, spread = self._expected[proposed]
            means += mean
            surprise += agreed - mean
            variance += spread
        uncut = means / max(_TICK, len(trunk) * self._expected[drafts][0])
        self._uncut += (1 - _END_MEMORY) * (uncut - self._uncut)
        self._surprise = self._surprise * _RECENT + surprise
        self._variance = self._variance * _RECENT + variance
        if abs(self._surprise) <= _CHANGE * math.sqrt(self._variance):
            return False
        self._surprise, self._variance, self._until_refresh = 0.0, 0.0, 0
        for known in (*self._right, self._gain, *self._gains):
            known.doubt()
        return True

    def _expectations(self) -> list[tuple[float, float]]:
        """Mean and variance of the drafts that are right, by how many there are."""
        reaches = self._reaches(len(self._right))
        means = accumulate(reaches)
        squares = accumulate((2 * place + 1) * reach for place, reach in enumerate(reaches))
        spreads = ((mean, max(_SPREAD, square - mean * mean)) for mean, square in zip(means, squares, strict=True))
        return [(0.0, 0.0), *spreads]

    def _share(self, branches: int) -> float:
        """Part of the gain of all branches that so many have: the likeliest come first."""
        return math.sqrt(branches / len(self._gains))
