"""What the models give: exactly what the engine gives, in the tensors that clients know."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from backend_double import Sender
from models_here import ask, engine_options, serving_here

import dflash_trt

OF_THE_REQUEST = {"total_accepted_draft_tokens", "total_draft_tokens", "finish_reason", "used_seed"}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "seed": 2**64 - 1},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "min_p": {"min_p": 0.2, "seed": 5},
}


@pytest.mark.parametrize("system", ["dflash", "dflare", "d2sd"])
def test_gives_what_the_engine_gives(repository_of, random_bundles, random_engines, system, layout):
    engine = random_engines[system]
    with serving_here(repository_of(random_bundles[system], layout)) as server:
        for name, inputs in REQUESTS.items():
            expected = engine.generate("Once upon", max_tokens=20, **engine_options(inputs))
            whole = ask(server, **inputs)
            stream = ask(server, stream=True, **inputs)
            (response,) = whole.wait()
            assert whole.tokens() == stream.tokens() == expected.token_ids, name
            assert whole.joined() == stream.joined() == expected.text
            assert response["finish_reason"].tolist() == [[b"length"]]
            assert response["used_seed"].tolist() == [[inputs["seed"]]] if "seed" in inputs else True
            statistics = expected.statistics
            for last in (response, stream.wait()[-1]):
                assert last["total_draft_tokens"].tolist() == [[statistics.proposed_drafts]]
                assert last["total_accepted_draft_tokens"].tolist() == [[statistics.accepted_drafts]]
                np.testing.assert_allclose(last["acceptance_rate"], statistics.acceptance_rate)
                np.testing.assert_allclose(last["acceptance_length"], statistics.mean_acceptance_length)


def test_a_stream_comes_step_by_step_with_the_text_that_belongs_to_it(models, random_engines):
    engine = random_engines["dflash"]
    responses = ask(models, stream=True).wait()
    assert len(responses) > 3
    text = engine.tokenizer.stream()
    for response in responses[:-1]:
        tokens = response["output_ids"].reshape(-1).tolist()
        assert 1 <= len(tokens) <= engine.limits.block_size + 1
        assert response["text_output"][0].decode() == "".join(text.feed(token).text for token in tokens)
    assert all(not OF_THE_REQUEST & {t.name() for t in r.output_tensors()} for r in responses[:-1])
    assert {t.name() for t in responses[-1].output_tensors()} >= OF_THE_REQUEST


# What clients were seen to send, by their sources.
CLIENTS: dict[str, dict[str, Any]] = {
    "Triton's OpenAI frontend": {
        "stream": False,
        "stop_words": ["\n\n", "###"],
        "top_p": 1.0,
        "temperature": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 11,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    },
    "TensorRT-LLM's gRPC client": {
        "stream": False,
        "beam_width": 1,
        "temperature": 1.0,
        "num_return_sequences": 1,
        "repetition_penalty": 1.0,
        "return_log_probs": False,
        "return_perf_metrics": True,
        "end_id": 300,
        "pad_id": 300,
        "exclude_input_in_output": True,
        "seed": 11,
    },
    "TensorRT-LLM's curl": {"bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 300},
}


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_of_tensorrt_llm_are_served(models, random_engines, client):
    sender = ask(models, **CLIENTS[client])
    (response,) = sender.wait()
    sampled = {"temperature": 1.0, "seed": 11} if "seed" in CLIENTS[client] else {}
    expected = random_engines["dflash"].generate("Once upon", max_tokens=20, **sampled)
    assert sender.tokens() == expected.token_ids
    assert response["text_output"].size == 1
    assert response["text_output"][0].decode() == expected.text


def test_shapes_and_types(models):
    (response,) = ask(models, return_num_input_tokens=True, return_num_output_tokens=True).wait()
    found = {t.name(): (t.as_numpy().shape, t.as_numpy().dtype) for t in response.output_tensors()}
    one = (1, 1)
    assert found == {
        "text_output": ((1,), np.object_),  # as TensorRT-LLM's postprocessing gives it
        "output_ids": ((1, 1, 20), np.int32),
        "num_input_tokens": (one, np.int32),
        "num_output_tokens": (one, np.int32),
        "acceptance_rate": (one, np.float32),
        "acceptance_length": (one, np.float32),
        "total_accepted_draft_tokens": (one, np.int32),
        "total_draft_tokens": (one, np.int32),
        "finish_reason": (one, np.object_),
        "used_seed": (one, np.uint64),
    }
    assert (response["num_input_tokens"].item(), response["num_output_tokens"].item()) == (9, 20)


def test_counts_of_a_stream_add_up(models):
    responses = ask(models, stream=True, return_num_input_tokens=True, return_num_output_tokens=True).wait()
    assert {r["num_input_tokens"].item() for r in responses} == {9}
    assert sum(r["num_output_tokens"].item() for r in responses) == 20


def test_one_token_has_no_steps_and_so_no_ratios(models):
    (response,) = ask(models, max_tokens=1).wait()
    assert "acceptance_length" not in response
    assert "acceptance_rate" not in response
    assert response["total_draft_tokens"].item() == 0


def test_echo(models, random_engines):
    text = random_engines["dflash"].generate("Once upon", max_tokens=20).text
    assert ask(models, exclude_input_in_output=False).joined() == "Once upon" + text
    assert ask(models, exclude_input_in_output=True).joined() == text
    assert ask(models, exclude_input_in_output=False, stream=True).joined() == text


def test_stop_and_bad_words_and_end(models, random_engines):
    engine = random_engines["dflash"]
    whole = engine.generate("Once upon", max_tokens=20)
    word = whole.text[7:9]
    (response,) = ask(models, stop_words=[word, "", "never"]).wait()
    assert response["text_output"][0].decode() == whole.text[: whole.text.index(word)]
    assert response["finish_reason"].item() == b"stop"
    assert ask(models, stop_words=word, stream=True).joined() == whole.text[: whole.text.index(word)]

    letter = next(each for each in whole.text if each.isalnum() and each.isascii())
    bad = engine.tokenizer.bad_words([letter])
    expected = engine.generate("Once upon", max_tokens=20, bad_token_ids=bad)
    assert letter not in expected.text
    assert ask(models, bad_words=[letter, ""]).tokens() == expected.token_ids
    assert ask(models, bad_words="").tokens() == whole.token_ids

    end = whole.token_ids[5]
    assert ask(models, end_id=end).tokens() == whole.token_ids[: whole.token_ids.index(end) + 1]
    late = engine.generate("Once upon", max_tokens=20, stop_token_ids=(end,), min_tokens=12)
    assert ask(models, end_id=end, min_tokens=12).tokens() == late.token_ids


def test_many_at_once(models, random_engines):
    """More than slots, of mixed kinds: each gets what it gets alone, and one last response."""
    choose = random.Random(0)
    engine = random_engines["dflash"]
    asked = []
    for index in range(40):
        text, inputs = "abcdefghij"[: choose.randint(1, 9)], choose.choice([*REQUESTS.values()])
        inputs = inputs | ({"seed": index} if "seed" in inputs else {})
        tokens = choose.randint(1, 40)
        sender = ask(models, text, tokens, stream=choose.random() < 0.5, **inputs)
        asked.append((sender, text, tokens, inputs))
    for sender, text, tokens, inputs in asked:
        expected = engine.generate(text, max_tokens=tokens, **engine_options(inputs))
        assert sender.tokens() == expected.token_ids
        assert sender.joined() == expected.text


def test_tokens_in_and_out(repository_of, bundle, random_engines):
    engine = random_engines["dflash"]
    with serving_here(repository_of(bundle, "ensemble")) as server:
        expected = engine.generate([5, 6, 7], max_tokens=12, bad_token_ids=((1, 2), (3,)))
        asked = {"input_ids": [5, 6, 7, 9, 9], "input_lengths": 3, "request_output_len": 12}
        sender = server.ask("dflash_trt", bad_words_list=[[1, 2, 3], [2, 3, -1]], **asked)
        (response,) = sender.wait()
        assert sender.tokens() == expected.token_ids
        assert response["sequence_length"].tolist() == [[12]]
        assert response["text"].item().decode() == expected.text
        for inputs in ({}, {"input_ids": []}):
            error = server.ask("dflash_trt", request_output_len=1, **inputs).error
            assert "input_ids: is missing or empty" in error.message()
        for length in (0, 6):
            error = server.ask("dflash_trt", **asked | {"input_lengths": length}).error
            assert f"input_lengths: is {length}, of 5 tokens" in error.message()
        error = server.ask("dflash_trt", input_ids=[320], request_output_len=1).error
        assert "token id 320 is outside" in error.message()


def test_the_torch_backend_serves_too(repository_of, torch_bundle, random_engines):
    with serving_here(repository_of(torch_bundle, "single")) as server:
        expected = dflash_trt.load(torch_bundle, threads=1).generate("Once upon", max_tokens=20)
        assert ask(server).tokens() == expected.token_ids


def test_only_what_was_asked_for_is_sent(repository_of, bundle):
    with serving_here(repository_of(bundle, "single")) as server:
        sender = server.ask("dflash_trt", Sender(["text_output"]), text_input="abc", max_tokens=4)
        (response,) = sender.wait()
        assert [t.name() for t in response.output_tensors()] == ["text_output"]
