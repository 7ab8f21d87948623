"""The draft-verify loop over a batch of sequences, each in its own cache row.

Lossless by construction: whatever the drafter proposes, every emitted token is the target's own choice, drawn with
randomness that depends on (seed, position) alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from dflash_trt.backends.base import Array, Cache, Session
from dflash_trt.errors import BackendError, DflashError, RequestError
from dflash_trt.runtime.acceptance import Acceptance, Choose, walk
from dflash_trt.runtime.adaptive_drafting import AdaptiveDrafting
from dflash_trt.runtime.branching import BranchPolicy
from dflash_trt.runtime.drafter import Drafter
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.proposer import Proposal, Proposer
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.statistics import StepMeter, host_time, timed
from dflash_trt.runtime.tree import CandidateTree


def checked(token: int | np.int64) -> int:
    """A token id of the target graph, which is -1 where its logits are not finite."""
    if token < 0:
        raise BackendError(
            "the target's logits are NaN or infinite", where="target graph", mend="Run `dflash-trt verify`"
        )
    return int(token)


def chunk_inputs(tokens: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """Inputs of the target graph for one row's tokens i64 [Q] from position `start` on; logits of the last one."""
    size = len(tokens)
    return {
        "input_ids": tokens[None],
        "position_ids": np.arange(start, start + size)[None],
        "visibility": np.tri(size, dtype=np.bool_)[None],
        "context_len": np.array([start]),
        "logit_rows": np.array([[size - 1]]),
    }


class Batch(ABC):
    """Decodes some sequences to their ends: `run`, or `prefill` once, then `step` until none is active.

    What the host loop (`DecodeBatch`) and the loop of whole device steps (`device_decode.DeviceDecodeBatch`) share.

    Args:
        target: session of the target graph.
        sequences: at most `limits.max_batch_size`, each with a prompt that passed `check_prompt`.
        speculation: whether there is a drafter, which takes the prompts' features.
    """

    _target_cache: Cache

    def __init__(
        self, target: Session, sequences: Sequence[SequenceState], limits: Limits, *, speculation: bool
    ) -> None:
        if len(sequences) > limits.max_batch_size:
            raise RequestError(
                f"{len(sequences)} sequences at once; the bundle takes 1..{limits.max_batch_size} (max_batch_size)"
            )
        self.target = target
        self.rows = dict(enumerate(sequences))
        self.limits = limits
        self._speculation = speculation

    @property
    def sequences(self) -> list[SequenceState]:
        """Those of the rows in use."""
        return list(self.rows.values())

    @property
    def active(self) -> list[int]:
        """Rows whose sequence goes on."""
        return [row for row, sequence in self.rows.items() if sequence.finish_reason is None]

    def run(self) -> None:
        """Decodes every sequence to its end."""
        self.prefill()
        while self.active:
            self.step()

    def prefill(self) -> None:
        """Runs every prompt through the target in chunks, injects its features, and emits each first token."""
        for row, sequence in self.rows.items():
            while not sequence.is_prefilled:
                self.prefill_chunk(row, sequence)

    def prefill_chunk(self, row: int, sequence: SequenceState) -> None:
        """Runs the next chunk of a prompt through the target and injects its features; the last emits the first token.

        Chunks depend on the prompt alone, never on what else is going on: so do the numbers that come of them.
        """
        with host_time([sequence.statistics], "prefill"):
            self._prefill_chunk(row, sequence)

    def step(self) -> None:
        """One proposal, one verification, one acceptance for every active row."""
        sequences = {row: self.rows[row] for row in self.active}
        with host_time([sequence.statistics for sequence in sequences.values()]):
            self._step(sequences)

    @abstractmethod
    def abandon(self) -> None:
        """Gives up what is active, between two steps; nothing is called after that."""

    @abstractmethod
    def _step(self, sequences: dict[int, SequenceState]) -> None:
        """One step of these rows."""

    @abstractmethod
    def _inject(self, row: int, sequence: SequenceState, features: Array, size: int) -> None:
        """Hands on the first `size` features [1, N, T*H], those of the prompt's chunk behind what is committed."""

    @property
    def chunk_size(self) -> int:
        """Tokens of a prompt that one pass takes."""
        return min(self.limits.prefill_chunk, self.target.longest_pass or self.limits.prefill_chunk)

    def _prefill_chunk(self, row: int, sequence: SequenceState) -> None:
        start, prompt = sequence.committed, sequence.prompt
        chunk = np.asarray(prompt[start : start + self.chunk_size], np.int64)
        greedy, last = sequence.params.is_plain_greedy, start + len(chunk) == len(prompt)
        wanted = ["token_ids" if greedy else "logits"] if last else []
        wanted += ["context_features"] if self._speculation else []
        with timed("prefill", [sequence.statistics]):
            outputs = self.target.run(chunk_inputs(chunk, start), wanted, self._target_cache.rows(row, row + 1))
        sequence.statistics.target_passes += 1
        if self._speculation:
            self._inject(row, sequence, outputs["context_features"], len(chunk))
        sequence.committed += len(chunk)
        if last and greedy:
            sequence.emit([checked(outputs["token_ids"][0, 0])])
        elif last:
            sequence.emit([sequence.sampler.choose(outputs["logits"][0, 0], len(prompt), sequence.history)])


