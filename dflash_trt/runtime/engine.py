"""`Engine`: a loaded bundle that generates text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from dflash_trt.backends.base import Session
from dflash_trt.errors import RequestError
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.sequence import FinishReason, SequenceState, check_prompt
from dflash_trt.runtime.statistics import GenerationStatistics
from dflash_trt.runtime.text import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """A finished output.

    Attributes:
        text: new text, without special tokens and cut before a stop string.
        token_ids: new tokens, the one that ended the output included.
        finish_reason: "stop" (stop token or string) or "length" (max_tokens or max_seq_len).
        seed: the seed in use; giving it again repeats the output.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    seed: int
    statistics: GenerationStatistics


@dataclass(frozen=True)
class StreamEvent:
    """What one step added; `generation` is set on the last event."""

    text: str
    token_ids: list[int]
    generation: Generation | None = None


class Engine:
    """Decodes with a target session and, speculatively, a drafter session.

    Made by `dflash_trt.load(bundle)`.
    """

    def __init__(
        self,
        target: Session,
        drafter: Session,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        mask_token_id: int,
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.tokenizer = tokenizer
        self.limits = limits
        self.mask_token_id = mask_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, speculation: bool = True, **sampling: Any
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[True], speculation: bool = True, **sampling: Any
    ) -> Iterator[StreamEvent]: ...

    def generate(
        self, prompt: Prompt, *, stream: bool = False, speculation: bool = True, **sampling: Any
    ) -> Generation | Iterator[StreamEvent]:
        """Generates from one prompt.

        Args:
            prompt: text, encoded with the tokenizer's special tokens, or token ids taken as they are.
            stream: gives an iterator of events, one per step.
            speculation: False decodes token by token with the same engine; the output is the same.
            sampling: fields of `SamplingParams`.

        Raises:
            RequestError: an empty or too long prompt. UsageError: a sampling parameter out of range.
        """
        sequence = self._sequence(prompt, SamplingParams(**sampling))
        batch = self._batch([sequence], speculation)
        if stream:
            return self._stream(sequence, batch)
        batch.run()
        return _generation(sequence)

    def generate_batch(
        self, prompts: Sequence[Prompt], *, speculation: bool = True, **sampling: Any
    ) -> list[Generation]:
        """Generates from several prompts, `max_batch_size` at once; each as `generate` would alone."""
        sequences = [self._sequence(prompt, SamplingParams(**sampling)) for prompt in prompts]
        for start in range(0, len(sequences), self.limits.max_batch_size):
            self._batch(sequences[start : start + self.limits.max_batch_size], speculation).run()
        return [_generation(sequence) for sequence in sequences]

    def _stream(self, sequence: SequenceState, batch: DecodeBatch) -> Iterator[StreamEvent]:
        characters = tokens = 0
        batch.prefill()
        while True:
            done = not batch.active
            yield StreamEvent(
                sequence.text[characters:], sequence.generated[tokens:], _generation(sequence) if done else None
            )
            if done:
                return
            characters, tokens = len(sequence.text), len(sequence.generated)
            batch.step()

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> SequenceState:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("is empty", where="prompt", mend="Give some text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        check_prompt(ids, self.limits, self.vocab_size)
        return SequenceState(ids, params, self.limits, self.eos_token_ids, self.tokenizer.stream(params.stop))

    def _batch(self, sequences: Sequence[SequenceState], speculation: bool) -> DecodeBatch:
        drafter = self.drafter if speculation else None
        return DecodeBatch(self.target, drafter, sequences, self.limits, self.mask_token_id)


def _generation(sequence: SequenceState) -> Generation:
    assert sequence.finish_reason is not None
    return Generation(
        prompt_token_ids=sequence.prompt,
        token_ids=sequence.generated,
        text=sequence.text,
        finish_reason=sequence.finish_reason,
        seed=sequence.sampler.seed,
        statistics=sequence.statistics,
    )
