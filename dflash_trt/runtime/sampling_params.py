"""The options of a generation, validated: how tokens are chosen and what ends the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from dflash_trt.errors import UsageError

_RULES: tuple[tuple[str, type, Callable[[Any], bool], str], ...] = (
    ("temperature", float, lambda v: v >= 0, "a finite number >= 0"),
    ("top_k", int, lambda v: v >= 0, "an integer >= 0; 0 is off"),
    ("top_p", float, lambda v: 0 < v <= 1, "a number in (0, 1]; 1 is off"),
    ("min_p", float, lambda v: 0 <= v <= 1, "a number in [0, 1]; 0 is off"),
    ("repetition_penalty", float, lambda v: v > 0, "a finite number > 0; 1 is off"),
    ("presence_penalty", float, lambda v: True, "a finite number; 0 is off"),
    ("frequency_penalty", float, lambda v: True, "a finite number; 0 is off"),
    ("seed", int, lambda v: 0 <= v < 2**64, "an integer in 0 .. 2**64 - 1, or None"),
    ("max_tokens", int, lambda v: v >= 1, "an integer >= 1"),
    ("min_tokens", int, lambda v: v >= 0, "an integer >= 0; 0 is off"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        temperature: 0 takes the likeliest token (the lowest id on ties); above 0 samples.
        top_k: keep logits >= the k-th largest (ties stay); 0 is off.
        top_p: keep the likeliest tokens whose mass reaches top_p; 1 is off.
        min_p: keep tokens with at least min_p times the top probability; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: subtracted from the logit of each token in the output (not the prompt).
        frequency_penalty: subtracted from the same once per occurrence.
        seed: 0 <= seed < 2**64; None draws one (see `Sampler.seed`).
        max_tokens: new tokens at most.
        stop: strings that end the text (not part of it); a single string stands for a tuple of one.
        stop_token_ids: tokens that end the output besides the model's own; not affected by `ignore_eos`.
        ignore_eos: go on after the model's own end-of-sequence tokens.
        min_tokens: before so many new tokens no token that ends the output is chosen: none of the model's own (unless
            `ignore_eos`) and of `stop_token_ids`. A string of `stop` ends it all the same.
        bad_token_ids: token sequences that never come about, be it across the end of the prompt: where all tokens of
            one but the last have just come, the last is not chosen. One that is a token ending the output, and nothing
            else, is not heeded, as in transformers. `Tokenizer.bad_words` gives the sequences of words.

    Raises:
        UsageError: naming the field, its value and the rule.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, kind, ok, rule in _RULES:
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
            self._require(number and math.isfinite(value) and ok(value), name, rule)
            object.__setattr__(self, name, kind(value))
        self._require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._tuple("stop", lambda v: isinstance(v, str) and v != "", "a sequence of non-empty strings")
        self._tuple("stop_token_ids", _is_token, "a sequence of integers >= 0")
        self._require(self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens ({self.max_tokens})")
        self._tuple("bad_token_ids", _is_token_sequence, "a sequence of non-empty sequences of integers >= 0")
        sequences = tuple(tuple(int(token) for token in sequence) for sequence in self.bad_token_ids)
        object.__setattr__(self, "bad_token_ids", sequences)

    def _require(self, ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise UsageError(f"{getattr(self, name)!r} must be {rule}", where=name, mend="Change it")

    def _tuple(self, name: str, ok: Callable[[Any], bool], rule: str) -> None:
        values = getattr(self, name)
        self._require(isinstance(values, (tuple, list)) and all(ok(value) for value in values), name, rule)
        object.__setattr__(self, name, tuple(values))

    def end_token_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end the output of a model with these end-of-sequence tokens."""
        return frozenset((*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)))

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is on."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def needs_history(self) -> bool:
        """Whether choices depend on the tokens before them, and not by the logits alone."""
        return self.has_penalties or self.min_tokens > 0 or bool(self.bad_token_ids)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether each choice is the argmax of the raw logits, so that a graph's own `token_ids` can serve."""
        return self.temperature == 0 and not self.needs_history


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_token_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(_is_token(token) for token in value)
