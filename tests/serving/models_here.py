"""The models of a repository in this process, behind the stand-in for the Python backend, and requests to them."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_double import (
    FINAL,
    SECONDS,
    InferenceRequest,
    InferenceResponse,
    Sender,
    Tensor,
    TritonError,
    python_backend,
)
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2


def read_config(file: Path) -> Any:
    """A config.pbtxt by Triton's own definition."""
    return text_format.Parse(file.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


class FakeServer:
    """The Python models of a repository."""

    def __init__(self, repository: Path) -> None:
        self.models: dict[str, Any] = {}
        self.configs = {path.name: read_config(path / "config.pbtxt") for path in repository.iterdir() if path.is_dir()}
        for name, config in self.configs.items():
            if config.backend == "python":
                self.models[name] = self._load(repository / name, config)
        InferenceRequest.answer = lambda model, request: self.models[model].execute([request])

    def _load(self, folder: Path, config: Any) -> Any:
        spec = importlib.util.spec_from_file_location(f"model_of_{folder.name}", folder / "1" / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        values = json_format.MessageToDict(config, preserving_proto_field_name=True)
        model.initialize(
            {
                "model_config": json.dumps(values),
                "model_repository": str(folder),
                "model_name": folder.name,
                "model_version": "1",
            }
        )
        return model

    def ask(self, model: str, sender: Sender | None = None, **inputs: Any) -> Sender:
        """Sends a request with these inputs, [1, n] each: values, or lists of them."""
        types = {port.name: port.data_type for port in self.configs[model].input}
        tensors = [Tensor(name, _array(value, types[name])) for name, value in inputs.items()]
        sender = sender or Sender()
        if self.configs[model].platform == "ensemble":
            self._ensemble(model, tensors, sender)
        else:
            self.models[model].execute([InferenceRequest(tensors, sender=sender)])
        return sender

    def _ensemble(self, name: str, tensors: Sequence[Tensor], sender: Sender) -> None:
        """Runs the steps of an ensemble: the last one once for each response of the decoupled one before it."""
        first, engine, last = self.configs[name].ensemble_scheduling.step
        known = {tensor.name(): tensor.as_numpy() for tensor in tensors}
        prepared = self._step(first, known)
        if prepared.has_error():
            sender.send(prepared, FINAL)
            return
        known |= _renamed(prepared, first.output_map)
        outputs = {port.name for port in self.configs[name].output}

        class Between(Sender):
            """Hands each response of the decoupled step on to the last one."""

            def send(_, response: InferenceResponse | None = None, flags: int = 0) -> None:  # noqa: N805
                if response is None or response.has_error():
                    sender.send(response, flags)
                    return
                between = _renamed(response, engine.output_map)
                request = InferenceRequest(_inputs(last.input_map, between), sender=_Cancelled(sender))
                (text,) = self.models[last.model_name].execute([request])
                done = between | _renamed(text, last.output_map)
                sender.send(InferenceResponse([Tensor(k, v) for k, v in done.items() if k in outputs]), flags)

        request = InferenceRequest(_inputs(engine.input_map, known), sender=Between())
        self.models[engine.model_name].execute([request])

    def _step(self, step: Any, known: Mapping[str, np.ndarray]) -> InferenceResponse:
        inputs = _inputs(step.input_map, known)
        if not inputs:
            return InferenceResponse([], TritonError("request has 0 inputs", TritonError.INVALID_ARG))
        (response,) = self.models[step.model_name].execute([InferenceRequest(inputs)])
        return response

    def close(self) -> None:
        for model in self.models.values():
            if hasattr(model, "finalize"):
                model.finalize()


class _Cancelled(Sender):
    """A step that begins after the ensemble's client is gone is cancelled."""

    def __init__(self, outer: Sender) -> None:
        super().__init__()
        self.cancelled = outer.cancelled


def _inputs(mapping: Mapping[str, str], known: Mapping[str, np.ndarray]) -> list[Tensor]:
    return [Tensor(key, known[tensor]) for key, tensor in mapping.items() if tensor in known]


def _renamed(response: InferenceResponse, mapping: Mapping[str, str]) -> dict[str, np.ndarray]:
    return {mapping[t.name()]: t.as_numpy() for t in response.output_tensors() if t.name() in mapping}


def _array(value: Any, data_type: int) -> np.ndarray:
    name = model_config_pb2.DataType.Name(data_type).removeprefix("TYPE_")
    if name == "STRING":
        values = [value] if isinstance(value, (str, bytes)) else value
        return np.array([[each.encode() if isinstance(each, str) else each for each in values]], np.object_)
    types = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "FP16": np.float16}
    return np.array([value if isinstance(value, list) else [value]], types[name])


@contextmanager
def serving_here(repository: Path) -> Iterator[FakeServer]:
    """A server of the repository in this process, closed at the end."""
    with python_backend():
        server = FakeServer(repository)
        try:
            yield server
        finally:
            server.close()


def ask(server: FakeServer, text: str | bytes = "Once upon", max_tokens: int = 20, **inputs: Any) -> Sender:
    model = "ensemble" if "ensemble" in server.configs else "dflash_trt"
    return server.ask(model, text_input=text, max_tokens=max_tokens, **inputs)


def engine_options(inputs: dict[str, Any]) -> dict[str, Any]:
    """The request in the engine's words."""
    sampled = {"temperature", "top_k", "top_p", "min_p"} & inputs.keys()
    return ({"temperature": 1.0} if sampled else {}) | inputs


def load(server: FakeServer) -> Any:
    return server.models["dflash_trt"].worker.load()


def slow_down(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take so long that there is time to do something between them."""
    scheduler = server.models["dflash_trt"].worker._scheduler
    step = scheduler.step

    def slowly() -> Any:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(scheduler, "step", slowly)


def eventually(condition: Any, seconds: float = SECONDS) -> None:
    """Waits until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)
