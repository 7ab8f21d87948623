"""One graph in two sessions on the same inputs: how far apart their outputs are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.backends.base import Array, Session, numpy_dtype
from dflash_trt.bundle import BundleInfo
from dflash_trt.export.contract import Role
from dflash_trt.runtime.drafter import Block, block_inputs
from dflash_trt.runtime.tree import CandidateTree

# |found - wanted| <= limit * (|wanted| + the output's median magnitude): a few channels of real hidden states are
# thousands of times larger than the rest, so the largest magnitude would excuse anything. Of ids, a mismatch is excused
# where the reference's own logits lie within the limit times their median magnitude.
LIMITS = {"float32": 1e-2, "float16": 0.3, "bfloat16": 1.0}
CACHES = "present_key_*, present_value_*"
_IDS_OF = {"token_ids": "logits", "draft_ids": "logits"}
_SEED = 20260206


@dataclass(frozen=True)
class OutputComparison:
    """One output of one graph."""

    output: str
    passed: bool
    measured: dict[str, Any]
    reason: str


def compare_graphs(info: BundleInfo, role: Role, session: Session, reference: Session) -> Iterator[OutputComparison]:
    """A few passes over growing caches; yields a comparison for every output.

    The target: a chunk, one token, a random tree of full size. A drafter: blocks with all and with some of the feature
    rows valid; the VP drafter: several blocks at once that see only themselves, each with another visible prefix.
    The caches are compared as they are after the last pass, all layers in one comparison.
    """
    outputs = [spec.name for spec in info.graphs[role].spec.outputs]
    passes = list(_target_passes(info) if role == "target" else _drafter_passes(info, role))
    capacity = _slots(passes)
    found, wanted = _run(passes, session, outputs, capacity), _run(passes, reference, outputs, capacity)
    limit = LIMITS[info.precision]
    for name in (*outputs, CACHES):
        if name in _IDS_OF:
            yield _compare_ids(name, found[name], wanted[name], wanted[_IDS_OF[name]], limit)
        else:
            yield _compare(name, np.concatenate(found[name]), np.concatenate(wanted[name]), limit)


def _run(
    passes: list[dict[str, Array]], session: Session, outputs: list[str], slots: int
) -> dict[str, list[np.ndarray]]:
    """Each output of all passes, flattened over everything but ids' and logits' last dimension."""
    results: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
    cache = session.new_cache(1, slots)
    for inputs in passes:
        for name, value in session.run(inputs, outputs, cache).items():
            results[name].append(_plain(value).reshape(-1))
    results[CACHES] = [_plain(buffer).reshape(-1) for buffer in cache.buffers]
    return results


def _slots(passes: list[dict[str, Array]]) -> int:
    """The slots the passes write."""
    return max(
        int(inputs["context_len"][0])
        + inputs["visibility"].shape[1]
        + (inputs["context_features"].shape[1] if "context_features" in inputs else 0)
        for inputs in passes
    )


def _target_passes(info: BundleInfo) -> Iterator[dict[str, Array]]:
    random = np.random.default_rng(_SEED)
    # every token in a row of its own position first, then a tree of full size
    room = info.limits.max_seq_len
    chunk = max(1, min(24, room - 2))
    size = info.limits.tree_size
    parents = np.array([-1, *(int(random.integers(max(0, i - 3), i)) for i in range(1, size))])
    tree = CandidateTree.from_parents(np.arange(size), parents)
    chain = np.arange(chunk)
    shapes = (
        (0, chain, np.tri(chunk, dtype=np.bool_)),
        (chunk, np.zeros(1, np.int64), np.ones((1, 1), np.bool_)),
        (chunk + 1, tree.depths, tree.visibility()),
    )
    for context, depths, visibility in shapes:
        yield {
            "input_ids": random.integers(0, info.target.vocab_size, (1, len(depths))),
            "position_ids": (context + depths)[None],
            "visibility": visibility[None],
            "context_len": np.array([context]),
            "logit_rows": np.arange(len(depths))[None],
        }


def _drafter_passes(info: BundleInfo, role: Role) -> Iterator[dict[str, Array]]:
    random = np.random.default_rng(_SEED)
    width, limits, context = len(info.taps) * info.target.hidden_size, info.limits, 0
    redrafts = role == "vp_drafter"
    size = limits.vp_block_size if redrafts else limits.block_size
    candidates = max(1, limits.redraft_rows) if redrafts else 1
    longest = max(1, info.limits.max_seq_len // 4)
    for rows, valid in ((16, 16), (1, 0), (5, 3), (4, 4)):
        rows, valid = min(rows, longest), min(valid, longest)
        tokens = random.integers(0, info.target.vocab_size, size).tolist()
        block = Block.of([tokens[: kept % size + 1] for kept in range(candidates)], size, info.mask_token_id)
        features = random.standard_normal((1, rows, width)).astype(numpy_dtype(info.precision))
        yield block_inputs(block, features, valid, context)
        context += valid


def _plain(value: Array) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        value = value.float().cpu().numpy()
    return value if value.dtype == np.int64 else value.astype(np.float64)


def _compare(name: str, found: np.ndarray, wanted: np.ndarray, limit: float) -> OutputComparison:
    for who, values in (("", found), ("the reference has ", wanted)):
        if not np.isfinite(values).all():
            return OutputComparison(name, False, {"finite": False}, f"{who}NaN or infinity")
    error, typical = np.abs(found - wanted), float(np.median(np.abs(wanted)))
    relative = float((error / (np.abs(wanted) + typical)).max()) if typical else float(error.max())
    passed = relative <= limit
    measured = {"max_relative_error": relative, "max_abs_error": float(error.max()), "median_abs_value": typical}
    return OutputComparison(name, passed, measured, "" if passed else f"relative error {relative:.3g}")


def _compare_ids(
    name: str, found: list[np.ndarray], wanted: list[np.ndarray], logits: list[np.ndarray], limit: float
) -> OutputComparison:
    """Ids agree, or the reference itself hardly prefers its own."""
    agreed = excused = wrong = 0
    for ids, own, scores in zip(found, wanted, logits, strict=True):
        table = scores.reshape(len(own), -1)
        near = limit * np.median(np.abs(table))
        for row, (one, other) in enumerate(zip(ids, own, strict=True)):
            if one == other:
                agreed += 1
            elif 0 <= one < table.shape[1] and table[row, other] - table[row, one] <= near:
                excused += 1
            else:
                wrong += 1
    measured = {"agree": agreed, "near_ties": excused, "differ": wrong}
    return OutputComparison(name, wrong == 0, measured, f"{wrong} ids differ" if wrong else "")
