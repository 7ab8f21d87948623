"""Decoding with any policy from recorded drafts (scripts/record_drafts.py), on a machine of which only times are known.

Greedy output does not depend on the policy, so what a step would have drafted at any place is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.adaptive_drafting import AdaptiveDrafting, Experience
from dflash_trt.runtime.branching import Branch, BranchPolicy, FixedBranches, PassCosts, staircase_of
from dflash_trt.runtime.staircase import break_chances
from dflash_trt.runtime.statistics import StepMeter

HOST = {False: 0.35e-3, True: 0.5e-3}  # seconds of a step outside its passes, by whether it drafts
DECIDING = 0.15e-3  # more, where a policy decides


@dataclass(frozen=True)
class Output:
    """What a prompt led to: tokens, and of each but the last the drafts behind it, and the tail behind each prefix."""

    tokens: list[int]
    drafts: list[tuple[list[int], list[float]]]
    tails: list[list[tuple[list[int], list[float]]]]
    block_size: int


def load(path: Path) -> dict[str, list[Output]]:
    """Outputs by the set of their prompts."""
    with np.load(path) as file:
        data = dict(file)  # an entry is read anew each time it is asked for
    outputs: dict[str, list[Output]] = {}
    token = step = 0
    for name, length in zip(data["sets"].tolist(), data["lengths"].tolist(), strict=True):
        tokens = data["tokens"][token : token + length].tolist()
        drafts, tails = [], []
        for place in range(step, step + length - 1):
            count = int(data["counts"][place])
            ids, sure = data["ids"][place].tolist(), data["confidence"][place].astype(float).tolist()
            drafts.append((ids[0][:count], sure[0][:count]))
            tails.append([(ids[1 + kept][: count - kept], sure[1 + kept][: count - kept]) for kept in range(count)])
        outputs.setdefault(name, []).append(Output(tokens, drafts, tails, 1 + data["ids"].shape[2]))
        token, step = token + length, step + length - 1
    return outputs


class Machine:
    """Times of passes, which differ from the table that was measured: by part, by the moment, and from pass to pass."""

    def __init__(self, costs: PassCosts, seed: int) -> None:
        self.costs = costs
        self._random, self._pace = np.random.default_rng(seed), 0.0
        self._seconds = {}
        for part in ("draft", "redraft", "verify"):
            tokens, seconds = zip(*getattr(costs, part), strict=True)
            skew = 1 + 0.05 * self._random.standard_normal()
            self._seconds[part] = (skew * np.interp(np.arange(tokens[-1] + 1), tokens, seconds)).tolist()

    def usual(self, part: str, tokens: int) -> float:
        """Seconds, without the noise of the moment."""
        return self._seconds[part][tokens]

    def measured(self, part: str, tokens: int) -> float:
        return self.usual(part, tokens) * float(np.exp(self._pace + 0.02 * self._random.standard_normal()))

    def next_step(self) -> None:
        self._pace = 0.98 * self._pace + 0.01 * self._random.standard_normal()


@dataclass(frozen=True)
class Setting:
    """`drafts` and `branches` as the command line has them; experience goes with "auto"."""

    drafts: int | str
    branches: int | str = 0
    experience: Experience | None = None


def seconds_per_token(outputs: Sequence[Output], machine: Machine, setting: Setting) -> float:
    """Over all outputs, in usual seconds: that a step happened to be slow is not the policy's fault."""
    seconds, tokens = zip(*(step for output in outputs for step in steps(output, machine, setting)), strict=True)
    return sum(seconds) / sum(tokens)


def steps(output: Output, machine: Machine, setting: Setting) -> Iterator[tuple[float, int]]:
    """Usual seconds and tokens of each step."""
    policy = None
    if setting.experience is not None:
        policy = AdaptiveDrafting(2 if setting.branches == "auto" else 0, machine.costs, setting.experience)
    place = 0
    while place < len(output.drafts):
        spent, yielded = _step(output, place, machine, setting, policy)
        yield spent, yielded
        place += yielded


def _step(
    output: Output, place: int, machine: Machine, setting: Setting, policy: AdaptiveDrafting | None
) -> tuple[float, int]:
    """Usual seconds of a step, and its tokens."""
    machine.next_step()
    block = output.block_size
    most = block - 1 if isinstance(setting.drafts, str) else setting.drafts
    if policy is not None:
        most = policy.drafts(most)
    draft, confidence = (part[:most] for part in output.drafts[place])
    weighing: BranchPolicy | None = policy or (FixedBranches(int(setting.branches)) if setting.branches else None)
    kept = weighing.choose(confidence, 1 + len(output.drafts[place][0])) if weighing and setting.branches else []
    breaks = break_chances(confidence)
    branches = [Branch(count, breaks[count], *output.tails[place][count]) for count in kept] if draft else []
    staircase = staircase_of(output.tokens[place], draft, branches)
    every = range(len(staircase.tokens))
    tree = staircase.part(weighing.prune(staircase, confidence, branches) if weighing and draft else every)

    meter = StepMeter()
    meter.tokens = {"verify": len(tree)}
    meter.tokens |= {"draft": block} if draft else {}
    meter.tokens |= {"redraft": block * len(branches)} if branches else {}
    meter.seconds = {part: machine.measured(part, tokens) for part, tokens in meter.tokens.items()}
    rest = [*output.tokens[place + 1 :], -1]
    acceptance = walk(tree, lambda node, path: rest[len(path)])
    meter.record_walk(tree, draft, acceptance.path)
    host = HOST[bool(draft)] + (DECIDING if policy is not None else 0)
    if policy is not None:
        policy.observe(meter, sum(meter.seconds.values()) + host)
    yielded = min(len(acceptance.tokens), len(output.tokens) - 1 - place)
    return host + sum(machine.usual(part, tokens) for part, tokens in meter.tokens.items()), yielded
