"""Choosing a token from logits, so that speculation cannot change the outcome.

A choice depends on nothing but (logits, history, seed, absolute position): not on how many tokens a step verified, nor
on the batch. So the walk over a candidate tree repeats, choice by choice, what token-by-token decoding would choose.

Meaning and order follow transformers 5.24 (`generation/logits_process.py`): repetition penalty, temperature, top-k,
top-p, min-p. Presence and frequency penalties, which it lacks, follow OpenAI and vLLM and come right after the
repetition penalty.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import BackendError, UsageError
from dflash_trt.runtime.sampling_params import SamplingParams

__all__ = ["History", "Sampler", "SamplingParams"]

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class History:
    """The tokens of one sequence that penalties look at: each distinct token with its count in the output.

    `extend` follows commits; a tree node's few tokens below the root are passed to `counts` and change nothing here.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._generated: dict[int, int] = dict.fromkeys(prompt, 0)
        self._arrays: tuple[Ids, Ids] | None = None  # the dictionary as arrays, until the next commit

    def extend(self, tokens: Iterable[int]) -> None:
        """Count committed output tokens (the anchor is one of them)."""
        for token in tokens:
            self._generated[token] = self._generated.get(token, 0) + 1
        self._arrays = None

    def counts(self, path: Sequence[int] = ()) -> tuple[Ids, Ids]:
        """(ids i64 [M] distinct, output counts i64 [M], 0 for tokens of the prompt only) with `path` appended."""
        if self._arrays is None:
            self._arrays = np.array([*self._generated], np.int64), np.array([*self._generated.values()], np.int64)
        ids, counts = self._arrays
        if path:
            ids, where = np.unique(np.concatenate([ids, np.asarray(path, np.int64)]), return_inverse=True)
            counts = np.bincount(where, np.concatenate([counts, np.ones(len(path))])).astype(np.int64)
        return ids, counts


