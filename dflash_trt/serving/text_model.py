"""`dflash_trt` of the layout "single": text in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.runtime.generation import StreamEvent
from dflash_trt.serving.engine_model import EngineModel
from dflash_trt.serving.exchange import Exchange
from dflash_trt.serving.prompts import Prompts
from dflash_trt.serving.request import Ask, Inputs, read, words
from dflash_trt.serving.results import Outputs, results, strings, text_of
from dflash_trt.serving.settings import Settings

__all__ = ["TritonPythonModel"]


class TritonPythonModel(EngineModel):
    """Has the tensors of TensorRT-LLM's ensemble: see `tensors.py`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        engine = self.engine
        self._prompts = Prompts.of(Settings(args), engine.tokenizer, engine.limits, engine.vocab_size)

    def read(self, request: Any) -> Ask:
        inputs = Inputs(request)
        text = inputs.text("text_input")
        return read(
            inputs,
            self._prompts.encode(text),
            text,
            self._prompts.bad_words(words(inputs, "bad_words")),
            vocab_size=self.engine.vocab_size,
            exclude_input=self.exclude_input,
        )

    def outputs(self, exchange: Exchange, event: StreamEvent) -> Outputs:
        # [1], without a batch: what TensorRT-LLM's clients index
        text = strings(exchange.ask.echo + text_of(exchange.ask, event))
        return {"text_output": text, **results(exchange.ask, event)}
