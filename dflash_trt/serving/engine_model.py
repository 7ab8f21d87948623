"""The model `dflash_trt`: the batched runtime behind Triton's Python backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import triton_python_backend_utils as pb_utils

from dflash_trt.loading import Device, load_engine
from dflash_trt.runtime.generation import StreamEvent
from dflash_trt.runtime.speculation import Speculation
from dflash_trt.runtime.trace import Branches
from dflash_trt.runtime.worker import EngineWorker
from dflash_trt.serving.exchange import Exchange, Exchanges
from dflash_trt.serving.metrics import Metrics
from dflash_trt.serving.request import Ask
from dflash_trt.serving.results import Outputs, tensors
from dflash_trt.serving.settings import Settings


class EngineModel(ABC):
    """What both layouts' models share: a decoupled model whose requests the runtime holds.

    `execute` returns at once. Each request ends with exactly one response that is final, its error's among them.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the bundle. Raises DflashError, which Triton reports as the reason why the model is not there."""
        settings = Settings(args)
        self.exclude_input = settings.flag("exclude_input_in_output")
        device = cast(Device, settings.choice("device", "cpu", "cuda"))
        self.engine = load_engine(settings.path("bundle"), threads=settings.integer("threads"), device=device)
        self.worker = EngineWorker(
            self.engine,
            max_queue=settings.integer("max_queue"),
            speculation=cast(Speculation, settings.choice("speculation", "auto", "on", "off")),
            branches=_branches(settings),
        )
        labels = {"model": settings.model, "version": settings.version, "system": self.engine.system}
        self.exchanges = Exchanges(pb_utils, self.worker, self._response, _metrics(labels))

    @abstractmethod
    def read(self, request: Any) -> Ask | None:
        """What a request asks for; None where it is done with. Raises DflashError to refuse it."""

    @abstractmethod
    def outputs(self, exchange: Exchange, event: StreamEvent) -> Outputs:
        """The output tensors of an event."""

    def execute(self, requests: Sequence[Any]) -> None:
        """Takes requests; what comes of them is sent from another thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                ask = self.read(request)
                if ask is None:
                    sender.send(pb_utils.InferenceResponse(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    self.exchanges.begin(ask, sender)
            except Exception as error:
                self.exchanges.refuse(error, sender)

    def finalize(self) -> None:
        """Ends what still runs, each with its error."""
        self.worker.close()
        self.exchanges.close()

    def _response(self, exchange: Exchange, event: StreamEvent) -> Any:
        return pb_utils.InferenceResponse(tensors(pb_utils, self.outputs(exchange, event)))


def _branches(settings: Settings) -> Branches | None:
    value = settings.text("branches")
    if value == "built":
        return None
    return "auto" if value == "auto" else settings.integer("branches")


def _metrics(labels: Mapping[str, str]) -> Metrics | None:
    """None where the server was started without metrics."""
    try:
        return Metrics(pb_utils, labels)
    except pb_utils.TritonModelException as error:
        pb_utils.Logger.log_warn(f"dflash_trt: no metrics: {error}")
        return None
