"""Traces to test with: by hand from candidates, and of a simulated generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.staircase import break_chances, likeliest, merge
from dflash_trt.runtime.trace import BranchTrace, StepTrace, Trace
from dflash_trt.runtime.tree import CandidateTree

ANCHOR = 1


def make_branch(kept: int, tokens: Sequence[int], probability: float = 0.25, confidence: float = 0.5) -> BranchTrace:
    """A branch whose re-drafts are all equally confident."""
    return BranchTrace(
        kept=kept, probability=probability, tokens=tuple(tokens), confidence=(confidence,) * len(tokens)
    )


def make_step(
    draft: Sequence[int],
    target: Sequence[int],
    branches: Sequence[BranchTrace] = (),
    *,
    confidence: Sequence[float] | None = None,
    limit: int | None = None,
    tree: CandidateTree | None = None,
    anchor_position: int = 7,
) -> StepTrace:
    """The step that verifies these candidates.

    Args:
        target: the target's choices, as many as the walk needs.
        confidence: of the drafts; 0.5 each by default.
        limit: tokens the step puts out at most.
        tree: what was verified, if not the merged candidates.
    """
    rows = [[ANCHOR, *draft], *([ANCHOR, *draft[: branch.kept], *branch.tokens] for branch in branches)]
    tree = tree or merge(rows).tree()
    acceptance = walk(tree, lambda node, path: target[len(path)])
    return StepTrace(
        anchor_position=anchor_position,
        draft=tuple(draft),
        confidence=(0.5,) * len(draft) if confidence is None else tuple(confidence),
        branches=tuple(branches),
        tokens=tuple(tree.tokens.tolist()),
        parents=tuple(tree.parents.tolist()),
        depths=tuple(tree.depths.tolist()),
        path=tuple(acceptance.path),
        emitted=tuple(acceptance.tokens[:limit]),
    )


def make_trace(steps: Sequence[StepTrace], **fields: Any) -> Trace:
    """A trace of these steps; each token's text is its id in letters, by default."""
    tokens = {token for step in steps for token in (*step.tokens, *step.emitted)}
    defaults: dict[str, Any] = dict(
        system="d2sd" if any(step.branches for step in steps) else "dflash",
        speculation=True,
        block_size=1 + max((len(step.draft) for step in steps), default=0),
        vp_block_size=0,
        branches=max((len(step.branches) for step in steps), default=0),
        sampling={"temperature": 0.0},
        prompt_token_ids=(5, 6, 7),
        token_ids=(ANCHOR, *(token for step in steps for token in step.emitted)),
        texts={token: "".join(chr(97 + int(digit)) for digit in str(token)) for token in tokens},
    )
    return Trace(steps=tuple(steps), **{**defaults, **fields})


def simulated_trace(
    seed: int,
    *,
    steps: int = 40,
    block_size: int = 16,
    vp_block_size: int = 0,
    branches: int = 4,
    texts: Sequence[str] = (),
    skill: float = 0.85,
) -> Trace:
    """A D2SD generation with drafters that are right as often as they say, the second one more often.

    Args:
        vp_block_size: 0 for no longer than the first block; longer ones extend the trunk, too.
        branches: 0 gives DFlash.
        texts: of tokens 2, 3, ...; made up where there are none.
    """
    random = np.random.default_rng(seed)
    vp_block_size = vp_block_size or block_size
    vocabulary = max(len(texts), 200)

    def drafted(target: Sequence[int], mean: float) -> tuple[list[int], list[float]]:
        confidence = random.beta(6 * mean, 6 * (1 - mean), len(target))
        right = random.random(len(target)) < confidence
        wrong = random.integers(2, 2 + vocabulary, len(target))
        return np.where(right, target, wrong).tolist(), confidence.tolist()

    made, position = [], 12
    for _ in range(steps):
        target = random.integers(2, 2 + vocabulary, vp_block_size + 1).tolist()
        draft, confidence = drafted(target[: block_size - 1], skill)
        posterior = break_chances(confidence)
        kept = sorted(likeliest(posterior[:-1], branches))
        kept += [len(draft)] if branches and vp_block_size > block_size else []
        tails = [(count, drafted(target[count : vp_block_size - 1], (1 + skill) / 2)) for count in kept]
        made.append(
            make_step(
                draft,
                target,
                [
                    BranchTrace(
                        kept=count, probability=posterior[count], tokens=tuple(tokens), confidence=tuple(confidences)
                    )
                    for count, (tokens, confidences) in tails
                ],
                confidence=confidence,
                anchor_position=position,
            )
        )
        position += len(made[-1].emitted)
    trace = make_trace(made, block_size=block_size, vp_block_size=vp_block_size if branches else 0, branches=branches)
    words = ["the", " return", " of", "self", ".", " (", "\n    ", "_name", " implementation", ","]
    texts = [*texts, *random.choice(words, vocabulary - len(texts)).tolist()]
    return replace(trace, texts={ANCHOR: "def", **dict(enumerate(texts, start=2))})
