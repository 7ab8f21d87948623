"""How a request is read: what is greedy, what is refused, what ends the output."""

from __future__ import annotations

import numpy as np
import pytest
from backend_double import InferenceRequest, Tensor
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.errors import DflashError, RequestError, UsageError
from dflash_trt.runtime.sampling_params import SamplingParams
from dflash_trt.serving.request import Ask, Inputs, read, stop_tokens, to_word_list, word_list
from dflash_trt.serving.tensors import REFUSED, TOKEN_NAMES

TYPES = {bool: np.bool_, int: np.int32, float: np.float32}
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def inputs_of(names: dict[str, str] | None = None, **values) -> Inputs:
    def array(value) -> np.ndarray:
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, (bytes, list)):
            return np.array([value if isinstance(value, list) else [value]], np.object_)
        return np.array([[value]], TYPES[type(value)])

    return Inputs(InferenceRequest([Tensor(name, array(value)) for name, value in values.items()]), names)


def ask(*, exclude_input: bool = True, bad_words=(), **values) -> Ask:
    values = {"max_tokens": 5} | values
    return read(inputs_of(**values), [1, 2], "the prompt", bad_words, vocab_size=100, exclude_input=exclude_input)


def params(**values) -> SamplingParams:
    return ask(**values).params


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GREEDY),
        ({"repetition_penalty": 1.2}, GREEDY | {"repetition_penalty": 1.2}),
        ({"temperature": 0.0}, GREEDY),
        ({"temperature": 0.7, "top_k": 1}, GREEDY),
        ({"temperature": 0.7, "top_p": 0.0}, GREEDY),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 7}, GREEDY),
        ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        ({"top_p": 1.0}, {"temperature": 1.0, "top_p": 1.0}),
        ({"top_k": 40}, {"temperature": 1.0, "top_k": 40}),
        ({"top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        ({"min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"presence_penalty": 0.25, "frequency_penalty": -0.5}, {"presence_penalty": 0.25, "frequency_penalty": -0.5}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"seed": np.array([[2**63 + 5]], np.uint64)}, {"seed": 2**63 + 5}),
        ({}, {"seed": None, "stop": (), "ignore_eos": False, "stop_token_ids": ()}),
        ({"stop_words": [b"a", b"", "\N{SNOWMAN}".encode()]}, {"stop": ("a", "\N{SNOWMAN}")}),
        ({"stop_words": b""}, {"stop": ()}),
        ({"end_id": 7}, {"ignore_eos": True, "stop_token_ids": (7,)}),
        ({"end_id": -1}, {"ignore_eos": True, "stop_token_ids": ()}),
        ({"end_id": 7, "stop_words_list": np.array([[[3], [1]]], np.int32)}, {"stop_token_ids": (3, 7)}),
        ({"pad_id": 2, "length_penalty": 1.0, "return_perf_metrics": True}, GREEDY),
    ],
)
def test_sampling(given, expected):
    found = params(**given)
    assert {name: getattr(found, name) for name in expected} == expected


@given(st.floats(2**-6, 128, width=32))
def test_a_float32_means_the_shortest_decimal(value):
    read_back = params(temperature=value).temperature
    assert np.float32(read_back) == np.float32(value)
    assert repr(read_back) == repr(float(str(np.float32(value))))


def test_a_decimal_is_what_it_is_elsewhere():
    assert params(temperature=0.7).temperature == 0.7
    assert float(np.float32(0.7)) != 0.7


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1, "temperature": 0.5}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.5}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"temperature": 0.0, "top_k": -3}, "top_k"),  # also where it would not matter
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"end_id": 100}, "end_id"),
        ({"end_id": -2}, "end_id"),
        ({"stop_words_list": np.array([[[100], [1]]], np.int32)}, "stop_words_list"),
        ({"stop_words_list": np.array([[[1, 2], [2, -1]]], np.int32)}, "stop_words_list"),
        ({"stop_words": b"\xff"}, "stop_words"),
        ({"max_tokens": np.array([[1, 2]], np.int32)}, "max_tokens"),
        ({"temperature": np.zeros((1, 0), np.float32)}, "temperature"),
    ],
)
def test_a_wrong_value_is_named(given, where):
    with pytest.raises((RequestError, UsageError)) as raised:
        params(**given)
    assert raised.value.where == where


def test_max_tokens_must_be_there():
    with pytest.raises(RequestError, match="max_tokens: is missing"):
        read(inputs_of(seed=1), [1], None, (), vocab_size=9, exclude_input=True)


