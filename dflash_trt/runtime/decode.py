"""The draft-verify loop over a batch of sequences, each in its own cache row.

Lossless by construction: whatever the drafter proposes, every emitted token is the target's own choice, drawn with
randomness that depends on (seed, position) alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dflash_trt.backends.base import Array, Cache, Session
from dflash_trt.errors import BackendError, RequestError
from dflash_trt.runtime.acceptance import Acceptance, Choose, walk
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.statistics import Stage
from dflash_trt.runtime.tree import CandidateTree


def _checked(token: np.int64) -> int:
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


class DecodeBatch:
    """Decodes some sequences to their ends: `run`, or `prefill` once, then `step` until none is active.

    Args:
        target: session of the target graph.
        drafter: session of the drafter graph; None decodes token by token.
        sequences: at most `limits.max_batch_size`, each with a prompt that passed `check_prompt`.
        mask_token_id: fills the block behind the anchor.
    """

    def __init__(
        self,
        target: Session,
        drafter: Session | None,
        sequences: Sequence[SequenceState],
        limits: Limits,
        mask_token_id: int,
    ) -> None:
        if not 1 <= len(sequences) <= limits.max_batch_size:
            raise RequestError(
                f"{len(sequences)} sequences at once; the bundle takes 1..{limits.max_batch_size} (max_batch_size)"
            )
        self.target, self.drafter = target, drafter
        self.sequences = list(sequences)
        self.limits = limits
        self.mask_token_id = mask_token_id
        longest = max(len(sequence.prompt) for sequence in sequences) + 2 * limits.block_size
        self._target_cache = self._new_cache(target, longest)
        self._draft_cache = self._new_cache(drafter, longest) if drafter else None

    @property
    def active(self) -> list[int]:
        """Rows whose sequence goes on."""
        return [row for row, sequence in enumerate(self.sequences) if sequence.finish_reason is None]

    def run(self) -> None:
        """Decodes every sequence to its end."""
        self.prefill()
        while self.active:
            self.step()

    def prefill(self) -> None:
        """Runs every prompt through the target in chunks, injects its features, and emits each first token."""
        for row, sequence in enumerate(self.sequences):
            with sequence.statistics.timed("prefill"):
                self._prefill_row(row, sequence)

    def step(self) -> None:
        """One draft, one verification, one acceptance for every active row."""
        rows = self.active
        size = max(self._block_size(self.sequences[row]) for row in rows)
        self._grow(max(self.sequences[row].committed for row in rows) + 2 * self.limits.block_size)
        trees = self._draft(rows, size) if self.drafter and size > 1 else self._anchors(rows)
        self._verify(rows, trees)

    # -- caches

    def _new_cache(self, session: Session, needed: int) -> Cache:
        return session.new_cache(len(self.sequences), session.capacity_for(needed, self.limits.capacity))

    def _grow(self, needed: int) -> None:
        """Makes room for `needed` slots in every row."""
        if self._target_cache.capacity < needed:
            capacity = self.target.capacity_for(needed, self.limits.capacity)
            self._target_cache = self._target_cache.resized(capacity)
            if self._draft_cache is not None:
                self._draft_cache = self._draft_cache.resized(capacity)

    # -- prefill

    def _prefill_row(self, row: int, sequence: SequenceState) -> None:
        cache = self._target_cache.row(row)
        prompt = np.asarray(sequence.prompt, np.int64)
        greedy = sequence.params.is_plain_greedy
        wanted = ["token_ids" if greedy else "logits", *(["context_features"] if self.drafter else [])]
        for start in range(0, len(prompt), self.limits.prefill_chunk):
            chunk = prompt[start : start + self.limits.prefill_chunk]
            outputs = self.target.run(chunk_inputs(chunk, start), wanted, cache)
            sequence.statistics.target_passes += 1
            if self.drafter:
                self._inject(row, sequence, outputs["context_features"], len(chunk), start)
        sequence.committed = len(prompt)
        if greedy:
            first = _checked(outputs["token_ids"][0, 0])
        else:
            first = sequence.sampler.choose(outputs["logits"][0, 0], len(prompt), sequence.history)
        sequence.emit([first])

    def _inject(self, row: int, sequence: SequenceState, features: Array, size: int, start: int) -> None:
        """Writes a chunk's features into the drafter's cache; its one-token block is drafted for nothing."""
        assert self.drafter is not None
        assert self._draft_cache is not None
        inputs = {
            "context_features": features,
            "feature_len": np.array([size]),
            "context_len": np.array([start]),
            "block_ids": np.array([[self.mask_token_id]]),
            "block_position_ids": np.array([[start + size]]),
            "visibility": np.ones((1, 1, 1), np.bool_),
        }
        self.drafter.run(inputs, [], self._draft_cache.row(row))
        sequence.statistics.draft_passes += 1
        sequence.pending, sequence.pending_len = features[0, :1], 0

    # -- draft

    def _block_size(self, sequence: SequenceState) -> int:
        """Anchor and drafts: no more drafts than tokens that may come, as in the authors' loop; none for the last."""
        if self.drafter is None or sequence.remaining == 1:
            return 1
        return min(self.limits.block_size, sequence.remaining + 1)

    def _anchors(self, rows: list[int]) -> list[CandidateTree]:
        return [CandidateTree.chain([self.sequences[row].anchor]) for row in rows]

    def _draft(self, rows: list[int], size: int) -> list[CandidateTree]:
        """Injects pending features and drafts one block per active row; returns a chain for each."""
        assert self.drafter is not None
        assert self._draft_cache is not None
        batch = len(self.sequences)
        blocks = np.full((batch, size), self.mask_token_id, np.int64)
        lengths, contexts = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        for row in rows:
            sequence = self.sequences[row]
            blocks[row, 0] = sequence.anchor
            lengths[row] = sequence.pending_len
            contexts[row] = sequence.committed - sequence.pending_len
        inputs = {
            "context_features": self._pending_features(rows),
            "feature_len": lengths,
            "context_len": contexts,
            "block_ids": blocks,
            "block_position_ids": (contexts + lengths)[:, None] + np.arange(size),
            "visibility": np.ones((batch, size, size), np.bool_),
        }
        with self._timed(rows, "draft"):
            drafts = self.drafter.run(inputs, ["draft_ids"], self._draft_cache)["draft_ids"]
        trees = []
        for row in rows:
            sequence = self.sequences[row]
            sequence.statistics.draft_passes += 1
            own_size = self._block_size(sequence)
            trees.append(CandidateTree.chain([sequence.anchor, *drafts[row, 1:own_size].tolist()]))
        return trees

    def _pending_features(self, rows: list[int]) -> Array:
        """[B, N, T*H]: each row's pending features, padded with whatever rows (`feature_len` says which count)."""
        assert self.drafter is not None
        longest = max(1, *(self.sequences[row].pending_len for row in rows))
        return self.drafter.stack([sequence.pending for sequence in self.sequences], longest)

    # -- verify

    def _verify(self, rows: list[int], trees: list[CandidateTree]) -> None:
        """One target pass over all trees, then each row's walk."""
        batch, size = len(self.sequences), max(len(tree) for tree in trees)
        tokens, depths = np.zeros((batch, size), np.int64), np.zeros((batch, size), np.int64)
        visibility = np.repeat(np.eye(size, dtype=np.bool_)[None], batch, axis=0)
        contexts = np.zeros(batch, np.int64)
        for row, tree in zip(rows, trees, strict=True):
            tokens[row], visibility[row], depths[row] = tree.padded(size)
            contexts[row] = self.sequences[row].committed
        inputs = {
            "input_ids": tokens,
            "position_ids": contexts[:, None] + depths,
            "visibility": visibility,
            "context_len": contexts,
            "logit_rows": np.repeat(np.arange(size)[None], batch, axis=0),
        }
        wanted = ["context_features"] if self.drafter else []
        plain = [self.sequences[row].params.is_plain_greedy for row in rows]
        wanted += ["token_ids"] if any(plain) else []
        wanted += ["logits"] if not all(plain) else []
        with self._timed(rows, "verify"):
            outputs = self.target.run(inputs, wanted, self._target_cache)
        for row, tree in zip(rows, trees, strict=True):
            sequence = self.sequences[row]
            sequence.statistics.target_passes += 1
            with sequence.statistics.timed("host"):
                acceptance = walk(tree, self._chooser(row, tree, outputs))
                self._commit(row, tree, acceptance, outputs.get("context_features"))

    def _chooser(self, row: int, tree: CandidateTree, outputs: dict[str, Array]) -> Choose:
        sequence = self.sequences[row]
        if sequence.params.is_plain_greedy:
            ids = outputs["token_ids"][row]
            return lambda node, path: _checked(ids[node])
        logits, first = outputs["logits"][row], sequence.committed + 1
        return lambda node, path: sequence.sampler.choose(
            logits[node], first + int(tree.depths[node]), sequence.history, path
        )

    def _commit(self, row: int, tree: CandidateTree, acceptance: Acceptance, features: Array | None) -> None:
        """Emits the accepted tokens, moves the path's cache rows into place and keeps its features pending."""
        sequence = self.sequences[row]
        yielded = sequence.emit(acceptance.tokens)
        sequence.statistics.record_step(proposed=len(tree) - 1, yielded=yielded)
        path = acceptance.path
        if path != list(range(len(path))):
            self._target_cache.move(row, [sequence.committed + node for node in path], sequence.committed)
        sequence.committed += len(path)
        if features is not None:
            sequence.pending, sequence.pending_len = features[row][path], len(path)

    @contextmanager
    def _timed(self, rows: list[int], stage: Stage) -> Iterator[None]:
        """Times a pass; the sequences that share it share its time."""
        started = time.perf_counter()
        yield
        share = (time.perf_counter() - started) / len(rows)
        for row in rows:
            self.sequences[row].statistics.seconds[stage] += share
