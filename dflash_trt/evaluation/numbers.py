"""One graph in two sessions on the same inputs: how far apart their outputs are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.backends.base import Array, Session, numpy_dtype
from dflash_trt.bundle import BundleInfo

RELATIVE_ERROR = 1e-3
AGREEMENT = 0.995
CACHES = "present_key_*, present_value_*"
_SEED = 20260206


@dataclass(frozen=True)
class OutputComparison:
    """One output of one graph."""

    output: str
    passed: bool
    measured: dict[str, Any]
    reason: str


def compare_graphs(info: BundleInfo, role: str, session: Session, reference: Session) -> Iterator[OutputComparison]:
    """Three passes over growing caches (a chunk, one token, a block); yields a comparison for every output.

    The caches are compared as they are after the last pass, all layers in one comparison.
    """
    outputs = [spec.name for spec in info.graphs[role].spec.outputs]
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*outputs, CACHES)}
    wanted: dict[str, list[np.ndarray]] = {name: [] for name in (*outputs, CACHES)}
    for results, runner in ((found, session), (wanted, reference)):
        cache = runner.new_cache(1, runner.capacity_for(64, info.limits.capacity))
        passes = _target_passes(info) if role == "target" else _drafter_passes(info)
        for inputs in passes:
            for name, value in runner.run(inputs, outputs, cache).items():
                results[name].append(_float_or_int(value))
        results[CACHES] = [_float_or_int(buffer) for buffer in cache.buffers]
    for name in found:
        yield _compare(name, found[name], wanted[name])


def _sizes(info: BundleInfo) -> tuple[tuple[int, int], ...]:
    """(context length, new tokens) of the passes, within a small capacity."""
    block = min(info.block_size, info.limits.max_seq_len)
    chunk = max(1, min(24, info.limits.capacity - block - 1))
    return ((0, chunk), (chunk, 1), (chunk + 1, min(block, info.limits.capacity - chunk - 1)))


def _target_passes(info: BundleInfo) -> Iterator[dict[str, Array]]:
    random = np.random.default_rng(_SEED)
    for context, size in _sizes(info):
        yield {
            "input_ids": random.integers(0, info.target.vocab_size, (1, size)),
            "position_ids": np.arange(context, context + size)[None],
            "visibility": np.tri(size, dtype=np.bool_)[None],
            "context_len": np.array([context]),
            "logit_rows": np.arange(size)[None],
        }


def _drafter_passes(info: BundleInfo) -> Iterator[dict[str, Array]]:
    random = np.random.default_rng(_SEED)
    width = len(info.taps) * info.drafter.target_hidden_size
    dtype = numpy_dtype(info.precision)
    size = min(info.block_size, info.limits.capacity // 4)
    context = 0
    for rows in (16, 1, 4):
        rows = min(rows, max(1, info.limits.capacity // 8))
        block = np.full((1, size), info.mask_token_id)
        block[0, 0] = random.integers(0, info.target.vocab_size)
        yield {
            "context_features": random.standard_normal((1, rows, width)).astype(dtype),
            "feature_len": np.array([rows]),
            "context_len": np.array([context]),
            "block_ids": block,
            "block_position_ids": np.arange(context + rows, context + rows + size)[None],
            "visibility": np.ones((1, size, size), np.bool_),
        }
        context += rows


def _float_or_int(value: Array) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        value = value.float().cpu().numpy()
    return value if value.dtype == np.int64 else value.astype(np.float64)


def _compare(name: str, found: list[np.ndarray], wanted: list[np.ndarray]) -> OutputComparison:
    a, b = (np.concatenate([array.reshape(-1) for array in arrays]) for arrays in (found, wanted))
    if a.dtype == np.int64:
        agreement = float(np.mean(a == b))
        passed = agreement >= AGREEMENT
        return OutputComparison(name, passed, {"agreement": agreement}, "" if passed else f"{agreement:.2%} agree")
    if not np.isfinite(a).all():
        return OutputComparison(name, False, {"finite": False}, "NaN or infinity")
    error, scale = float(np.abs(a - b).max()), float(np.abs(b).max())
    passed = error <= RELATIVE_ERROR * scale
    measured = {"max_abs_error": error, "max_abs_value": scale}
    return OutputComparison(name, passed, measured, "" if passed else f"error {error:.3g} at magnitude {scale:.3g}")
