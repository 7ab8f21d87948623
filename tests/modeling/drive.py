"""Driving a target or drafter session by hand, one pass at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


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
