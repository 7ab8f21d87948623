"""The sampler against transformers' own processors, and its promises of its own."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_trt.errors import BackendError, UsageError
from dflash_trt.runtime.sampling import History, Sampler, SamplingParams


def oracle(params: SamplingParams, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """The distribution transformers' `generate` would sample from."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    processors.append(MinPLogitsWarper(params.min_p))
    scores = processors(torch.tensor([tokens]), torch.from_numpy(logits)[None].clone())
    return scores[0].softmax(-1).numpy()


options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.9]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, 1000]),
        "top_p": st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.1, 0.01]),
        "min_p": st.sampled_from([0.0, 0.02, 0.1, 0.6]),
        "repetition_penalty": st.sampled_from([1.0, 0.8, 1.3]),
    }
)


@settings(max_examples=300)
@given(options, st.integers(0, 10**6), st.sampled_from([7, 64, 500]))
def test_distribution_equals_transformers(kwargs: dict[str, Any], seed: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=vocabulary).astype(np.float32)
    prompt, generated = rng.integers(0, vocabulary, 9).tolist(), rng.integers(0, vocabulary, 6).tolist()
    params = SamplingParams(**kwargs)
    expected = oracle(params, logits, prompt + generated)
    history = History(prompt)
    history.extend(generated[:4])
    actual = Sampler(params).distribution(logits, history, generated[4:])
    assert np.array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@settings(max_examples=200)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(0, 14))
def test_top_k_keeps_all_that_tie_with_the_last(values: list[int], top_k: int) -> None:
    logits = np.array(values, np.float32)
    params = SamplingParams(temperature=0.8, top_k=top_k)
    actual = Sampler(params).distribution(logits)
    np.testing.assert_allclose(actual, oracle(params, logits, [0]), atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 10, 16])
@pytest.mark.parametrize("top_p", [0.05, 0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.999])
def test_top_p_at_exact_boundaries_of_ties(size: int, top_p: float) -> None:
    logits = np.full(size, 1.5, np.float32)
    params = SamplingParams(temperature=1, top_p=top_p)
    actual, expected = Sampler(params).distribution(logits), oracle(params, logits, [0])
    assert np.array_equal(actual > 0, expected > 0)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = np.array([1.0, 2.0, -1.0, 0.5, 3.0], np.float32)
    history = History([0, 1, 1])
    history.extend([1, 2, 2])
    params = SamplingParams(
        temperature=1, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, top_p=1.0
    )
    # vLLM: repetition over prompt and output, then counts of the output; the path counts as output
    expected = np.array([1.0 / 2, 2.0 / 2 - 0.25 - 0.5, -1.0 * 2 - 0.25 - 2 * 0.5, 0.5, 3.0 / 2 - 0.25 - 0.5])
    expected = np.exp(expected) / np.exp(expected).sum()
    np.testing.assert_allclose(Sampler(params).distribution(logits, history, (4,)), expected, rtol=1e-6)
    ids, counts = history.counts()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {0: 0, 1: 1, 2: 2}, "a path leaves no trace"


def test_prompt_tokens_beyond_the_head_are_ignored() -> None:
    logits = np.array([1.0, 2.0], np.float32)
    assert Sampler(SamplingParams(repetition_penalty=5.0)).choose(logits, 0, History([1, 2, 900])) == 0


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), max_size=20), st.data())
def test_history_counts(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    committed = data.draw(st.integers(0, len(output)))
    history = History(prompt)
    history.extend(output[:committed])
    ids, counts = history.counts(output[committed:])
    assert sorted(ids.tolist()) == sorted({*prompt, *output})
    assert all(output.count(i) == n for i, n in zip(ids.tolist(), counts.tolist(), strict=True))


def test_greedy_takes_the_first_of_ties_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([0, 3, 3, 1], np.float32)
    logits.flags.writeable = False
    sampler = Sampler(SamplingParams())
    assert sampler.choose(logits, 5) == 1 == int(torch.from_numpy(logits.copy()).argmax())
    assert sampler._processed(logits, None, ()) is logits
    assert sampler.decision_margin(logits, 5) == 0
    assert sampler.distribution(logits).tolist() == [0, 1, 0, 0]
    assert sampler.params.is_plain_greedy


def test_greedy_with_penalties_equals_transformers() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        logits = rng.normal(size=20).astype(np.float32)
        tokens = rng.integers(0, 20, 10).tolist()
        scores = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), torch.from_numpy(logits)[None].clone())
        sampler, before = Sampler(SamplingParams(repetition_penalty=1.7)), logits.copy()
        assert sampler.choose(logits, 10, History(tokens)) == int(scores.argmax())
        assert np.array_equal(logits, before)


