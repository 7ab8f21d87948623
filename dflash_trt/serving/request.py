"""A request as Triton hands it over, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import RequestError
from dflash_trt.runtime.sampling_params import SamplingParams
from dflash_trt.serving.tensors import REFUSED, Refused

MOST_WORDS, MOST_CHARACTERS = 1000, 16384
_SAMPLED_BY = ("temperature", "top_k", "top_p", "min_p")
_TAKEN_AS_THEY_ARE = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "seed")


@dataclass(frozen=True)
class Ask:
    """What a request asks for.

    Attributes:
        echo: the text that the whole output begins with; a stream has none.
        num_input_tokens, num_output_tokens: whether responses say them.
    """

    prompt: Sequence[int]
    params: SamplingParams
    stream: bool
    echo: str
    num_input_tokens: bool
    num_output_tokens: bool


class Inputs:
    """The input tensors of one request, by the names of the text tensors.

    Args:
        request: a `pb_utils.InferenceRequest`.
        names: how the model calls what is called otherwise here.
    """

    def __init__(self, request: Any, names: Mapping[str, str] | None = None) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}
        self._names = names or {}

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """The tensor without its batch; None where it was not sent."""
        tensor = self._tensors.get(self._names.get(name, name))
        if tensor is None:
            return None
        array = tensor.as_numpy()
        return array.reshape(array.shape[1:]) if array.ndim and array.shape[0] == 1 else array

    def scalar(self, name: str) -> Any:
        """The one value of a tensor, as Python has it; None where it was not sent.

        A float32 is read as the shortest decimal that it stands for, so that 0.7 is what 0.7 is everywhere else.

        Raises:
            RequestError: not one value.
        """
        array = self.array(name)
        if array is None:
            return None
        if array.size != 1:
            raise RequestError(f"has {array.size} values", where=name, mend="Send one")
        value = array.reshape(())[()]
        return float(str(value)) if isinstance(value, np.float32) else array.item()

    def strings(self, name: str) -> list[str]:
        """The texts of a tensor; none where it was not sent.

        Raises:
            RequestError: not valid UTF-8.
        """
        array = self.array(name)
        return [] if array is None else [_utf8(value, name) for value in array.reshape(-1).tolist()]

    def text(self, name: str) -> str | None:
        """The one text of a tensor; None where it was not sent. Raises RequestError as `scalar` and `strings` do."""
        value = self.scalar(name)
        return None if value is None else _utf8(value, name)


def _utf8(value: bytes | str, name: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"is not valid UTF-8 (byte {error.start})"
        raise RequestError(what, where=name, mend="Convert it to UTF-8") from error


def read(
    inputs: Inputs,
    prompt: Sequence[int],
    text: str | None,
    bad_words: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    exclude_input: bool,
) -> Ask:
    """What a request asks for.

    Args:
        text: of the prompt, for the echo, where it is known.
        bad_words: as tokens.
        exclude_input: whether the output is without the input where the request says nothing of it.

    Raises:
        RequestError, UsageError: a value that is out of range, or asks for what cannot be served.
    """
    for refused in REFUSED:
        _check_neutral(inputs, refused)
    stream = bool(inputs.scalar("stream"))
    excluded = inputs.scalar("exclude_input_in_output")
    echoes = not (exclude_input if excluded is None else excluded) and not stream
    return Ask(
        prompt=prompt,
        params=_sampling(inputs, bad_words, vocab_size),
        stream=stream,
        echo=(text or "") if echoes else "",
        num_input_tokens=bool(inputs.scalar("return_num_input_tokens")),
        num_output_tokens=bool(inputs.scalar("return_num_output_tokens")),
    )


def _check_neutral(inputs: Inputs, refused: Refused) -> None:
    name = refused.tensor.name
    array = inputs.array(name)
    if array is None or array.size == 0:
        return
    values = np.unique(array).tolist()
    asking = [value for value in values if value not in refused.neutral]
    if asking:
        shown = "what was sent" if array.size > 1 else repr(asking[0])
        raise RequestError(f"{shown} cannot be served: {refused.reason}", where=name, mend="Leave it out")


def _sampling(inputs: Inputs, bad_words: Sequence[Sequence[int]], vocab_size: int) -> SamplingParams:
    given = {name: value for name in _SAMPLED_BY if (value := inputs.scalar(name)) is not None}
    greedy = not given or given.get("top_k") == 1 or given.get("top_p") == 0 or given.get("temperature") == 0
    if given.get("top_p") == 0:
        del given["top_p"]
    fields = {name: value for name in _TAKEN_AS_THEY_ARE if (value := inputs.scalar(name)) is not None}
    max_tokens = inputs.scalar("max_tokens")
    if max_tokens is None:
        raise RequestError("is missing", where="max_tokens", mend="Say how many tokens may be generated")
    params = SamplingParams(
        **{"temperature": 1.0} | given | fields,
        max_tokens=max_tokens,
        stop=tuple(words(inputs, "stop_words")),
        bad_token_ids=tuple(map(tuple, bad_words)),
        **_end(inputs, vocab_size),
    )
    return replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) if greedy else params


def words(inputs: Inputs, name: str) -> list[str]:
    """The words of a tensor without the empty ones, which clients send for none.

    Raises:
        RequestError: so many or long ones that looking for them would hold up other requests.
    """
    found = [word for word in inputs.strings(name) if word]
    characters = sum(map(len, found))
    if len(found) > MOST_WORDS or characters > MOST_CHARACTERS:
        what = f"{len(found)} words of {characters} characters; at most {MOST_WORDS} of {MOST_CHARACTERS} together"
        raise RequestError(what, where=name, mend="Send fewer or shorter ones")
    return found


def _end(inputs: Inputs, vocab_size: int) -> dict[str, Any]:
    """The tokens that end the output: the model's own, or `end_id` in place of them, as in TensorRT-LLM; -1 is none."""
    tokens = set(stop_tokens(inputs))
    end_id = inputs.scalar("end_id")
    if end_id is not None and end_id != -1:
        tokens.add(end_id)
    for token in tokens:
        if not 0 <= token < vocab_size:
            where = "end_id" if token == end_id else "stop_words_list"
            raise RequestError(f"token {token} is outside 0..{vocab_size - 1}", where=where)
    return {"stop_token_ids": tuple(sorted(tokens)), "ignore_eos": end_id is not None}


