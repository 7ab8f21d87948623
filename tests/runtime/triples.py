"""Random triples of a target and two drafters (D2SD), with drafts that are right now and then, and checks of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engines import torch_engine
from hypothesis import strategies as st
from makers import make_drafter, make_target
from runtime.hints import Hinted
from test_lossless_random_pairs import SAMPLING, Seen, pairs, write_pair

from dflash_trt.evaluation.losslessness import compare_outputs
from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.trace import StepTrace
from dflash_trt.runtime.tree import CandidateTree

STOPS = (*SAMPLING, {"temperature": 0.0, "stop_token_ids": [0, 1]})
SURE = (0.0, 0.2, 0.5, 0.9, 1.0)  # confidences with exact ends, and equal ones often


def per_token(fixed: float, token: float) -> tuple[tuple[int, float], ...]:
    return ((1, fixed + token), (200, fixed + 200 * token))


BALANCED = PassCosts(draft=per_token(1.0, 0.0), redraft=per_token(1.0, 0.0), verify=per_token(1.0, 0.1))
COSTLY = PassCosts(draft=per_token(1.0, 0.0), redraft=per_token(1000.0, 0.0), verify=per_token(1.0, 0.0))


@st.composite
def triples(draw: st.DrawFn) -> dict:
    """Shapes of a target and two drafters, the second for blocks up to 4 tokens longer."""
    shape, other = draw(pairs()), draw(pairs())
    more = draw(st.sampled_from([0, 0, 1, 4]))
    redrafter = {"block_size": shape["block_size"] + more, "layers": other["drafter_layers"], **other["drafter"]}
    return shape | {"redrafter": redrafter}


def write_triple(shape: dict, folder: Path) -> None:
    write_pair(shape, folder)
    make_drafter(folder / "v", folder / "t", taps=shape["taps"], seed=shape["seed"] + 2, **shape["redrafter"])


def small_triple(
    folder: Path, block_size: int = 5, vp_block_size: int = 5, kind: Any = "dflash", **options: Any
) -> Engine:
    """An engine over the same small random checkpoints each time it is asked."""
    if not (folder / "t").exists():
        make_target(folder / "t", vocab_size=9, num_hidden_layers=2, seed=5)
        for name, size, seed, own in (("d", block_size, 6, kind), ("v", vp_block_size, 7, "dflash")):
            make_drafter(folder / name, folder / "t", taps=[0, 1], block_size=size, seed=seed, kind=own, layers=1)
    return torch_engine(folder / "t", folder / "d", folder / "v", **options)


def prompts_of(engine: Engine, *sizes: int) -> list[list[int]]:
    random = np.random.default_rng(len(sizes))
    return [random.integers(0, engine.vocab_size, size).tolist() for size in sizes]


def hint(
    engine: Engine, prompts: Sequence[list[int]], accuracy: Sequence[float], confidences: Sequence[float] = (),
    **sampling: Any,
) -> list[list[int]]:  # fmt: skip
    """Hints both drafters, one prompt a row of the batch; returns the token-by-token output of each."""
    plain = [engine.generate(prompt, speculation=False, **sampling).token_ids for prompt in prompts]
    rights = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    for name, share in zip(("drafter", "vp_drafter"), accuracy, strict=True):
        session = getattr(engine, name)
        if session is not None:
            session = session._session if isinstance(session, Hinted) else session
            setattr(engine, name, Hinted(session, rights, share, name, confidences))
    return plain


@dataclass
class SeenSteps(Seen):
    """Besides: tokens gained where a branch won, numbers of branches, and how often two rows began a tail alike."""

    gained: Counter[int] = field(default_factory=Counter)
    branches: Counter[int] = field(default_factory=Counter)
    merged: int = 0
    extended: int = 0
    pruned: int = 0


def check_step(step: StepTrace, limits: Limits, asked: int | None, seen: SeenSteps) -> None:
    """What holds of every step.

    Args:
        asked: branches of `FixedBranches`; None for `AdaptiveBranches`, which also prunes the tree.
    """
    draft, drafts = list(step.draft), len(step.draft)
    tree = CandidateTree(np.array(step.tokens), np.array(step.parents), np.array(step.depths))
    assert len(tree) <= limits.tree_size
    assert drafts < limits.block_size
    accepted = [step.tokens[node] for node in step.path[1:]]
    assert [step.parents[node] for node in step.path] == [-1, *step.path[:-1]]
    assert 1 <= len(step.emitted) <= len(step.path)
    assert list(step.emitted[: len(accepted)]) == accepted[: len(step.emitted)]
    choices = accepted + list(step.emitted[len(accepted) :])

    kept = [branch.kept for branch in step.branches]
    sizes = {branch.kept + len(branch.tokens) for branch in step.branches}
    assert kept == sorted(set(kept))
    assert len(kept) <= limits.redraft_rows
    assert len(sizes) <= 1
    extension = sizes and max(sizes) > drafts
    if asked is not None:
        assert len(kept) == min(asked, drafts) + bool(extension)
        assert (kept[-1:] == [drafts]) == bool(extension)
    breaks = np.cumprod([1.0, *step.confidence]) * [*(1 - np.array(step.confidence)), 1]
    np.testing.assert_allclose([branch.probability for branch in step.branches], breaks[kept], rtol=1e-12)

    rows = [draft, *(draft[: branch.kept] + list(branch.tokens) for branch in step.branches)]
    whole = {tuple(row[:size]) for row in rows for size in range(len(row) + 1)}
    spelled: list[tuple[int, ...]] = []
    for token, parent in zip(step.tokens, step.parents, strict=True):
        spelled.append((*spelled[parent], token) if parent >= 0 else ())
    assert set(spelled) <= whole
    chain = walk(CandidateTree.chain([step.tokens[0], *draft]), lambda node, path: [*choices, -1][len(path)])
    if asked is not None:
        assert set(spelled) == whole
        assert len(step.path) >= len(chain.path)
        assert list(step.path[: len(chain.path)]) == chain.path  # the trunk's nodes come first
    elif len(spelled) < len(whole):
        seen.pruned += 1

    seen.branches[len(kept) - bool(extension)] += 1
    seen.extended += bool(extension)
    firsts = Counter((*draft[: branch.kept], branch.tokens[0]) for branch in step.branches)
    seen.merged += any(first in {tuple(draft[:size]) for size in range(drafts + 1)} for first in firsts)
    if len(step.path) > len(chain.path):
        seen.gained[len(step.path) - len(chain.path)] += 1


def check(
    engine: Engine, prompts: list[list[int]], sampling: Mapping[str, Any], seen: SeenSteps, accuracy: Sequence[float],
    branches: Any, confidences: Sequence[float] = (), tokens: int = 24,
) -> None:  # fmt: skip
    """All prompts as one batch, and the first one alone with its steps."""
    plain = hint(engine, prompts, accuracy, confidences, max_tokens=tokens, **sampling)
    batch = engine.generate(prompts, branches=branches, max_tokens=tokens, **sampling)
    alone = engine.generate(prompts[0], branches=branches, trace=True, max_tokens=tokens, **sampling)
    for prompt, expected, drafted in zip([*prompts, prompts[0]], [*plain, plain[0]], [*batch, alone], strict=True):
        comparison = compare_outputs(engine, prompt, expected, drafted.token_ids, **sampling)
        seen.verdicts[comparison.verdict] += 1
        assert comparison.verdict != "different", comparison
        lengths = drafted.statistics.acceptance_lengths
        assert sum(lengths) == len(drafted.token_ids) - 1
        seen.accepted.update(lengths)
    assert alone.trace is not None
    position = len(prompts[0])
    for step in alone.trace.steps:
        check_step(step, engine.limits, None if branches == "auto" else branches, seen)
        assert step.anchor_position == position
        position += len(step.emitted)
    assert [len(step.emitted) for step in alone.trace.steps] == alone.statistics.acceptance_lengths
    assert alone.statistics.proposed_drafts == sum(len(step.tokens) - 1 for step in alone.trace.steps)
