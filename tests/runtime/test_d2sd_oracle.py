"""D2SD's steps against the paper's equations, computed the slow way: nothing cached, nothing merged, one row at a time.

`Oracle` shares no code with the runtime. The target is transformers', the drafters are the authors' DFlash class
(PyPI `dflash` 0.1.0), and whatever a step asks is computed from all tokens again: the first draft, one re-draft for
each branch, one verification for each candidate. Acceptance is the authors' walk over rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engines import torch_engine
from makers import make_drafter, make_target
from oracles import transformers_target
from runtime.hints import Hinted, hinted

from dflash_trt.runtime.trace import StepTrace

TIE = 1e-4
ACCURACY = {"first": 0.5, "second": 0.6}  # of the hints each drafter gets
EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny"

Hint = Callable[[str, list[int], list[int], int], list[int]]
"""(which drafter, drafts of every place, the ids given, position of the first) -> drafts."""


class Step(NamedTuple):
    """What one step drafted, re-drafted (behind how many kept drafts) and emitted.

    `gained` counts the tokens accepted beyond those of the first draft alone; `gap` is how near the step was to have
    gone another way.
    """

    draft: list[int]
    branches: list[tuple[int, list[int]]]
    emitted: list[int]
    gained: int
    gap: float


class Oracle:
    """Greedy D2SD over checkpoint folders."""

    def __init__(self, target_dir: Path, drafter_dir: Path, vp_drafter_dir: Path) -> None:
        self.authors = pytest.importorskip("dflash.model")
        self.target = transformers_target(target_dir)
        self.first, self.second = (
            self.authors.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (drafter_dir, vp_drafter_dir)
        )

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], tokens: int, sizes: tuple[int, int], branches: int, hint: Hint | None = None
    ) -> tuple[list[int], list[Step]]:
        """(new tokens, steps).

        Args:
            sizes: tokens in a first block and in a branch, their anchor included.
        """
        choice, _ = self._choices(prompt)[-1]
        text, steps = [*prompt, choice], []
        while (remaining := len(prompt) + tokens - len(text)) > 0:
            steps.append(self._step(text, remaining, sizes, branches, hint))
            text += steps[-1].emitted
        return text[len(prompt) :], steps

    def _step(self, text: list[int], remaining: int, sizes: tuple[int, int], branches: int, hint: Hint | None) -> Step:
        # No more drafts than tokens that may come, and none for the last one.
        first, second = (min(size, remaining + 1) if remaining > 1 else 1 for size in sizes)
        features = self._features(text[:-1])
        block, confidence, gap = self._fill(self.first, features, [text[-1]], first, "first", hint)

        rates = [float(np.prod(confidence[:i]) * (1 - confidence[i])) for i in range(first - 1)]
        ranked = sorted(rates, reverse=True)
        count = min(branches, first - 1)
        if 0 < count < len(ranked):
            gap = min(gap, ranked[count - 1] - ranked[count])
        kept = sorted(sorted(range(first - 1), key=lambda i: -rates[i])[:count])
        if count and second > first:
            kept.append(first - 1)  # the whole first draft, continued: the authors' first row

        rows = []
        for keep in kept:
            row, _, near = self._fill(self.second, features, block[: keep + 1], second, "second", hint)
            rows.append(row)
            gap = min(gap, near)
        # The authors leave the first draft out where a row continues it.
        candidates = rows if count and second > first else [*rows, block]
        emitted, near = self._accept(text[:-1], candidates)
        trunk = next((i for i, (a, b) in enumerate(zip(block[1:], emitted, strict=False)) if a != b), first - 1)
        return Step(
            draft=block[1:],
            branches=[(keep, row[keep + 1 :]) for keep, row in zip(kept, rows, strict=True)],
            emitted=emitted[:remaining],
            gained=len(emitted) - 1 - trunk,
            gap=min(gap, near),
        )

    def _accept(self, committed: list[int], rows: Sequence[list[int]]) -> tuple[list[int], float]:
        """(accepted tokens, smallest margin): each row verified by a pass of its own."""
        choices = [self._choices([*committed, *row])[len(committed) :] for row in rows]
        valid, emitted, gap = list(range(len(rows))), [], np.inf
        while True:
            token, margin = choices[valid[0]][len(emitted)]
            gap = min(gap, margin)
            emitted.append(token)
            valid = [row for row in valid if len(emitted) < len(rows[row]) and rows[row][len(emitted)] == token]
            if not valid:
                return emitted, gap

    def _choices(self, tokens: list[int]) -> list[tuple[int, float]]:
        """Behind every token: the best next one, and its lead."""
        return _best(self.target(torch.tensor([tokens]), use_cache=False).logits[0])

    def _features(self, tokens: list[int]) -> torch.Tensor:
        states = self.target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[tap + 1] for tap in self.first.target_layer_ids], dim=-1)

    def _fill(
        self, drafter: Any, features: torch.Tensor, given: list[int], size: int, which: str, hint: Hint | None
    ) -> tuple[list[int], np.ndarray, float]:
        """The given tokens and drafts up to `size`; confidences of the drafts, smallest margin among them."""
        if size == len(given):
            return given, np.zeros(0), np.inf
        ids, start = [*given, *[drafter.mask_token_id] * (size - len(given))], features.shape[1]
        hidden = drafter(
            target_hidden=features,
            noise_embedding=self.target.get_input_embeddings()(torch.tensor([ids])),
            position_ids=torch.arange(start + size)[None],
        )
        logits = drafter.compute_logits(hidden, self.target.lm_head)[0]
        best = _best(logits)
        drafts = [token for token, _ in best]
        if hint is not None:
            drafts = hint(which, drafts, ids, start)
        confidence = logits.double().softmax(-1).amax(-1).numpy()
        gap = min(margin for _, margin in best[len(given) :])
        return [*given, *drafts[len(given) :]], confidence[len(given) :], gap


def hint_towards(right: list[int]) -> Hint:
    """The same hints as `Hinted` gives the runtime's drafters."""
    return lambda which, drafts, given, anchor: hinted(drafts, given, anchor, right, ACCURACY[which], which)


