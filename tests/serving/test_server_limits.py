"""What a real tritonserver's clients may do wrong: each is told so by its protocol, and the others are served on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from triton_clients import PROTOCOLS, Client, GrpcStream, RefusedError
from triton_server import TritonServer, serving

from dflash_trt.serving.repository import Options, write_repository

MODELS = {"single": "dflash_trt", "ensemble": "ensemble"}
KNOWN = {"text_input": "def read(self, size=-1):", "max_tokens": 12}
# takes all of its tokens, and seconds: end_id -1 is none
LONG = {"text_input": "for line in file:", "max_tokens": 900, "end_id": -1, "stream": True}
SLOTS = 4
MAX_QUEUE = 1


@dataclass(frozen=True)
class Served:
    """A repository being served, and the right text of KNOWN."""

    layout: str
    server: TritonServer
    client: Client
    text: str

    def check_serving(self) -> None:
        assert self.client.generate(KNOWN).text == self.text

    def ended(self, outcome: str) -> float:
        """How many requests ended so, once the metrics stand still."""
        before, now = "", self.server.metric_text()
        while now != before:
            time.sleep(0.5)  # they are brought up to date more often
            before, now = now, self.server.metric_text()
        return self.server.metric("dflash_trt_requests_total", outcome=outcome)

    def wait_until_ended(self, outcome: str, count: float) -> None:
        self.server.wait_for("dflash_trt_requests_total", count, outcome=outcome)
        self.server.wait_for("dflash_trt_slots_in_use", 0)


@pytest.fixture(scope="module", params=list(MODELS))
def served(request, tiny_bundle, tiny_engine, tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    options = Options(layout=request.param, speculation="on", threads=1, max_queue=MAX_QUEUE)
    write_repository(tiny_bundle("d2sd"), folder / "repository", options)
    right = tiny_engine("d2sd").generate(KNOWN["text_input"], max_tokens=KNOWN["max_tokens"])
    with serving(folder / "repository", folder / "server") as server:
        yield Served(request.param, server, Client(server.http, server.grpc, MODELS[request.param]), right.text)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text_input": None}, "text_input: is missing"),
    "empty text": ({"text_input": ""}, "text_input: is empty"),
    "too many tokens": ({"text_input": "a = b\n" * 600}, "tokens; the bundle takes at most"),
    "10 MB": ({"text_input": "x" * 10_000_000}, "the bundle takes at most"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens: is missing"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens: 0 must be"),
    "min_tokens": ({"min_tokens": 13}, "min_tokens: 13 must be at most"),
    "temperature": ({"temperature": -0.5}, "temperature: -0.5 must be"),
    "top_k": ({"top_k": -1}, "top_k: -1 must be"),
    "top_p": ({"top_p": 1.5}, "top_p: 1.5 must be"),
    "min_p": ({"min_p": 2.0}, "min_p: 2.0 must be"),
    "repetition_penalty": ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 must be"),
    "end_id": ({"end_id": 10**6}, "end_id: token 1000000 is outside"),
    "beams": ({"beam_width": 4}, "beam_width: 4 cannot be served"),
    "log probabilities": ({"return_log_probs": True}, "return_log_probs: True cannot be served"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(served: Served, case: str) -> None:
    changed, message = WRONG[case]
    inputs = {name: value for name, value in (KNOWN | changed).items() if value is not None}
    for name, ask in PROTOCOLS.items():
        with pytest.raises(RefusedError, match=re.escape(message)) as refused:
            ask(served.client, inputs)
        assert len(str(refused.value)) < 300
        assert refused.value.status == (400 if name.startswith("generate") else None)
    served.check_serving()


@pytest.mark.parametrize("name", ["text_input", "stop_words", "bad_words"])
def test_text_that_is_not_utf8(served: Served, name: str) -> None:
    body = json.dumps(KNOWN | {name: "one MARK two"}).encode().replace(b"MARK", b"\xff\xfe")
    for endpoint in ("generate", "generate_stream"):
        with served.client.posted(endpoint, body) as response:
            assert response.status == 400
            assert f"{name}: is not valid UTF-8 (byte 4)" in response.read().decode()
    with GrpcStream(served.client) as stream:
        stream.send("bytes", KNOWN | {name: b"one \xff\xfe two"})
        with pytest.raises(RefusedError, match="is not valid UTF-8"):
            stream.receive()
        stream.send("known", KNOWN)  # on the same stream
        assert stream.answer().text == served.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"text_input": "\\ud800", "max_tokens": 4}', b'{"text_input": "a", "max_tokens": "four"}'],
    ids=["nothing", "half", "list", "surrogate", "type"],
)
def test_a_body_that_is_no_request(served: Served, body: bytes) -> None:
    """The server itself refuses it."""
    for endpoint in ("generate", "generate_stream"):
        with served.client.posted(endpoint, body) as response:
            assert response.status >= 400
            assert b"error" in response.read()
    served.check_serving()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"temperature": np.array([[np.nan]], np.float32)}, "temperature: nan must be"),
        ({"max_tokens": np.array([[4]], np.int64)}, "INT64"),
        ({"max_tokens": np.array([[4, 5]], np.int32)}, "max_tokens"),
        ({name: np.array([[value]] * 2, kind) for name, value, kind in
          (("text_input", "a", np.object_), ("max_tokens", 4, np.int32))}, "batch-size must be <= 1"),
        ({"no_such_input": np.array([[4]], np.int32)}, "no_such_input"),
    ],
    ids=["nan", "type", "shape", "batch", "name"],
)  # fmt: skip
def test_tensors_that_are_no_request(served: Served, inputs: dict[str, Any], message: str) -> None:
    with GrpcStream(served.client) as stream:
        stream.send("wrong", KNOWN | inputs)
        with pytest.raises(RefusedError, match=re.escape(message)):
            stream.receive()
        stream.send("known", KNOWN)
        assert stream.answer().text == served.text


def test_wrong_requests_among_others_harm_none(served: Served) -> None:
    """As many as there are slots and places in the queue, of which every other one is wrong."""

    def ask(index: int) -> str:
        protocol = list(PROTOCOLS.values())[index // 2 % len(PROTOCOLS)]
        inputs = KNOWN if index % 2 else KNOWN | list(WRONG.values())[4 + index % 10][0] | {"top_k": -1}
        try:
            return protocol(served.client, {name: value for name, value in inputs.items() if value is not None}).text
        except RefusedError:
            return "refused"

    with ThreadPoolExecutor(SLOTS + MAX_QUEUE) as clients:
        assert list(clients.map(ask, range(40))) == ["refused", served.text] * 20


def test_requests_beyond_the_queue_are_refused_at_once(served: Served) -> None:
    before, cancelled = served.ended("refused"), served.ended("cancelled")
    with ThreadPoolExecutor(1) as others, GrpcStream(served.client) as stream:
        for index in range(SLOTS):
            stream.send(f"long {index}", LONG)
        served.server.wait_for("dflash_trt_slots_in_use", SLOTS)
        waiting = others.submit(served.client.generate, KNOWN)
        served.server.wait_for("dflash_trt_queue_depth", 1)
        for name, ask in PROTOCOLS.items():
            with pytest.raises(RefusedError, match="requests wait already") as refused:
                ask(served.client, KNOWN)
            assert (refused.value.status is not None) == name.startswith("generate")  # newer servers say 503
        assert served.server.metric("dflash_trt_slots_in_use") == SLOTS
        assert not waiting.done()
        stream.cancel()
        assert waiting.result().text == served.text
    served.wait_until_ended("refused", before + len(PROTOCOLS))
    served.wait_until_ended("cancelled", cancelled + SLOTS)


def test_a_client_that_leaves_a_stream_frees_its_slot(served: Served) -> None:
    before = served.ended("cancelled")
    served.client.leave("generate_stream", LONG)
    served.wait_until_ended("cancelled", before + 1)
    with GrpcStream(served.client) as stream:
        stream.send("long", LONG)
        stream.receive()
        stream.cancel()
    served.wait_until_ended("cancelled", before + 2)
    served.check_serving()


def test_a_client_that_leaves_before_anything_came(served: Served) -> None:
    """Triton tells a model that runs, by gRPC, but no step of an ensemble that runs: it is decoded for nobody."""
    outcome = {"single": "cancelled", "ensemble": "finished"}[served.layout]
    before = served.ended(outcome)
    with GrpcStream(served.client) as stream:
        stream.send("long", LONG | {"stream": False})
        served.server.wait_for("dflash_trt_slots_in_use", 1)
        stream.cancel()
    served.wait_until_ended(outcome, before + 1)
    served.check_serving()


@pytest.mark.parametrize("served", ["single"], indirect=True)
def test_a_client_that_leaves_the_queue(served: Served) -> None:
    with GrpcStream(served.client) as stream:
        for index in range(SLOTS):
            stream.send(f"long {index}", LONG)
        served.server.wait_for("dflash_trt_slots_in_use", SLOTS)
        with GrpcStream(served.client) as other:
            other.send("waiting", KNOWN)
            served.server.wait_for("dflash_trt_queue_depth", 1)
            other.cancel()
        served.server.wait_for("dflash_trt_queue_depth", 0)
        assert served.server.metric("dflash_trt_slots_in_use") == SLOTS
        stream.cancel()
    served.check_serving()


def test_nothing_of_it_all_was_a_failure_or_is_left(served: Served) -> None:
    assert served.ended("failed") == 0
    assert served.server.stop() == 0  # which waits for every request that Triton holds
