"""Two rules polygraphy lacks, as comparison functions for its `Comparator`: whole rows, and ids but for near ties.

Each takes the results of one pass of both sessions, by output name, and gives a verdict for every output it looks at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Pass = Mapping[str, np.ndarray]
Index = tuple[int, ...]
_TINY = float(np.finfo(np.float32).tiny)


def largest_error(errors: np.ndarray, magnitudes: np.ndarray, typical: float) -> tuple[float, Index]:
    """The largest of errors / max(magnitudes, typical), and its index."""
    shares = errors.astype(np.float64) / np.maximum(magnitudes, max(typical, _TINY))
    index = tuple(map(int, np.unravel_index(int(shares.argmax()), shares.shape)))
    return float(shares[index]), index


def row_lengths(values: np.ndarray) -> np.ndarray:
    """Euclidean lengths along the last dimension."""
    return np.linalg.norm(values.astype(np.float64), axis=-1)


@dataclass(frozen=True)
class RowsVerdict:
    """The largest error of a row, as a share of its length or of `CompareRows.typical`, and which row that is."""

    error: float
    row: Index
    limit: float

    def __bool__(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class CompareRows:
    """Of rows along the last dimension: |found - wanted| <= limit * max(|wanted|, typical).

    Attributes:
        typical: by output, the length below which rows are not measured by their own.
    """

    typical: Mapping[str, float]
    limit: float

    def __call__(self, found: Pass, wanted: Pass) -> dict[str, RowsVerdict]:
        return {name: self._compare(name, found[name], wanted[name]) for name in self.typical if name in wanted}

    def _compare(self, name: str, found: np.ndarray, wanted: np.ndarray) -> RowsVerdict:
        error, row = largest_error(row_lengths(found - wanted), row_lengths(wanted), self.typical[name])
        return RowsVerdict(error, row, self.limit)


@dataclass(frozen=True)
class IdsVerdict:
    """How many ids agree, differ where the reference hardly prefers its own, and differ; and the first of those."""

    agree: int
    near_ties: int
    differ: int
    first: Index | None

    def __bool__(self) -> bool:
        return not self.differ


@dataclass(frozen=True)
class CompareIds:
    """Ids agree, or the reference's own logits of the two lie within limit * the median magnitude of its logits.

    Attributes:
        logits: by output of ids [...], the name of the logits [..., V] they are chosen by.
    """

    logits: Mapping[str, str]
    limit: float

    def __call__(self, found: Pass, wanted: Pass) -> dict[str, IdsVerdict]:
        return {name: self._compare(found[name], wanted[name], wanted[of]) for name, of in self.logits.items()}

    def _compare(self, found: np.ndarray, wanted: np.ndarray, logits: np.ndarray) -> IdsVerdict:
        in_range = (found >= 0) & (found < logits.shape[-1])
        theirs, own = (
            np.take_along_axis(logits, ids[..., None], -1)[..., 0] for ids in (np.where(in_range, found, 0), wanted)
        )
        near = in_range & (own - theirs <= self.limit * np.median(np.abs(logits)))
        tied, wrong = (found != wanted) & near, (found != wanted) & ~near
        first = tuple(map(int, np.argwhere(wrong)[0])) if wrong.any() else None
        return IdsVerdict(int((found == wanted).sum()), int(tied.sum()), int(wrong.sum()), first)
