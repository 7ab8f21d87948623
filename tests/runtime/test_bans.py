"""Bad words and minimum lengths in the sampler, against transformers' own processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_trt.errors import BackendError, RequestError, UsageError
from dflash_trt.runtime.sampling import History, Sampler, SamplingParams

VOCABULARY = 5
tokens = st.integers(0, VOCABULARY - 1)


def processors(params: SamplingParams, ends: list[int], prompt_len: int) -> LogitsProcessorList:
    """Those of transformers' `generate`, in its order."""
    found = LogitsProcessorList()
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_token_ids:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_token_ids], ends))
    if params.min_tokens and ends:
        found.append(MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, ends))
    if params.temperature:
        found.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            found.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            found.append(TopPLogitsWarper(params.top_p))
        found.append(MinPLogitsWarper(params.min_p))
    return found


@settings(max_examples=600)
@given(
    kwargs=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.6]),
            "top_k": st.sampled_from([0, 1, 3]),
            "top_p": st.sampled_from([1.0, 0.9, 0.4]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "repetition_penalty": st.sampled_from([1.0, 1.4]),
            "min_tokens": st.integers(0, 6),
            "bad_token_ids": st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=6),
        }
    ),
    ends=st.lists(tokens, max_size=2),
    prompt=st.lists(tokens, min_size=1, max_size=5),
    output=st.lists(tokens, max_size=6),
    data=st.data(),
)
def test_the_distribution_equals_transformers(
    kwargs: dict[str, Any], ends: list[int], prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    """Wherever the committed tokens end and the candidate path begins."""
    params = SamplingParams(**kwargs)
    logits = np.random.default_rng(data.draw(st.integers(0, 999))).normal(scale=2, size=VOCABULARY).astype(np.float32)
    scores = torch.from_numpy(logits)[None].clone()
    scores = processors(params, ends, len(prompt))(torch.tensor([prompt + output]), scores)[0]
    committed = data.draw(st.integers(0, len(output)))
    history, path = History(prompt), tuple(output[committed:])
    history.extend(output[:committed])
    sampler, before = Sampler(params, ends), logits.copy()
    if scores.max() == -torch.inf:
        with pytest.raises(RequestError, match="leave no token to choose"):
            sampler.choose(logits, 7, history, path)
        return
    expected = scores.softmax(-1).numpy() if params.temperature else np.eye(VOCABULARY)[int(scores.argmax())]
    actual = sampler.distribution(logits, history, path)
    assert np.array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert np.array_equal(logits, before)
    assert expected[sampler.choose(logits, len(prompt) + len(output), history, path)] > 0


def allowed(params: SamplingParams, history: History, path: tuple[int, ...] = (), ends: tuple[int, ...] = ()) -> str:
    """The tokens that may come, of eight, as digits."""
    logits = np.zeros(8, np.float32)
    return "".join(str(token) for token in np.flatnonzero(Sampler(params, ends).distribution(logits, history, path)))


def test_a_word_may_begin_in_the_prompt_and_go_on_in_the_path() -> None:
    params = SamplingParams(temperature=1, bad_token_ids=[[1, 2, 3, 4], [3, 5], [6]])
    history = History([0, 1])
    assert allowed(params, history, (2, 3)) == "01237"
    assert allowed(params, history, (2,)) == "0123457"
    history.extend([2])
    assert allowed(params, history, (3,)) == "01237"
    assert allowed(params, history, (7, 3)) == "012347"
    assert allowed(params, History()) == "0123457"


def test_no_end_before_the_minimum() -> None:
    params = SamplingParams(temperature=1, min_tokens=3)
    history = History([0] * 50)
    assert allowed(params, history, (1, 1), ends=(2, 7, 900)) == "013456"
    history.extend([1])
    assert allowed(params, history, (1,), ends=(2, 7, 900)) == "013456"
    assert allowed(params, history, (1, 1), ends=(2, 7, 900)) == "01234567"


def test_an_end_alone_is_no_bad_word() -> None:
    """As in transformers; as a part of one it counts."""
    params = SamplingParams(temperature=1, bad_token_ids=[[2], [1, 2], [3]])
    assert allowed(params, History([5]), ends=(2,)) == "0124567"
    assert allowed(params, History([1]), ends=(2,)) == "014567"
    assert allowed(params, History([5])) == "014567"


def test_ids_outside_the_vocabulary_ban_nothing() -> None:
    params = SamplingParams(temperature=1, bad_token_ids=[[900], [1, 2**40], [1, 3]], min_tokens=9)
    assert allowed(params, History([1]), ends=(8,)) == "0124567"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left(temperature: float) -> None:
    """transformers would go on with a banned token, or fail in the draw."""
    sampler = Sampler(SamplingParams(temperature=temperature, bad_token_ids=[[0], [5, 1]], min_tokens=1), [2])
    logits, history = np.zeros(3, np.float32), History([5])
    with pytest.raises(RequestError, match="leave no token to choose"):
        sampler.choose(logits, 1, history)
    assert sampler.choose(logits, 1, History([4])) == 1
    logits[1] = np.nan
    with pytest.raises(BackendError, match="largest logit"):
        sampler.choose(logits, 1, History([4]))


@pytest.mark.parametrize("options", [{"bad_token_ids": [[1]]}, {"min_tokens": 1}])
def test_neither_is_plain_greedy_nor_goes_without_history(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert not params.is_plain_greedy
    with pytest.raises(UsageError, match="history"):
        Sampler(params).choose(np.zeros(3, np.float32), 0)


def test_which_tokens_end_the_output() -> None:
    assert SamplingParams(stop_token_ids=[3]).end_token_ids((1, 2)) == {1, 2, 3}
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).end_token_ids((1, 2)) == {3}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *[("min_tokens", value, "an integer >= 0") for value in (-1, 1.5, True, None)],
        ("min_tokens", 300, r"at most max_tokens \(256\)"),
        *[
            ("bad_token_ids", value, "a sequence of non-empty sequences of integers >= 0")
            for value in ("ab", [1], [[]], [[1], []], [[-1]], [["a"]], [[True]], [[1.0]], 5, None)
        ],
    ],
)
def test_refused_parameters_name_field_value_and_rule(field: str, value: object, rule: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}: .* must be {rule}") as caught:
        SamplingParams(**{field: value})
    assert repr(value) in caught.value.what


def test_sequences_are_normalised() -> None:
    params = SamplingParams(bad_token_ids=[[np.int64(1), 2], (3,)], min_tokens=np.int32(4))
    assert params.bad_token_ids == ((1, 2), (3,))
    assert type(params.bad_token_ids[0][0]) is type(params.min_tokens) is int
