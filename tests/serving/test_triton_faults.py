"""Errors, full queues, clients that leave: each concerns its request alone, and every request has one end."""

from __future__ import annotations

from typing import Any

import pytest
from backend_double import Logger, Sender, TritonError, metric
from models_here import ask, eventually, load, serving_here, slow_down

import dflash_trt.serving.request

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"text": ""}, "text_input: is empty"),
    "no UTF-8": ({"text": b"a\xff"}, "text_input: is not valid UTF-8 (byte 1)"),
    "too long": ({"text": "a" * 96}, "the bundle takes at most"),
    "10 MB": ({"text": "a" * 10_000_000}, "the bundle takes at most"),
    "no tokens asked for": ({"max_tokens": 0}, "max_tokens: 0 must be"),
    "a negative temperature": ({"temperature": -1.0}, "temperature: -1.0 must be"),
    "a bad word of 1 MB": ({"bad_words": b"a" * 1_000_000}, "bad_words: 1 words of 1000000 characters; at most 1000"),
    "a stop word of 1 MB": ({"stop_words": b"a" * 1_000_000}, "stop_words: 1 words of 1000000 characters; at most"),
    "penalties that overflow": ({"frequency_penalty": -3.4e38}, "sampling parameters: the penalties are too large"),
    "a bias at the end": ({"embedding_bias_weights": [0.0] * 1500 + [9.0]}, "embedding_bias_weights: what was sent"),
    "beams": ({"beam_width": 2}, "beam_width: 2 cannot be served"),
    "an end outside the vocabulary": ({"end_id": 320}, "end_id: token 320 is outside 0..319"),
    "a bad word that is no UTF-8": ({"bad_words": b"\xff"}, "bad_words: is not valid UTF-8"),
    "a stop word that is no UTF-8": ({"stop_words": b"\xff"}, "stop_words: is not valid UTF-8"),
}


def assert_left(sender: Sender) -> None:
    """Its request came to an end, without an error and without a generation."""
    responses = sender.wait()
    assert sender.closed
    assert not any(response.has_error() for response in responses)
    names = {tensor.name() for response in responses for tensor in response.output_tensors()}
    assert "finish_reason" not in names


@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_is_its_request_s_alone(models, wrong):
    inputs, said = WRONG[wrong]
    running = ask(models, stream=True, max_tokens=60)
    error = ask(models, **inputs).error
    assert said in error.message()
    assert error.code() == TritonError.INVALID_ARG
    assert len(running.tokens()) == 60
    assert ask(models, max_tokens=2).tokens() == running.tokens()[:2]


def test_what_is_missing_is_said(models):
    model = "ensemble" if "ensemble" in models.configs else "dflash_trt"
    for inputs, name in (({"max_tokens": 3}, "text_input"), ({"text_input": "a"}, "max_tokens")):
        error = models.ask(model, **inputs).error
        assert f"{name}: is missing" in error.message()
        assert error.code() == TritonError.INVALID_ARG


def test_a_full_queue_refuses_at_once(repository_of, bundle, layout):
    with serving_here(repository_of(bundle, layout, max_queue=1)) as server:
        senders = [ask(server, max_tokens=80) for _ in range(12)]
        answers = [sender.wait()[-1] for sender in senders]
        refused = [answer.error() for answer in answers if answer.has_error()]
        assert {error.code() for error in refused} == {TritonError.UNAVAILABLE}
        assert all("requests wait already" in error.message() for error in refused)
        served = [sender.tokens() for sender, answer in zip(senders, answers, strict=True) if not answer.has_error()]
        assert len(served) >= 3  # two slots, and one that waits
        assert len(refused) + len(served) == 12
        assert all(tokens == served[0] and len(tokens) == 80 for tokens in served)
        eventually(lambda: metric("dflash_trt_requests_total", outcome="refused") == len(refused))
        assert len(ask(server, max_tokens=3).tokens()) == 3


def test_a_client_that_leaves_frees_its_slot(models, monkeypatch):
    slow_down(models, monkeypatch)
    leaving, staying = ask(models, stream=True, max_tokens=80), ask(models, "xyz", stream=True, max_tokens=30)
    leaving.wait(responses=2)
    leaving.cancelled = True
    assert_left(leaving)
    eventually(lambda: load(models).totals.cancelled == 1)
    assert load(models).totals.generated_tokens < 80
    assert len(staying.tokens()) == 30
    eventually(lambda: load(models).slots_in_use == 0)
    eventually(lambda: metric("dflash_trt_requests_total", outcome="cancelled") == 1)


