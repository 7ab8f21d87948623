"""One sequence on its way: what is committed, what is pending, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dflash_trt.errors import DflashError, RequestError
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sampling import History, Sampler, SamplingParams
from dflash_trt.runtime.statistics import GenerationStatistics
from dflash_trt.runtime.text import TextStream
from dflash_trt.runtime.trace import StepTrace

FinishReason = Literal["stop", "length"]


def check_prompt(prompt: Sequence[int], limits: Limits, vocab_size: int) -> None:
    """Refuses a prompt that cannot be served.

    Raises:
        RequestError: empty, too long for the bundle, or with ids outside the vocabulary.
    """
    if not prompt:
        raise RequestError("is empty", where="prompt", mend="Give at least one token of text")
    if len(prompt) > limits.max_input_len:
        raise RequestError(
            f"has {len(prompt)} tokens; the bundle takes at most {limits.max_input_len} (max_input_len)",
            where="prompt",
            mend="Shorten it, or build with a larger --max-input-len",
        )
    if len(prompt) >= limits.max_seq_len:
        raise RequestError(
            f"has {len(prompt)} tokens, which leaves no room to generate within {limits.max_seq_len} (max_seq_len)",
            where="prompt",
            mend="Shorten it, or build with a larger --max-seq-len",
        )
    if not all(0 <= token < vocab_size for token in prompt):
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(f"token id {wrong} is outside 0..{vocab_size - 1}", where="prompt")


class SequenceState:
    """Tokens and lengths of one sequence.

    Invariant between steps: the target's cache holds `committed` rows, which are all tokens but the last one (the
    anchor).
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        limits: Limits,
        eos_token_ids: Sequence[int],
        text: TextStream,
    ) -> None:
        self.prompt = list(prompt)
        self.params = params
        self._stop_ids = params.end_token_ids(eos_token_ids)
        self.sampler = Sampler(params, self._stop_ids)
        self.history = History(prompt)
        self.generated: list[int] = []
        self.committed = 0
        self.finish_reason: FinishReason | None = None
        self.error: DflashError | None = None
        self.cancelled = False
        self.statistics = GenerationStatistics()
        self.trace: list[StepTrace] | None = None
        self.text = ""
        self._limit = min(params.max_tokens, limits.max_seq_len - len(prompt))
        self._stream = text

    @property
    def anchor(self) -> int:
        """The last token, not yet in any cache."""
        return self.generated[-1]

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: it ended, or it failed with `error`."""
        return self.finish_reason is not None or self.error is not None

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt went through the target."""
        return self.committed >= len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._limit - len(self.generated)

    def emit(self, tokens: Sequence[int]) -> int:
        """Takes tokens one by one until one ends the sequence; returns how many it took."""
        taken = 0
        for token in tokens:
            taken += 1
            self.generated.append(token)
            piece = self._stream.feed(token)
            self.text += piece.text
            if piece.stopped or token in self._stop_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                rest = self._stream.finish()
                self.text += rest.text
                if rest.stopped:  # held-back text can complete a stop string at the very end
                    self.finish_reason = "stop"
                break
        if self.params.needs_history:
            self.history.extend(self.generated[-taken:])
        return taken
