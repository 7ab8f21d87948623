"""The model `preprocessing` of the layout "ensemble": text to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from dflash_trt.bundle import read_info
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.serving.errors import error_response
from dflash_trt.serving.prompts import Prompts
from dflash_trt.serving.request import Inputs, to_word_list, words
from dflash_trt.serving.results import Outputs, tensors
from dflash_trt.serving.settings import Settings

__all__ = ["TritonPythonModel"]

# Clients know the first ones, so errors name these.
NAMES = {"text_input": "QUERY", "max_tokens": "REQUEST_OUTPUT_LEN", "bad_words": "BAD_WORDS_DICT"}


class TritonPythonModel:
    """Has the bundle's tokenizer and limits. The files of the bundle are checked by `dflash_trt`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = Settings(args)
        bundle = settings.path("bundle")
        info = read_info(bundle)
        self._prompts = Prompts.of(settings, Tokenizer(bundle / "tokenizer"), info.limits, info.target.vocab_size)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(tensors(pb_utils, self._outputs(Inputs(request, NAMES))))
        except Exception as error:
            return error_response(pb_utils, error)

    def _outputs(self, inputs: Inputs) -> Outputs:
        tokens = self._prompts.encode(inputs.text("text_input"))
        outputs: Outputs = {
            "INPUT_ID": np.array([tokens], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(tokens)]], np.int32),
        }
        max_tokens = inputs.scalar("max_tokens")
        if max_tokens is not None:
            outputs["REQUEST_OUTPUT_LEN"] = np.array([[max_tokens]], np.int32)
        bad_words = self._prompts.bad_words(words(inputs, "bad_words"))
        if bad_words:
            outputs["BAD_WORDS_IDS"] = to_word_list(bad_words)
        return outputs
