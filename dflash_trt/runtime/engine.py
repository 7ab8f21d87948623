"""`Engine`: a loaded bundle that generates text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args, overload

from dflash_trt.backends.base import Session
from dflash_trt.errors import RequestError, UsageError
from dflash_trt.export.contract import Role
from dflash_trt.runtime.adaptive_drafting import AdaptiveDrafting, Experience
from dflash_trt.runtime.branching import (
    AdaptiveBranches,
    BranchPolicy,
    FixedBranches,
    PassCosts,
    chosen_branches,
    chosen_drafts,
)
from dflash_trt.runtime.decode import Batch, DecodeBatch
from dflash_trt.runtime.generation import Generation, StreamEvent, StreamReader, generation_of
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import DEFAULT_QUEUE, Scheduler
from dflash_trt.runtime.sequence import SequenceState, check_prompt
from dflash_trt.runtime.slots import SlotBatch
from dflash_trt.runtime.speculation import AdaptivePlan, FixedPlan, Plan, Speculation, SpeculationPolicy
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.runtime.trace import Branches, Drafts, StepTrace, System, Trace

if TYPE_CHECKING:
    from dflash_trt.runtime.device_decode import DeviceSlots

Prompt = str | Sequence[int]


class _Drafting(NamedTuple):
    """How a generation drafts; without speculation there are no branches and no drafts."""

    speculation: bool
    branches: Branches
    drafts: Drafts

    @property
    def is_adaptive(self) -> bool:
        """Whether each step decides how much it verifies."""
        return "auto" in (self.branches, self.drafts)


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
        self._experience: Experience | None = None
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
        branches: Branches | None = None, drafts: Drafts | None = None, trace: bool = False, **sampling: Any,
    ) -> Generation: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[True], speculation: bool = True,
        branches: Branches | None = None, drafts: Drafts | None = None, trace: bool = False, **sampling: Any,
    ) -> Iterator[StreamEvent]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, speculation: bool = True,
        branches: Branches | None = None, drafts: Drafts | None = None, trace: bool = False, **sampling: Any,
    ) -> list[Generation]: ...  # fmt: skip

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        stream: bool = False,
        speculation: bool = True,
        branches: Branches | None = None,
        drafts: Drafts | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Generation | Iterator[StreamEvent] | list[Generation]:
        """Generates from one prompt, or from a list of prompts.

        Args:
            prompt: text, encoded with the tokenizer's special tokens, or token ids taken as they are. Of a list of
                these, `limits.max_batch_size` are decoded at once, each as it would be alone; the next one begins when
                one ends. (For requests that come one by one there is `AsyncEngine`.)
            stream: gives an iterator of events, one per step; for one prompt.
            speculation: False decodes token by token with the same engine; the output is the same.
            branches: of a D2SD bundle, with speculation: how many a step has at most, 0 for none (DFlash), "auto" for
                as many as pay; None for as many as the bundle was built for. The output is the same.
            drafts: how many drafts behind the anchor a step verifies at most, before branches: "auto" for as many as
                pay, which may be none; None for all of a block. The output is the same.
            trace: keeps what each step did.
            sampling: fields of `SamplingParams`.

        Raises:
            RequestError: an empty or too long prompt. UsageError: a sampling parameter, `branches` or
                `drafts` out of range.
        """
        drafting, params = self._drafting(speculation, branches, drafts), SamplingParams(**sampling)
        several = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], Integral)
        if several and stream:
            raise UsageError("takes one prompt, not a list", where="stream", mend="Use AsyncEngine for several")
        prompts = cast(Sequence[Prompt], prompt if several else [prompt])
        sequences = [self.sequence(one, params) for one in prompts]
        for sequence in sequences:
            sequence.trace = [] if trace else None
        if stream:
            return self._stream(sequences[0], drafting)
        self._run(sequences, drafting)
        outputs = [self._generation(drafting, sequence) for sequence in sequences]
        return outputs if several else outputs[0]

    def scheduler(
        self,
        *,
        speculation: Speculation = "auto",
        branches: Branches | None = None,
        max_queue: int = DEFAULT_QUEUE,
    ) -> Scheduler:
        """Continuous batching over this engine's sessions, with caches of its own. `EngineWorker` runs it in a thread.

        Args:
            speculation: "auto" drafts as much as pays, "on" always, "off" never; no output token depends on it.
            branches: as in `generate`; with "auto" speculation the most.
            max_queue: sequences that may wait for a slot.

        Raises:
            UsageError: an option out of range.
        """
        if speculation not in get_args(Speculation):
            raise UsageError(f"{speculation!r} must be auto, on or off", where="speculation", mend="Choose one of them")
        drafting = self._drafting(speculation != "off", branches)
        if speculation != "auto":
            return self._scheduler(drafting, self.limits.max_batch_size, max_queue)
        most = self._most_branches(drafting)
        batch = self._slots(drafting._replace(branches=most), self.limits.max_batch_size)
        return Scheduler(batch, AdaptivePlan(self.limits, most, self.costs), _fixed_branches, max_queue)

    def _scheduler(self, drafting: _Drafting, slots: int, max_queue: int) -> Scheduler:
        """One whose steps are all alike."""
        most = self._most_branches(drafting)
        plan: SpeculationPolicy = FixedPlan(Plan(self._most_drafts(drafting), most))
        policy = self._policy(drafting)
        return Scheduler(self._slots(drafting, slots), plan, lambda plan: policy, max_queue)

    def _slots(self, drafting: _Drafting, slots: int) -> SlotBatch:
        drafter = self.drafter if drafting.speculation else None
        vp_drafter = self.vp_drafter if drafting.branches else None
        return SlotBatch(self.target, drafter, self.limits, self.mask_token_id, vp_drafter, slots)

    def _run(self, sequences: list[SequenceState], drafting: _Drafting) -> None:
        """Decodes all of them to their ends. Raises the first error of one."""
        if len(sequences) > 1 and not self._steps_on_device(sequences, drafting):
            slots = min(len(sequences), self.limits.max_batch_size)
            scheduler = self._scheduler(drafting, slots, max_queue=len(sequences))
            for sequence in sequences:
                scheduler.submit(sequence)
            while not scheduler.is_idle:
                scheduler.step()
                if (error := next((s.error for s in sequences if s.error is not None), None)) is not None:
                    raise error
            return
        for start in range(0, len(sequences), self.limits.max_batch_size):
            self._batch(sequences[start : start + self.limits.max_batch_size], drafting).run()

    def _drafting(self, speculation: bool, branches: Branches | None, drafts: Drafts | None = None) -> _Drafting:
        """How to draft. Raises UsageError where the bundle cannot have these branches or drafts."""
        if not isinstance(speculation, bool):
            mend = 'Choose one; "auto", "on" and "off" are of AsyncEngine'
            raise UsageError(f"{speculation!r} must be True or False", where="speculation", mend=mend)
        limits, costs, vp_drafter = self.limits, self.costs, self.vp_drafter is not None
        found = chosen_branches(
            branches, limits.branches, speculation=speculation, vp_drafter=vp_drafter, costs=costs
        )
        verified = chosen_drafts(
            drafts, limits.block_size, speculation=speculation, branches=found, costs=costs
        )
        return _Drafting(speculation, found, verified)

    def _most_drafts(self, drafting: _Drafting) -> int:
        return self.limits.block_size - 1 if drafting.drafts == "auto" else drafting.drafts

    def _stream(self, sequence: SequenceState, drafting: _Drafting) -> Iterator[StreamEvent]:
        batch = self._batch([sequence], drafting)
        reader = StreamReader(sequence, partial(self._generation, drafting))
        batch.prefill()
        while True:
            done = not batch.active
            try:
                yield reader.event()
            except GeneratorExit:
                batch.abandon()
                raise
            if done:
                return
            batch.step()

    def sequence(self, prompt: Prompt, params: SamplingParams) -> SequenceState:
        """A prompt with what to do with it, for a scheduler or a batch.

        Raises:
            RequestError: an empty or too long prompt, or ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("is empty", where="prompt", mend="Give some text")
            self.tokenizer.check_length(prompt, self.limits.max_input_len)
            ids = self.tokenizer.encode(prompt)
        else:
            if not all(isinstance(token, Integral) for token in prompt):
                raise RequestError("must be one text, or token ids", where="prompt", mend="Give several one by one")
            ids = [int(token) for token in prompt]
        check_prompt(ids, self.limits, self.vocab_size)
        return SequenceState(ids, params, self.limits, self.eos_token_ids, self.tokenizer.stream(params.stop))

    def _batch(self, sequences: Sequence[SequenceState], drafting: _Drafting) -> Batch:
        if self._steps_on_device(sequences, drafting):
            return self._device_batch(sequences, int(drafting.branches))
        drafter = self.drafter if drafting.speculation else None
        vp_drafter = self.vp_drafter if drafting.branches else None
        common = (self.target, drafter, sequences, self.limits, self.mask_token_id, vp_drafter)
        drafts = self._most_drafts(drafting)
        if len(sequences) > 1 or not drafting.is_adaptive:
            return DecodeBatch(*common, policy=self._policy(drafting), drafts=drafts)
        return DecodeBatch(*common, drafts=drafts, adaptive=self._adaptive(drafting))

    def _steps_on_device(self, sequences: Sequence[SequenceState], drafting: _Drafting) -> bool:
        """Everything else needs the host between the passes of a step: to sample, to weigh costs, to record."""
        fixed = drafting.speculation and not drafting.is_adaptive and drafting.drafts == self.limits.block_size - 1
        return self.device_step and fixed and all(s.params.is_plain_greedy and s.trace is None for s in sequences)

    def _device_batch(self, sequences: Sequence[SequenceState], branches: int) -> Batch:
        from dflash_trt.runtime.device_decode import DeviceDecodeBatch, DeviceSlots

        if not self._free_slots:
            target, drafter, vp_drafter = cast(Any, (self.target, self.drafter, self.vp_drafter))  # on devices
            self._free_slots.append(DeviceSlots(target, drafter, vp_drafter, self.limits, self.mask_token_id))
        return DeviceDecodeBatch(self._free_slots.pop(), sequences, branches, self._free_slots.append)

    def _policy(self, drafting: _Drafting) -> BranchPolicy | None:
        """For any number of sequences: it learns nothing."""
        if not drafting.is_adaptive:
            return FixedBranches(int(drafting.branches)) if drafting.branches else None
        assert self.costs is not None
        return AdaptiveBranches(self._most_branches(drafting), self.costs)

    def _adaptive(self, drafting: _Drafting) -> AdaptiveDrafting:
        """For one sequence."""
        assert self.costs is not None
        if self._experience is None:
            self._experience = Experience(self.costs)
        return AdaptiveDrafting(self._most_branches(drafting), self.costs, self._experience)

    def _most_branches(self, drafting: _Drafting) -> int:
        return self.limits.branches if drafting.branches == "auto" else drafting.branches

    def _generation(self, drafting: _Drafting, sequence: SequenceState) -> Generation:
        trace = None if sequence.trace is None else self._trace(sequence, sequence.trace, drafting)
        return generation_of(sequence, trace)

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


def _fixed_branches(plan: Plan) -> BranchPolicy | None:
    """As many as a step's plan says."""
    return FixedBranches(plan.branches) if plan.branches else None
