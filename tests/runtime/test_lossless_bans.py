"""Bad words and minimum lengths hold in speculative output, which is the token-by-token output of all systems.

What is banned is taken from what would have come without the ban, so that it matters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import test_lossless_random_pairs
import torch
from engines import torch_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import make_drafter, make_target
from oracles import transformers_target
from runtime.triples import SURE, SeenSteps, check, prompts_of, triples, write_triple
from test_lossless_random_pairs import SAMPLING, Seen, pairs, write_pair

from dflash_trt.errors import RequestError
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.generation import Generation
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.speculation import Speculation

TOKENS = 30


def restrictions(engine: Engine, prompt: list[int], sampling: dict[str, Any], random: np.random.Generator) -> dict:
    """Bad words of up to four tokens from the free output, perhaps from where the prompt ends; a stop token from its
    beginning, and a minimum length that is beyond it more often than not."""
    free = engine.generate(prompt, speculation=False, max_tokens=TOKENS, **sampling).token_ids
    whole = [*prompt, *free]

    def from_output(size: int) -> list[int]:
        end = random.integers(len(prompt), min(len(prompt) + 12, len(whole))) + 1
        return whole[max(end - size, 0) : end]

    words = [from_output(size) for size in (1, *random.integers(2, 5, 2).tolist())]
    return {
        **sampling,
        "bad_token_ids": words,
        "stop_token_ids": [free[random.integers(0, min(len(free), 10))]],
        "min_tokens": int(random.integers(0, 20)),
    }


def check_restrictions(result: Generation, sampling: dict[str, Any], changes: Counter[str]) -> None:
    whole, (stop,) = [*result.prompt_token_ids, *result.token_ids], sampling["stop_token_ids"]
    for end in range(len(result.prompt_token_ids) + 1, len(whole) + 1):
        for word in sampling["bad_token_ids"]:
            assert word == [stop] or whole[max(end - len(word), 0) : end] != word
    assert stop not in result.token_ids[: sampling["min_tokens"]]
    changes["stopped"] += result.finish_reason == "stop"


def test_pairs() -> None:
    seen, changes = Seen(), Counter[str]()

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=pairs(),
        prompt_len=st.integers(1, 20),
        sampling=st.sampled_from(SAMPLING),
        accuracy=st.sampled_from([0.5, 0.9, 1.0]),
    )
    def holds(shape: dict, prompt_len: int, sampling: dict, accuracy: float) -> None:
        shape["target"]["vocab_size"] += 4  # five bans leave something
        with TemporaryDirectory() as folder:
            write_pair(shape, Path(folder))
            engine = torch_engine(Path(folder) / "t", Path(folder) / "d")
            random = np.random.default_rng(shape["seed"])
            prompt = random.integers(0, engine.vocab_size, prompt_len).tolist()
            restricted = restrictions(engine, prompt, sampling, random)
            test_lossless_random_pairs.check(engine, [prompt], TOKENS, restricted, seen, accuracy)
            result = engine.generate(prompt, max_tokens=TOKENS, **restricted)
            check_restrictions(result, restricted, changes)
            free = engine.generate(prompt, max_tokens=TOKENS, **sampling)
            changes["changed"] += result.token_ids != free.token_ids[: len(result.token_ids)]

    holds()
    assert seen.verdicts["equal"] == sum(seen.verdicts.values())
    assert len(seen.accepted) >= 4, seen.accepted
    assert min(changes["changed"], changes["stopped"]) >= 5, changes


def test_triples() -> None:
    """In a batch, and its first row alone."""
    seen, changes = SeenSteps(), Counter[str]()

    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=triples(),
        sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
        sampling=st.sampled_from(SAMPLING),
        branches=st.integers(1, 4),
        accuracy=st.tuples(st.sampled_from([0.5, 0.9]), st.sampled_from([0.6, 1.0])),
    )
    def holds(shape: dict, sizes: list[int], sampling: dict, branches: int, accuracy: tuple[float, float]) -> None:
        shape["target"]["vocab_size"] += 4
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_triple(shape, folder)
            engine = torch_engine(folder / "t", folder / "d", folder / "v", branches=4, max_batch_size=len(sizes))
            prompts = prompts_of(engine, *sizes)
            restricted = restrictions(engine, prompts[0], sampling, np.random.default_rng(shape["seed"]))
            check(engine, prompts, restricted, seen, accuracy, branches, SURE, tokens=TOKENS)
            for result in engine.generate(prompts, branches=branches, max_tokens=TOKENS, **restricted):
                check_restrictions(result, restricted, changes)

    holds()
    assert seen.verdicts["equal"] == sum(seen.verdicts.values())
    assert len(seen.gained) >= 2, seen
    assert changes["stopped"] >= 5, changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    make_target(path / "t", vocab_size=12, seed=5, eos_token_id=[3, 4])
    make_drafter(path / "d", path / "t", taps=[1, 2], block_size=5, seed=6)
    return path


@pytest.mark.parametrize("speculation", ["auto", "on", "off"])
def test_a_request_alone_equals_itself_among_others(folder: Path, speculation: Speculation) -> None:
    """Each with bans of its own; one in the middle bans too much, and fails alone."""
    alone = torch_engine(folder / "t", folder / "d")
    scheduler = torch_engine(folder / "t", folder / "d", max_batch_size=3).scheduler(speculation=speculation)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 12, size).tolist() for size in (1, 7, 30, 2, 5)]
    requests = [
        SamplingParams(max_tokens=TOKENS, **restrictions(alone, prompt, sampling, random))
        for prompt, sampling in zip(prompts, SAMPLING, strict=True)
    ]
    requests.insert(2, SamplingParams(bad_token_ids=[[token] for token in range(12)], ignore_eos=True))
    prompts.insert(2, [0])
    sequences = [alone.sequence(prompt, params) for prompt, params in zip(prompts, requests, strict=True)]
    for sequence in sequences:
        scheduler.submit(sequence)
    while not scheduler.is_idle:
        scheduler.step()
    assert "they leave no token to choose" in str(sequences.pop(2).error)
    del prompts[2], requests[2]
    for prompt, params, sequence in zip(prompts, requests, sequences, strict=True):
        single = alone.generate(prompt, speculation=False, **asdict(params))
        assert (sequence.generated, sequence.finish_reason) == (single.token_ids, single.finish_reason)


@pytest.mark.parametrize("minimum", [0, 9, 24])
def test_greedy_output_is_what_transformers_generates(folder: Path, minimum: int) -> None:
    """The model's own end tokens included."""
    engine, reference = torch_engine(folder / "t", folder / "d"), transformers_target(folder / "t")
    random, lengths = np.random.default_rng(minimum), []
    for size in (2, 5, 9, 14, 20, 27):
        prompt = random.integers(0, 12, size).tolist()
        words = restrictions(engine, prompt, {"ignore_eos": True}, random)["bad_token_ids"]
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, bad_words_ids=words,
                min_new_tokens=minimum, pad_token_id=0,
            )  # fmt: skip
        result = engine.generate(prompt, max_tokens=TOKENS, bad_token_ids=words, min_tokens=minimum)
        assert result.token_ids == expected[0, size:].tolist()
        lengths.append(len(result.token_ids))
    assert minimum <= min(lengths) < TOKENS, lengths


@pytest.mark.parametrize("speculation", [True, False])
def test_a_request_that_leaves_no_token_ends_with_its_own_error(folder: Path, speculation: bool) -> None:
    engine = torch_engine(folder / "t", folder / "d")
    words = [[token] for token in range(12) if token not in (3, 4)]
    with pytest.raises(RequestError, match="they leave no token to choose"):
        engine.generate([1, 2], bad_token_ids=words, min_tokens=2, speculation=speculation)
    result = engine.generate([1, 2], bad_token_ids=words, speculation=speculation)
    assert result.token_ids in ([3], [4])
    assert result.finish_reason == "stop"
