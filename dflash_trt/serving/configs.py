"""The configuration of each model, as config.pbtxt holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_trt.serving.pbtxt import Word
from dflash_trt.serving.tensors import (
    OPTIONS,
    REFUSED,
    RESULTS,
    TEXT_OUTPUTS,
    TOKEN_NAMES,
    TOKEN_OUTPUTS,
    Tensor,
    text_inputs,
    token_inputs,
)

PREPROCESSING, ENGINE, POSTPROCESSING, ENSEMBLE = "preprocessing", "dflash_trt", "postprocessing", "ensemble"

# The length only passes through: Triton itself refuses a step without any input, in words that name none, and so a
# request without text comes as far as to be told what is missing.
PREPROCESSING_INPUTS = (
    Tensor("QUERY", "STRING"),
    Tensor("REQUEST_OUTPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_DICT", "STRING", (-1,)),
)
PREPROCESSING_OUTPUTS = (
    Tensor("INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "INT32"),
    Tensor("REQUEST_OUTPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
)
POSTPROCESSING_INPUTS = (
    Tensor("TEXT", "STRING"),
    Tensor("ECHO", "STRING"),
    Tensor("REQUEST_NUMBER", "UINT64"),
)
POSTPROCESSING_OUTPUTS = (Tensor("OUTPUT", "STRING", (-1,)),)

Config = dict[str, Any]


def text_model(parameters: Mapping[str, str]) -> Config:
    """`dflash_trt` of the layout "single"."""
    return _python(ENGINE, text_inputs(), TEXT_OUTPUTS, parameters, decoupled=True)


def token_model(parameters: Mapping[str, str]) -> Config:
    """`dflash_trt` of the layout "ensemble"."""
    return _python(ENGINE, token_inputs(), TOKEN_OUTPUTS, parameters, decoupled=True)


def preprocessing(parameters: Mapping[str, str]) -> Config:
    """Text to tokens."""
    return _python(PREPROCESSING, PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS, parameters)


def postprocessing() -> Config:
    """Pieces of text to `text_output`.

    One instance: a stream's pieces are handled one after the other, so that they arrive in order.
    """
    return _python(POSTPROCESSING, POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS, {"engine_model": ENGINE})


def ensemble() -> Config:
    """All three. What follows a decoupled model may read nothing else, so `dflash_trt` hands on what comes after it."""
    shared = [each.name for each in (*OPTIONS, *(refused.tensor for refused in REFUSED))]
    engine_inputs = {
        "input_ids": "_INPUT_ID",
        "input_lengths": "_REQUEST_INPUT_LEN",
        "request_output_len": "_REQUEST_OUTPUT_LEN",
        "bad_words_list": "_BAD_WORDS_IDS",
        "prompt_text": "text_input",
        "stop_words": "stop_words",
        **{TOKEN_NAMES.get(name, name): name for name in shared},
    }
    engine_outputs = {
        "text": "_TEXT",
        "echo": "_ECHO",
        "request_number": "_REQUEST_NUMBER",
        **{each.name: each.name for each in RESULTS},
    }
    steps = [
        _step(
            PREPROCESSING,
            {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens", "BAD_WORDS_DICT": "bad_words"},
            {each.name: f"_{each.name}" for each in PREPROCESSING_OUTPUTS},
        ),
        _step(ENGINE, engine_inputs, engine_outputs),
        _step(
            POSTPROCESSING,
            {"TEXT": "_TEXT", "ECHO": "_ECHO", "REQUEST_NUMBER": "_REQUEST_NUMBER"},
            {"OUTPUT": "text_output"},
        ),
    ]
    return {
        "name": ENSEMBLE,
        "platform": "ensemble",
        "max_batch_size": 1,
        **_tensors(text_inputs(), TEXT_OUTPUTS),
        "ensemble_scheduling": {"step": steps},
    }


def _python(
    name: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    parameters: Mapping[str, str],
    *,
    decoupled: bool = False,
) -> Config:
    """A model of the Python backend: one process, one prompt a request. Requests are batched by the runtime inside."""
    config: Config = {"name": name, "backend": "python", "max_batch_size": 1}
    if decoupled:
        config["model_transaction_policy"] = {"decoupled": True}
    config |= _tensors(inputs, outputs)
    config["instance_group"] = [{"count": 1, "kind": Word("KIND_CPU")}]
    config["parameters"] = [{"key": key, "value": {"string_value": value}} for key, value in parameters.items()]
    return config


def _tensors(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> Config:
    return {
        "input": [_tensor(each) | {"optional": True} for each in inputs],
        "output": [_tensor(each) for each in outputs],
    }


def _tensor(tensor: Tensor) -> Config:
    return {"name": tensor.name, "data_type": Word(f"TYPE_{tensor.kind}"), "dims": list(tensor.dims)}


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Config:
    def pairs(mapping: Mapping[str, str]) -> list[Config]:
        return [{"key": key, "value": value} for key, value in mapping.items()]

    return {"model_name": model, "model_version": -1, "input_map": pairs(inputs), "output_map": pairs(outputs)}
