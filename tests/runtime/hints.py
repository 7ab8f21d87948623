"""Drafters that are right now and then: random ones seldom are, and steps of every acceptance length must occur."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def chance(*key: object) -> float:
    """In [0, 1), a hash of the key: the same whoever asks, whenever."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest()) / 2**32


def hinted(
    drafts: Sequence[int], candidate: Sequence[int], anchor: int, right: Sequence[int], accuracy: float, salt: str
) -> list[int]:
    """Drafts, each replaced with probability `accuracy` by the token that is right at its position.

    Args:
        drafts: of every place of the candidate.
        candidate: ids the drafter was given: the anchor, what is kept, masks.
        anchor: the position of its first token.
        right: the whole sequence that the target chooses.
    """
    given = tuple(int(token) for token in candidate)
    return [
        right[anchor + place]
        if anchor + place < len(right) and chance(salt, anchor, given, place) < accuracy
        else int(draft)
        for place, draft in enumerate(drafts)
    ]


class Hinted:
    """A drafter session whose drafts are `hinted`, candidate by candidate.

    Args:
        rights: for each row of a batch the sequence the target chooses, prompt included; a smaller batch has the first.
        confidences: values to put in place of the drafter's confidences, again by a hash; none to leave them.
    """

    def __init__(
        self,
        session: Any,
        rights: Sequence[Sequence[int]],
        accuracy: float,
        salt: str = "",
        confidences: Sequence[float] = (),
    ) -> None:
        self._session, self._rights = session, rights
        self._accuracy, self._salt, self._confidences = accuracy, salt, confidences

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, inputs: dict, outputs: Sequence[str], cache: Any) -> dict:
        results = self._session.run(inputs, outputs, cache)
        if "draft_ids" not in results:
            return results
        ids, confidence = results["draft_ids"].copy(), results["confidence"].copy()
        rows = zip(self._rights, inputs["block_ids"], inputs["block_position_ids"], strict=False)
        for row, (right, block, positions) in enumerate(rows):
            anchor = int(positions[0])
            starts = np.flatnonzero(positions == anchor).tolist()
            for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
                given = block[start:end].tolist()
                ids[row, start:end] = hinted(ids[row, start:end], given, anchor, right, self._accuracy, self._salt)
                if self._confidences:
                    confidence[row, start:end] = [
                        self._confidences[
                            int(chance("c", self._salt, anchor, tuple(given), place) * len(self._confidences))
                        ]
                        for place in range(end - start)
                    ]
        return {**results, "draft_ids": ids, "confidence": confidence}
