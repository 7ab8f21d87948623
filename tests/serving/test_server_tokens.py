"""The trained checkpoints behind a real tritonserver: every client gets what the engine gives alone."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_clients import PROTOCOLS, Answer, Client, GrpcStream
from triton_server import TritonServer, serving

import dflash_trt
from dflash_trt.runtime.generation import Generation
from dflash_trt.serving.repository import Options, write_repository

HELD_OUT = Path(__file__).parents[2] / "examples" / "tiny" / "heldout.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
MODELS = {"single": "dflash_trt", "ensemble": "ensemble"}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 7},
    "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 5},
}


@dataclass(frozen=True)
class Served:
    """A repository of a system, being served."""

    system: str
    server: TritonServer
    client: Client
    bundle: Path
    engine: dflash_trt.Engine

    def metric(self, name: str, **labels: str) -> float:
        """One of ours, of this system."""
        return self.server.metric(f"dflash_trt_{name}", system=self.system, **labels)


@pytest.fixture(
    scope="module",
    params=[(system, layout) for system in ("dflash", "dflare", "d2sd") for layout in MODELS],
    ids="-".join,
)
def served(request, tiny_bundle, tiny_engine, tmp_path_factory) -> Iterator[Served]:
    system, layout = request.param
    folder = tmp_path_factory.mktemp(f"{system}-{layout}")
    options = Options(layout=layout, speculation="on", threads=1)
    write_repository(tiny_bundle(system), folder / "repository", options)
    with serving(folder / "repository", folder / "server") as server:
        client = Client(server.http, server.grpc, MODELS[layout])
        yield Served(system, server, client, tiny_bundle(system), tiny_engine(system))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_each_protocol_gives_what_run_gives(served: Served, sampling: str, run_cli) -> None:
    prompt, settings = PROMPTS[4], SAMPLING[sampling]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    code, out, err = run_cli("run", served.bundle, "--json", "--prompt", prompt, "--max-tokens", 40, *options)
    assert code == 0, err
    expected = json.loads(out)

    for name, ask in PROTOCOLS.items():
        answer = ask(served.client, {"text_input": prompt, "max_tokens": 40} | settings)
        assert (answer.text, answer.token_ids) == (expected["text"], expected["token_ids"]), name
        assert answer.last["finish_reason"] == expected["finish_reason"]
        assert (answer.responses > 1) == name.endswith("stream")
        # that speculation ran, and came to what it comes to without a server
        assert answer.last["acceptance_length"] == pytest.approx(expected["mean_acceptance_length"])
        assert answer.last["acceptance_rate"] == pytest.approx(expected["acceptance_rate"])
        assert answer.last["total_draft_tokens"] == expected["statistics"]["proposed_drafts"]


def test_speculation_pays(served: Served) -> None:
    lengths = [
        served.client.generate({"text_input": prompt, "max_tokens": 40}).last["acceptance_length"]
        for prompt in PROMPTS[:8]
    ]
    assert statistics.fmean(lengths) > 1.2


def test_many_clients_get_what_each_gets_alone(served: Served) -> None:
    requests = _mixed_requests(32)
    _settle(served)
    before = _counters(served)
    with ThreadPoolExecutor(len(requests)) as clients:
        asked = [
            clients.submit(PROTOCOLS[protocol], served.client, inputs | {"return_num_input_tokens": True})
            for protocol, inputs in requests
        ]
        answers = [future.result() for future in asked]
    for (_, inputs), answer in zip(requests, answers, strict=True):
        for speculation in (True, False):
            alone = _alone(served.engine, inputs, speculation)
            assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text), inputs
            assert answer.last["finish_reason"] == alone.finish_reason

    _settle(served)
    grown = {name: value - before[name] for name, value in _counters(served).items()}
    assert grown == {
        "requests": len(requests),
        "prompt_tokens": _sum(answers, "num_input_tokens"),
        "generated_tokens": sum(len(answer.token_ids) for answer in answers),
        "proposed_drafts": _sum(answers, "total_draft_tokens"),
        "accepted_drafts": _sum(answers, "total_accepted_draft_tokens"),
    }
    step_tokens, steps = served.metric("step_tokens_total"), served.metric("steps_total")
    assert served.metric("acceptance_length") == pytest.approx(step_tokens / steps)
    assert step_tokens / steps > 1.1


def test_more_requests_than_slots_on_one_stream(served: Served) -> None:
    """200 at once: each is answered once."""
    requests = [{"text_input": prompt[:40], "max_tokens": 3} for prompt in PROMPTS[:10]]
    expected = [_alone(served.engine, request).text for request in requests]
    _settle(served)
    before = _counters(served)["requests"]
    received: dict[str, list[str]] = {}
    with GrpcStream(served.client) as stream:
        for index in range(200):
            stream.send(str(index), requests[index % 10])
        for _ in range(200):
            request, outputs, last = stream.receive()
            assert last
            received.setdefault(request, []).append(outputs["text_output"])
    assert received == {str(index): [expected[index % 10]] for index in range(200)}
    _settle(served)
    assert _counters(served)["requests"] == before + 200


@pytest.mark.parametrize("stream", [False, True])
def test_requests_as_the_openai_frontend_makes_them(served: Served, stream: bool) -> None:
    """The tensors that its converter for TensorRT-LLM makes, with their types and shapes."""
    alone = _alone(served.engine, {"text_input": PROMPTS[6], "max_tokens": 30, "temperature": 0.7, "seed": 11})
    stop = [alone.text[20:23], "never there"]
    inputs = {
        "text_input": np.array([[PROMPTS[6]]], np.object_),
        "stream": np.array([[stream]]),
        "max_tokens": np.array([[30]], np.int32),
        "stop_words": np.array([stop], np.object_),
        "top_p": np.array([[1.0]], np.float32),
        "frequency_penalty": np.array([[0.0]], np.float32),
        "presence_penalty": np.array([[0.0]], np.float32),
        "seed": np.array([[11]], np.uint64),
        "temperature": np.array([[0.7]], np.float32),
    }
    with GrpcStream(served.client) as connection:
        connection.send("chatcmpl-1", inputs)
        answer = connection.answer()
    assert answer.text == alone.text[: alone.text.index(stop[0])]
    assert answer.last["finish_reason"] == "stop"
    assert (answer.responses > 1) == stream


def _mixed_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all protocols, of many lengths and parameters."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.4, "top_k": 5, "seed": 2**64 - 1},
        {"top_p": 0.7, "seed": 5, "min_tokens": 6},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 0.8, "stop_words": ["\n", "("]},
        {"bad_words": ["self", ":"], "min_p": 0.1, "seed": 9},
    ]
    requests = []
    for index in range(count):
        prompt = PROMPTS[index] * (1 + index % 3)
        inputs = {"text_input": prompt[: 20 + 17 * index], "max_tokens": max(6, index * 11 % 47)}
        requests.append((list(PROTOCOLS)[index % 4], inputs | options[index % len(options)]))
    return requests


def _alone(engine: dflash_trt.Engine, inputs: dict[str, Any], speculation: bool = True) -> Generation:
    """What the engine gives for a request alone."""
    return _generated(engine, json.dumps(inputs, sort_keys=True), speculation)


@functools.cache
def _generated(engine: dflash_trt.Engine, inputs: str, speculation: bool) -> Generation:
    settings = json.loads(inputs)
    prompt = settings.pop("text_input")
    settings["stop"] = settings.pop("stop_words", ())
    settings["bad_token_ids"] = engine.tokenizer.bad_words(settings.pop("bad_words", ()))
    if settings.keys() & {"top_p", "top_k", "min_p"}:
        settings = {"temperature": 1.0} | settings
    return engine.generate(prompt, speculation=speculation, **settings)


def _settle(served: Served) -> None:
    """Until our metrics know of all requests that Triton knows to be over."""
    over = served.server.metric("nv_inference_request_success", model="dflash_trt")
    served.server.wait_for("dflash_trt_requests_total", over, outcome="finished")


def _counters(served: Served) -> dict[str, float]:
    names = ("prompt_tokens", "generated_tokens", "proposed_drafts", "accepted_drafts")
    requests = served.metric("requests_total", outcome="finished")
    return {"requests": requests} | {name: served.metric(f"{name}_total") for name in names}


def _sum(answers: list[Answer], output: str) -> int:
    return sum(answer.last[output] for answer in answers)
