"""What a load test sends requests to: an engine in this process, or Triton servers over HTTP or gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import click

from dflash_trt.runtime.async_engine import AsyncEngine
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.speculation import Speculation
from dflash_trt.runtime.trace import Branches


class LoadTestError(click.ClickException):
    """What is measured does not answer as it should."""

    exit_code = 2


@dataclass(frozen=True)
class Piece:
    """Newly generated text and its number of tokens; the last one may say the request's mean acceptance length."""

    text: str
    tokens: int
    acceptance_length: float | None = None


class Target(Protocol):
    """Something that serves, while it is entered."""

    name: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """What comes for a prompt. `sampling`: max_tokens, and temperature and seed where it is sampled."""


class InProcess:
    """An engine of its own with continuous batching."""

    def __init__(self, engine: Engine, speculation: Speculation, branches: Branches | None) -> None:
        self.name: str = speculation
        self._options: dict[str, Any] = {"speculation": speculation, "max_queue": 4096}
        if speculation != "off":
            self._options["branches"] = branches
        self._engine = engine

    async def __aenter__(self) -> Self:
        self._serving = AsyncEngine(self._engine, **self._options)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._serving.close()

    async def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Piece]:
        async for event in self._serving.stream(prompt, **sampling):
            done = event.generation
            length = None if done is None else done.statistics.mean_acceptance_length
            yield Piece(event.text, len(event.token_ids), length)


class HttpServer:
    """A Triton server's `generate_stream`."""

    def __init__(self, name: str, address: str, model: str) -> None:
        self.name = name
        self._url = f"http://{address}/v2/models/{model}/generate_stream"

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Piece]:
        import aiohttp

        body = {"text_input": prompt, "stream": True, "return_num_output_tokens": True, **sampling}
        try:
            async with self._session.post(self._url, json=body) as response:
                async for line in response.content:
                    if line.strip():
                        answer = json.loads(line.removeprefix(b"data:"))
                        if "error" in answer:
                            raise LoadTestError(f"{self._url}: {answer['error']}")
                        yield Piece(
                            answer["text_output"], answer["num_output_tokens"], answer.get("acceptance_length")
                        )
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            raise LoadTestError(f"{self._url}: {type(error).__name__}: {error}") from error


_TYPES = {str: "BYTES", bool: "BOOL", float: "FP32", int: "INT32"}


class GrpcServer:
    """A Triton server's gRPC stream; one for each request."""

    def __init__(self, name: str, address: str, model: str) -> None:
        self.name, self._address, self._model = name, address, model

    async def __aenter__(self) -> Self:
        from tritonclient.grpc.aio import InferenceServerClient

        self._client = InferenceServerClient(self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Piece]:
        from grpc.aio import AioRpcError
        from tritonclient.utils import InferenceServerException

        values = {"text_input": prompt, "stream": True, "return_num_output_tokens": True, **sampling}
        try:
            async for result, error in self._client.stream_infer(self._requests(values)):
                if error is not None:
                    raise LoadTestError(f"grpc://{self._address}: {error}")
                length = result.as_numpy("acceptance_length")
                yield Piece(
                    result.as_numpy("text_output").item().decode(),
                    result.as_numpy("num_output_tokens").item(),
                    None if length is None else length.item(),
                )
        except (InferenceServerException, AioRpcError) as error:
            what = error.details() if isinstance(error, AioRpcError) else error
            raise LoadTestError(f"grpc://{self._address}: {what}") from error

    async def _requests(self, values: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        import numpy as np
        from tritonclient.grpc.aio import InferInput
        from tritonclient.utils import triton_to_np_dtype

        inputs = []
        for name, value in values.items():
            kind = "UINT64" if name == "seed" else _TYPES[type(value)]
            data = value.encode() if isinstance(value, str) else value
            inputs.append(InferInput(name, [1, 1], kind))
            inputs[-1].set_data_from_numpy(np.array([[data]], triton_to_np_dtype(kind)))
        yield {"model_name": self._model, "inputs": inputs}


def server(text: str, model: str) -> HttpServer | GrpcServer:
    """The server that `[NAME=]http://HOST:PORT` or `[NAME=]grpc://HOST:PORT` means."""
    name, _, url = text.rpartition("=")
    scheme, _, address = url.partition("://")
    if scheme not in ("http", "grpc") or not address.strip("/"):
        what = f"{text} must be [NAME=]http://HOST:PORT or [NAME=]grpc://HOST:PORT"
        raise click.BadParameter(what, param_hint="--url")
    kind = HttpServer if scheme == "http" else GrpcServer
    return kind(name or scheme, address.strip("/"), model)
