"""Comparing speculative with token-by-token output, ties told apart.

Passes of different width may differ in the last bits. Where two choices at a position lie within `TIE` of each other
(in logits, or in the cumulative probability a sample falls on), the comparison of that sequence ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash_trt.runtime.decode import chunk_inputs
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.sampling import History, Sampler, SamplingParams

TIE = 1e-4

Verdict = Literal["equal", "tie", "different"]


@dataclass(frozen=True)
class Comparison:
    """The verdict on two outputs; `position` is where they part (new tokens counted from 0)."""

    verdict: Verdict
    position: int | None = None
    margin: float | None = None


def compare_outputs(
    engine: Engine, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], **sampling: Any
) -> Comparison:
    """Compares two outputs for one prompt, made with the same sampling parameters (`seed` included)."""
    if list(first) == list(second):
        return Comparison("equal")
    position = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    if position == min(len(first), len(second)):  # one ended where the other went on: no tie explains that
        return Comparison("different", position)
    margin = decision_margin(engine, prompt, first[:position], SamplingParams(**sampling))
    return Comparison("tie" if margin < TIE else "different", position, margin)


def decision_margin(engine: Engine, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> float:
    """How close the choice after `prompt` + `output` is to another one (see `Sampler.decision_margin`)."""
    tokens = [*prompt, *output]
    history = History(prompt)
    history.extend(output)
    logits = last_logits(engine, tokens)
    return Sampler(params, params.end_token_ids(engine.eos_token_ids)).decision_margin(logits, len(tokens), history)


def last_logits(engine: Engine, tokens: Sequence[int]) -> np.ndarray:
    """The target's logits f32 [V] after `tokens`, in chunks as a prompt's."""
    target, limits, ids = engine.target, engine.limits, np.asarray(tokens, np.int64)
    cache = target.new_cache(1, target.capacity_for(len(ids), limits.capacity))
    size = min(limits.prefill_chunk, target.longest_pass or len(ids))
    for start in range(0, len(ids), size):
        outputs = target.run(chunk_inputs(ids[start : start + size], start), ["logits"], cache)
    return outputs["logits"][0, 0]
