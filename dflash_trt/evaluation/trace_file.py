"""Reading a trace that `run --trace` wrote, and making sure that no step contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.documents import DocumentError, parse
from dflash_trt.errors import UsageError
from dflash_trt.runtime.trace import StepTrace, Trace
from dflash_trt.runtime.tree import CandidateTree

_KIND = Trace.kind
_AGAIN = "Write it again with `dflash-trt run BUNDLE --trace FILE.json`"
_ROUNDING = 1e-3  # a softmax in low precision may sum to a little more than 1


def read_trace(path: Path) -> Trace:
    """The trace in a JSON file.

    Raises:
        UsageError: no JSON, another kind of JSON, a field that is missing or wrong, or a step that contradicts itself.
        OSError: the file cannot be read.
    """
    values = _read_json(path)
    if not isinstance(values, dict) or values.get("kind") != _KIND:
        raise UsageError(
            f'is JSON but no trace: a trace is an object with "kind": "{_KIND}"',
            where=str(path),
            mend="Give a checkpoint folder, a bundle, a graph, or a file written by `dflash-trt run --trace`",
        )
    try:
        trace = parse(Trace, values, "trace")
    except DocumentError as error:
        raise UsageError(f"is a damaged trace: {error}", where=str(path), mend=_AGAIN) from error
    for number, step in enumerate(trace.steps, start=1):
        try:
            check_step(step)
        except UsageError as error:
            what = f"is a damaged trace: {f'{error.where}: ' if error.where else ''}{error.what}"
            raise UsageError(what, where=f"{path}, step {number}", mend=_AGAIN) from error
    return trace


def check_step(step: StepTrace) -> None:
    """Checks that a step's parts agree with each other.

    Raises:
        UsageError: not a tree, a path or emitted tokens that are not in it, or confidences that match no drafts.
    """
    try:
        CandidateTree(*(np.array(ids, np.int64) for ids in (step.tokens, step.parents, step.depths)))
    except OverflowError as error:
        raise UsageError("a token, parent or depth does not fit 64 bits", where="CandidateTree") from error
    _check_path(step)
    _check_confidences(step.draft, step.confidence, "draft")
    for number, branch in enumerate(step.branches, start=1):
        where = f"branch {number}"
        _check_confidences(branch.tokens, branch.confidence, where)
        _check_probability(branch.probability, f"{where}, probability")
        if not 0 <= branch.kept <= len(step.draft):
            raise UsageError(f"kept {branch.kept} must be in 0..{len(step.draft)}, the drafts there are", where=where)


def _check_path(step: StepTrace) -> None:
    path, emitted = step.path, step.emitted
    if not path or path[0] != 0:
        raise UsageError("must begin with node 0, the anchor", where="path")
    for parent, node in pairwise(path):
        if not 0 < node < len(step.tokens):
            raise UsageError(f"node {node} is not in the tree of {len(step.tokens)} nodes", where="path")
        if step.parents[node] != parent:
            what = f"node {node} is a child of {step.parents[node]}, not of {parent} before it"
            raise UsageError(what, where="path")
    if not 1 <= len(emitted) <= len(path):
        raise UsageError(
            f"{len(emitted)} tokens of a path of {len(path)} nodes; it must be 1..{len(path)}", where="emitted"
        )
    for number, (token, node) in enumerate(zip(emitted, path[1:], strict=False), start=1):
        if token != step.tokens[node]:
            what = f"token {number} is {token}, but the accepted node {node} carries {step.tokens[node]}"
            raise UsageError(what, where="emitted")


def _check_confidences(tokens: Sequence[int], confidence: Sequence[float], where: str) -> None:
    if len(tokens) != len(confidence):
        raise UsageError(f"{len(tokens)} tokens but {len(confidence)} confidences", where=where)
    for value in confidence:
        _check_probability(value, f"{where}, confidence")


def _check_probability(value: float, where: str) -> None:
    if not 0 <= value <= 1 + _ROUNDING:  # false for NaN too
        raise UsageError(f"{value} must be in 0..1", where=where)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except UnicodeDecodeError as error:
        raise UsageError("is not UTF-8 text, so no JSON", where=str(path), mend=_AGAIN) from error
    except RecursionError as error:
        raise UsageError("is nested too deeply for a trace", where=str(path), mend=_AGAIN) from error
    except ValueError as error:  # besides JSONDecodeError: integers with thousands of digits
        raise UsageError(f"is not valid JSON: {error}", where=str(path), mend=_AGAIN) from error