def test_a_client_that_leaves_before_anything_came(repository_of, bundle, monkeypatch):
    """While it waits for a slot, and while its answer, which is no stream, is under way."""
    with serving_here(repository_of(bundle, "single")) as server:
        slow_down(server, monkeypatch)
        running = [ask(server, max_tokens=80) for _ in range(2)]
        waiting = ask(server, max_tokens=80)
        waiting.cancelled = running[0].cancelled = True
        for sender in (waiting, running[0]):
            assert_left(sender)
        eventually(lambda: load(server).totals.cancelled == 2)
        assert len(running[1].tokens()) == 80


def test_a_request_stops_another(repository_of, bundle, monkeypatch):
    with serving_here(repository_of(bundle, "ensemble")) as server:
        slow_down(server, monkeypatch)
        tokens = server.ask("dflash_trt", input_ids=[1, 2, 3], request_output_len=80, streaming=True)
        number = tokens.wait(responses=1)[0]["request_number"].item()
        stop = server.ask("dflash_trt", stop=True, request_number=number)
        assert [t.name() for r in stop.wait() for t in r.output_tensors()] == []
        assert_left(tokens)
        again = server.ask("dflash_trt", stop=True, request_number=number)
        assert not again.wait()[-1].has_error()
        assert "request_number: is missing" in server.ask("dflash_trt", stop=True).error.message()


def test_an_unloaded_model_answers_everybody(repository_of, bundle, layout, monkeypatch):
    with serving_here(repository_of(bundle, layout)) as server:
        slow_down(server, monkeypatch)
        senders = [ask(server, stream=True, max_tokens=80) for _ in range(5)]
        senders[0].wait(responses=1)
        server.models["dflash_trt"].finalize()
        assert all(sender.wait()[-1].has_error() for sender in senders)
        assert all(sender.closed for sender in senders)
        assert ask(server).wait()[-1].has_error()


def test_a_response_that_cannot_be_sent_ends_its_request_alone(repository_of, bundle, monkeypatch):
    with serving_here(repository_of(bundle, "single")) as server:
        slow_down(server, monkeypatch)
        failing, other = ask(server, stream=True, max_tokens=80), ask(server, max_tokens=40)
        failing.wait(responses=1)
        failing.failing = True
        error = failing.wait()[-1].error()
        assert (error.code(), "shared memory is full" in error.message()) == (TritonError.INTERNAL, True)
        assert len(other.tokens()) == 40
        assert any("shared memory is full" in line for line in Logger.lines)


def test_the_backend_failing_elsewhere_loses_no_request(repository_of, bundle, monkeypatch):
    """Asking whether a client is there, and setting a metric, are calls to another process, too."""
    with serving_here(repository_of(bundle, "single")) as server:

        def fail(*_: Any) -> None:
            raise OSError("no answer")

        failing = Sender()
        failing.is_cancelled = fail  # type: ignore[method-assign]
        error = server.ask("dflash_trt", failing, text_input="abc", max_tokens=9).error
        assert (error.code(), error.message()) == (TritonError.INTERNAL, "OSError: no answer")
        with monkeypatch.context() as patched:
            patched.setattr(server.models["dflash_trt"].exchanges._metrics, "update", fail)
            assert len(ask(server).tokens()) == 20
            eventually(lambda: any("OSError: no answer" in line for line in Logger.lines))
        assert len(ask(server).tokens()) == 20

        def ended(outcome: str) -> float:
            return metric("dflash_trt_requests_total", outcome=outcome)

        eventually(lambda: ended("finished") + ended("cancelled") == 3)
        assert ended("finished") >= 2  # the failing one may have come to its end before it was let go


def test_an_error_of_the_runtime_is_internal(repository_of, bundle, monkeypatch):
    with serving_here(repository_of(bundle, "single")) as server:

        def fail(*_: Any) -> None:
            raise RuntimeError("the GPU is gone")

        batch = server.models["dflash_trt"].worker._scheduler._batch
        with monkeypatch.context() as patched:
            patched.setattr(batch, "advance", fail)
            error = ask(server).error
        assert (error.code(), "the GPU is gone" in error.message()) == (TritonError.INTERNAL, True)
        assert len(ask(server).tokens()) == 20


def test_a_fault_of_the_model_s_own_code_is_internal(models, monkeypatch):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("by mistake")

    with monkeypatch.context() as patched:
        patched.setattr(dflash_trt.serving.request.Inputs, "strings", fail)
        error = ask(models).error
    assert (error.code(), error.message()) == (TritonError.INTERNAL, "ZeroDivisionError: by mistake")
    assert len(ask(models).tokens()) == 20