def stop_tokens(inputs: Inputs) -> list[int]:
    """The single tokens of `stop_words_list`.

    Raises:
        RequestError: a word of several tokens, which are ended by as text.
    """
    words = word_list(inputs, "stop_words_list")
    if any(len(word) != 1 for word in words):
        what = "a word of several tokens does not end the output"
        raise RequestError(what, where="stop_words_list", mend="Send it as text, in stop_words")
    return [word[0] for word in words]


def word_list(inputs: Inputs, name: str) -> list[list[int]]:
    """TensorRT-LLM's form of words as tokens, [2, n]: the tokens of all, and where each word ends (the rest is -1).

    Raises:
        RequestError: it is not of this form.
    """
    array = inputs.array(name)
    if array is None or array.size == 0:
        return []
    tokens, ends = array.tolist() if array.ndim == 2 and array.shape[0] == 2 else ([], [])
    ends = [end for end in ends if end != -1]
    if not tokens or sorted(set(ends)) != ends or (ends and not 0 < ends[0] <= ends[-1] <= len(tokens)):
        raise RequestError("is not tokens over the ends of words", where=name, mend="Send two rows: [tokens, ends]")
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def to_word_list(words: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Words as tokens in the form of `word_list`, i32 [1, 2, n]."""
    tokens = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.array([[tokens, ends + [-1] * (len(tokens) - len(ends))]], np.int32)
