"""Clients of a server: a request by each protocol, and what came back in one form."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from types import TracebackType
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

SECONDS = 120.0
"""Longer than any answer takes: one that is not there by then is lost."""


class RefusedError(Exception):
    """The server's error for a request; `status` of HTTP, where it came by that."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Answer:
    """All responses to one request, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    responses: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, response: Mapping[str, Any]) -> None:
        """A response's outputs: numbers and texts, those of `output_ids` one or several."""
        self.text += response["text_output"]
        tokens = response["output_ids"]
        self.token_ids += tokens if isinstance(tokens, list) else [tokens]
        self.responses += 1
        self.last = dict(response)


@dataclass(frozen=True)
class Client:
    """Asks one model. `http` and `grpc` are the server's addresses."""

    http: str
    grpc: str
    model: str

    def generate(self, inputs: Mapping[str, Any]) -> Answer:
        """By HTTP's generate: one response. Raises RefusedError."""
        with self.posted("generate", json.dumps(inputs).encode()) as response:
            return _answer([_checked(response.read(), response.status)])

    def generate_stream(self, inputs: Mapping[str, Any]) -> Answer:
        """By HTTP's generate_stream, server-sent events. Raises RefusedError."""
        with self.posted("generate_stream", json.dumps({**inputs, "stream": True}).encode()) as response:
            return _answer([_checked(event, response.status) for event in events(response)])

    def grpc_stream(self, inputs: Mapping[str, Any]) -> Answer:
        """By a gRPC stream, with a response for each step. Raises RefusedError."""
        with GrpcStream(self) as stream:
            stream.send("one", {**inputs, "stream": True})
            return stream.answer()

    def grpc_whole(self, inputs: Mapping[str, Any]) -> Answer:
        """By a gRPC stream, with one response. Raises RefusedError."""
        with GrpcStream(self) as stream:
            stream.send("one", inputs)
            return stream.answer()

    @contextlib.contextmanager
    def posted(self, endpoint: str, body: bytes) -> Iterator[HTTPResponse]:
        """The response to a body, of which nothing is read yet; its connection is closed at the end."""
        connection = HTTPConnection(self.http, timeout=SECONDS)
        try:
            connection.request("POST", f"/v2/models/{self.model}/{endpoint}", body)
            yield connection.getresponse()
        finally:
            connection.close()

    def leave(self, endpoint: str, inputs: Mapping[str, Any]) -> None:
        """Asks, waits for the first bytes of the answer, and is gone."""
        body = json.dumps(inputs).encode()
        host, port = self.http.split(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            head = f"POST /v2/models/{self.model}/{endpoint} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            connection.recv(1)


PROTOCOLS: dict[str, Callable[[Client, Mapping[str, Any]], Answer]] = {
    "generate": Client.generate,
    "generate_stream": Client.generate_stream,
    "grpc_stream": Client.grpc_stream,
    "grpc_whole": Client.grpc_whole,
}


class GrpcStream:
    """One gRPC stream of a model; any number of requests at once, told apart by their ids."""

    def __init__(self, client: Client) -> None:
        self._model = client.model
        self._client = grpc.InferenceServerClient(client.grpc)
        self._types = {each.name: each.datatype for each in self._client.get_model_metadata(client.model).inputs}
        self._received: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._received.put((result, error)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.stop_stream()  # after the responses that are still to come
        self._client.close()

    def cancel(self) -> None:
        """Leaves all requests that are not over."""
        self._client.stop_stream(cancel_requests=True)

    def send(self, request_id: str, inputs: Mapping[str, Any]) -> None:
        """Values go into tensors of the shape [1, n]; arrays go as they are."""
        self._client.async_stream_infer(
            self._model, [self._tensor(name, value) for name, value in inputs.items()], request_id=request_id
        )

    def receive(self) -> tuple[str, dict[str, Any], bool]:
        """The next response: its request, its outputs, and whether it is the request's last. Raises RefusedError."""
        result, error = self._received.get(timeout=SECONDS)
        if error is not None:
            raise RefusedError(error.message())
        response = result.get_response()
        outputs = {output.name: _values(result.as_numpy(output.name)) for output in response.outputs}
        return response.id, outputs, response.parameters["triton_final_response"].bool_param

    def answer(self) -> Answer:
        """The answer to the only request. Raises RefusedError."""
        answer, over = Answer(), False
        while not over:
            _, outputs, over = self.receive()
            answer.add(outputs)
        return answer

    def _tensor(self, name: str, value: Any) -> grpc.InferInput:
        if not isinstance(value, np.ndarray):
            values = [value] if not isinstance(value, (list, tuple)) else value
            encoded = [each.encode() if isinstance(each, str) else each for each in values]
            value = np.array([encoded], triton_to_np_dtype(self._types[name]))
        tensor = grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        return tensor


def events(response: HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events, as they come."""
    for line in response:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ")


def _answer(responses: Sequence[Mapping[str, Any]]) -> Answer:
    answer = Answer()
    for response in responses:
        answer.add(response)
    return answer


def _checked(data: bytes, status: int) -> dict[str, Any]:
    response = json.loads(data)
    if "error" in response:
        raise RefusedError(response["error"], status)
    return response


def _values(array: np.ndarray) -> Any:
    """As JSON has them in HTTP's answers: one value alone, several in a list."""
    values = [each.decode() if isinstance(each, bytes) else each for each in array.reshape(-1).tolist()]
    return values[0] if len(values) == 1 else values
