"""A stand-in for the module that the Python backend gives to models.

It keeps to what the real one enforces: responses after the last one, unknown flags, outputs nobody asked for, negative
counters.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np

MODULE = "triton_python_backend_utils"
IMPORTING = ("engine_model", "text_model", "token_model", "preprocessing", "postprocessing")
"""Our modules that import it."""
FINAL = 1
SECONDS = 60.0
"""Longer than anything takes here: a request that is not answered by then is lost."""


class TritonModelException(Exception):  # noqa: N818 - the backend's own name
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError("a tensor is made of an array")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def __getitem__(self, name: str) -> np.ndarray:
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}[name]

    def __contains__(self, name: str) -> bool:
        return name in {tensor.name() for tensor in self._tensors}


class Sender:
    """What a request's responses go to; `wait` waits for the last one."""

    def __init__(self, outputs: Sequence[str] = ()) -> None:
        self.responses: list[InferenceResponse] = []
        self.cancelled = False
        self.failing = False
        self.seen_after_cancel = 0
        self._outputs, self._closed = set(outputs), False
        self._changed = threading.Condition()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, FINAL) or (flags == 0 and response is None):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if self.failing and not response.has_error():
            raise TritonModelException("shared memory is full")
        with self._changed:
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._closed = flags == FINAL
            if response is not None and (self._outputs or not response.has_error()):
                kept = [t for t in response.output_tensors() if not self._outputs or t.name() in self._outputs]
                response = InferenceResponse(kept, response.error())
            if response is not None:
                self.responses.append(response)
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self, responses: int | None = None) -> list[InferenceResponse]:
        """The responses, after the last one, or after so many."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._closed or (responses is not None and len(self.responses) >= responses), SECONDS
            )
        assert done, "the request was lost"
        return list(self.responses)

    @property
    def error(self) -> TritonError:
        """The one response, which is an error."""
        (response,) = self.wait()
        assert response.error() is not None
        return response.error()

    def joined(self, name: str = "text_output") -> str:
        return b"".join(response[name].reshape(-1)[0] for response in self.wait()).decode()

    def tokens(self) -> list[int]:
        return [token for response in self.wait() for token in response["output_ids"].reshape(-1).tolist()]


class InferenceRequest:
    """As handed to a model, or made by one to ask another (`exec`)."""

    answer: Callable[[str, InferenceRequest], None] | None = None
    """What hands a request that a model makes to another model."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        sender: Sender | None = None,
    ) -> None:
        self._inputs, self._outputs, self._model = list(inputs), list(requested_output_names), model_name
        self.sender = sender or Sender(requested_output_names)

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def get_response_sender(self) -> Sender:
        return self.sender

    def is_cancelled(self) -> bool:
        return self.sender.cancelled

    def exec(self, decoupled: bool = False) -> Iterator[InferenceResponse]:
        assert decoupled
        assert InferenceRequest.answer is not None
        InferenceRequest.answer(self._model, self)
        return iter(self.sender.wait())


class Logger:
    lines: list[str] = []  # noqa: RUF012 - of the one process, as the server's log

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.lines.append(message)

    log_warn = log_info = log_error


class _Metric:
    def __init__(self, kind: str, labels: Mapping[str, str]) -> None:
        self.kind, self.labels, self._value = kind, dict(labels), 0.0

    def increment(self, value: float) -> None:
        if self.kind == "counter" and value < 0:
            raise TritonModelException("counters only grow")
        self._value += value

    def set(self, value: float) -> None:
        if self.kind == "counter":
            raise TritonModelException("a counter cannot be set")
        self._value = value

    def value(self) -> float:
        return self._value


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    metrics: dict[str, list[_Metric]] = {}  # noqa: RUF012 - of the one process, as the server's
    unsupported = False

    def __init__(self, name: str, description: str, kind: str) -> None:
        if MetricFamily.unsupported:
            raise TritonModelException("metrics not supported")
        assert description
        self._kind, self._metrics = kind, MetricFamily.metrics.setdefault(name, [])

    def Metric(self, labels: Mapping[str, str]) -> _Metric:  # noqa: N802 - the backend's own
        self._metrics.append(_Metric(self._kind, labels))
        return self._metrics[-1]


def metric(name: str, **labels: str) -> float:
    """The value of a metric that has these labels."""
    (found,) = [each for each in MetricFamily.metrics[name] if labels.items() <= each.labels.items()]
    return found.value()


def _module() -> ModuleType:
    module = ModuleType(MODULE)
    contents = (Tensor, TritonError, TritonModelException, InferenceRequest, InferenceResponse, Logger, MetricFamily)
    for each in contents:
        setattr(module, each.__name__, each)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    return module


@contextmanager
def python_backend() -> Iterator[None]:
    """The backend's module can be imported; the models are imported anew, with it."""
    _forget()
    sys.modules[MODULE] = _module()
    MetricFamily.metrics, MetricFamily.unsupported, Logger.lines = {}, False, []
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for name in (MODULE, *(f"dflash_trt.serving.{module}" for module in IMPORTING)):
        sys.modules.pop(name, None)
