"""What a request gives: a generation as a whole, or the events of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.runtime.sequence import FinishReason, SequenceState
from dflash_trt.runtime.statistics import GenerationStatistics
from dflash_trt.runtime.trace import Trace


@dataclass(frozen=True)
class Generation:
    """A finished output.

    Attributes:
        text: new text, without special tokens and cut before a stop string.
        token_ids: new tokens, the one that ended the output included.
        finish_reason: "stop" (stop token or string) or "length" (max_tokens or max_seq_len).
        seed: the seed in use; giving it again repeats the output.
        trace: what each step did, where it was asked for.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    seed: int
    statistics: GenerationStatistics
    trace: Trace | None = None


@dataclass(frozen=True)
class StreamEvent:
    """What one step added; `generation` is set on the last event."""

    text: str
    token_ids: list[int]
    generation: Generation | None = None


def generation_of(sequence: SequenceState, trace: Trace | None = None) -> Generation:
    """The output of a sequence that ended."""
    assert sequence.finish_reason is not None
    return Generation(
        prompt_token_ids=sequence.prompt,
        token_ids=sequence.generated,
        text=sequence.text,
        finish_reason=sequence.finish_reason,
        seed=sequence.sampler.seed,
        statistics=sequence.statistics,
        trace=trace,
    )


class StreamReader:
    """Reads a sequence as it grows: each event is what came since the last one.

    Args:
        finish: makes the generation of a sequence that ended.
    """

    def __init__(
        self, sequence: SequenceState, finish: Callable[[SequenceState], Generation] = generation_of
    ) -> None:
        self._sequence, self._finish = sequence, finish
        self._characters = self._tokens = 0

    def event(self) -> StreamEvent:
        """What is new."""
        sequence = self._sequence
        text, tokens = sequence.text[self._characters :], sequence.generated[self._tokens :]
        self._characters, self._tokens = len(sequence.text), len(sequence.generated)
        return StreamEvent(text, tokens, self._finish(sequence) if sequence.finish_reason is not None else None)