class DecodeBatch(Batch):
    """The host loop: it sees what every pass gives, and so it serves whatever is asked.

    Args:
        target: session of the target graph.
        drafter: session of the drafter graph; None decodes token by token.
        sequences: as of `Batch`.
        mask_token_id: fills the block behind the anchor.
        vp_drafter, policy: session of the VP drafter graph, and what chooses the branches (D2SD) and prunes the tree.
        slots: rows to make caches for; None for as many as there are sequences.
        drafts: of a trunk at most; None for whole blocks.
        adaptive: the policy, where it learns from each step; for one sequence.
    """

    def __init__(
        self,
        target: Session,
        drafter: Session | None,
        sequences: Sequence[SequenceState],
        limits: Limits,
        mask_token_id: int,
        vp_drafter: Session | None = None,
        policy: BranchPolicy | None = None,
        slots: int | None = None,
        drafts: int | None = None,
        adaptive: AdaptiveDrafting | None = None,
    ) -> None:
        super().__init__(target, sequences, limits, speculation=drafter is not None)
        slots = len(sequences) if slots is None else slots
        longest = max((len(sequence.prompt) for sequence in sequences), default=0) + limits.step_slots
        capacity = target.capacity_for(longest, limits.capacity)
        self.meter = StepMeter()
        self._policy = policy if adaptive is None else adaptive
        self._drafts = limits.block_size - 1 if drafts is None else drafts
        self._adaptive = adaptive
        self._target_cache = target.new_cache(slots, capacity)
        self._proposer = None
        if drafter is not None:
            shape, path, chunk = (slots, capacity, mask_token_id), limits.longest_path, self.chunk_size
            drafters = [Drafter(drafter, *shape, limits.block_size, (path,), chunk)]
            if vp_drafter is not None:
                block = limits.redraft_rows * limits.vp_block_size
                drafters.append(Drafter(vp_drafter, *shape, block, (path, limits.longest_pending), chunk))
            self._proposer = Proposer(limits, drafters, self.meter, self._fault)

    def _inject(self, row: int, sequence: SequenceState, features: Array, size: int) -> None:
        assert self._proposer is not None
        self._proposer.accept(row, sequence, self._kept(features[0], list(range(size))))

    def abandon(self) -> None:
        """Caches and pending features go with the batch."""

    def _step(self, sequences: dict[int, SequenceState]) -> None:
        self._grow(max(sequence.committed for sequence in sequences.values()) + self.limits.step_slots)
        if self._adaptive is None:
            self._advance(sequences, self._drafts, self._policy)
            return
        started = time.perf_counter()
        self._advance(sequences, self._adaptive.drafts(self._drafts), self._policy)
        self._adaptive.observe(self.meter, time.perf_counter() - started)

    def _grow(self, needed: int) -> None:
        """Makes room for `needed` slots in every row."""
        if self._target_cache.capacity < needed:
            self._resize(self.target.capacity_for(needed, self.limits.capacity))

    def _resize(self, capacity: int) -> None:
        self._target_cache = self._target_cache.resized(capacity)
        if self._proposer is not None:
            self._proposer.resize(capacity)

    def _advance(self, sequences: dict[int, SequenceState], drafts: int, policy: BranchPolicy | None) -> None:
        """One step with at most so many drafts in a trunk, and the policy's branches."""
        self.meter.reset()
        # Rows behind the last one that takes part are left out; not where that would change a fixed shape.
        rows = 1 + max(self.rows if self.target.fixed_shapes else sequences)
        if self._proposer is None:
            drafts, proposals = 0, {row: Proposal.anchor(sequence.anchor) for row, sequence in sequences.items()}
        else:
            proposals = self._proposer.propose(sequences, rows, drafts, policy)
        if proposals:
            self._verify(proposals, rows, full=drafts > 0)

    def _fault(self, row: int, error: DflashError) -> None:
        """Called with the error of one row; here it is that of the whole batch."""
        raise error

    def _verify(self, proposals: dict[int, Proposal], batch: int, *, full: bool) -> None:
        """One target pass over the first `batch` rows with all trees, then each row's walk.

        Args:
            full: whether graphs of a fixed shape take the largest tree; else they take anchors alone.
        """
        size = max(len(proposal.tree) for proposal in proposals.values())
        if self.target.fixed_shapes and full:
            size = self.limits.tree_size
        tokens, depths = np.zeros((batch, size), np.int64), np.zeros((batch, size), np.int64)
        visibility = np.repeat(np.eye(size, dtype=np.bool_)[None], batch, axis=0)
        contexts = np.zeros(batch, np.int64)
        for row, sequence in self.rows.items():
            # A row that rests gets what is padding behind what it holds, where nobody will see it.
            if row < batch and sequence.finish_reason is None:
                contexts[row] = sequence.committed
        for row, proposal in proposals.items():
            tokens[row], visibility[row], depths[row] = proposal.tree.padded(size)
        inputs = {
            "input_ids": tokens,
            "position_ids": contexts[:, None] + depths,
            "visibility": visibility,
            "context_len": contexts,
            "logit_rows": np.repeat(np.arange(size)[None], batch, axis=0),
        }
        wanted = ["context_features"] if self._proposer else []
        plain = [self.rows[row].params.is_plain_greedy for row in proposals]
        wanted += ["token_ids"] if any(plain) else []
        wanted += ["logits"] if not all(plain) else []
        with self.meter.timed("verify", [self.rows[row].statistics for row in proposals], batch * size):
            outputs = self.target.run(inputs, wanted, self._target_cache.rows(0, batch))
        for row, proposal in proposals.items():
            statistics, started = self.rows[row].statistics, time.perf_counter()
            statistics.target_passes += 1
            try:
                acceptance = walk(proposal.tree, self._chooser(row, proposal.tree, outputs))
            except DflashError as error:
                self._fault(row, error)
            else:
                statistics.seconds["accept"] += time.perf_counter() - started
                self._commit(row, proposal, acceptance, outputs.get("context_features"))

    def _chooser(self, row: int, tree: CandidateTree, outputs: dict[str, Array]) -> Choose:
        sequence = self.rows[row]
        if sequence.params.is_plain_greedy:
            ids = outputs["token_ids"][row]
            return lambda node, path: checked(ids[node])
        logits, first = outputs["logits"][row], sequence.committed + 1
        return lambda node, path: sequence.sampler.choose(
            logits[node], first + int(tree.depths[node]), sequence.history, path
        )

    def _commit(self, row: int, proposal: Proposal, acceptance: Acceptance, features: Array | None) -> None:
        """Emits the accepted tokens, moves the path's cache rows into place and hands its features to the drafters."""
        sequence, path = self.rows[row], acceptance.path
        yielded = sequence.emit(acceptance.tokens)
        walked = self.meter.record_walk(proposal.tree, proposal.draft, path)
        sequence.statistics.record_step(proposed=len(proposal.tree) - 1, yielded=yielded, walk=walked)
        if sequence.trace is not None:
            sequence.trace.append(proposal.traced(sequence.committed, path, acceptance.tokens[:yielded]))
        seconds, started = sequence.statistics.seconds, time.perf_counter()
        before = seconds["prefill"]
        if path != list(range(len(path))):
            self._target_cache.move(row, [sequence.committed + node for node in path], sequence.committed)
        sequence.committed += len(path)
        if self._proposer is not None:
            assert features is not None
            self._proposer.accept(row, sequence, self._kept(features[row], path))
        injected = seconds["prefill"] - before  # for want of room for more features
        seconds["move"] += time.perf_counter() - started - injected

    def _kept(self, features: Array, rows: list[int]) -> Array:
        """Rows of features [N, T*H], to be kept over later passes. Part of them is copied, or all would be kept."""
        return features if self.target.keeps_features and len(rows) == len(features) else features[rows]
