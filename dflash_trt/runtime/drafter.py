"""A drafter at work on a batch: its cache of injected features, and the features that wait to be injected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.backends.base import Array, Cache, Session
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import Role


@dataclass(frozen=True)
class Block:
    """What one row of the batch asks a drafter to fill.

    Attributes:
        ids: i64 [Q], anchors and kept drafts, and mask tokens elsewhere.
        offsets: i64 [Q], positions counted from the anchor's.
        visibility: bool [Q, Q].
    """

    ids: np.ndarray
    offsets: np.ndarray
    visibility: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], size: int, mask_token_id: int) -> Block:
        """Candidates one below the other, each filled up with masks to `size` tokens; each sees only itself."""
        ids = np.full((len(rows), size), mask_token_id, np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        owner = np.arange(len(rows)).repeat(size)
        return cls(ids.reshape(-1), np.tile(np.arange(size), len(rows)), owner[:, None] == owner)


def block_inputs(block: Block, features: Array, feature_len: int, context_len: int) -> dict[str, Array]:
    """Inputs of a drafter graph for one row: `feature_len` of features [1, N, T*H] go behind `context_len` slots."""
    return {
        "context_features": features,
        "feature_len": np.array([feature_len]),
        "context_len": np.array([context_len]),
        "block_ids": block.ids[None],
        "block_position_ids": context_len + feature_len + block.offsets[None],
        "visibility": block.visibility[None],
    }


def inject(
    session: Session, cache: Cache, features: Array, size: int, context_len: int, mask_token_id: int
) -> None:
    """Writes the first `size` of features [1, N, T*H] into a cache of one row that holds `context_len`."""
    unused = Block.of([[]], 1, mask_token_id)
    session.run(block_inputs(unused, features, size, context_len), [], cache)


def not_finite(role: Role) -> BackendError:
    """The error of a request for which a drafter's confidence is NaN or infinite."""
    return BackendError("a confidence is NaN or infinite", where=f"{role} graph", mend="Run `dflash-trt verify`")


@dataclass(frozen=True)
class Draft:
    """What a drafter put in each place of a block: ids i64 [Q], confidence f64 [Q] in 0..1.

    `is_finite`: False where the drafter's numbers were NaN or infinite; then they mean nothing.
    """

    ids: np.ndarray
    confidence: np.ndarray
    is_finite: bool = True


