"""Choosing a token from logits, so that speculation cannot change the outcome.

A choice depends on nothing but (logits, history, seed, absolute position): not on how many tokens a step verified, nor
on the batch. So the walk over a candidate tree repeats, choice by choice, what token-by-token decoding would choose.

Meaning and order follow transformers 5.24 (`generation/logits_process.py`): repetition penalty, bad words, minimum
length, temperature, top-k, top-p, min-p. Presence and frequency penalties, which it lacks, follow OpenAI and vLLM and
come right after the repetition penalty.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import BackendError, RequestError, UsageError
from dflash_trt.runtime.sampling_params import SamplingParams

__all__ = ["History", "Sampler", "SamplingParams"]

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)
_SEED_BITS = 53  # of seeds that are drawn: JSON readers keep such integers exactly


class History:
    """The tokens of one sequence: their order, and each distinct one with its count in the output.

    `extend` follows commits; a tree node's few tokens below the root are passed as `path` and change nothing here.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._tokens = list(prompt)
        self._prompt_len = len(self._tokens)
        self._counts = dict.fromkeys(self._tokens, 0)
        self._arrays: tuple[Ids, Ids] | None = None  # the counts as arrays, until the next commit

    def extend(self, tokens: Iterable[int]) -> None:
        """Add committed output tokens (the anchor is one of them)."""
        for token in tokens:
            self._tokens.append(token)
            self._counts[token] = self._counts.get(token, 0) + 1
        self._arrays = None

    @property
    def generated(self) -> int:
        """The number of committed output tokens."""
        return len(self._tokens) - self._prompt_len

    def last(self, size: int, path: Sequence[int] = ()) -> tuple[int, ...]:
        """The last `size` tokens, `path` being the latest of them; all where there are fewer."""
        committed = min(max(size - len(path), 0), len(self._tokens))
        return (*self._tokens[len(self._tokens) - committed :], *path[max(len(path) - size, 0) :])

    def counts(self, path: Sequence[int] = ()) -> tuple[Ids, Ids]:
        """(ids i64 [M] distinct, output counts i64 [M], 0 for tokens of the prompt only) with `path` appended."""
        if self._arrays is None:
            self._arrays = np.array([*self._counts], np.int64), np.array([*self._counts.values()], np.int64)
        ids, counts = self._arrays
        if path:
            ids, where = np.unique(np.concatenate([ids, np.asarray(path, np.int64)]), return_inverse=True)
            counts = np.bincount(where, np.concatenate([counts, np.ones(len(path))])).astype(np.int64)
        return ids, counts


class _Bans:
    """What may not come next: the last token of each bad word whose others have just come, and ends too soon."""

    def __init__(self, params: SamplingParams, end_token_ids: Collection[int]) -> None:
        self._min_tokens = params.min_tokens
        self._ends = np.array(sorted(end_token_ids), np.int64)
        last_tokens: dict[tuple[int, ...], set[int]] = {}
        for *before, last in params.bad_token_ids:
            if before or last not in end_token_ids:
                last_tokens.setdefault(tuple(before), set()).add(last)
        self._last_tokens = {before: np.array(sorted(last), np.int64) for before, last in last_tokens.items()}
        self._sizes = sorted({len(before) for before in last_tokens})

    def ids(self, history: History, path: Sequence[int]) -> Ids:
        """i64 [M], not sorted, some perhaps twice or outside the vocabulary."""
        banned = [self._ends] if history.generated + len(path) < self._min_tokens else []
        recent = history.last(max(self._sizes, default=0), path)
        for size in self._sizes:
            if size <= len(recent) and (last := self._last_tokens.get(recent[len(recent) - size :])) is not None:
                banned.append(last)
        return np.concatenate([_NONE, *banned])


class Sampler:
    """Chooses tokens for one sequence. `seed` is the seed in use, also where the parameters gave none.

    In all methods: `logits` f32 [V] (never changed); `position` the absolute position of the token to be chosen;
    `history` the committed tokens and `path` the candidate tokens after them (both only read when
    `params.needs_history`, and then `history` is required).

    Args:
        end_token_ids: what ends the output (`params.end_token_ids`); `min_tokens` and `bad_token_ids` ask for it.
    """

    def __init__(self, params: SamplingParams, end_token_ids: Collection[int] = ()) -> None:
        self.params = params
        self.seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        self._bans = _Bans(params, end_token_ids)

    def choose(self, logits: Floats, position: int, history: History | None = None, path: Sequence[int] = ()) -> int:
        """The next token.

        Raises:
            UsageError: `history` is needed and missing.
            RequestError: the parameters leave no token to choose.
            BackendError: the largest logit is NaN or infinite.
        """
        if self.params.temperature == 0:
            scores = self._processed(logits, history, path)
            best = int(scores.argmax())
            _check_best(scores[best], logits)
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
            scores = self._processed(logits, history, path)
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

    def _processed(self, logits: Floats, history: History | None, path: Sequence[int]) -> Floats:
        """`logits` itself where nothing is to be done, else an adjusted copy; float32 arithmetic, as transformers'."""
        if not self.params.needs_history:
            return logits
        if history is None:
            what = "penalties, bad_token_ids and min_tokens need the history"
            raise UsageError(what, where="Sampler", mend="pass a History of prompt and output")
        scores = logits.copy()
        if self.params.has_penalties:
            self._penalise(scores, *history.counts(path))
        # Ids outside the head are never generated: those of a prompt (a larger embedding has them) and banned ones.
        banned = self._bans.ids(history, path)
        scores[banned[banned < len(scores)]] = -np.inf
        return scores

    def _penalise(self, scores: Floats, ids: Ids, counts: Ids) -> None:
        """Changes the scores of these tokens in place."""
        params = self.params
        ids, counts = ids[ids < len(scores)], counts[ids < len(scores)]
        old = scores[ids]
        factor = np.float32(params.repetition_penalty)
        new = np.where(old < 0, old * factor, old / factor)
        with np.errstate(over="ignore"):  # whoever chooses looks at the best score
            new -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
            new -= np.float32(params.presence_penalty) * (counts > 0)
        scores[ids] = new

    def _kept(self, logits: Floats, history: History | None, path: Sequence[int]) -> tuple[Ids, Weights]:
        """(ids i64 [M] ascending, weights f64 [M]) of tokens that may be drawn; weights are relative to the best."""
        params, scores = self.params, self._processed(logits, history, path)
        ids = np.arange(len(scores))
        if 0 < params.top_k < len(scores):
            # Temperature keeps the order, so top-k can go first and spare the work on the rest.
            ids = np.flatnonzero(scores >= np.partition(scores, -params.top_k)[-params.top_k])
        best = scores.max()
        _check_best(best, logits)
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


def _check_best(best: np.float32, logits: Floats) -> None:
    if np.isfinite(best):
        return
    if np.isfinite(logits.max()):
        if best == -np.inf:
            mend = "Ban fewer tokens, or lower min_tokens"
            raise RequestError("they leave no token to choose", where="sampling parameters", mend=mend)
        what, mend = "the penalties are too large: scores overflow", "Bring them nearer to 1 and 0"
        raise RequestError(what, where="sampling parameters", mend=mend)
    mend = "Run `dflash-trt verify`; float16 may have overflowed."
    raise BackendError(f"the largest logit is {best}", where="logits", mend=mend)
