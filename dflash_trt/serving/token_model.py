"""`dflash_trt` of the layout "ensemble": tokens in; tokens, pieces of text and what postprocessing needs out."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_trt.errors import RequestError
from dflash_trt.runtime.generation import StreamEvent
from dflash_trt.serving.engine_model import EngineModel
from dflash_trt.serving.exchange import Exchange
from dflash_trt.serving.request import Ask, Inputs, read, word_list
from dflash_trt.serving.results import Outputs, results, strings, text_of
from dflash_trt.serving.tensors import TOKEN_NAMES

__all__ = ["TritonPythonModel"]


class TritonPythonModel(EngineModel):
    """Has the tensors of TensorRT-LLM's model `tensorrt_llm`, and text beside the tokens: see `tensors.py`.

    A request with `stop` set ends the one whose `request_number` it gives. The responses of a request say its number.
    """

    def read(self, request: Any) -> Ask | None:
        inputs = Inputs(request, TOKEN_NAMES)
        if inputs.scalar("stop"):
            self._stop(inputs)
            return None
        return read(
            inputs,
            _prompt(inputs),
            inputs.text("prompt_text"),
            word_list(inputs, "bad_words_list"),
            vocab_size=self.engine.vocab_size,
            exclude_input=self.exclude_input,
        )

    def outputs(self, exchange: Exchange, event: StreamEvent) -> Outputs:
        answer = results(exchange.ask, event)
        answer["sequence_length"] = np.array([[answer["output_ids"].size]], np.int32)
        answer["text"] = strings(text_of(exchange.ask, event)).reshape(1, 1)
        answer["request_number"] = np.array([[exchange.number]], np.uint64)
        if exchange.ask.echo:
            answer["echo"] = strings(exchange.ask.echo).reshape(1, 1)
        return answer

    def _stop(self, inputs: Inputs) -> None:
        number = inputs.scalar("request_number")
        if number is None:
            raise RequestError("is missing", where="request_number", mend="Send the number of the request to stop")
        self.exchanges.stop(number)


def _prompt(inputs: Inputs) -> list[int]:
    """The first `input_lengths` tokens; all, where it was not sent."""
    array = inputs.array("input_ids")
    if array is None or array.size == 0:
        raise RequestError("is missing or empty", where="input_ids", mend="Send the tokens of the prompt")
    tokens = array.reshape(-1).tolist()
    length = inputs.scalar("input_lengths")
    if length is not None and not 0 < length <= len(tokens):
        raise RequestError(f"is {length}, of {len(tokens)} tokens", where="input_lengths")
    return tokens[:length]