class Sampler:
    """Chooses tokens for one sequence. `seed` is the seed in use, also where the parameters gave none.

    In all methods: `logits` f32 [V] (never changed); `position` the absolute position of the token to be chosen;
    `history` the committed tokens and `path` the candidate tokens after them (both only read when there are
    penalties, and then `history` is required).
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed

    def choose(self, logits: Floats, position: int, history: History | None = None, path: Sequence[int] = ()) -> int:
        """The next token.

        Raises:
            UsageError: penalties are on and `history` is missing.
            BackendError: the largest logit is NaN or infinite.
        """
        if self.params.temperature == 0:
            scores = self._penalised(logits, history, path)
            best = int(scores.argmax())
            _check_finite(scores[best])
            return best
        ids, weights = self._kept(logits, history, path)
        bounds = np.cumsum(weights)
        return int(ids[_draw(bounds, self.uniform(position))])

    def distribution(self, logits: Floats, history: History | None = None, path: Sequence[int] = ()) -> Weights:
        """f64 [V]: the probabilities `choose` draws from (all on one token at temperature 0)."""
        probabilities = np.zeros(len(logits))
        if self.params.temperature == 0:
            probabilities[self.choose(logits, 0, history, path)] = 1
        else:
            ids, weights = self._kept(logits, history, path)
            probabilities[ids] = weights / weights.sum()
        return probabilities

    def decision_margin(
        self, logits: Floats, position: int, history: History | None = None, path: Sequence[int] = ()
    ) -> float:
        """How close `choose` was to another answer; for the analysis of ties in tests only.

        Temperature 0: the gap between the two best processed logits. Above: the distance of u to the nearer end of
        the chosen token's interval of the CDF, in probability (it knows nothing of what top-k and the like cut off).
        """
        if self.params.temperature == 0:
            scores = self._penalised(logits, history, path)
            if len(scores) == 1:
                return math.inf
            second, first = np.partition(scores, len(scores) - 2)[-2:]
            return float(first) - float(second)
        bounds = np.cumsum(self._kept(logits, history, path)[1])
        u, chosen = self.uniform(position), _draw(bounds, self.uniform(position))
        low, high = (bounds[chosen - 1] if chosen else 0.0) / bounds[-1], bounds[chosen] / bounds[-1]
        return float(min(u - low, high - u))

    def uniform(self, position: int) -> float:
        """u in [0, 1), a function of (seed, position) alone: 53 bits of Philox-4x64 with key seed, counter position."""
        bits = np.random.Philox(key=self.seed, counter=position).random_raw()
        return float(int(bits) >> 11) * 2.0**-53

    def _penalised(self, logits: Floats, history: History | None, path: Sequence[int]) -> Floats:
        """`logits` itself without penalties, else an adjusted copy; float32 arithmetic, as transformers'."""
        params = self.params
        if not params.has_penalties:
            return logits
        if history is None:
            raise UsageError("penalties need the history", where="Sampler", mend="pass a History of prompt and output")
        ids, counts = history.counts(path)
        # A prompt may hold ids of an embedding that is larger than the head; those are never generated.
        ids, counts = ids[ids < len(logits)], counts[ids < len(logits)]
        old = logits[ids]
        factor = np.float32(params.repetition_penalty)
        new = np.where(old < 0, old * factor, old / factor)
        new -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        new -= np.float32(params.presence_penalty) * (counts > 0)
        scores = logits.copy()
        scores[ids] = new
        return scores

    def _kept(self, logits: Floats, history: History | None, path: Sequence[int]) -> tuple[Ids, Weights]:
        """(ids i64 [M] ascending, weights f64 [M]) of tokens that may be drawn; weights are relative to the best."""
        params, scores = self.params, self._penalised(logits, history, path)
        ids = np.arange(len(scores))
        if 0 < params.top_k < len(scores):
            # Temperature keeps the order, so top-k can go first and spare the work on the rest.
            ids = np.flatnonzero(scores >= np.partition(scores, -params.top_k)[-params.top_k])
        best = scores.max()
        _check_finite(best)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            weights = np.exp((scores[ids].astype(np.float64) - float(best)) / params.temperature)
        if params.top_p < 1:
            keep = _nucleus(weights, params.top_p)
            ids, weights = ids[keep], weights[keep]
        if params.min_p > 0:
            keep = weights >= params.min_p  # the best weight is 1
            ids, weights = ids[keep], weights[keep]
        return ids, weights


def _nucleus(weights: Weights, top_p: float) -> npt.NDArray[np.bool_]:
    """bool [M]: what top-p keeps: all but the smallest weights whose running sum stays within 1 - top_p.

    Probabilities and the comparison are rounded to float32, as transformers has them: it decides exact ties.
    """
    keep = np.ones(len(weights), dtype=np.bool_)
    total = weights.sum()
    # Weights below this cannot sum to more than the removed mass however many they are: no need to sort them.
    small = weights < (1 - top_p) * total / len(weights)
    keep[small] = False
    rest = np.flatnonzero(keep)
    order = rest[np.argsort(weights[rest], kind="stable")]
    probabilities = (weights[order] / total).astype(np.float32)
    mass = weights[small].sum() / total + np.cumsum(probabilities, dtype=np.float64)
    keep[order[:-1]] = mass[:-1].astype(np.float32) > np.float32(1 - top_p)
    return keep


def _draw(bounds: Weights, u: float) -> int:
    """The first index whose cumulative weight exceeds u of the total; never one of weight 0."""
    index = int(np.searchsorted(bounds, u * bounds[-1], side="right"))
    # u * total can round up to the total itself: then the last index of positive weight is meant.
    return index if index < len(bounds) else int(np.searchsorted(bounds, bounds[-1]))


def _check_finite(best: np.float32) -> None:
    if not np.isfinite(best):
        raise BackendError(
            f"the largest logit is {best}", where="logits", mend="Run `dflash-trt verify`; float16 may have overflowed."
        )