class Drafter:
    """One drafter graph over the rows of a batch.

    Invariant between steps: a row's cache and its pending features together cover all its committed tokens.

    Args:
        capacity: cache slots of each row.
        mask_token_id: fills what is to be drafted.
        full_size: tokens of a row's largest block; graphs of a fixed shape always take so many.
        full_rows: rows of features that those graphs take, ascending: the fewest that hold what is pending. What is
            more than the last of them is injected in a pass of its own.
        chunk: features that may wait at most, or `full_rows[-1]`, and so those that a pass of its own takes.
    """

    def __init__(
        self,
        session: Session,
        batch: int,
        capacity: int,
        mask_token_id: int,
        full_size: int,
        full_rows: Sequence[int],
        chunk: int,
    ) -> None:
        self.mask_token_id = mask_token_id
        self._session, self._full_size, self._full_rows = session, full_size, full_rows
        self._chunk = max(full_rows[-1], chunk)
        self.cache = session.new_cache(batch, capacity)
        self._injected = np.zeros(batch, np.int64)
        self._written = np.zeros(batch, np.bool_)  # rows that a pass may have put something into
        self._pending: list[list[Array]] = [[] for _ in range(batch)]
        self._waiting = [0] * batch  # features in all pieces of `_pending`
        self._nothing: Array = None  # no features [0, T*H], for rows without pending ones

    @property
    def role(self) -> Role:
        """Of the graph."""
        return self._session.graph.role

    def resize(self, capacity: int) -> None:
        """Gives every row `capacity` slots."""
        self.cache = self.cache.resized(capacity)

    def free(self, row: int) -> None:
        """Forgets a row's sequence, and sets what it left in the cache to zero."""
        if self._written[row]:
            self.cache.clear_row(row)
            self._written[row] = False
        self._injected[row], self._pending[row], self._waiting[row] = 0, [], 0

    def move_row(self, source: int, destination: int) -> None:
        """Gives a row's sequence another row."""
        if self._injected[source]:
            self.cache.copy_row(source, destination, int(self._injected[source]))
            self._written[destination] = True
        self._injected[destination] = self._injected[source]
        self._pending[destination], self._waiting[destination] = self._pending[source], self._waiting[source]
        self.free(source)

    def pending(self, row: int) -> int:
        """How many features of `row` wait."""
        return self._waiting[row]

    def accept(self, row: int, features: Array) -> None:
        """Takes features [n, T*H] of tokens just committed, and keeps them: a later pass injects them."""
        self._pending[row].append(features)
        self._waiting[row] += len(features)
        if self._nothing is None:
            self._nothing = features[:0]

    def overdue(self, row: int, size: int) -> bool:
        """Whether `size` features more would be too many to keep."""
        waiting = self._waiting[row]
        return waiting > 0 and waiting + size > self._chunk

    def inject_pending(self, row: int) -> None:
        """Writes a row's waiting features into its cache, in a pass of their own."""
        size, cache = self._waiting[row], self.cache.rows(row, row + 1)
        self._written[row] = True
        features = self._session.stack([self._pending[row]], size)
        inject(self._session, cache, features, size, int(self._injected[row]), self.mask_token_id)
        self._injected[row] += size
        self._pending[row], self._waiting[row] = [], 0

    def late(self, rows: Iterable[int], batch: int) -> list[int]:
        """Those of the rows with more waiting than a drafting pass over the first `batch` rows takes.

        Where shapes are free, a pass over one row takes all: it reads every weight in any case. In a pass over several,
        the others would be padded to as many features.
        """
        if batch == 1 and not self._session.fixed_shapes:
            return []
        return [row for row in rows if self.pending(row) > self._full_rows[-1]]

    def block_size(self, blocks: Mapping[int, Block]) -> int:
        """Tokens of each row in the pass that fills these blocks."""
        return self._full_size if self._session.fixed_shapes else max(len(block.ids) for block in blocks.values())

    def draft(self, blocks: Mapping[int, Block], batch: int) -> dict[int, Draft]:
        """Injects the pending features of the rows in `blocks`, none of them late, and fills the blocks.

        One pass over the first `batch` rows.
        """
        size = self.block_size(blocks)
        rows = max(1, *map(self.pending, blocks))
        if self._session.fixed_shapes:
            rows = next(full for full in self._full_rows if full >= rows)
        ids = np.full((batch, size), self.mask_token_id, np.int64)
        offsets, lengths = np.zeros((batch, size), np.int64), np.zeros(batch, np.int64)
        visibility = np.repeat(np.eye(size, dtype=np.bool_)[None], batch, axis=0)
        contexts = self._injected[:batch].copy()  # a row that rests gets what is padding behind what it holds
        for row, block in blocks.items():
            own = len(block.ids)
            ids[row, :own], offsets[row, :own], visibility[row, :own, :own] = block.ids, block.offsets, block.visibility
            lengths[row] = self.pending(row)
        pieces = [(self._pending[row] if row in blocks else []) or [self._nothing] for row in range(batch)]
        inputs = {
            "context_features": self._session.stack(pieces, rows),
            "feature_len": lengths,
            "context_len": contexts,
            "block_ids": ids,
            "block_position_ids": (contexts + lengths)[:, None] + offsets,
            "visibility": visibility,
        }
        self._written[:batch] = True
        results = self._session.run(inputs, ["draft_ids", "confidence"], self.cache.rows(0, batch))
        drafts = {}
        for row, block in blocks.items():
            self._injected[row] += lengths[row]
            self._pending[row], self._waiting[row] = [], 0
            own = len(block.ids)
            confidence = results["confidence"][row, :own].astype(np.float64)
            finite = bool(np.isfinite(confidence).all())
            drafts[row] = Draft(results["draft_ids"][row, :own], np.clip(confidence, 0, 1), finite)
        return drafts
