"""Driving a target or drafter session by hand, one pass at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_trt.checkpoint.spec import DrafterSpec


def causal(queries: int, batch: int = 1) -> np.ndarray:
    """The visibility of a chain: bool [B, Q, Q]."""
    return np.broadcast_to(np.tril(np.ones((queries, queries), bool)), (batch, queries, queries))


def target_pass(
    session: Any,
    cache: Any,
    ids: np.ndarray,
    context_len: np.ndarray,
    visibility: np.ndarray | None = None,
    depth: np.ndarray | None = None,
    logit_rows: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """One pass over ids [B, Q] after context_len [B] tokens: a chain, unless visibility and depth [B, Q] say more."""
    batch, queries = ids.shape
    every = np.broadcast_to(np.arange(queries), (batch, queries))
    inputs = {
        "input_ids": ids,
        "position_ids": context_len[:, None] + (every if depth is None else depth),
        "visibility": causal(queries, batch) if visibility is None else visibility,
        "context_len": context_len,
        "logit_rows": every if logit_rows is None else logit_rows,
    }
    out = session.run(inputs, ["logits", "token_ids", "context_features"], cache)
    return {name: np.asarray(value) for name, value in out.items()}


def draft_pass(
    session: Any,
    cache: Any,
    features: np.ndarray,
    feature_len: np.ndarray,
    context_len: np.ndarray,
    block_ids: np.ndarray,
) -> dict[str, np.ndarray]:
    """Injects features [B, N, F], feature_len [B] of them valid, after context_len [B]; drafts block_ids [B, Q]."""
    batch, queries = block_ids.shape
    inputs = {
        "context_features": features,
        "feature_len": feature_len,
        "context_len": context_len,
        "block_ids": block_ids,
        "block_position_ids": (context_len + feature_len)[:, None] + np.arange(queries),
        "visibility": np.ones((batch, queries, queries), bool),
    }
    return session.run(inputs, ["draft_ids", "confidence", "logits"], cache)


class RandomInputs:
    """Random inputs for a drafter of spec `spec`."""

    spec: DrafterSpec

    def features(self, batch: int, rows: int, seed: int) -> np.ndarray:
        """Like a residual stream: some large values among small ones."""
        rng = np.random.default_rng(seed)
        size = len(self.spec.taps) * self.spec.target_hidden_size
        return (rng.standard_normal((batch, rows, size)) * rng.choice((1, 20), size)).astype(np.float32)

    def block(self, batch: int, seed: int) -> np.ndarray:
        """An anchor and masks."""
        ids = np.full((batch, self.spec.block_size), self.spec.mask_token_id)
        ids[:, 0] = np.random.default_rng(seed).integers(0, self.spec.vocab_size, batch)
        return ids
