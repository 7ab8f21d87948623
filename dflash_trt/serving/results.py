"""Events of the runtime as output tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.runtime.generation import Generation, StreamEvent
from dflash_trt.serving.request import Ask

Outputs = dict[str, npt.NDArray[Any]]


def results(ask: Ask, event: StreamEvent) -> Outputs:
    """What a response says beside the text.

    `output_ids` i32 [1, 1, n], as TensorRT-LLM has them, and `num_output_tokens` are those of this response. What is of
    the whole request comes with its last one.
    """
    generation = event.generation
    token_ids = event.token_ids if ask.stream or generation is None else generation.token_ids
    outputs: Outputs = {"output_ids": np.array([[token_ids]], np.int32)}
    if ask.num_input_tokens:
        outputs["num_input_tokens"] = np.array([[len(ask.prompt)]], np.int32)
    if ask.num_output_tokens:
        outputs["num_output_tokens"] = np.array([[len(token_ids)]], np.int32)
    return outputs if generation is None else outputs | _of_the_request(generation)


def text_of(ask: Ask, event: StreamEvent) -> str:
    """The new text of a stream's response, the whole text of any other."""
    return event.text if ask.stream or event.generation is None else event.generation.text


def strings(*texts: str) -> npt.NDArray[np.object_]:
    """A string tensor, of UTF-8."""
    return np.array([text.encode() for text in texts], np.object_)


def tensors(backend: Any, outputs: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    """As `pb_utils.Tensor`s; `backend` is `triton_python_backend_utils`."""
    return [backend.Tensor(name, array) for name, array in outputs.items()]


def _of_the_request(generation: Generation) -> Outputs:
    statistics = generation.statistics
    rates = {
        "acceptance_rate": statistics.acceptance_rate,
        "acceptance_length": statistics.mean_acceptance_length,
    }
    return {
        "total_accepted_draft_tokens": np.array([[statistics.accepted_drafts]], np.int32),
        "total_draft_tokens": np.array([[statistics.proposed_drafts]], np.int32),
        "finish_reason": strings(generation.finish_reason).reshape(1, 1),
        "used_seed": np.array([[generation.seed]], np.uint64),
        **{name: np.array([[rate]], np.float32) for name, rate in rates.items() if rate is not None},
    }
