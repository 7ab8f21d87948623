"""The configurations say what TensorRT-LLM's clients and Triton expect."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from dflash_trt.serving import configs
from dflash_trt.serving.pbtxt import dump

# Written down from TensorRT-LLM's triton_backend: the ensemble's inputs, and those outputs that there is something to
# say about here.
ENSEMBLE_INPUTS = """
text_input STRING 1, decoder_text_input STRING 1, max_tokens INT32 1, num_return_sequences INT32 1, bad_words STRING -1,
stop_words STRING -1, exclude_input_in_output BOOL 1, end_id INT32 1, pad_id INT32 1, top_k INT32 1, top_p FP32 1,
temperature FP32 1, length_penalty FP32 1, repetition_penalty FP32 1, min_tokens INT32 1, presence_penalty FP32 1,
frequency_penalty FP32 1, seed UINT64 1, return_log_probs BOOL 1, return_context_logits BOOL 1,
return_generation_logits BOOL 1, return_perf_metrics BOOL 1, return_num_input_tokens BOOL 1,
return_num_output_tokens BOOL 1, beam_width INT32 1, stream BOOL 1, prompt_embedding_table FP16 -1 -1,
prompt_table_extra_id UINT64 1, prompt_vocab_size INT32 1, embedding_bias_words STRING -1,
embedding_bias_weights FP32 -1, lora_task_id UINT64 1, lora_weights FP16 -1 -1, lora_config INT32 -1 3,
guided_decoding_guide_type STRING 1, guided_decoding_guide STRING 1
"""
ENSEMBLE_OUTPUTS = """
text_output STRING -1, acceptance_rate FP32 1, total_accepted_draft_tokens INT32 1, total_draft_tokens INT32 1,
num_input_tokens INT32 1, num_output_tokens INT32 1
"""
TOKEN_INPUTS = """
input_ids INT32 -1, input_lengths INT32 1, request_output_len INT32 1, end_id INT32 1, pad_id INT32 1,
stop_words_list INT32 2 -1, bad_words_list INT32 2 -1, beam_width INT32 1, temperature FP32 1, runtime_top_k INT32 1,
runtime_top_p FP32 1, len_penalty FP32 1, repetition_penalty FP32 1, min_tokens INT32 1, presence_penalty FP32 1,
frequency_penalty FP32 1, seed UINT64 1, return_log_probs BOOL 1, exclude_input_in_output BOOL 1, stop BOOL 1,
streaming BOOL 1, num_return_sequences INT32 1, prompt_embedding_table FP16 -1 -1, lora_task_id UINT64 1
"""
TOKEN_OUTPUTS = """
output_ids INT32 -1 -1, sequence_length INT32 -1, acceptance_rate FP32 1, total_accepted_draft_tokens INT32 1,
total_draft_tokens INT32 1, num_input_tokens INT32 1, num_output_tokens INT32 1
"""
PARAMETERS = {"bundle": "../../bundle", "max_queue": "7"}
ALL = {
    "text": configs.text_model(PARAMETERS),
    "token": configs.token_model(PARAMETERS),
    "preprocessing": configs.preprocessing(PARAMETERS),
    "postprocessing": configs.postprocessing(),
    "ensemble": configs.ensemble(),
}


def parsed(name: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(dump(ALL[name]), model_config_pb2.ModelConfig())


def ports(text: str) -> dict[str, tuple[int, list[int]]]:
    words = [entry.split() for entry in text.replace("\n", " ").split(",")]
    return {name: (model_config_pb2.DataType.Value(f"TYPE_{kind}"), list(map(int, d))) for name, kind, *d in words}


def found(declared) -> dict[str, tuple[int, list[int]]]:
    return {port.name: (port.data_type, list(port.dims)) for port in declared}


@pytest.mark.parametrize("name", ["text", "ensemble"])
def test_text_tensors_are_those_of_tensorrt_llm(name):
    config = parsed(name)
    assert found(config.input).items() >= ports(ENSEMBLE_INPUTS).items()
    assert found(config.output).items() >= ports(ENSEMBLE_OUTPUTS).items()
    assert set(found(config.input)) - set(ports(ENSEMBLE_INPUTS)) == {"min_p"}


def test_both_layouts_have_the_same_text_tensors():
    assert found(parsed("text").input) == found(parsed("ensemble").input)
    assert found(parsed("text").output) == found(parsed("ensemble").output)


def test_token_tensors_are_those_of_tensorrt_llm():
    config = parsed("token")
    assert found(config.input).items() >= ports(TOKEN_INPUTS).items()
    assert found(config.output).items() >= ports(TOKEN_OUTPUTS).items()


@pytest.mark.parametrize("name", sorted(ALL))
def test_requests_have_one_prompt_and_every_input_may_be_missing(name):
    config = parsed(name)
    assert config.max_batch_size == 1
    assert all(port.optional for port in config.input)
    assert not config.HasField("dynamic_batching")


@pytest.mark.parametrize(("name", "decoupled"), [("text", True), ("token", True), ("preprocessing", False)])
def test_python_models(name, decoupled):
    config = parsed(name)
    assert (config.backend, config.platform) == ("python", "")
    assert config.model_transaction_policy.decoupled == decoupled
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, config.instance_group[0].KIND_CPU)]
    assert {key: value.string_value for key, value in config.parameters.items()} == PARAMETERS


def test_pieces_of_a_stream_go_through_one_instance():
    assert [group.count for group in parsed("postprocessing").instance_group] == [1]


def test_ensemble_maps_every_input_and_output():
    config = parsed("ensemble")
    assert (config.platform, config.backend) == ("ensemble", "")
    steps = config.ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["preprocessing", "dflash_trt", "postprocessing"]
    read = {tensor for step in steps for tensor in step.input_map.values()}
    given = {tensor for step in steps for tensor in step.output_map.values()}
    assert {port.name for port in config.input} <= read
    assert {port.name for port in config.output} <= given
    assert read - {port.name for port in config.input} <= given
    assert steps[1].input_map["runtime_top_k"] == "top_k"
    assert steps[1].input_map["streaming"] == "stream"
    assert steps[0].input_map["REQUEST_OUTPUT_LEN"] == "max_tokens"
    assert steps[1].input_map["request_output_len"] == steps[0].output_map["REQUEST_OUTPUT_LEN"]
