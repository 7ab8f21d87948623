"""`Engine`: a loaded bundle that generates text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

from dflash_trt.backends.base import Session
from dflash_trt.errors import RequestError, UsageError
from dflash_trt.export.contract import Role
from dflash_trt.runtime.branching import AdaptiveBranches, BranchPolicy, FixedBranches, PassCosts
from dflash_trt.runtime.decode import Batch, DecodeBatch
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.sequence import FinishReason, SequenceState, check_prompt
from dflash_trt.runtime.statistics import GenerationStatistics
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.runtime.trace import Branches, StepTrace, System, Trace

if TYPE_CHECKING:
    from dflash_trt.runtime.device_decode import DeviceSlots

Prompt = str | Sequence[int]


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


class _Drafting(NamedTuple):
    """How a generation drafts; without speculation there are no branches."""

    speculation: bool
    branches: Branches


class Engine:
    """Decodes with a target session and, speculatively, a drafter session or two.

    Made by `dflash_trt.load(bundle)`.

    Attributes:
        vp_drafter: of a D2SD bundle, else None.
        costs: seconds of passes by tokens, which `branches="auto"` needs; None where they were not measured.
        device_step: whether decode steps run whole on the sessions' device where they can (`DeviceSession`s only):
            those of plain greedy requests with speculation, a number of branches and no trace. The output is the same.
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
        system: System = "dflash",
        vp_drafter: Session | None = None,
        costs: PassCosts | None = None,
        device_step: bool | None = None,
    ) -> None:
        """`device_step`: None for what the sessions say is best (yes on a CUDA device).

        Raises:
            UsageError: `device_step` is asked for with sessions that cannot.
        """
        self.target, self.drafter, self.vp_drafter = target, drafter, vp_drafter
        whole_steps = [session.whole_steps for session in self.sessions.values()]
        if device_step and None in whole_steps:
            mend = "Leave it out"
            raise UsageError("needs sessions on a device, of torch or TensorRT", where="device_step", mend=mend)
        self.tokenizer = tokenizer
        self.limits = limits
        self.system = system
        self.costs = costs
        self.device_step = all(whole_steps) if device_step is None else device_step
        self._free_slots: list[DeviceSlots] = []
        self.mask_token_id = mask_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size

    @property
    def sessions(self) -> dict[Role, Session]:
        """The graphs by role."""
        sessions: dict[Role, Session] = {"target": self.target, "drafter": self.drafter}
        return sessions if self.vp_drafter is None else {**sessions, "vp_drafter": self.vp_drafter}

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, speculation: bool = True,
        branches: Branches | None = None, trace: bool = False, **sampling: Any,
    ) -> Generation: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[True], speculation: bool = True,
        branches: Branches | None = None, trace: bool = False, **sampling: Any,
    ) -> Iterator[StreamEvent]: ...  # fmt: skip

    def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        speculation: bool = True,
        branches: Branches | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Generation | Iterator[StreamEvent]:
        """Generates from one prompt.

        Args:
            prompt: text, encoded with the tokenizer's special tokens, or token ids taken as they are.
            stream: gives an iterator of events, one per step.
            speculation: False decodes token by token with the same engine; the output is the same.
            branches: of a D2SD bundle, with speculation: how many a step has at most, 0 for none (DFlash), "auto" for
                as many as pay; None for as many as the bundle was built for. The output is the same.
            trace: keeps what each step did.
            sampling: fields of `SamplingParams`.

        Raises:
            RequestError: an empty or too long prompt. UsageError: a sampling parameter or `branches` out of range.
        """
        drafting = self._drafting(speculation, branches)
        sequence = self._sequence(prompt, SamplingParams(**sampling))
        if trace:
            sequence.trace = []
        if stream:
            return self._stream(sequence, drafting)
        self._batch([sequence], drafting).run()
        return self._generation(sequence, drafting)

    def generate_batch(
        self, prompts: Sequence[Prompt], *, speculation: bool = True, branches: Branches | None = None, **sampling: Any
    ) -> list[Generation]:
        """Generates from several prompts, `max_batch_size` at once; each as `generate` would alone."""
        drafting = self._drafting(speculation, branches)
        sequences = [self._sequence(prompt, SamplingParams(**sampling)) for prompt in prompts]
        for start in range(0, len(sequences), self.limits.max_batch_size):
            self._batch(sequences[start : start + self.limits.max_batch_size], drafting).run()
        return [self._generation(sequence, drafting) for sequence in sequences]

    def _drafting(self, speculation: bool, branches: Branches | None) -> _Drafting:
        """How to draft. Raises UsageError where the bundle cannot have these branches."""
        built = self.limits.branches
        if branches is None:
            return _Drafting(speculation, built if speculation else 0)
        if not speculation:
            mend = "Leave it out, or --no-speculation"
            raise UsageError("there are none in token-by-token decoding", where="--branches", mend=mend)
        if self.vp_drafter is None:
            mend = "Build it with --vp-drafter, or leave --branches out"
            raise UsageError("needs a VP drafter, which this bundle does not have", where="--branches", mend=mend)
        if branches == "auto":
            if built and self.costs is None:
                mend = "Build it without --no-verify, or give a number"
                raise UsageError("auto needs the cost table, which --no-verify left out", where="--branches", mend=mend)
            return _Drafting(True, "auto" if built else 0)
        if type(branches) is not int or not 0 <= branches <= built:
            what = f"{branches} must be auto or 0 to {built}, which the bundle was built for"
            raise UsageError(what, where="--branches", mend="Use fewer, or build with a larger --branches")
        return _Drafting(True, branches)

    def _stream(self, sequence: SequenceState, drafting: _Drafting) -> Iterator[StreamEvent]:
        batch = self._batch([sequence], drafting)
        characters = tokens = 0
        batch.prefill()
        while True:
            done = not batch.active
            try:
                yield StreamEvent(
                    sequence.text[characters:],
                    sequence.generated[tokens:],
                    self._generation(sequence, drafting) if done else None,
                )
            except GeneratorExit:
                batch.abandon()
                raise
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

    def _batch(self, sequences: Sequence[SequenceState], drafting: _Drafting) -> Batch:
        if self._steps_on_device(sequences, drafting):
            return self._device_batch(sequences, int(drafting.branches))
        drafter = self.drafter if drafting.speculation else None
        vp_drafter = self.vp_drafter if drafting.branches else None
        policy = self._policy(drafting.branches)
        return DecodeBatch(self.target, drafter, sequences, self.limits, self.mask_token_id, vp_drafter, policy)

    def _steps_on_device(self, sequences: Sequence[SequenceState], drafting: _Drafting) -> bool:
        """Everything else needs the host between the passes of a step: to sample, to weigh costs, to record."""
        fixed = drafting.speculation and drafting.branches != "auto"
        return self.device_step and fixed and all(s.params.is_plain_greedy and s.trace is None for s in sequences)

    def _device_batch(self, sequences: Sequence[SequenceState], branches: int) -> Batch:
        from dflash_trt.runtime.device_decode import DeviceDecodeBatch, DeviceSlots

        if not self._free_slots:
            target, drafter, vp_drafter = cast(Any, (self.target, self.drafter, self.vp_drafter))  # on devices
            self._free_slots.append(DeviceSlots(target, drafter, vp_drafter, self.limits, self.mask_token_id))
        return DeviceDecodeBatch(self._free_slots.pop(), sequences, branches, self._free_slots.append)

    def _policy(self, branches: Branches) -> BranchPolicy:
        if branches != "auto":
            return FixedBranches(branches)
        assert self.costs is not None
        return AdaptiveBranches(self.limits.branches, self.costs)

    def _generation(self, sequence: SequenceState, drafting: _Drafting) -> Generation:
        assert sequence.finish_reason is not None
        return Generation(
            prompt_token_ids=sequence.prompt,
            token_ids=sequence.generated,
            text=sequence.text,
            finish_reason=sequence.finish_reason,
            seed=sequence.sampler.seed,
            statistics=sequence.statistics,
            trace=None if sequence.trace is None else self._trace(sequence, sequence.trace, drafting),
        )

    def _trace(self, sequence: SequenceState, steps: Sequence[StepTrace], drafting: _Drafting) -> Trace:
        occurring = {token for step in steps for token in (*step.tokens, *step.emitted)}
        occurring |= {token for step in steps for branch in step.branches for token in branch.tokens}
        return Trace(
            system=self.system,
            speculation=drafting.speculation,
            block_size=self.limits.block_size,
            vp_block_size=self.limits.vp_block_size,
            branches=drafting.branches,
            sampling=asdict(sequence.params) | {"seed": sequence.sampler.seed},
            prompt_token_ids=tuple(sequence.prompt),
            token_ids=tuple(sequence.generated),
            steps=tuple(steps),
            texts={token: self.tokenizer.decode([token], skip_special_tokens=False) for token in sorted(occurring)},
        )
