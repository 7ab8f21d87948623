"""What goes in and out: names and types of TensorRT-LLM's ensemble, so that its clients find what they know.

In the layout "single" the model `dflash_trt` has the text tensors. In the layout "ensemble" they are the ensemble's,
and `dflash_trt` has those of TensorRT-LLM's model `tensorrt_llm`. All inputs are declared optional: Triton does not
enforce those that are not, and a model that is asked can say which one is missing.

Greedy or sampled, as in TensorRT-LLM's Python API: nothing given of `temperature`, `top_k`, `top_p` and `min_p` is
greedy, and so are `top_k` 1, `top_p` 0 and `temperature` 0, whatever else is given. All other requests are sampled: the
temperature is 1 where none is given, the rest is off. Without `seed` one is drawn; the output `used_seed` says which.
(In TensorRT-LLM's C++ runtime `temperature` alone stays greedy.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["STRING", "BOOL", "INT32", "UINT64", "FP16", "FP32"]


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model; `dims` without the batch, which is one."""

    name: str
    kind: Kind
    dims: tuple[int, ...] = (1,)


TEXT_INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("max_tokens", "INT32"),
    Tensor("bad_words", "STRING", (-1,)),
    Tensor("stop_words", "STRING", (-1,)),
)

# Of every request, in both layouts.
OPTIONS = (
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("min_p", "FP32"),
    Tensor("temperature", "FP32"),
    Tensor("length_penalty", "FP32"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("min_tokens", "INT32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("seed", "UINT64"),
    Tensor("stream", "BOOL"),
    Tensor("return_perf_metrics", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
)


@dataclass(frozen=True)
class Refused:
    """An input of TensorRT-LLM's that cannot be served: taken where it is empty or neutral, which clients send.

    `neutral`: values that ask for nothing. `reason` completes "NAME: VALUE cannot be served: ...".
    """

    tensor: Tensor
    neutral: tuple[bytes | bool | int | float, ...]
    reason: str


_ONE_OUTPUT = "a request has one output"
_NO_LOGITS = "log probabilities and logits are not kept"
_NO_PROMPT_TUNING = "there is no prompt tuning"
_NO_BIAS = "there is no bias of logits"
_NO_LORA = "there is no LoRA; merge it into the target before the build"
_NO_GUIDE = "there is no guided decoding"

REFUSED = (
    Refused(Tensor("decoder_text_input", "STRING"), (b"",), "the model is a decoder alone"),
    Refused(Tensor("num_return_sequences", "INT32"), (0, 1), _ONE_OUTPUT),
    Refused(Tensor("beam_width", "INT32"), (0, 1), "there is no beam search"),
    Refused(Tensor("return_log_probs", "BOOL"), (False,), _NO_LOGITS),
    Refused(Tensor("return_context_logits", "BOOL"), (False,), _NO_LOGITS),
    Refused(Tensor("return_generation_logits", "BOOL"), (False,), _NO_LOGITS),
    Refused(Tensor("prompt_embedding_table", "FP16", (-1, -1)), (), _NO_PROMPT_TUNING),
    Refused(Tensor("prompt_table_extra_id", "UINT64"), (0,), _NO_PROMPT_TUNING),
    Refused(Tensor("prompt_vocab_size", "INT32"), (0,), _NO_PROMPT_TUNING),
    Refused(Tensor("embedding_bias_words", "STRING", (-1,)), (b"",), _NO_BIAS),
    Refused(Tensor("embedding_bias_weights", "FP32", (-1,)), (0.0,), _NO_BIAS),
    Refused(Tensor("lora_task_id", "UINT64"), (0,), _NO_LORA),
    Refused(Tensor("lora_weights", "FP16", (-1, -1)), (), _NO_LORA),
    Refused(Tensor("lora_config", "INT32", (-1, 3)), (), _NO_LORA),
    Refused(Tensor("guided_decoding_guide_type", "STRING"), (b"",), _NO_GUIDE),
    Refused(Tensor("guided_decoding_guide", "STRING"), (b"",), _NO_GUIDE),
)

# How `tensorrt_llm` calls what the ensemble calls otherwise; `dflash_trt` does so in the layout "ensemble".
TOKEN_NAMES = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}

# Besides the prompt: its text, for the echo, and what a request has that only stops another one.
TOKEN_INPUTS = (
    Tensor("input_ids", "INT32", (-1,)),
    Tensor("input_lengths", "INT32"),
    Tensor("request_output_len", "INT32"),
    Tensor("bad_words_list", "INT32", (2, -1)),
    Tensor("stop_words_list", "INT32", (2, -1)),
    Tensor("stop_words", "STRING", (-1,)),
    Tensor("prompt_text", "STRING"),
    Tensor("stop", "BOOL"),
    Tensor("request_number", "UINT64"),
)

# What both kinds of outputs have. Those without a value are left out: a rate of acceptance where nothing was drafted.
RESULTS = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("acceptance_rate", "FP32"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
    Tensor("acceptance_length", "FP32"),
    Tensor("finish_reason", "STRING"),
    Tensor("used_seed", "UINT64"),
)
TEXT_OUTPUTS = (Tensor("text_output", "STRING", (-1,)), *RESULTS)
TOKEN_OUTPUTS = (
    Tensor("sequence_length", "INT32", (-1,)),
    Tensor("text", "STRING"),
    Tensor("echo", "STRING"),
    Tensor("request_number", "UINT64"),
    *RESULTS,
)


def text_inputs() -> tuple[Tensor, ...]:
    """The inputs of a model that takes text."""
    return (*TEXT_INPUTS, *OPTIONS, *(refused.tensor for refused in REFUSED))


def token_inputs() -> tuple[Tensor, ...]:
    """The inputs of `dflash_trt` in the layout "ensemble"."""
    shared = (*OPTIONS, *(refused.tensor for refused in REFUSED))
    renamed = (Tensor(TOKEN_NAMES.get(each.name, each.name), each.kind, each.dims) for each in shared)
    return (*TOKEN_INPUTS, *renamed)