def _best(logits: torch.Tensor) -> list[tuple[int, float]]:
    top = logits.topk(2, dim=-1)
    return list(zip(top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist(), strict=True))


@dataclass
class Seen:
    """Steps compared and steps there were; their acceptance lengths; tokens gained where a branch won."""

    compared: int = 0
    steps: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    gained: Counter[int] = field(default_factory=Counter)

    def compare(self, expected: list[Step], steps: Sequence[StepTrace]) -> bool:
        """Whether all are the same; they may part only where the oracle itself was near to do otherwise."""
        self.steps += len(expected)
        for own, step in zip(expected, steps, strict=False):
            branches = [(branch.kept, list(branch.tokens)) for branch in step.branches]
            same = (list(step.draft), branches, list(step.emitted)) == (own.draft, own.branches, own.emitted)
            if not same:
                assert own.gap < TIE, (own, step)
                return False
            self.compared += 1
            self.lengths[len(own.emitted)] += 1
            if own.gained:
                self.gained[own.gained] += 1
        assert len(expected) == len(steps)
        return True


WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}
CASES: dict[str, tuple[str, bool, tuple[int, int], tuple[int, ...], dict, dict]] = {
    # family, tied, block sizes, branches, changes of the drafter and of the VP drafter
    "2 of 2": ("qwen3", True, (2, 2), (1, 4), {}, {}),
    "4 of 4": ("llama", False, (4, 4), (0, 2), {}, {}),
    "8 of 8": ("qwen3", False, (8, 8), (4,), {}, {}),
    "all prefixes of 4": ("qwen3", True, (4, 4), (6,), {}, {}),
    "2 of 5": ("llama", True, (2, 5), (2,), {}, {}),
    "4 of 6": ("qwen3", True, (4, 6), (1, 6), {}, {}),
    "8 of 10": ("llama", False, (8, 10), (3,), {}, {}),
    "causal, 4 of 4": ("qwen3", True, (4, 4), (3,), {"is_causal": True}, {"is_causal": True}),
    "windows, 8 of 9": ("qwen3", False, (8, 9), (2,), WINDOW, WINDOW | {"sliding_window": 3}),
    "symmetric window, 4 of 5": ("llama", True, (4, 5), (5,), WINDOW | {"is_causal": False}, {"is_causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_steps_as_the_equations(case: str, tmp_path: Path) -> None:
    """Tokens, drafts, chosen prefixes, re-drafts and acceptance lengths of every step."""
    family, tie, (block, vp_block), numbers, first, second = CASES[case]
    seed, vocabulary = list(CASES).index(case), 8
    make_target(tmp_path / "t", family, tie, seed, vocab_size=vocabulary, num_hidden_layers=3)
    for name, size, changes, add in (("d", block, first, 100), ("v", vp_block, second, 200)):
        make_drafter(tmp_path / name, tmp_path / "t", [0, 2], size, seed=seed + add, **changes)
    oracle = Oracle(tmp_path / "t", tmp_path / "d", tmp_path / "v")
    engine = torch_engine(tmp_path / "t", tmp_path / "d", tmp_path / "v", branches=max(*numbers, 1), max_seq_len=64)
    drafter, vp_drafter = engine.drafter, engine.vp_drafter
    assert engine.limits.vp_block_size == vp_block
    random, seen, cut = np.random.default_rng(seed), Seen(), 0
    for branches in numbers:
        for size in (1, 15):
            prompt = random.integers(0, vocabulary, size).tolist()
            right = [*prompt, *engine.generate(prompt, max_tokens=18, speculation=False).token_ids]
            tokens, steps = oracle.generate(prompt, 18, (block, vp_block), branches, hint_towards(right))
            engine.drafter = Hinted(drafter, [right], ACCURACY["first"], "first")
            engine.vp_drafter = Hinted(vp_drafter, [right], ACCURACY["second"], "second")
            ours = engine.generate(prompt, max_tokens=18, branches=branches, trace=True)
            assert ours.trace is not None
            if seen.compare(steps, ours.trace.steps):
                assert ours.token_ids == tokens
                assert ours.statistics.acceptance_lengths == [len(step.emitted) for step in steps]
            else:
                cut += 1
    assert cut <= 1
    assert seen.compared >= 0.8 * seen.steps, "ties are rare"
    assert len(seen.lengths) >= min(3, vp_block), seen
    print(seen, cut)
    if max(numbers) > 1 and block > 2:
        assert sum(seen.gained.values()) >= 3, seen
        assert max(seen.gained) >= 2, seen


@pytest.mark.slow
@pytest.mark.parametrize("branches", [2, 4])
def test_the_same_steps_on_a_trained_pair(branches: int) -> None:
    """Real confidences and no hints; without a VP drafter the first one re-drafts, as in the paper's ablation."""
    folders = [EXAMPLES / name for name in ("target", "dflash", "vp_drafter")]
    if not folders[2].exists():
        folders[2] = folders[1]
    engine, oracle = torch_engine(*folders, branches=branches, max_seq_len=160, prefill_chunk=64), Oracle(*folders)
    sizes, seen = (engine.limits.block_size, engine.limits.vp_block_size), Seen()
    for line in (EXAMPLES / "heldout.jsonl").read_text().splitlines()[:6]:
        prompt = engine.tokenizer.encode(json.loads(line)["prompt"])
        ours = engine.generate(prompt, max_tokens=32, trace=True, ignore_eos=True)
        tokens, steps = oracle.generate(prompt, 32, sizes, branches)
        assert ours.trace is not None
        if seen.compare(steps, ours.trace.steps):
            assert ours.token_ids == tokens
            assert ours.statistics.acceptance_lengths == [len(step.emitted) for step in steps]
    assert seen.compared >= 0.9 * seen.steps
    assert len(seen.lengths) >= 4, seen
    assert sum(seen.gained.values()) >= 3, seen