ASKING = {
    "decoder_text_input": b"x",
    "num_return_sequences": 2,
    "beam_width": 4,
    "return_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
    "prompt_embedding_table": np.zeros((1, 2, 3), np.float16),
    "prompt_table_extra_id": 1,
    "prompt_vocab_size": 8,
    "embedding_bias_words": [b"a", b"b"],
    "embedding_bias_weights": np.array([[0.0, 1.0]], np.float32),
    "lora_task_id": 3,
    "lora_weights": np.zeros((1, 2, 3), np.float16),
    "lora_config": np.zeros((1, 2, 3), np.int32),
    "guided_decoding_guide_type": b"json",
    "guided_decoding_guide": b"{}",
}


def test_every_refused_input_is_tried():
    assert {refused.tensor.name for refused in REFUSED} == ASKING.keys()


@pytest.mark.parametrize("name", ASKING)
def test_what_cannot_be_served_is_refused_by_name(name):
    with pytest.raises(RequestError, match="cannot be served") as raised:
        params(**{name: ASKING[name]})
    assert raised.value.where == name


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.tensor.name)
def test_neutral_values_of_it_are_taken(refused):
    name = refused.tensor.name
    assert params(**{name: np.zeros((1, 0), np.float32)}) == params()
    for value in refused.neutral:
        assert params(**{name: value}) == params()


def test_echo():
    assert ask().echo == ""
    assert ask(exclude_input=False).echo == "the prompt"
    assert ask(exclude_input=False, exclude_input_in_output=True).echo == ""
    assert ask(exclude_input_in_output=False).echo == "the prompt"
    assert ask(exclude_input_in_output=False, stream=True).echo == ""


def test_flags():
    assert (ask().stream, ask().num_input_tokens, ask().num_output_tokens) == (False, False, False)
    told = ask(stream=True, return_num_input_tokens=True, return_num_output_tokens=True)
    assert (told.stream, told.num_input_tokens, told.num_output_tokens) == (True, True, True)


def test_names_of_the_token_model():
    inputs = inputs_of(TOKEN_NAMES, request_output_len=9, runtime_top_k=4, runtime_top_p=0.5, streaming=True)
    told = read(inputs, [1], None, [[4, 5]], vocab_size=9, exclude_input=False)
    assert (told.params.max_tokens, told.params.top_k, told.params.top_p, told.stream) == (9, 4, 0.5, True)
    assert told.params.bad_token_ids == ((4, 5),)
    assert told.echo == ""


WORDS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=5)


@given(WORDS.filter(bool))
def test_words_as_tokens_come_back(words):
    array = to_word_list(words)
    assert (array.dtype, array.shape) == (np.int32, (1, 2, sum(map(len, words))))
    assert word_list(inputs_of(bad_words_list=array), "bad_words_list") == words


def test_word_list_as_tensorrt_llm_writes_it():
    # its preprocessing: "the tokens 5 6", "the token 7", padded as in a batch with longer lists
    array = np.array([[[5, 6, 7, 0, 0], [2, 3, -1, -1, -1]]], np.int32)
    assert word_list(inputs_of(bad_words_list=array), "bad_words_list") == [[5, 6], [7]]
    assert word_list(inputs_of(bad_words_list=np.array([[[0], [-1]]], np.int32)), "bad_words_list") == []
    assert stop_tokens(inputs_of(stop_words_list=np.array([[[5, 7], [1, 2]]], np.int32))) == [5, 7]
    assert stop_tokens(inputs_of()) == []


@pytest.mark.parametrize(
    "array", [[[1, 2]], [[[1, 2], [3, -1]]], [[[1, 2], [2, 1]]], [[[1, 2], [0, 2]]], [[[1], [1], [1]]], [[[1], [-2]]]]
)
def test_other_word_lists_are_refused(array):
    with pytest.raises(DflashError, match="bad_words_list: is not tokens over the ends of words"):
        word_list(inputs_of(bad_words_list=np.array(array, np.int32)), "bad_words_list")


@pytest.mark.parametrize("value", [b"\xff\xfe", b"a\xc3", "\ud800".encode("utf-8", "surrogatepass")])
def test_text_must_be_utf8(value):
    with pytest.raises(RequestError, match="text_input: is not valid UTF-8"):
        inputs_of(text_input=value).text("text_input")


def test_text():
    assert inputs_of(text_input="a\0\N{SNOWMAN}".encode()).text("text_input") == "a\0\N{SNOWMAN}"
    assert inputs_of().text("text_input") is None
    with pytest.raises(RequestError, match="text_input: has 2 values"):
        inputs_of(text_input=[b"a", b"b"]).text("text_input")
