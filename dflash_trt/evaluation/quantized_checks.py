"""What is checked of a bundle with quantised weights: the weights themselves, that rows stand alone, and quality."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_trt.backends.base import Cache, Session
from dflash_trt.bundle import BundleInfo
from dflash_trt.checkpoint.target import EMBEDDING, LM_HEAD
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.evaluation.probes import probe_prompts, room_behind_probes
from dflash_trt.evaluation.report import Check, Status
from dflash_trt.export.quantization import (
    BITS,
    BLOCK,
    PACKED,
    QUANTIZED,
    SCALES,
    dequantize,
    quantized_names,
    read_quantized,
)
from dflash_trt.loading import float_weights, reference_session
from dflash_trt.runtime.decode import chunk_inputs
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.tree import CandidateTree

MIN_AGREEMENT, MAX_PERPLEXITY_RATIO = 0.5, 2.0  # beyond these the model is another one, not a rounded one
QUALITY_TOKENS = 32
_SCALE_ERROR = 1e-6  # a few steps of float32
_ROWS = 16  # of the row check, at most; each is a pass
_OUTPUTS = ("logits", "context_features")  # what the row check compares
_SEED = 20260207
_ITEMS = 1 << 22  # weights compared at a time


def weight_checks(folder: Path, info: BundleInfo) -> Iterator[Check]:
    """Every quantised weight of each graph against the float it was made of.

    Measured: `largest_error`, in steps of the block's scale; `relative_error`, the root mean square over that of the
    floats; `bytes_per_pass`, the weights of linear layers that one pass reads, the target's head included; and
    `float_bytes_per_pass`, what they would be in float32.
    """
    limit = f"each within one step of its float; 2^(bits-1) scales are the largest of a block within {_SCALE_ERROR:g}"
    sizes: dict[str, tuple[int, int]] = {}
    for role in info.roles:
        floats, tensors = float_weights(folder, info, role), read_quantized(folder / role / QUANTIZED)
        errors = _Errors()
        sizes = {name: size for name, size in sizes.items() if name == LM_HEAD}  # the target's comes first
        for name in quantized_names(tensors):
            source = name if name in floats else EMBEDDING  # of a tied head
            errors.add(name, floats, source, tensors, BITS[info.weights])
            packed, scales = tensors[name + PACKED], tensors[name + SCALES]
            sizes[name] = (packed.nbytes + scales.nbytes, 4 * math.prod(floats[source].shape))
        measured = {
            "largest_error": errors.steps,
            "relative_error": errors.relative,
            "bytes_per_pass": sum(size for size, _ in sizes.values()),
            "float_bytes_per_pass": sum(size for _, size in sizes.values()),
        }
        status: Status = "failed" if errors.reason else "passed"
        yield Check(f"weights: {role}", status, measured, limit, errors.reason)


def row_check(info: BundleInfo, engine: Engine) -> Check:
    """The same tokens of the target one by one, and among others in one pass: bit for bit the same logits and features.

    Rounding to int8 makes of a last bit a step, and no rule for ties excuses what comes of it. With branches the tokens
    are a path through a tree that leaves the trunk.
    """
    session, limits, random = engine.target, info.limits, np.random.default_rng(_SEED)
    size = max(2, min(_ROWS, limits.tree_size))
    parents = np.arange(-1, size - 1)
    if limits.branches:
        parents[size // 2] = size // 4
    path = [row for row in range(size) if not size // 4 < row < size // 2 or not limits.branches]
    context = max(1, min(120, limits.prefill_chunk, limits.max_seq_len - size))
    prompt, tokens = (random.integers(0, info.target.vocab_size, count) for count in (context, size))
    tree = CandidateTree.from_parents(np.arange(size), parents)

    def start() -> Cache:
        cache = session.new_cache(1, session.capacity_for(context + size, limits.capacity))
        session.run(chunk_inputs(prompt, 0), ["token_ids"], cache)
        return cache

    cache = start()
    passes = [
        _forced(session, tokens[row : row + 1], context + depth, cache, _OUTPUTS) for depth, row in enumerate(path)
    ]
    alone = [np.concatenate(parts) for parts in zip(*passes, strict=True)]
    changes = {"position_ids": (context + tree.depths)[None], "visibility": tree.visibility()[None]}
    together = [rows[path] for rows in _forced(session, tokens, context, start(), _OUTPUTS, **changes)]
    unequal = np.any([(one != other).any(axis=-1) for one, other in zip(alone, together, strict=True)], axis=0)
    measured = {
        "rows": len(path),
        "unequal_rows": int(unequal.sum()),
        "largest_logit_difference": float(np.abs(alone[0] - together[0]).max()),
    }
    reason = ""
    if unequal.any():
        reason = "this CPU computes rows otherwise when others are beside them; build with --weights float for it"
    return Check("rows: target", "failed" if reason else "passed", measured, "equal to the last bit", reason)


def quality_check(folder: Path, info: BundleInfo, engine: Engine) -> Check:
    """The target against the float32 reference, over the probes and what the reference continues them with, greedily.

    Measured, both reading the same tokens: `greedy_agreement`, the share of positions where both prefer the same token;
    `mean_kl_divergence`, of the quantised from the float distribution in nats, over the same positions;
    `perplexity_ratio`, quantised over float, of the continuations alone.
    """
    limit = f"greedy_agreement >= {MIN_AGREEMENT}, perplexity_ratio <= {MAX_PERPLEXITY_RATIO:g}: else it is no rounding"
    if importlib.util.find_spec("torch") is None:
        return Check("quality: target", "not run", {}, limit, "torch is not installed")
    reference = reference_session(folder, info, "target", weights="float")
    found = []
    for prompt in probe_prompts(engine):
        tokens = min(QUALITY_TOKENS, room_behind_probes(info.limits))
        ids = _continued(reference, prompt, tokens, info)
        wanted, got = (_log_softmax(_teacher_forced(session, ids, info)) for session in (reference, engine.target))
        found.append(_compare(wanted, got, ids, len(prompt)))
    if not found:
        return Check("quality: target", "failed", {}, limit, "the tokenizer encodes no probe")
    same, divergence, surprise = (np.concatenate(parts) for parts in zip(*found, strict=True))
    agreement, ratio = float(same.mean()), float(np.exp(surprise.mean()))
    measured = {
        "positions": len(same),
        "greedy_agreement": agreement,
        "mean_kl_divergence": float(divergence.mean()),
        "perplexity_ratio": ratio,
    }
    absurd = not (agreement >= MIN_AGREEMENT and ratio <= MAX_PERPLEXITY_RATIO)  # NaN is, too
    reason = f"{info.weights} is too few bits for this model" if absurd else ""
    return Check("quality: target", "failed" if reason else "passed", measured, limit, reason)


@dataclass
class _Errors:
    """The worst of the weights so far; `reason` names the first that is wrong."""

    steps: float = 0.0
    reason: str = ""
    squared_error: float = 0.0
    squared: float = 0.0

    @property
    def relative(self) -> float:
        return float(np.sqrt(self.squared_error / self.squared)) if self.squared else 0.0

    def add(self, name: str, floats: TensorFolder, source: str, tensors: TensorFolder, bits: int) -> None:
        packed, scales = tensors.read(name + PACKED), tensors.read(name + SCALES)
        columns = floats[source].shape[1]
        rows, start = max(1, _ITEMS // columns), 0
        padding = ((0, 0), (0, -columns % BLOCK))
        for block in floats.blocks(source, rows * columns):
            wanted = np.pad(block.astype(np.float32).reshape(-1, columns), padding)
            part = slice(start, start + len(wanted))
            start += len(wanted)
            error = dequantize(packed[part], scales[part], wanted.shape[1]) - wanted
            step = np.abs(scales[part])
            largest = np.abs(wanted.reshape(*step.shape, BLOCK)).max(axis=-1)
            steps = np.abs(error.reshape(*step.shape, BLOCK)).max(axis=-1) / np.maximum(step, np.finfo(np.float32).tiny)
            self.steps = max(self.steps, float(steps.max()))
            self.squared_error += float(np.square(error, dtype=np.float64).sum())
            self.squared += float(np.square(wanted, dtype=np.float64).sum())
            sound = (steps <= 1 + 1e-3) & (np.abs(step * (1 << bits - 1) - largest) <= _SCALE_ERROR * largest)
            if not sound.all() and not self.reason:
                row, number = (int(index) for index in np.argwhere(~sound)[0])
                row += part.start
                self.reason = f"{name}, row {row}, block {number} does not stand for its floats"


def _forced(
    session: Session, ids: np.ndarray, start: int, cache: Cache, outputs: Sequence[str], **changes: np.ndarray
) -> list[np.ndarray]:
    """Outputs [n, ...] of tokens i64 [n] behind `start` others; `changes` to the inputs of a chain."""
    inputs = chunk_inputs(ids, start) | {"logit_rows": np.arange(len(ids))[None]} | changes
    found = session.run(inputs, outputs, cache)
    return [np.array(found[name][0]) for name in outputs]


def _continued(session: Session, prompt: list[int], count: int, info: BundleInfo) -> np.ndarray:
    """A prompt i64 [n] and up to `count` tokens of greedy choice behind it; the last is -1 where logits are not finite.
    """
    ids = list(prompt)
    cache = session.new_cache(1, session.capacity_for(len(prompt) + count, info.limits.capacity))
    fed = 0
    while len(ids) < len(prompt) + count and ids[-1] not in (-1, *info.target.eos_token_ids):
        outputs = session.run(chunk_inputs(np.array(ids[fed:]), fed), ["token_ids"], cache)
        fed = len(ids)
        ids.append(int(outputs["token_ids"][0, 0]))
    return np.array(ids)


def _teacher_forced(session: Session, ids: np.ndarray, info: BundleInfo) -> np.ndarray:
    """The logits f32 [n - 1, V] that predict all tokens i64 [n] but the first."""
    cache = session.new_cache(1, session.capacity_for(len(ids), info.limits.capacity))
    return _forced(session, ids[:-1], 0, cache, ["logits"])[0]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _compare(
    wanted: np.ndarray, found: np.ndarray, ids: np.ndarray, prompt: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of log-probabilities [n - 1, V]: by position whether the greedy choices are one, and the divergence; of the
    tokens behind the prompt, how much less likely the found ones make them, in nats."""
    same = wanted.argmax(axis=-1) == found.argmax(axis=-1)
    divergence = (np.exp(wanted) * (wanted - found)).sum(axis=-1)
    own = np.take_along_axis(wanted - found, ids[1:, None], axis=-1)[:, 0]
    return same, divergence, own[prompt - 1 :]