def test_draws_follow_the_distribution() -> None:
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0], np.float32)
    sampler, draws = Sampler(SamplingParams(temperature=1, seed=11)), 24000
    counts = np.bincount([sampler.choose(logits, position) for position in range(draws)], minlength=8)
    expected = torch.from_numpy(logits).double().softmax(-1).numpy() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.32  # 0.999 quantile of chi-square, 7 degrees
    # neighbouring positions are independent: pairs against the product, 49 degrees
    uniforms = np.array([sampler.uniform(position) for position in range(draws)])
    pairs = np.histogram2d(uniforms[:-1], uniforms[1:], bins=8, range=[[0, 1], [0, 1]])[0]
    assert float(((pairs - draws / 64) ** 2 / (draws / 64)).sum()) < 103.4  # 0.999 quantile, 63 degrees


def test_choice_depends_on_seed_and_position_alone() -> None:
    logits = np.random.default_rng(0).normal(size=100).astype(np.float32)
    one, two = (Sampler(SamplingParams(temperature=1, seed=4)) for _ in range(2))
    forward = [one.choose(logits, position) for position in range(50)]
    backward = [two.choose(logits, position) for position in reversed(range(50))]
    assert forward == backward[::-1]
    other = Sampler(SamplingParams(temperature=1, seed=5))
    assert forward != [other.choose(logits, position) for position in range(50)]


def test_the_generator_is_pinned() -> None:
    """A bundle must answer a seed alike on every platform and numpy version."""
    sampler = Sampler(SamplingParams(seed=2**64 - 1))
    assert [sampler.uniform(p) for p in (0, 1, 131072)] == [0.23494158814525556, 0.3501621337115973, 0.9111628788736804]


def test_a_seed_is_drawn_when_none_is_given() -> None:
    assert Sampler(SamplingParams()).seed != Sampler(SamplingParams()).seed
    assert Sampler(SamplingParams(seed=0)).seed == 0


def test_margins() -> None:
    greedy = Sampler(SamplingParams())
    assert greedy.decision_margin(np.array([1.0, 4.0, 3.5], np.float32), 0) == 0.5
    assert greedy.decision_margin(np.array([1.0], np.float32), 0) == math.inf
    sampler, logits = Sampler(SamplingParams(temperature=1, seed=1)), np.zeros(4, np.float32)
    for position in range(20):
        u = sampler.uniform(position)
        chosen = sampler.choose(logits, position)
        assert chosen == int(u * 4)
        assert sampler.decision_margin(logits, position) == pytest.approx(min(u - chosen / 4, (chosen + 1) / 4 - u))


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = np.array([1.0, 2.0, -np.inf], np.float32)
    probabilities = Sampler(SamplingParams(temperature=temperature)).distribution(logits)
    assert probabilities.tolist() == ([0.5, 0.5, 0] if temperature > 1 else [0, 1, 0])


def test_tokens_at_minus_infinity_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], np.float32)
    for params in (SamplingParams(temperature=1, seed=1), SamplingParams(temperature=1, seed=1, top_k=4, top_p=0.99)):
        assert {Sampler(params).choose(logits, position) for position in range(60)} == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_an_error(temperature: float, value: float) -> None:
    with pytest.raises(BackendError, match="largest logit is"):
        Sampler(SamplingParams(temperature=temperature)).choose(np.array([1, value, 2], np.float32), 0)


def test_penalties_without_history_are_an_error() -> None:
    with pytest.raises(UsageError, match="history"):
        Sampler(SamplingParams(presence_penalty=1.0)).choose(np.zeros(3, np.float32), 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, math.nan, math.inf, "1", True, None)],
        *[("top_k", v) for v in (-1, 1.5, True)],
        *[("top_p", v) for v in (0, -0.5, 1.01, math.nan)],
        *[("min_p", v) for v in (-0.1, 1.1)],
        *[("repetition_penalty", v) for v in (0, -1, math.inf)],
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        *[("seed", v) for v in (-1, 2**64, 1.0)],
        *[("max_tokens", v) for v in (0, -5, 2.0)],
        *[("stop", v) for v in ("", ["a", ""], [1], 3)],
        *[("stop_token_ids", v) for v in ([-1], ["a"], 3)],
        ("ignore_eos", 1),
    ],
)
def test_refused_parameters_name_field_value_and_rule(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert " must be " in caught.value.what
    assert repr(value) in caught.value.what or field == "stop"


def test_accepted_parameters_are_normalised() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(7), stop="END")
    assert (params.temperature, params.top_k, params.seed, params.stop) == (0.5, 3, 7, ("END",))
    assert isinstance(params.seed, int)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop == ("a", "b")
