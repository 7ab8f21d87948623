"""Responses: a thread that sends what the runtime reports, and notices clients that went away."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import DflashError, QueueFullError
from dflash_trt.runtime.generation import StreamEvent
from dflash_trt.runtime.worker import EngineWorker, Ticket
from dflash_trt.serving.errors import error_response
from dflash_trt.serving.metrics import Metrics
from dflash_trt.serving.request import Ask

POLL_SECONDS = 0.1
"""How often clients of requests that have no events are looked for, and the metrics brought up to date."""


@dataclass(eq=False)
class Exchange:
    """A request between its arrival and its last response."""

    number: int
    ask: Ask
    sender: Any
    ticket: Ticket | None = None
    over: bool = False


class Exchanges:
    """All requests of a model.

    The runtime's thread only puts events into a queue: to send a response, or to ask whether a client is there, is a
    call to another process.

    Args:
        backend: `triton_python_backend_utils`.
        respond: the response of an event.
        metrics: kept up to date, where the server has them.
    """

    def __init__(
        self,
        backend: Any,
        worker: EngineWorker,
        respond: Callable[[Exchange, StreamEvent], Any],
        metrics: Metrics | None,
    ) -> None:
        self._backend, self._worker, self._respond, self._metrics = backend, worker, respond, metrics
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._open: dict[int, Exchange] = {}
        self._refused = 0
        self._looked_around = 0.0
        self._settled = False  # whether nothing is going on, and the metrics show it
        self._thread = threading.Thread(target=self._run, name="dflash-trt responses", daemon=True)
        self._thread.start()

    def begin(self, ask: Ask, sender: Any) -> None:
        """Hands a request to the runtime; what comes of it is sent.

        Raises:
            DflashError: the runtime refused it. Nothing was sent then.
        """
        exchange = Exchange(next(self._numbers), ask, sender)
        self._open[exchange.number] = exchange
        self._events.put(self._wake)
        try:
            exchange.ticket = self._worker.submit(
                ask.prompt, ask.params, lambda event: self._events.put(lambda: self._deliver(exchange, event))
            )
        except BaseException:
            if self._let_go(exchange):
                raise
            return  # its client left meanwhile, and that was its end
        if exchange.over:  # cancelled while it was handed over
            exchange.ticket.cancel()

    def refuse(self, error: Exception, sender: Any) -> None:
        """Answers a request that the runtime does not have."""
        if not isinstance(error, QueueFullError):  # which the runtime counts
            self._refused += 1
        if not isinstance(error, DflashError):
            self._log(error)
        self._events.put(self._wake)
        self._send_error(sender, error)

    def stop(self, number: int) -> None:
        """Ends a request as if its client had gone; one that is over already is none."""
        exchange = self._open.get(number)
        if exchange is not None:
            self._events.put(lambda: self._abandon(exchange))

    def close(self) -> None:
        """Sends what is left, after the worker was closed."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            try:
                event = self._events.get(timeout=None if self._settled else POLL_SECONDS)
                going = event is not None
            except queue.Empty:
                event = None
            try:
                if event is not None:
                    event()
                if not going or time.monotonic() - self._looked_around >= POLL_SECONDS:
                    self._look_around()
            except Exception as error:  # everybody waits for this thread
                self._log(error)

    def _wake(self) -> None:
        self._settled = False

    def _deliver(self, exchange: Exchange, event: StreamEvent | DflashError) -> None:
        self._settled = False
        if exchange.over:
            return
        try:
            if isinstance(event, DflashError):
                self._end(exchange, event)
            elif exchange.sender.is_cancelled():
                self._abandon(exchange)
            elif exchange.ask.stream or event.generation is not None:
                self._send(exchange, event)
        except Exception as error:  # its own alone
            self._log(error)
            self._end(exchange, error)

    def _send(self, exchange: Exchange, event: StreamEvent) -> None:
        last = event.generation is not None
        response = self._respond(exchange, event)
        exchange.sender.send(response, self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
        if last:
            self._close(exchange)

    def _look_around(self) -> None:
        self._looked_around = time.monotonic()
        for exchange in list(self._open.values()):
            if exchange.sender.is_cancelled():
                self._abandon(exchange)
        load = self._worker.load()
        if self._metrics is not None:
            self._metrics.update(load, self._refused)
        self._settled = not (self._open or load.slots_in_use or load.queue_depth)

    def _end(self, exchange: Exchange, error: Exception) -> None:
        """Lets a request go that has not had its last response: its error."""
        if self._let_go(exchange):
            self._send_error(exchange.sender, error)

    def _abandon(self, exchange: Exchange) -> None:
        """Lets a request go that nobody waits for.

        Its last response is empty: after an error, tritonserver 2.51 would keep the ensemble's request for ever, if a
        piece of its stream is still in another step.
        """
        if self._let_go(exchange):
            exchange.sender.send(flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _let_go(self, exchange: Exchange) -> bool:
        """Whether it was still there; of two threads one is told so."""
        was_open = self._close(exchange)
        if exchange.ticket is not None:  # else `begin` will see that it is over
            exchange.ticket.cancel()
        return was_open

    def _send_error(self, sender: Any, error: Exception) -> None:
        try:
            sender.send(error_response(self._backend, error), self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as failure:  # there is no other way to tell it
            self._log(failure)

    def _log(self, error: Exception) -> None:
        self._backend.Logger.log_error(f"dflash_trt: {type(error).__name__}: {error}")

    def _close(self, exchange: Exchange) -> bool:
        exchange.over = True
        return self._open.pop(exchange.number, None) is not None
