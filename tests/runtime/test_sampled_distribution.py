"""Sampled speculative output follows the target's distribution, and a verification that cheats is found out.

For every token sampled the exact probabilities come from a transformers forward over what precedes it. Tokens are
counted by their rank in these, apart for each preceding token; a chi-square test compares the counts with the
probabilities summed. Contexts need not recur for that: each adds its own expectation and its own covariance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engines import torch_engine
from makers import make_drafter, make_target
from oracles import transformers_target
from transformers import PreTrainedModel

from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.sampling import SamplingParams

VOCABULARY, PROMPT = 6, [3, 1, 4]
ROWS, TOKENS = 128, 42  # of each output all tokens count but the first, which comes before any step
SYSTEMS = [pytest.param("dflash", marks=pytest.mark.slow), pytest.param("dflare", marks=pytest.mark.slow), "d2sd"]
SEEDS = {"dflash": 0, "dflare": 10_000, "d2sd": 20_000}  # outputs depend on nothing else


class Sampled(NamedTuple):
    """Outputs i64 [N, TOKENS] of as many seeds, and acceptance lengths of steps."""

    tokens: np.ndarray
    lengths: Counter[int]


class Fit(NamedTuple):
    """A chi-square statistic, its degrees of freedom and the chance of one as large."""

    statistic: float
    freedom: int
    chance: float


class DrawsTwice(DecodeBatch):
    """A lossy verification: where the token drawn was not drafted, a second draw may still hit a draft."""

    def _chooser(self, row: int, tree: Any, outputs: Any) -> Callable[[int, tuple[int, ...]], int]:
        choose, sequence = super()._chooser(row, tree, outputs), self.rows[row]

        def choose_again(node: int, path: tuple[int, ...]) -> int:
            token = choose(node, path)
            if tree.child(node, token) is not None:
                return token
            again = sequence.sampler.choose(outputs["logits"][row][node], 10_000 + sequence.committed + len(path))
            return again if tree.child(node, again) is not None else token

        return choose_again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few tokens, and drafters that are right now and then."""
    path = tmp_path_factory.mktemp("distribution")
    make_target(path / "target", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, head_dim=8, seed=3)
    for name, kind, size, seed in (("dflash", "dflash", 4, 4), ("dflare", "dflare", 4, 4), ("vp", "dflash", 5, 5)):
        make_drafter(path / name, path / "target", [0, 1], size, layers=1, seed=seed, kind=kind)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    return transformers_target(folder / "target")


def engine_of(folder: Path, system: str) -> Engine:
    drafters = [folder / "dflash", folder / "vp"] if system == "d2sd" else [folder / system]
    return torch_engine(folder / "target", *drafters, max_batch_size=ROWS, max_seq_len=64, branches=2)


def sample(engine: Engine, batches: int, temperature: float = 1.0, kind: type[DecodeBatch] = DecodeBatch) -> Sampled:
    """One output for each of some seeds."""
    outputs, lengths = [], Counter[int]()
    first = SEEDS[engine.system]
    for start in range(first, first + batches * ROWS, ROWS):
        sequences = [
            engine.sequence(PROMPT, SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS))
            for seed in range(start, start + ROWS)
        ]
        kind(
            engine.target, engine.drafter, sequences, engine.limits, engine.mask_token_id, engine.vp_drafter,
            engine._policy(engine._drafting(True, None)),
        ).run()  # fmt: skip
        for sequence in sequences:
            outputs.append(sequence.generated)
            lengths.update(sequence.statistics.acceptance_lengths)
    return Sampled(np.array(outputs), lengths)


@torch.inference_mode()
def fit(target: PreTrainedModel, tokens: np.ndarray) -> Fit:
    """How well tokens i64 [N, TOKENS], all but the first of each row, agree with the target."""
    texts = np.concatenate([np.tile(PROMPT, (len(tokens), 1)), tokens], axis=1)
    logits = target(torch.from_numpy(texts)).logits[:, len(PROMPT) : -1]
    probabilities = logits.double().softmax(-1).numpy().reshape(-1, VOCABULARY)
    chosen, previous = tokens[:, 1:].reshape(-1), tokens[:, :-1].reshape(-1)
    order = np.argsort(-probabilities, axis=1)
    expected = np.take_along_axis(probabilities, order, axis=1)
    observed = order == chosen[:, None]
    statistic, freedom = 0.0, 0
    for token in range(VOCABULARY):
        group = previous == token
        if group.sum() < 100:
            continue
        # The last rank is what the others leave.
        mine, excess = expected[group, :-1], (observed[group, :-1] - expected[group, :-1]).sum(0)
        covariance = np.diag(mine.sum(0)) - mine.T @ mine
        statistic += float(excess @ np.linalg.solve(covariance, excess))
        freedom += VOCABULARY - 1
    return Fit(statistic, freedom, chance_of(statistic, freedom))


def chance_of(statistic: float, freedom: int) -> float:
    """That a chi-square variable is at least `statistic`."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("system", SYSTEMS)
def test_tokens_come_as_often_as_the_target_says(folder: Path, target: PreTrainedModel, system: str) -> None:
    sampled = sample(engine_of(folder, system), 4)
    assert sampled.tokens[:, 1:].size >= 20_000
    assert min(sampled.lengths[length] for length in (1, 2, 3)) >= 30  # drafts were accepted, and refused
    result = fit(target, sampled.tokens)
    assert result.freedom >= 20
    assert result.chance > 1e-3, result


@pytest.mark.parametrize(
    ("temperature", "kind"), [(0.8, DecodeBatch), (1.0, DrawsTwice)], ids=["too cold", "drawn twice"]
)
def test_a_bias_is_found(folder: Path, target: PreTrainedModel, temperature: float, kind: type[DecodeBatch]) -> None:
    """The test can fail."""
    result = fit(target, sample(engine_of(folder, "d2sd"), 1, temperature, kind).tokens)
    assert result.chance < 1e-6, result


def test_the_chance_of_a_statistic() -> None:
    """Against tabled quantiles of the chi-square distribution."""
    for freedom, statistic, chance in ((1, 3.841, 0.05), (10, 18.307, 0.05), (100, 135.807, 0.01)):
        assert chance_of(statistic, freedom) == pytest.approx(chance, rel=1e-3)
