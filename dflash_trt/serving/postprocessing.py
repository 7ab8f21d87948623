"""The model `postprocessing` of the layout "ensemble": pieces of text to `text_output`.

It also is the one place where an ensemble notices that its client is gone: Triton marks the steps that begin
afterwards, and not the one that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from dflash_trt.serving.errors import error_response
from dflash_trt.serving.request import Inputs
from dflash_trt.serving.results import strings
from dflash_trt.serving.settings import Settings

__all__ = ["TritonPythonModel"]


class TritonPythonModel:
    """Puts the echo, where there is one, before the text."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._engine_model = Settings(args).text("engine_model")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            inputs = Inputs(request)
            if request.is_cancelled():
                self._stop(inputs.scalar("REQUEST_NUMBER"))
            # [1], without a batch: what TensorRT-LLM's clients index
            text = strings((inputs.text("ECHO") or "") + (inputs.text("TEXT") or ""))
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", text)])
        except Exception as error:
            return error_response(pb_utils, error)

    def _stop(self, number: int) -> None:
        inputs = [
            pb_utils.Tensor("stop", np.array([[True]])),
            pb_utils.Tensor("request_number", np.array([[number]], np.uint64)),
        ]
        stop = pb_utils.InferenceRequest(
            model_name=self._engine_model, requested_output_names=["request_number"], inputs=inputs
        )
        for response in stop.exec(decoupled=True):
            if response.has_error():
                pb_utils.Logger.log_warn(f"postprocessing: a request was not stopped: {response.error().message()}")
